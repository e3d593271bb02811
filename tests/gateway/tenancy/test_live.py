"""A gateway with keys, on real sockets: who gets in, what limits say, what replicas see."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import CHAT, Replica, Running, gateway, tokens, until
from tests.gateway.straight_support import line, request
from tests.gateway.tenancy.support import Keys, ask


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def error_of(response: Any) -> tuple[int, str | None]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


def replica(**fields: Any) -> Replica:
    """One that counts as keeping tenants apart (it serves a worker's state)."""
    made = Replica(incarnation="one")
    made.play(**fields)
    return made


async def test_only_those_with_a_key_get_in(keys: Keys) -> None:
    key = keys.make("acme")
    async with gateway(replica(), keys_file=keys.path) as running:
        for headers in (
            {},
            {"authorization": ""},
            {"authorization": "Bearer"},
            {"authorization": f"Basic {key}"},
            {"authorization": "Bearer sk-something"},
            {"authorization": f"Bearer {key[:-1]}{'a' if key[-1] != 'a' else 'b'}"},
            {"x-api-key": "wg-nothing"},
        ):
            response = await running.client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert error_of(response) == (401, "invalid_api_key")
            assert response.headers["x-request-id"]
            listed = await running.client.get("/v1/models", headers=headers)
            assert error_of(listed) == (401, "invalid_api_key")
        assert running.replicas[0].log.num_started == 0
        assert (await ask(running, key)).status_code == 200
        lower = await running.client.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"bearer {key}"})
        assert lower.status_code == 200
        assert running.events("warmgate_unauthenticated_total") >= 7


async def test_a_refused_request_leaves_the_connection_usable_and_its_body_unread(keys: Keys) -> None:
    key = keys.make("acme")
    async with gateway(replica(), keys_file=keys.path) as running:
        assert (await ask(running, None, junk="x" * 200_000)).status_code == 401
        assert (await ask(running, key)).status_code == 200


async def test_the_clients_key_stays_here_and_the_replicas_own_goes_there(keys: Keys) -> None:
    key = keys.make("acme")
    one, two = replica(), replica()
    for each in (one, two):
        await each.start()
    two_spec = {"url": two.url, "api_key": "for-the-replica"}
    async with gateway(one, two, keys_file=keys.path, urls=[one.url, two_spec]) as running:  # type: ignore[list-item]
        for _ in range(4):
            assert (await ask(running, key)).status_code == 200
        assert "authorization" not in one.log.last_headers
        assert two.log.last_headers["authorization"] == "Bearer for-the-replica"
        for each in (one, two):
            assert key not in json.dumps(each.log.last_headers) + each.log.last_body


async def test_a_revoked_key_is_refused_and_a_new_one_taken_without_a_restart(keys: Keys) -> None:
    key = keys.make("acme")
    async with gateway(replica(), keys_file=keys.path) as running:
        assert (await ask(running, key)).status_code == 200
        keys.store.remove(keys.ids[key])
        fresh = keys.make("acme")
        directory = running.app.tenancy.directory
        await until(lambda: directory.find(key.encode()) is None and directory.find(fresh.encode()))
        assert error_of(await ask(running, key)) == (401, "invalid_api_key")
        assert (await ask(running, fresh)).status_code == 200


async def test_a_revoked_key_is_refused_on_a_connection_that_has_used_it(keys: Keys) -> None:
    """Whose key it is is remembered with the connection's head, and is not to outlast the key."""
    key = keys.make("acme")
    asked = request(extra=b"authorization: Bearer %b\r\n" % key.encode())
    async with gateway(replica(), keys_file=keys.path) as running, line(running) as client:
        for _ in range(3):
            status, headers, _ = await client.ask(asked)
            assert status == 200
        keys.store.remove(keys.ids[key])
        directory = running.app.tenancy.directory
        await until(lambda: directory.find(key.encode()) is None)
        status, headers, body = await client.ask(asked)
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        assert not any(name.startswith("x-ratelimit") for name in headers)


async def test_a_file_that_breaks_changes_nothing_until_it_is_too_old(keys: Keys) -> None:
    key = keys.make("acme")
    async with gateway(replica(), keys_file=keys.path, keys_stale_s=2.0) as running:
        keys.path.write_text("{")
        assert (await ask(running, key)).status_code == 200
        watcher = running.app.tenancy._watcher
        assert watcher is not None
        await until(lambda: watcher.is_stale)
        assert error_of(await ask(running, key)) == (503, "keys_unavailable")


async def test_a_key_may_use_its_models_and_sees_no_others(keys: Keys) -> None:
    free, bound = keys.make("acme"), keys.make("acme", "fake", "alias")
    settings = {"keys_file": keys.path, "model_aliases": {"alias": "other", "second": "fake"}}
    other = Replica("other", incarnation="two")
    async with gateway(replica(), other, **settings) as running:
        listed = await running.client.get("/v1/models", headers={"authorization": f"Bearer {bound}"})
        assert {model["id"] for model in listed.json()["data"]} == {"fake", "alias", "second"}
        everything = await running.client.get("/v1/models", headers={"authorization": f"Bearer {free}"})
        assert {model["id"] for model in everything.json()["data"]} == {"fake", "other", "alias", "second"}
        hidden = await running.client.get("/v1/models/other", headers={"authorization": f"Bearer {bound}"})
        assert error_of(hidden) == (404, "model_not_found")
        for model in ("fake", "alias", "second"):
            assert (await ask(running, bound, model=model)).status_code == 200
        assert error_of(await ask(running, bound, model="other")) == (404, "model_not_found")
        assert (await ask(running, free, model="other")).status_code == 200


async def test_messages_take_x_api_key_and_say_so_in_their_own_shape(keys: Keys) -> None:
    key = keys.make("acme", "fake", requests_per_minute=1)
    body = {**CHAT, "max_tokens": 4}
    async with gateway(replica(), keys_file=keys.path) as running:
        post = running.client.post
        missing = await post("/v1/messages", json=body)
        assert (missing.status_code, missing.json()["type"]) == (401, "error")
        assert missing.json()["error"]["type"] == "authentication_error"
        counted = await post("/v1/messages/count_tokens", json=CHAT)
        assert (counted.status_code, counted.json()["error"]["type"]) == (401, "authentication_error")
        assert (await post("/v1/messages", json=body, headers={"x-api-key": key})).status_code == 200
        limited = await post("/v1/messages", json=body, headers={"x-api-key": key})
        assert (limited.status_code, limited.json()["error"]["type"]) == (429, "rate_limit_error")
        assert limited.headers["retry-after"]


async def test_a_count_by_the_gateway_itself_is_one_of_its_keys_requests(keys: Keys) -> None:
    key = keys.make("acme", requests_per_minute=2)

    class Tokenizer:
        async def packed_ids(self, replica_id: str, source: object) -> bytes:
            return bytes(4 * 7)

    async with gateway(replica(), keys_file=keys.path) as running:
        running.app.registry.ready()[0].key_mode = "token"
        assert running.app._counter is not None
        running.app._counter._prefix = Tokenizer()  # type: ignore[assignment]
        answers = [await ask(running, key, "/v1/messages/count_tokens") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[0].json() == {"input_tokens": 7}
        running.app.tenancy.check_invariants()
        assert not any(account.num_active for account in running.app.tenancy.ledger.accounts.values())


async def test_stored_responses_are_their_tenants_own(keys: Keys) -> None:
    mine, theirs = keys.make("acme"), keys.make("other")
    async with gateway(replica(), keys_file=keys.path) as running:

        async def respond(key: str, **fields: Any) -> Any:
            body = {"model": "fake", "input": "hi", **fields}
            return await running.client.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})

        made = (await respond(mine)).json()["id"]
        path = f"/v1/responses/{made}"
        for key, status in ((theirs, 404), (mine, 200)):
            assert (await running.client.get(path, headers={"authorization": f"Bearer {key}"})).status_code == status
        assert (await running.client.get(path)).status_code == 401
        assert (await respond(theirs, previous_response_id=made)).status_code == 400
        assert (await respond(mine, previous_response_id=made)).status_code == 200
        assert (await running.client.delete(path, headers={"authorization": f"Bearer {theirs}"})).status_code == 404
        running.app.responses.check_invariants()


async def test_requests_a_minute_with_openais_headers(keys: Keys) -> None:
    key = keys.make("acme", requests_per_minute=2, tokens_per_minute=100_000)
    async with gateway(replica(), keys_file=keys.path) as running:
        first = await ask(running, key, max_tokens=10)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 100_000
        stream = await ask(running, key, stream=True)
        assert stream.headers["x-ratelimit-remaining-requests"] == "0"
        limited = await ask(running, key)
        assert error_of(limited) == (429, "rate_limit_exceeded")
        assert 1 <= int(limited.headers["retry-after"]) <= 30
        assert limited.headers["x-ratelimit-remaining-requests"] == "0"
        assert running.replicas[0].log.num_started == 2
        assert running.events("warmgate_tenant_denials_total") == 1


async def test_tokens_are_settled_by_what_was_used(keys: Keys) -> None:
    """Each reserves 256 and its prompt and uses 18: without settling, the second one would be refused."""
    key = keys.make("acme", tokens_per_minute=400)
    async with gateway(replica(num_tokens=8), keys_file=keys.path) as running:
        too_large = await ask(running, key, max_tokens=2000)
        assert error_of(too_large) == (429, "rate_limit_exceeded")
        assert too_large.headers["x-should-retry"] == "false"
        for stream in (False, True, False, True):
            answer = await ask(running, key, stream=stream)
            assert answer.status_code == 200, answer.text
        [account] = running.app.tenancy.ledger.accounts.values()
        assert account.num_active == 0
        assert 400 - 4 * 18 <= account.tokens <= 400
        running.app.tenancy.check_invariants()


async def test_who_hangs_up_pays_for_what_came(keys: Keys) -> None:
    key = keys.make("acme", tokens_per_minute=1000, concurrency=1)
    async with gateway(replica(num_tokens=400, token_s=0.005), keys_file=keys.path) as running:
        headers = {"authorization": f"Bearer {key}"}
        body = {**CHAT, "stream": True, "max_tokens": 500}
        async with running.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            text = ""
            async for part in response.aiter_text():
                text += part
                if " t20" in text:
                    break
            assert error_of(await ask(running, key)) == (429, "rate_limit_exceeded")
        [account] = running.app.tenancy.ledger.accounts.values()
        await until(lambda: account.num_active == 0)
        assert 400 < account.tokens < 990
        assert (await ask(running, key, max_tokens=1)).status_code == 200


async def test_an_answer_that_another_replica_goes_on_with_is_paid_once(keys: Keys) -> None:
    key = keys.make("acme", budget_tokens=10_000)
    bad, good = replica(), Replica(incarnation="two")
    async with gateway(bad, good, keys_file=keys.path) as running:
        fields = {"stream": True, "temperature": 0, "max_tokens": 12}
        bad.play(fault="die", after=5, token_s=0.01, times=1)
        answers = [await ask(running, key, **fields) for _ in range(2)]
        assert good.log.num_resumed == 1
        assert [len(tokens(answer.content)) for answer in answers] == [12, 12]
        [account] = running.app.tenancy.ledger.accounts.values()
        assert account.spent == 2 * (10 + 12)
        running.app.tenancy.check_invariants()


async def test_a_spent_budget_is_no_rate_limit_and_outlives_a_restart(keys: Keys) -> None:
    key = keys.make("acme", budget_tokens=120)
    served = replica(num_tokens=60)
    async with gateway(served, keys_file=keys.path) as running:
        assert (await ask(running, key, max_tokens=60)).status_code == 200
        spent = await ask(running, key, max_tokens=60)
        assert error_of(spent) == (429, "insufficient_quota")
        assert spent.json()["error"]["type"] == "insufficient_quota"
        assert spent.headers["x-should-retry"] == "false"
    await served.start()
    async with gateway(served, keys_file=keys.path) as running:
        assert error_of(await ask(running, key, max_tokens=60)) == (429, "insufficient_quota")


async def test_a_tenants_own_limits_hold_for_all_of_its_keys(keys: Keys) -> None:
    from gateway.tenancy.keys import Limits

    one, two = keys.make("acme"), keys.make("acme")
    keys.store.limit("acme", Limits(requests_per_minute=1))
    async with gateway(replica(), keys_file=keys.path) as running:
        assert (await ask(running, one)).status_code == 200
        assert error_of(await ask(running, two)) == (429, "rate_limit_exceeded")


async def salts(running: Running, *requests: tuple[str, dict[str, Any]]) -> list[str | None]:
    seen = []
    for key, fields in requests:
        assert (await ask(running, key, **fields)).status_code == 200
        seen.append(json.loads(running.replicas[0].log.last_body).get("cache_salt"))
    return seen


async def test_salts_keep_tenants_apart_and_clients_only_narrow(keys: Keys) -> None:
    a, again, b, c = keys.make("a"), keys.make("a"), keys.make("b"), keys.make("c")
    settings = {"keys_file": keys.path, "share_prefixes": "pair=a,b"}
    async with gateway(replica(), **settings) as running:
        plain: dict[str, Any] = {}
        own: dict[str, Any] = {"cache_salt": "x"}
        null: dict[str, Any] = {"cache_salt": None}
        of_a, of_again, of_b, of_c, narrow_a, narrow_c, of_null = await salts(
            running, (a, plain), (again, plain), (b, plain), (c, plain), (a, own), (c, own), (a, null)
        )
        assert of_a == of_again == of_b == of_null
        assert len({of_a, of_c, narrow_a, narrow_c, "x", None}) == 6
        # A tenant that knows another's salt can't step into its cache with it.
        assert of_a not in await salts(running, (c, {"cache_salt": of_a}))


async def test_routing_expects_a_prefix_only_where_the_tenant_may_find_it(keys: Keys) -> None:
    a, b = keys.make("a"), keys.make("b")
    long = {"messages": [{"role": "user", "content": "a long story about a cache " * 40}]}
    async with gateway(replica(), keys_file=keys.path, policy="warm") as running:
        assert int((await ask(running, a, **long)).headers["x-warmgate-matched-tokens"]) == 0
        assert int((await ask(running, a, **long)).headers["x-warmgate-matched-tokens"]) > 0
        assert int((await ask(running, b, **long)).headers["x-warmgate-matched-tokens"]) == 0


async def test_the_rest_of_a_body_is_as_the_client_wrote_it(keys: Keys) -> None:
    key = keys.make("a")
    body = b'{ "model":"fake" ,"messages":[{"role":"user","content":"cache_salt \\u00e9"}],"x": {"cache_salt": 1}}'
    async with gateway(replica(), keys_file=keys.path) as running:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        answer = await running.client.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 200
        sent = running.replicas[0].log.last_body
        salt = json.loads(sent)["cache_salt"]
        assert sent == body.decode().replace("{ ", f'{{"cache_salt":"{salt}", ', 1)


async def test_replicas_that_mix_tenants_get_nothing_unless_allowed(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    key = keys.make("a")
    mixing = Replica()
    async with gateway(mixing, replica(), keys_file=keys.path) as running:
        for _ in range(4):
            assert (await ask(running, key)).status_code == 200
        assert mixing.log.num_started == 0
    await mixing.start()
    async with gateway(mixing, keys_file=keys.path) as running:
        assert error_of(await ask(running, key)) == (503, "no_isolation")
    assert "doesn't keep tenants' caches apart" in caplog.text
    await mixing.start()
    caplog.clear()
    async with gateway(mixing, keys_file=keys.path, unsalted_replicas="allow") as running:
        assert (await ask(running, key)).status_code == 200
        assert "cache_salt" not in mixing.log.last_body
    assert "apart" not in caplog.text


async def test_operators_pages_and_the_audit_in_the_log(keys: Keys, tmp_path: Path) -> None:
    key = keys.make("acme", requests_per_minute=1)
    log = tmp_path / "access.log"
    async with gateway(replica(), keys_file=keys.path, access_log=str(log)) as running:
        await ask(running, key)
        await ask(running, key)
        await ask(running, None)
        assert "warmgate_tenant_tokens_total" in (await running.client.get("/metrics")).text  # from this machine
        assert "replicas" in (await running.client.get("/health")).json()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    audit = [(line.get("tenant"), line.get("key"), line.get("admission"), line["status"]) for line in lines]
    named = ("acme", keys.ids[key])
    assert audit == [(*named, "admitted", 200), (*named, "denied: requests", 429), (None, None, None, 401)]
    assert key not in log.read_text()


async def test_a_model_that_is_not_there_is_in_the_log_with_who_asked_for_it(keys: Keys, tmp_path: Path) -> None:
    free, bound = keys.make("acme"), keys.make("bound", "fake")
    log = tmp_path / "access.log"
    async with gateway(replica(), keys_file=keys.path, access_log=str(log)) as running:
        for key, model in ((free, "gpt-9"), (bound, "gpt-9"), (bound, "\x1b[2J\u202e" + "x" * 200)):
            answer = await ask(running, key, model=model)
            assert answer.json()["error"]["code"] == "model_not_found"
        assert running.events("warmgate_requests_total") == 3
        assert b"gpt-9" not in (await running.client.get("/metrics")).content, "clients can't add to the figures"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["tenant"], line["key"]) for line in lines] == [
        (tenant, keys.ids[key]) for tenant, key in (("acme", free), ("bound", bound), ("bound", bound))
    ]
    assert [line["admission"] for line in lines] == ["admitted", None, None]
    assert [line["model"] for line in lines[:2]] == ["gpt-9", "gpt-9"]
    assert lines[2]["model"] == r"\x1b[2J\u202e" + "x" * 123


@contextlib.asynccontextmanager
async def full(running: Running, key: str, num_slots: int) -> AsyncIterator[None]:
    """All slots are taken by requests of `key` that won't end; they leave at the end of the block."""
    [served] = running.replicas
    served.play(first_token_s=60.0)
    holding = [asyncio.create_task(ask(running, key)) for _ in range(num_slots)]
    await until(lambda: served.log.num_in_flight == num_slots)
    served.play()
    yield
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)


async def test_a_flood_waits_behind_what_others_ask(keys: Keys) -> None:
    """One replica with two slots: twenty requests of one tenant are waiting when another's three come."""
    flood, calm = keys.make("flood"), keys.make("calm")
    order: list[str] = []
    async with gateway(replica(), keys_file=keys.path, replica_slots=2) as running:

        async def one(key: str, name: str) -> None:
            assert (await ask(running, key, stream=True)).status_code == 200
            order.append(name)

        async with full(running, flood, 2):
            tasks = [asyncio.create_task(one(flood, "flood")) for _ in range(20)]
            await until(lambda: running.app.admission.num_queued == 20)
            tasks += [asyncio.create_task(one(calm, "calm")) for _ in range(3)]
            await until(lambda: running.app.admission.num_queued == 23)
        await asyncio.gather(*tasks)
        assert "calm" not in order[12:]
        running.app.admission.check_invariants()


async def test_a_full_queue_lets_others_in_before_the_floods_last(keys: Keys) -> None:
    flood, calm = keys.make("flood"), keys.make("calm")
    settings = {"keys_file": keys.path, "replica_slots": 1, "max_queued": 6}
    async with gateway(replica(), **settings) as running:
        async with full(running, flood, 1):
            flooding = [asyncio.create_task(ask(running, flood)) for _ in range(6)]
            await until(lambda: running.app.admission.num_queued == 6)
            assert error_of(await ask(running, flood)) == (503, "queue_full")
            calming = asyncio.create_task(ask(running, calm))
            await until(lambda: any(task.done() for task in flooding))
        assert (await calming).status_code == 200
        statuses = [answer.status_code for answer in await asyncio.gather(*flooding)]
        assert sorted(statuses) == [200] * 5 + [503]


async def test_what_a_replica_can_run_is_learned_from_its_queue(keys: Keys) -> None:
    """Nobody told the gateway of the replica's two slots."""
    flood, calm = keys.make("flood"), keys.make("calm")
    async with gateway(replica(slots=2, first_token_s=60.0), keys_file=keys.path) as running:
        [served] = running.replicas
        first = [asyncio.create_task(ask(running, flood)) for _ in range(8)]
        await until(lambda: served.log.num_in_flight == 8)
        await until(lambda: running.app.registry.num_slots("fake") == 4)
        tasks = [*first, *(asyncio.create_task(ask(running, key)) for key in (flood, calm))]
        await until(lambda: running.app.admission.num_queued == 2)
        assert served.log.num_in_flight == 8
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""The failure catalogue's rows on replicas, where other files leave them open: bad links, crash loops, poison."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest

from gateway.replicas.gate import OPEN_AFTER
from loadtest.toxic import Toxic, toxic
from tests.gateway.harness import CHAT, Replica, gateway, tokens, until

COUNT = 40


def link_url(link: Toxic) -> str:
    return f"http://127.0.0.1:{link.port}"


def is_error_end(text: str) -> bool:
    last = text.rstrip().splitlines()[-1]
    return last.startswith('data: {"error"') and "[DONE]" not in text


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 64, 1000])
async def test_a_stream_that_comes_in_slices_is_relayed_byte_for_byte(slice_bytes):
    """Row 9, on the wire: heads, chunk sizes, events and characters are cut anywhere."""
    replica = Replica()
    await replica.start()
    async with toxic("127.0.0.1", replica.port) as link, gateway(replica, urls=[link_url(link)]) as running:
        async with httpx.AsyncClient(verify=False) as client:
            body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
            direct = await client.post(f"{replica.url}/v1/chat/completions", json=body)
        link.slice_bytes = slice_bytes
        answer = await running.client.post("/v1/chat/completions", json=body)
        assert answer.content == direct.content


@pytest.mark.parametrize("harm", ["truncate_after", "reset_after", "stall_after"])
@pytest.mark.parametrize("at", [1, 40, 200, 400, 900, 2000])
async def test_a_link_that_ends_in_mid_answer_never_makes_a_success(harm, at):
    """Rows 4, 5, 6, 7: wherever it ends, a stream is whole, or ends in an error event, or was refused."""
    replica = Replica()
    await replica.start()
    async with (
        toxic("127.0.0.1", replica.port) as link,
        gateway(replica, urls=[link_url(link)], first_token_s=0.3, stream_idle_s=0.3, poll_interval_s=60.0) as running,
    ):
        replica.play(num_tokens=COUNT)
        setattr(link, harm, at)
        answer = await running.chat(True)
        link.heal()
        if answer.status_code != 200:
            assert answer.status_code in (502, 504)
            assert answer.json()["error"]["message"]
        else:
            got = tokens(answer.content)
            assert got == [f" t{n}" for n in range(len(got))]
            assert is_error_end(answer.text)
            assert '"finish_reason":"stop"' not in answer.text


async def test_a_slow_and_narrow_link_delays_and_breaks_nothing():
    replica = Replica()
    await replica.start()
    async with toxic("127.0.0.1", replica.port) as link, gateway(replica, urls=[link_url(link)]) as running:
        link.latency_s, link.bytes_per_s = 0.002, 2_000_000
        answers = await asyncio.gather(*(running.chat(n % 2 == 0) for n in range(10)))
        assert all(tokens(answer.content) == [f" t{n}" for n in range(8)] for answer in answers)


async def test_a_replica_that_keeps_failing_gets_trials_only(tmp_path, caplog):
    """Rows 13 and 24: its polls are well, its answers are not; after some failures in a row others get its share."""
    bad, good = Replica(), Replica()
    path = tmp_path / "access.log"
    async with gateway(bad, good, access_log=str(path)) as running:
        bad.play(fault="status", status=500)
        for _ in range(4 * OPEN_AFTER):
            assert (await running.chat()).status_code == 200
        assert bad.log.num_started == OPEN_AFTER
        assert running.events("warmgate_replica_breaker_open") == 1
        told = {each["id"]: each["detail"] for each in (await running.client.get("/health")).json()["replicas"]}
        assert "status 500" in told[bad.name]
        assert told[good.name] == ""
        metrics = (await running.client.get("/metrics")).text
        [failovers] = [line for line in metrics.splitlines() if line.startswith("warmgate_failovers_total{")]
        assert f'replica="{bad.name}"' in failovers
    [warning] = [record for record in caplog.records if "trials only" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert f"replica {bad.name}: {OPEN_AFTER} requests in a row failed there" in warning.getMessage()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["failed_over_from"] for line in lines if line["attempts"] > 1] == [[bad.name]] * OPEN_AFTER
    assert all("failed_over_from" not in line for line in lines if line["attempts"] == 1)


async def test_an_engine_that_is_dead_behind_a_live_api_is_found_out_by_its_silence():
    """Row 24: /health alone proves nothing."""
    deaf, good = Replica(), Replica()
    async with gateway(deaf, good, first_token_s=0.25) as running:
        deaf.play(fault="stall")
        for _ in range(3 * OPEN_AFTER):
            assert (await running.chat(True)).headers["x-warmgate-replica"] == good.name
        assert deaf.log.num_started == OPEN_AFTER


async def test_breakers_spread_traffic_and_never_refuse_it():
    """When all are open they count for nothing: a client that makes every replica fail can't lock others out."""
    replicas = [Replica(), Replica()]
    async with gateway(*replicas) as running:
        for replica in replicas:
            replica.play(fault="status", status=500)
        for _ in range(2 * OPEN_AFTER):
            assert (await running.chat()).status_code == 500
        for replica in replicas:
            replica.play()
        assert (await running.chat()).status_code == 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("num_before", [0, 3], ids=["new connections", "used connections"])
async def test_a_request_that_kills_two_workers_is_not_given_to_a_third(num_before, stream):
    """Row 14: 422, for the client's own retry too; other requests are served. A connection that has served before may
    have gone stale, so there the request is tried once more at the same replica: that one is gone, and dead of it."""
    replicas = [Replica(), Replica(), Replica()]
    async with gateway(*replicas, poll_interval_s=60.0) as running:
        for _ in range(num_before):
            assert (await running.chat()).status_code == 200
        for replica in replicas:
            replica.log.num_started = 0
            replica.play(poison="poison")
            replica.worker.on_poison = replica.stop
        poison = {**CHAT, "messages": [{"role": "user", "content": "poison"}], "stream": stream}
        for _ in range(2):
            answer = await running.client.post("/v1/chat/completions", json=poison)
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "request_quarantined")
            assert answer.headers["x-should-retry"] == "false"
        assert len(running.app.registry.ready()) == 1
        assert sum(replica.log.num_started for replica in replicas) == 2
        assert (await running.chat(True)).status_code == 200


async def test_a_worker_that_hangs_up_on_a_poll_while_it_dies_counts_as_dead():
    """The poll that is to say whether it died finds it neither well nor gone; the next one knows."""
    replicas = [Replica(), Replica(), Replica()]

    def dying(replica: Replica) -> Callable[[], Awaitable[None]]:
        async def die() -> None:
            def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.close()
                server.close()

            assert replica._server is not None
            replica._server.close()
            server = await asyncio.start_server(hang_up, "127.0.0.1", replica.port)
            await replica.stop()

        return die

    async with gateway(*replicas, poll_interval_s=60.0) as running:
        for replica in replicas:
            replica.play(poison="poison")
            replica.worker.on_poison = dying(replica)
        answer = await running.chat(messages=[{"role": "user", "content": "poison"}])
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "request_quarantined")
        assert sum(replica.log.num_started for replica in replicas) == 2
        assert (await running.chat()).status_code == 200


async def test_equal_requests_that_shared_a_dying_worker_are_not_poison():
    dying, good = Replica(), Replica()
    async with gateway(dying, good) as running:
        for replica in (dying, good):
            replica.play(first_token_s=0.2)
        load = [asyncio.create_task(running.chat(True)) for _ in range(10)]
        await until(lambda: dying.log.num_in_flight == 5)
        await dying.stop()
        assert [answer.status_code for answer in await asyncio.gather(*load)] == [200] * 10
        assert (await running.chat(True)).status_code == 200


async def test_a_connection_that_breaks_is_not_a_death():
    """Two resets of live replicas make a 502 that may be tried again, not a quarantine."""
    replicas = [Replica(), Replica()]
    async with gateway(*replicas) as running:
        for replica in replicas:
            replica.play(fault="close", times=1)
        assert (await running.chat()).status_code in (200, 502)
        for replica in replicas:
            replica.play()
        assert (await running.chat()).status_code == 200


async def test_a_replica_back_from_the_dead_is_not_stormed():
    """Row 20: with the others busy, it holds its ramp's share."""
    first, second = Replica(), Replica()
    async with gateway(first, second, policy="least_loaded", slow_start_s=1000.0) as running:
        second.play(fault="stall", after=0)
        await first.stop()
        await until(lambda: len(running.app.registry.ready()) == 1)
        held = [asyncio.create_task(running.chat()) for _ in range(10)]
        await until(lambda: second.log.num_in_flight == 10)
        first.play(fault="stall", after=0)
        await first.start()
        await until(lambda: len(running.app.registry.ready()) == 2)
        held += [asyncio.create_task(running.chat()) for _ in range(10)]
        await until(lambda: first.log.num_in_flight + second.log.num_in_flight == 20)
        assert first.log.num_in_flight <= 2
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new():
    first, second = Replica(), Replica()
    headers = {"x-warmgate-secret": "s3cret"}
    async with gateway(first, second, secret="s3cret") as running:
        first.play(fault="stall", after=0)
        second.play(fault="stall", after=0)
        held = [asyncio.create_task(running.chat()) for _ in range(2)]
        await until(lambda: first.log.num_in_flight + second.log.num_in_flight == 2)
        path = f"/admin/replicas/{first.name}/drain"
        assert (await running.client.post(path)).status_code == 401
        state = (await running.client.post(path, headers=headers)).json()
        assert state == {"id": first.name, "state": "draining", "num_in_flight": 1}
        second.play()
        for _ in range(4):
            assert (await running.chat()).headers["x-warmgate-replica"] == second.name
        assert first.log.num_aborted == 0
        await asyncio.sleep(0.1)  # over some polls, which say that it is ready
        assert len(running.app.registry.ready()) == 1
        assert (await running.client.delete(path, headers=headers)).json()["state"] == "ready"
        assert (await running.client.post("/admin/replicas/none/drain", headers=headers)).status_code == 404
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_a_drained_gateway_refuses_new_requests_and_ends_the_others():
    replica = Replica()
    headers = {"x-warmgate-secret": "s3cret"}
    async with gateway(replica, secret="s3cret") as running:
        replica.play(first_token_s=0.3)
        held = asyncio.create_task(running.chat(True))
        await until(lambda: replica.log.num_in_flight == 1)
        state = (await running.client.post("/admin/drain", headers=headers)).json()
        assert state == {"draining": True, "num_in_flight": 1}
        refused = await running.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        assert (await running.client.get("/ready")).status_code == 503
        assert (await held).status_code == 200
        assert (await running.client.delete("/admin/drain", headers=headers)).json()["num_in_flight"] == 0
        assert (await running.chat()).status_code == 200


async def test_without_a_secret_nobody_is_an_administrator():
    async with gateway(Replica()) as running:
        answer = await running.client.post("/admin/drain")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_secret")


async def test_what_finds_all_places_taken_waits_and_then_what_finds_the_queue_full_hears_so():
    replica = Replica()
    async with gateway(replica, max_in_flight=2, max_queued=1) as running:
        replica.play(first_token_s=0.3)
        held = [asyncio.create_task(running.chat(True)) for _ in range(3)]
        await until(lambda: running.events("warmgate_queue_depth") == 1)
        refused = await running.chat(True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 3
        assert json.loads((await running.chat()).content)["choices"]
        running.app.admission.check_invariants()

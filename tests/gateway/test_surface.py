"""What clients and browsers expect around the answers: paths, names, methods, headers and deadlines."""

from __future__ import annotations

import json
import re

import pytest

from gateway.app import HOT_ROUTES
from tests.gateway.harness import CHAT, Replica, gateway, until

ORIGIN = "https://app.example"


@pytest.mark.parametrize(
    "path", ["/v1//chat/completions", "//v1/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"]
)
async def test_paths_that_clients_put_together_badly(path: str):
    replica = Replica()
    async with gateway(replica) as running:
        answer = await running.client.post(f"http://127.0.0.1:{running.port}{path}", json=CHAT)
        assert answer.status_code == 200
        assert replica.log.last_path == "/v1/chat/completions"
        models = await running.client.get(f"http://127.0.0.1:{running.port}/v1//models")
        assert [entry["id"] for entry in models.json()["data"]] == ["fake"]


@pytest.mark.parametrize(
    "headers", [{"content-type": "text/plain"}, {"content-type": "multipart/form-data"}, {"content-encoding": "gzip"}]
)
async def test_bodies_that_say_they_are_something_else_are_refused(headers: dict[str, str]):
    """A page in a browser can send text/plain to a gateway on its visitor's machine without being asked."""
    async with gateway(Replica()) as running:
        body = json.dumps(CHAT).encode()
        answer = await running.client.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 415
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        for fine in ({}, {"content-type": "application/json; charset=utf-8"}, {"content-type": "application/x+json"}):
            assert (await running.client.post("/v1/chat/completions", content=body, headers=fine)).status_code == 200


async def test_embeddings_are_asked_of_the_replicas_that_have_them():
    """The others are found out by asking, which is no failure of theirs, and passed over from then on."""
    without, also_without, having = Replica(), Replica(), Replica()
    also_without.worker.embeddings_status = 501
    having.worker.embeddings_status = 200
    async with gateway(without, also_without, having) as running:
        for _ in range(4):
            answer = await running.client.post("/v1/embeddings", json={"model": "fake", "input": "hi"})
            assert (answer.status_code, answer.headers["x-warmgate-replica"]) == (200, having.name)
        assert without.log.num_embeddings <= 1
        assert also_without.log.num_embeddings <= 1
        having.worker.embeddings_status = 404
        answer = await running.client.post("/v1/embeddings", json={"model": "fake", "input": "hi"})
        assert answer.status_code == 404
        assert "embeddings" in answer.json()["error"]["message"]


async def test_embeddings_of_a_replica_that_is_down_are_missing_for_a_while_only():
    without, having = Replica(), Replica()
    having.worker.embeddings_status = 200
    body = {"model": "fake", "input": "hi"}
    async with gateway(without, having) as running:
        while not without.log.num_embeddings:
            assert (await running.client.post("/v1/embeddings", json=body)).status_code == 200
        await having.stop()
        await until(lambda: len(running.app.registry.ready()) == 1)
        answer = await running.client.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert answer.headers["retry-after"]


async def test_a_conversation_of_stored_answers_is_no_larger_than_a_body_may_be():
    async with gateway(Replica(), max_body_bytes=4096) as running:
        body = {"model": "fake", "input": "x" * 2500}
        first = await running.client.post("/v1/responses", json=body)
        assert first.status_code == 200
        again = {**body, "previous_response_id": first.json()["id"]}
        answer = await running.client.post("/v1/responses", json=again)
        assert answer.status_code == 413


async def test_models_have_slashes_and_replicas_of_their_own():
    one, two = Replica("org/one"), Replica("org/two")
    async with gateway(one, two) as running:
        for name, replica in (("org/one", one), ("org/two", two)):
            answer = await running.client.get(f"/v1/models/{name}")
            assert answer.json()["id"] == name
            for _ in range(3):
                answer = await running.chat(model=name)
                assert answer.headers["x-warmgate-replica"] == replica.name
        missing = await running.client.get("/v1/models/org/three")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_aliases():
    one, two = Replica("one"), Replica("two")
    aliases = {"gpt-4o": "one", "claude-*": "two", "one": "two", "dangling": "three"}
    async with gateway(one, two, model_aliases=aliases) as running:
        for name, replica in (("gpt-4o", one), ("claude-x", two), ("one", one)):
            answer = await running.chat(model=name)
            assert answer.headers["x-warmgate-replica"] == replica.name
            assert json.loads(replica.log.last_body)["model"] == replica.worker.model
        for name, words in (
            ("dangling", "'dangling' stands for 'three', which"),
            ("three", "The model 'three' does"),
        ):
            refused = await running.chat(model=name)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            assert refused.json()["error"]["message"].startswith(words)
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert {entry["id"]: entry.get("root") for entry in listed} == {"one": None, "two": None, "gpt-4o": "one"}
        assert (await running.client.get("/v1/models/gpt-4o")).json()["root"] == "one"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/"])
async def test_the_bare_address_says_where_everything_is(path: str):
    """A browser, and whoever has left a path out: each that is named is there."""
    async with gateway(Replica()) as running:
        root = f"http://127.0.0.1:{running.port}"
        answer = await running.client.get(root + path)
        assert answer.status_code == 200
        told = answer.json()
        assert (told["service"], told["api"]) == ("warmgate", "/v1")
        assert "/v1" in told["about"]
        places = [place for place in told.values() if place.startswith("/")]
        assert {"/v1", "/health", "/metrics"} <= set(places)
        for place in places:
            assert (await running.client.get(root + place)).status_code == 200, place
        refused = await running.client.post(root + path, json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/v1/nothing"])
async def test_every_answer_has_an_id_and_head_is_get_without_a_body(path: str):
    async with gateway(Replica()) as running:
        got = await running.client.get(path, headers={"x-request-id": "mine-1"})
        assert got.headers["x-request-id"] == "mine-1"
        head = await running.client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_other_methods_are_refused_in_openais_shape(path: str):
    async with gateway(Replica()) as running:
        answer = await running.client.put(path, json={})
        assert answer.status_code == 405
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (await running.client.options(path)).headers["allow"] == "POST, OPTIONS"


async def test_pages_of_allowed_origins_may_call():
    async with gateway(Replica(), allowed_origins=[ORIGIN]) as running:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-stainless-os",
        }
        preflight = await running.client.options("/v1/chat/completions", headers={"origin": ORIGIN, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
        for stream in (False, True):
            headers = {"origin": ORIGIN}
            answer = await running.client.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers)
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        foreign = await running.client.post(
            "/v1/chat/completions", json=CHAT, headers={"origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in foreign.headers


async def test_no_page_may_call_unless_told_so():
    async with gateway(Replica()) as running:
        answer = await running.client.post("/v1/chat/completions", json=CHAT, headers={"origin": ORIGIN})
        assert "access-control-allow-origin" not in answer.headers


class TestPatience:
    """The client says how long it waits; nobody works for it after that."""

    @pytest.mark.parametrize("name", ["x-stainless-read-timeout", "x-stainless-timeout"])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_it_is_the_deadline_of_the_first_byte(self, name: str, stream: bool):
        replica = Replica()
        async with gateway(replica) as running:
            replica.play(fault="stall")
            body = {**CHAT, "stream": stream}
            answer = await running.client.post("/v1/chat/completions", json=body, headers={name: "0.3"})
            assert answer.status_code == 504
            assert answer.headers["x-should-retry"] == "false"
            assert answer.json()["error"]["code"] == "timeout"
            await until(lambda: replica.log.num_aborted == 1)
            assert replica.log.num_started == 1

    async def test_a_stream_that_has_begun_may_take_longer(self):
        replica = Replica()
        async with gateway(replica) as running:
            replica.play(num_tokens=8, token_s=0.1)
            headers = {"x-stainless-read-timeout": "0.5"}
            answer = await running.client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
            assert b"[DONE]" in answer.content

    @pytest.mark.parametrize("value", ["", "soon", "-1", "0", "inf", "nan"])
    async def test_what_is_no_time_is_ignored(self, value: str):
        async with gateway(Replica()) as running:
            headers = {"x-stainless-read-timeout": value}
            assert (await running.client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_the_published_document_describes_what_is_served():
    """Every hot route and every documented path is there on both sides; examples of answers fit their schemas."""
    replica = Replica()
    async with gateway(replica) as running:
        answer = await running.client.get("/openapi.json")
        described = answer.json()
        assert described["openapi"].startswith("3.1")
        hot = {path for path in HOT_ROUTES if path.startswith("/v1/") or path.endswith("tokenize")}
        assert hot <= set(described["paths"])
        for path, operations in described["paths"].items():
            for method in operations.keys() & {"get", "post"}:
                url = path.replace("{model}", "fake").replace("{response_id}", "resp_0")
                got = await running.client.request(method, url, **({"json": {}} if method == "post" else {}))
                assert str(got.status_code) in operations[method]["responses"], (method, path, got.text)
                assert got.status_code < 500
        names = set(re.findall(r"#/components/schemas/(\w+)", answer.text))
        assert names == set(described["components"]["schemas"])

"""What reaches the client is what the replica sent, byte for byte, with the gateway's facts in the headers."""

from __future__ import annotations

import asyncio
import codecs
import json

import httpx
import pytest

from tests.gateway.harness import CHAT, Replica, gateway, tokens, until


async def test_a_whole_answer_is_relayed_as_it_is_with_the_routing_headers():
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(cached_tokens=7)
        direct = await httpx.AsyncClient(verify=False).post(f"{replica.url}/v1/chat/completions", json=CHAT)
        answer = await running.chat()
        assert answer.status_code == 200
        assert answer.content == direct.content
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-warmgate-replica"] == replica.name
        assert answer.headers["x-warmgate-policy"] == "round_robin"
        assert answer.headers["x-warmgate-matched-tokens"] == "0"
        assert answer.headers["x-warmgate-cached-tokens"] == "7"
        assert answer.headers["x-fake"] == "1"
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    "script",
    [
        {},
        {"chunk_bytes": 1, "num_tokens": 3},
        {"chunk_bytes": 7},
        {"newline": "\r\n"},
        {"newline": "\r\n", "chunk_bytes": 5, "comments": True},
        {"comments": True},
        {"fault": "malformed", "after": 2},
        {"bom": True},
        {"bom": True, "chunk_bytes": 1, "num_tokens": 3},
        {"bom": True, "newline": "\r\n", "comments": True},
    ],
)
async def test_a_stream_is_relayed_byte_for_byte(script):
    replica = Replica()
    async with gateway(replica) as running:
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        replica.play(**script)
        async with httpx.AsyncClient(verify=False) as client:
            direct = await client.post(f"{replica.url}/v1/chat/completions", json=body)
        answer = await running.client.post("/v1/chat/completions", json=body)
        assert answer.content == direct.content
        assert answer.headers["content-type"] == "text/event-stream"
        assert tokens(answer.content) == [f" t{n}" for n in range(replica.worker.script.num_tokens)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_byte_order_mark_hides_no_event(path):
    """Neither a token, from whoever counts or translates them, nor an error that comes first and deserves a status."""
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(bom=True, num_tokens=3)
        asked = {"input": "hi"} if path == "/v1/responses" else {"messages": CHAT["messages"], "max_tokens": 3}
        body = {"model": "fake", "stream": True, **asked}
        answer = await running.client.post(path, json=body)
        assert tokens(answer.content)[:3] == [" t0", " t1", " t2"]
        assert answer.content.startswith(codecs.BOM_UTF8) == (path == "/v1/chat/completions")
        replica.play(bom=True, fault="error", after=0)
        answer = await running.client.post(path, json=body)
        assert answer.status_code == 500
        assert "told to fail" in answer.text


async def test_the_request_body_arrives_byte_for_byte_and_headers_are_cleaned():
    replica = Replica()
    async with gateway(replica) as running:
        body = b'{ "model":"fake",\n "new": {"z":1,"a":[1.50, 1e2]}, "messages":[{"content":"h\\u00e9"}] }'
        headers = {
            "content-type": "application/json",
            "authorization": "Bearer abc",
            "cookie": "a=b",
            "x-warmgate-secret": "guess",
            "x-forwarded-for": "1.2.3.4",
            "x-request-id": "mine-1",
        }
        answer = await running.client.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine-1"
        assert replica.log.last_body == body.decode("latin-1")
        sent = replica.log.last_headers
        assert sent["x-request-id"] == "mine-1"
        assert sent["accept-encoding"] == "identity"
        assert not {"authorization", "cookie", "x-warmgate-secret", "x-forwarded-for"} & set(sent)


async def test_an_insane_request_id_is_replaced():
    async with gateway(Replica()) as running:
        answer = await running.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "a b\tc"})
        assert answer.headers["x-request-id"].startswith("req-")


async def test_the_status_line_waits_for_the_first_token():
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(fault="stall", after=0)
        request = running.client.build_request("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
        sending = asyncio.create_task(running.client.send(request, stream=True))
        await until(lambda: replica.log.num_in_flight)
        assert not sending.done()
        sending.cancel()


async def test_other_routes_answer_in_shape():
    replica = Replica("org/model-a")
    async with gateway(replica) as running:
        get = running.client.get
        assert [m["id"] for m in (await get("/v1/models")).json()["data"]] == ["org/model-a"]
        assert (await get("/v1//models")).status_code == 200
        assert (await get("/v1/models/org/model-a")).json()["id"] == "org/model-a"
        missing = await get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await get("/nothing")).json()["error"].keys() == {"message", "type", "param", "code"}
        assert (await get("/v1/chat/completions")).status_code == 405
        assert (await running.client.options("/v1/chat/completions")).headers["allow"] == "POST, OPTIONS"
        assert (await running.client.head("/health")).status_code == 200
        assert (await get("/health")).json()["num_ready"] == 1
        assert (await get("/ready")).status_code == 200
        tokenized = await running.client.post("/tokenize", json={"prompt": "x"})
        assert tokenized.json()["count"] == 3
        assert "warmgate_replicas" in (await get("/metrics")).text


async def test_a_doubled_slash_and_a_missing_v1_reach_the_replica():
    replica = Replica()
    async with gateway(replica) as running:
        for path in ("//v1//chat/completions", "/chat/completions"):
            assert (await running.client.post(path, json=CHAT)).status_code == 200
            assert replica.log.last_path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, None),
        (b"\xff", 400, None),
        (b'{"model":"fake","model":"fake","messages":[{}]}', 400, None),
        (b'{"messages":[{}]}', 400, None),
        (b'{"model":"other","messages":[{}]}', 404, "model_not_found"),
        (b'{"model":"fake","messages":[' + b"[" * 50_000 + b"]" * 50_000 + b"]}", 400, None),
        (b'{"model":"fake","messages":[{"content":"' + b"x" * 2_000_000 + b'"}]}', 413, None),
    ],
)
async def test_bad_requests_are_refused_before_any_replica_hears_of_them(body, status, code):
    replica = Replica()
    async with gateway(replica, max_body_bytes=1_000_000) as running:
        answer = await running.client.post("/v1/chat/completions", content=body)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert answer.headers["x-request-id"]
        assert replica.log.num_started == 0


async def test_headers_beyond_the_limit_are_refused():
    async with gateway(Replica(), max_header_bytes=4096) as running:
        answer = await running.client.post("/v1/chat/completions", json=CHAT, headers={"x-long": "a" * 5000})
        assert answer.status_code == 431
        assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"


async def test_a_body_that_does_not_come_is_timed_out():
    async with gateway(Replica(), body_s=0.1) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_bundled_workers_alone_are_told_the_work_that_is_expected():
    for incarnation, policy, told in (("life", "warm", True), ("", "warm", False), ("life", "round_robin", False)):
        replica = Replica(incarnation=incarnation)
        async with gateway(replica, policy=policy) as running:
            response = await running.client.post(
                "/v1/chat/completions", json=CHAT, headers={"x-warmgate-work": "forged"}
            )
            assert response.status_code == 200
        work = replica.log.last_headers.get("x-warmgate-work")
        assert (work is not None) == told
        assert work is None or float(work) > 0.0

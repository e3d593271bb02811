"""Translated answers through a gateway and a replica that fails as told: each ends once, in the client's shape."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from httpx_sse import EventSource

from gateway.observe.record import RequestRecord
from gateway.translate.answer import TranslatedAnswer
from gateway.translate.messages import MessagesTranslation
from gateway.translate.responses import ResponsesTranslation
from gateway.translate.store import ResponseStore
from tests.gateway.harness import Replica, Running, gateway

BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "fake", "input": "hi"},
}
PATHS = pytest.mark.parametrize("path", BODIES)


async def ask(running: Running, path: str, stream: bool = False, **fields: Any) -> httpx.Response:
    return await running.client.post(path, json={**BODIES[path], "stream": stream, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events' data; each event's name is its data's type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in EventSource(response).iter_sse():
        found.append(event.json())
        assert found[-1]["type"] == event.event
    return found


@PATHS
async def test_ids_come_back_by_both_names_and_the_route_is_told(path: str):
    replica = Replica()
    async with gateway(replica) as running:
        answer = await running.client.post(path, json=BODIES[path], headers={"x-request-id": "mine"})
        assert (answer.headers["x-request-id"], answer.headers["request-id"]) == ("mine", "mine")
        assert answer.headers["x-warmgate-replica"] == replica.name
        assert answer.headers["content-type"] == "application/json"
        assert running.app.router.policy.name == answer.headers["x-warmgate-policy"]


@PATHS
@pytest.mark.parametrize("given", [{"x-api-key": "secret"}, {"authorization": "Bearer secret"}])
async def test_the_clients_key_does_not_reach_the_replica(path: str, given: dict[str, str]):
    replica = Replica()
    async with gateway(replica) as running:
        await running.client.post(path, json=BODIES[path], headers=given)
        assert not {"x-api-key", "authorization"} & set(replica.log.last_headers)


@PATHS
@pytest.mark.parametrize("chunk_bytes", [0, 1])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
async def test_a_streams_text_is_all_there(path: str, chunk_bytes: int, newline: str):
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(num_tokens=4, chunk_bytes=chunk_bytes, newline=newline, comments=True, cached_tokens=6)
        found = events(await ask(running, path, stream=True))
        if path == "/v1/messages":
            texts = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
            assert found[0]["message"]["usage"]["cache_read_input_tokens"] == 6
            assert found[-2]["usage"] == {
                "input_tokens": 4,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 6,
                "output_tokens": 4,
            }
        else:
            texts = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
            assert found[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 6
        assert "".join(texts) == " t0 t1 t2 t3"


@PATHS
@pytest.mark.parametrize("fault", ["error", "die", "no_finish", "no_done", "malformed"])
async def test_what_breaks_in_mid_stream_ends_in_an_error_event(path: str, fault: str):
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(num_tokens=4, fault=fault, after=2, token_s=0.05)
        found = events(await ask(running, path, stream=True))
        ends = {"message_stop", "message_delta", "response.completed", "response.incomplete", "error"}
        assert [event["type"] for event in found if event["type"] in ends] == ["error"]
        assert found[-1]["error"]["message"]


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_status_and_shape(path: str, stream: bool):
    replica = Replica()
    async with gateway(replica) as running:
        for status, kind in ((400, "invalid_request_error"), (429, "rate_limit_error"), (503, "overloaded_error")):
            replica.play(fault="status", status=status, retry_after="7")
            answer = await ask(running, path, stream)
            assert answer.status_code == status
            if status != 400:
                assert answer.headers["retry-after"] == "7"
            if path == "/v1/messages":
                assert answer.json()["type"] == "error"
                assert answer.json()["error"]["type"] == kind
                assert answer.json()["request_id"] == answer.headers["request-id"]
            else:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@PATHS
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model":"fake"}', b'{"model":1}', b'{"a":1,"a":2}', b"\xff{}"])
async def test_bad_bodies_are_the_clients_fault(path: str, body: bytes):
    async with gateway(Replica()) as running:
        answer = await running.client.post(path, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


@PATHS
async def test_one_failover_before_the_first_token(path: str):
    bad, good = Replica(), Replica()
    async with gateway(bad, good) as running:
        bad.play(fault="close")
        for stream in (False, True, False, True):
            answer = await ask(running, path, stream)
            assert answer.status_code == 200
            assert answer.headers["x-warmgate-replica"] == good.name


@PATHS
async def test_a_replica_that_answers_no_chat_is_bad_gateway(path: str):
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(fault="html")
        assert (await ask(running, path)).status_code == 502


class Sent:
    """What an application sent to its server."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_a_replica_that_does_not_stream_gives_a_stream_of_one_chunk(api: str):
    translation: Any = MessagesTranslation() if api == "messages" else ResponsesTranslation(ResponseStore(10_000))
    translation.request(msgspec.json.encode({**BODIES[f"/v1/{api}"], "stream": True}))
    sent = Sent()
    record = RequestRecord(request_id="r", endpoint=api, started_at=0.0)
    answer = TranslatedAnswer({"headers": []}, sent, translation, record)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    choice = {"message": {"content": "hello", "tool_calls": [call]}, "finish_reason": "tool_calls"}
    whole = {"model": "m", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    await answer.whole(200, [(b"content-type", b"application/json")], msgspec.json.encode(whole))
    assert sent.headers[b"content-type"].startswith(b"text/event-stream")
    last = events(httpx.Response(200, content=sent.body, headers=list(sent.headers.items())))[
        -1 if api == "responses" else -2
    ]
    if api == "responses":
        assert [item["type"] for item in last["response"]["output"]] == ["message", "function_call"]
    else:
        assert last["delta"]["stop_reason"] == "tool_use"

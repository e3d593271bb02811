"""Whatever shape a replica's error has, clients get the one that they read."""

from __future__ import annotations

import json

import pytest

from gateway.openai.errors import error_in, in_shape
from tests.gateway.harness import CHAT, Replica, gateway

KEYS = {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # vLLM
        (
            b'{"error":{"message":"This model\'s maximum context length is 9","type":"BadRequestError",'
            b'"param":null,"code":400}}',
            ("This model's maximum context length is 9", "invalid_request_error", "context_length_exceeded"),
        ),
        (
            b'{"object":"error","message":"wrong","type":"BadRequestError","param":"n","code":400}',
            ("wrong", "invalid_request_error", None),
        ),
        # llama.cpp
        (
            b'{"error":{"code":400,"message":"the request exceeds the available context size",'
            b'"type":"exceed_context_size_error"}}',
            ("the request exceeds the available context size", "exceed_context_size_error", "context_length_exceeded"),
        ),
        # FastAPI
        (b'{"detail":"Not Found"}', ("Not Found", "invalid_request_error", None)),
        (b'{"detail":[{"loc":["body"]}]}', ("The replica failed (400).", "invalid_request_error", None)),
        # others
        (b'{"error":"boom"}', ("boom", "invalid_request_error", None)),
        (b"<html>nginx</html>", ("The replica failed (400).", "invalid_request_error", None)),
        (b"[1]", ("The replica failed (400).", "invalid_request_error", None)),
        (b"", ("The replica failed (400).", "invalid_request_error", None)),
    ],
)
def test_other_shapes_are_put_right(body: bytes, expected: tuple):
    assert not in_shape(body)
    error = error_in(body, 400)
    assert (error.message, error.type, error.code) == expected
    assert in_shape(error.body())


def test_the_right_shape_is_left_alone():
    assert in_shape(b'{"error": {"code":null, "message":"m","type":"server_error","param":null, "more":1}}')


async def test_a_refusal_reaches_the_client_in_shape():
    """The scripted replica puts its status into `code`, as engines do."""
    replica = Replica()
    async with gateway(replica) as running:
        for status, seen in ((400, 400), (404, 404), (422, 400)):
            replica.play(fault="status", status=status)
            answer = await running.chat()
            assert answer.status_code == seen
            assert answer.headers["content-type"] == "application/json"
            assert set(answer.json()["error"]) == KEYS
            assert answer.json()["error"]["code"] is None


@pytest.mark.parametrize("after", [0, 2])
async def test_an_error_in_the_stream_reaches_the_client_in_shape(after: int):
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(fault="error", after=after, token_s=0.02)
        answer = await running.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        if after == 0:  # nothing has gone out, so it has a status
            assert answer.status_code == 500
            assert set(answer.json()["error"]) == KEYS
            return
        *_, last = answer.text.strip().split("\n\n")
        assert set(json.loads(last.removeprefix("data: "))["error"]) == KEYS
        assert 'finish_reason":"' not in answer.text

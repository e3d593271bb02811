"""The ledger's usage: asked for in the bytes that the client sent, and taken out of the stream that it gets."""

from __future__ import annotations

import json
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.parse import parse_request, with_model
from gateway.openai.sse import StreamScanner
from tests.gateway.harness import CHAT, Replica, gateway, until


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (
            b'{ "model":"m", "messages":[{"content":"\\u00e9"}],"stream" : true , "z":1.50}\n',
            b'{ "model":"m", "messages":[{"content":"\\u00e9"}],"stream" : true,"stream_options":{"include_usage":true}'
            b' , "z":1.50}\n',
        ),
        (
            b'{"stream_options": {"x":1, "include_usage":false} ,"stream":true,"model":"m","messages":[{}]}',
            b'{"stream_options": {"x":1,"include_usage":true} ,"stream":true,"model":"m","messages":[{}]}',
        ),
        (
            b'{"stream":true,"stream_options":null,"model":"m","messages":[{}]}',
            b'{"stream":true,"stream_options":{"include_usage":true},"model":"m","messages":[{}]}',
        ),
    ],
)
def test_a_stream_is_asked_for_its_usage_in_the_received_bytes(body: bytes, sent: bytes):
    parsed = parse_request("chat", body)
    assert (parsed.body, parsed.adds_usage) == (sent, True)


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream":true, "stream_options":{"include_usage":true},"model":"m","messages":[{}]}',
        b'{"stream":false,"model":"m","messages":[{}]}',
        b'{ "model":"m","messages":[{}]}',
    ],
)
def test_other_bodies_stay_as_they_are(body: bytes):
    parsed = parse_request("chat", body)
    assert (parsed.body, parsed.adds_usage) == (body, False)


def test_another_model_changes_its_own_bytes_alone():
    body = b'{ "messages":[{"model":"x"}], "model" : "x" ,"a":1.0}'
    parsed = with_model(parse_request("chat", body), "org/y")
    assert (parsed.model, parsed.body) == ("org/y", b'{ "messages":[{"model":"x"}], "model" : "org/y" ,"a":1.0}')


def stream(null: str, usage: str) -> bytes:
    text = json.dumps('say "usage":null}\n\n, or data: {"usage":1}')
    frames = [
        f'{{"choices":[{{"delta":{{"role":"assistant"}},"finish_reason":null}}]{null}}}',
        f'{{"choices":[{{"delta":{{"content":{text}}},"finish_reason":null}}]{null}}}',
        f'{{"choices":[],"prompt_filter_results":[]{null}}}',
        f'{{"choices":[{{"delta":{{}},"finish_reason":"stop"}}]{null}}}',
    ]
    frames += ['{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'] if usage else []
    return b"".join(b"data: " + frame.encode() + b"\n\n" for frame in [*frames, "[DONE]"])


@given(st.lists(st.integers(0, 600), max_size=8), st.sampled_from(["", ',"usage":null', ', "usage": null']))
def test_its_traces_are_taken_out_wherever_the_stream_is_cut(cuts: list[int], null: str):
    data = stream(null, "usage")
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    scanner = StreamScanner(10_000, strip_usage=True)
    out = b""
    for start, end in pairwise(edges):
        out += scanner.feed(data[start:end])
        scanner.check_invariants()
    assert out == stream("", "")
    assert scanner.usage is not None
    assert (scanner.usage.completion_tokens, scanner.done, scanner.broken) == (2, True, "")


def test_a_client_that_asked_gets_everything():
    data = stream(',"usage":null', "usage")
    assert StreamScanner(10_000).feed(data) == data


@pytest.mark.parametrize("script", [{}, {"chunk_bytes": 1, "num_tokens": 3}, {"newline": "\r\n"}, {"comments": True}])
async def test_the_client_gets_what_a_replica_sends_that_was_not_asked(script: dict):
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(**script)
        body = {**CHAT, "stream": True}
        async with httpx.AsyncClient(verify=False) as client:
            direct = await client.post(f"{replica.url}/v1/chat/completions", json=body)
        answer = await running.client.post("/v1/chat/completions", json=body)
        assert answer.content == direct.content
        assert json.loads(replica.log.last_body)["stream_options"] == {"include_usage": True}
        await until(lambda: running.events("warmgate_output_tokens_total") == replica.worker.script.num_tokens)
        assert running.events("warmgate_prompt_tokens_total") == 10

"""Bodies and chunks as OpenAI's clients need them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.contract.errors import ApiError
from engine_worker.core.types import FinishReason, SampledToken
from engine_worker.serving import sse
from engine_worker.serving.detokenizer import Piece, PlacedToken
from engine_worker.serving.replies import _TEXT, ChatReply, CompletionReply, Usage, encode
from engine_worker.serving.token_text import TokenText
from tests.engine_worker.serving.fake_engine import make_tokenizer

TOKENIZER = make_tokenizer()
TOKENS = TokenText(TOKENIZER)
USAGE = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3)
HI = Piece("hi", finish_reason=FinishReason.STOP)


def token(text: str, *top: str) -> SampledToken:
    [token_id] = TOKENIZER.encode(text).ids
    others = tuple((TOKENIZER.encode(other).ids[0], -1.0 - i) for i, other in enumerate(top))
    return SampledToken(token_id, -0.25, others)


def chat(num_logprobs: int | None = None, include_usage: bool = False) -> ChatReply:
    return ChatReply("chatcmpl-1", 7, "m", TOKENS, num_logprobs, include_usage)


def completion(num_logprobs: int | None = None, include_usage: bool = False) -> CompletionReply:
    return CompletionReply("cmpl-1", 7, "m", TOKENS, num_logprobs, include_usage)


def parsed(chunks: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(chunk) for chunk in chunks]


def test_a_whole_chat() -> None:
    assert json.loads(chat().whole([HI], USAGE)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def test_a_whole_completion() -> None:
    body = json.loads(completion().whole([HI, HI], USAGE))
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    ended = {"finish_reason": "stop", "stop_reason": None}
    assert body["choices"][0] == {"index": 0, "text": "hi", "logprobs": None, **ended}


def test_the_chunks_of_a_chat() -> None:
    reply = chat()
    [opening] = parsed(reply.opening(0, has_text=True))
    [text, end] = parsed(reply.chunks(0, HI))
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": "hi"}
    assert end["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in (opening, text, end)] == [None, None, "stop"]
    assert {chunk["object"] for chunk in (opening, text, end)} == {"chat.completion.chunk"}
    assert "usage" not in text
    assert reply.closing(USAGE) == []


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("reason", ["END", 7])
def test_what_stopped_an_answer_is_told_beside_its_finish_reason(make: Any, reason: str | int) -> None:
    piece = Piece("hi", finish_reason=FinishReason.STOP, stop_reason=reason)
    assert json.loads(make().whole([piece], USAGE))["choices"][0]["stop_reason"] == reason
    chunks = parsed(make().chunks(0, piece))
    assert [choice.get("stop_reason") for chunk in chunks for choice in chunk["choices"]][-1] == reason
    assert "stop_reason" not in parsed(make().chunks(0, Piece("hi")))[0]["choices"][0]


@pytest.mark.parametrize("make", [chat, completion])
def test_usage_comes_in_a_chunk_of_its_own(make: Any) -> None:
    reply = make(include_usage=True)
    chunks = parsed([*reply.opening(0, has_text=True), *reply.chunks(0, HI)])
    assert all(chunk["usage"] is None for chunk in chunks)
    [last] = parsed(reply.closing(USAGE))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_logprobs_of_a_chat() -> None:
    piece = Piece("é", (PlacedToken(token("a", "b", "c"), 0),), FinishReason.LENGTH)
    [entry] = json.loads(chat(1).whole([piece], USAGE))["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}],
    }


def test_logprobs_of_a_completion() -> None:
    piece = Piece("ab", (PlacedToken(token("a", "b", "c"), 0), PlacedToken(token("b"), 1)), FinishReason.LENGTH)
    assert json.loads(completion(2).whole([piece], USAGE))["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"b": -1.0, "c": -2.0, "a": -0.25}, {"b": -0.25}],
        "text_offset": [0, 1],
    }


def test_minus_infinity_is_said_in_json() -> None:
    piece = Piece("a", (PlacedToken(SampledToken(token("a").token_id, float("-inf")), 0),), FinishReason.LENGTH)
    [entry] = json.loads(chat(0).whole([piece], USAGE))["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0


def test_frames() -> None:
    assert sse.frames([b'{"a":1}', b"{}"]) == b'data: {"a":1}\n\ndata: {}\n\n'
    event = sse.error_event(ApiError(503, "gone"))
    assert json.loads(event.removeprefix(b"data: ")) == {
        "error": {"message": "gone", "type": "server_error", "param": None, "code": None}
    }
    assert event.endswith(b"}\n\n")


@given(st.text(), st.integers(0, 3), st.sampled_from(["m", '"\\"{}', f"{_TEXT}"]), st.booleans())
def test_a_chunk_of_text_is_what_the_encoder_makes_of_it(text: str, index: int, model: str, usage: bool) -> None:
    """Most chunks are put together from a template: to the byte as those that are not."""
    more = {"usage": None} if usage else {}
    for reply, choice in (
        (ChatReply("c", 7, model, TOKENS, None, usage), {"index": index, "delta": {"content": text}}),
        (CompletionReply("c", 7, model, TOKENS, None, usage), {"index": index, "text": text}),
    ):
        whole = {"id": "c", "object": reply.chunk_object, "created": 7, "model": model}
        expected = {**whole, "choices": [{**choice, "logprobs": None, "finish_reason": None}], **more}
        for _ in range(2):
            assert reply.chunks(index, Piece(text)) == [encode(expected)]

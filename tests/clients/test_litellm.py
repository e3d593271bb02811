"""litellm as a client of the gateway."""

from __future__ import annotations

import json
import time

import litellm
import pytest

from tests.clients.test_openai import SCHEMA, WEATHER, left, until_left, user

litellm.suppress_debug_info = True


@pytest.fixture(scope="module")
def options(base: str) -> dict:
    return {"model": "openai/scripted", "api_base": f"{base}/v1", "api_key": "unused", "num_retries": 0}


def test_whole_and_streamed(options: dict) -> None:
    answer = litellm.completion(messages=user("say hello there"), **options)
    assert answer.choices[0].message.content == "hello there"
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    stream = litellm.completion(messages=user("say a b c"), stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "a b c"


def test_tools(options: dict) -> None:
    answer = litellm.completion(messages=user("weather?"), tools=[WEATHER], **options)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "x", "days": 7}
    chunks = list(litellm.completion(messages=user("weather?"), tools=[WEATHER], stream=True, **options))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_structured_output(options: dict) -> None:
    wanted = {"type": "json_schema", "json_schema": SCHEMA}
    answer = litellm.completion(messages=user("who?"), response_format=wanted, **options)
    assert json.loads(answer.choices[0].message.content) == {"name": "x", "age": 7}


def test_embeddings(options: dict) -> None:
    answer = litellm.embedding(input=["ab", "abc"], encoding_format="float", **options)
    assert [entry["embedding"] for entry in answer.data] == [[2.0, 0.0, 0.5], [3.0, 1.0, 0.5]]


def test_the_messages_api(base: str) -> None:
    answer = litellm.completion(
        model="anthropic/claude-any-4", api_base=base, api_key="unused", messages=user("say hello there"), max_tokens=9
    )
    assert answer.choices[0].message.content == "hello there"


def test_errors_and_retries(options: dict) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=user("fail 400 99"), **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=user("hi"), **{**options, "model": "openai/no-such"})
    answer = litellm.completion(messages=user(f"fail 500 2 {time.time_ns()}"), **{**options, "num_retries": 3})
    assert answer.choices[0].message.content == "fine"


def test_a_stream_that_is_left_reaches_the_replica(options: dict, scripted: str) -> None:
    before = left(scripted)
    stream = litellm.completion(messages=user("hang"), stream=True, **options)
    next(stream)
    stream.completion_stream.close()
    until_left(scripted, before)

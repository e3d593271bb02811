"""llama-index's OpenAILike through the gateway."""

from __future__ import annotations

import gc
import time

import openai
import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from tests.clients.test_openai import left, until_left

MODEL = "scripted"


def llm(base: str, **fields: object) -> OpenAILike:
    options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, "max_retries": 0}
    return OpenAILike(model=MODEL, api_base=f"{base}/v1", api_key="unused", **{**options, **fields})


def weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{city} {days}"


def test_chat_and_its_stream(base: str) -> None:
    question = [ChatMessage(role="user", content="say hello there")]
    assert llm(base).chat(question).message.content == "hello there"
    *_, last = llm(base).stream_chat(question)
    assert last.message.content == "hello there"


def test_plain_completions_are_its_default(base: str) -> None:
    assert llm(base, is_chat_model=False).complete("say well then").text == "well then"
    *_, last = llm(base, is_chat_model=False).stream_complete("say well then")
    assert last.text == "well then"


def test_tools(base: str) -> None:
    tools = [FunctionTool.from_defaults(weather)]
    model = llm(base)
    answer = model.chat_with_tools(tools, user_msg="weather?")
    [call] = model.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "x", "days": 7})
    *_, last = model.stream_chat_with_tools(tools, user_msg="weather?")
    [call] = model.get_tool_calls_from_response(last)
    assert call.tool_kwargs == {"city": "x", "days": 7}


def test_embeddings(base: str) -> None:
    embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{base}/v1", api_key="unused")
    assert embedding.get_text_embedding_batch(["ab", "abc"]) == [[2.0, 0.0, 0.5], [3.0, 1.0, 0.5]]


def test_errors_and_retries(base: str) -> None:
    with pytest.raises(openai.BadRequestError):
        llm(base).complete("fail 400 99")
    assert llm(base, max_retries=3).complete(f"fail 500 2 {time.time_ns()}").text == "fine"


def test_a_stream_that_is_left_reaches_the_replica(base: str, scripted: str) -> None:
    before = left(scripted)
    stream = llm(base).stream_complete("hang")
    next(stream)
    # Its instrumentation keeps the connection in a reference cycle, whatever the gateway does.
    del stream
    gc.collect()
    until_left(scripted, before)

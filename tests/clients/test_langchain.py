"""langchain-openai through the gateway."""

from __future__ import annotations

import time

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.test_openai import left, until_left

MODEL = "scripted"


@pytest.fixture(scope="module")
def chat(base: str) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{base}/v1", api_key="unused", max_retries=0, timeout=60)


@tool
def weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{city} {days}"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def test_whole_and_streamed(chat: ChatOpenAI) -> None:
    answer = chat.invoke("say hello there")
    assert answer.content == "hello there"
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 5
    assert "".join(chunk.content for chunk in chat.stream("say a b c")) == "a b c"


def test_a_streams_usage_when_asked_for(chat: ChatOpenAI) -> None:
    usages = [chunk.usage_metadata for chunk in chat.stream("say a b", stream_usage=True) if chunk.usage_metadata]
    assert usages[-1]["output_tokens"] == 2
    assert not any(chunk.usage_metadata for chunk in chat.stream("say a b", stream_usage=False))


def test_a_tool_loop(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather])
    question = HumanMessage("weather?")
    answer = bound.invoke([question])
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "x", "days": 7})
    total = None
    for chunk in bound.stream([question]):
        total = chunk if total is None else total + chunk
    assert total.tool_calls[0]["args"] == call["args"]
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert bound.invoke([question, answer, result]).content == "the result is x 7"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: str) -> None:
    assert chat.with_structured_output(Person, method=method).invoke("who?") == Person(name="x", age=7)


def test_the_responses_api(base: str) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=f"{base}/v1", api_key="unused", use_responses_api=True)
    assert chat.invoke("say hello there").text == "hello there"
    assert "".join(chunk.text for chunk in chat.stream("say a b c")) == "a b c"


def test_embeddings(base: str) -> None:
    """Text goes as text only with `check_embedding_ctx_length=False`; else it is cut by OpenAI's own tokenizer."""
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{base}/v1", api_key="unused", check_embedding_ctx_length=False
    )
    assert embeddings.embed_documents(["ab", "abc"]) == [[2.0, 0.0, 0.5], [3.0, 1.0, 0.5]]
    assert embeddings.embed_query("abcd") == [4.0, 0.0, 0.5]


def test_errors_and_retries(chat: ChatOpenAI, base: str) -> None:
    with pytest.raises(openai.BadRequestError):
        chat.invoke("fail 400 99")
    patient = ChatOpenAI(model=MODEL, base_url=f"{base}/v1", api_key="unused", max_retries=2)
    assert patient.invoke(f"fail 500 2 {time.time_ns()}").content == "fine"


def test_a_stream_that_is_left_reaches_the_replica(chat: ChatOpenAI, scripted: str) -> None:
    before = left(scripted)
    stream = chat.stream("hang")
    next(stream)
    stream.close()
    until_left(scripted, before)

"""Tools and formats through OpenAI's own client, with a model far too small to get them right by itself."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import Stack

pytestmark = pytest.mark.e2e

ASK = [{"role": "user", "content": "What is the weather in Paris over the next two days?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather forecast of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: int
    married: bool


def check_weather(arguments: str) -> None:
    value = json.loads(arguments)
    assert set(value) == {"city", "days"}
    assert isinstance(value["days"], int)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call(client: openai.OpenAI, stack: Stack, choice: Any) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=ASK, tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False, seed=1
    )
    [choice_] = answer.choices
    assert choice_.finish_reason == "tool_calls"
    assert choice_.message.content is None
    assert choice_.message.tool_calls is not None
    [call] = choice_.message.tool_calls
    assert call.id
    assert call.type == "function"
    if call.function.name == "get_weather":
        check_weather(call.function.arguments)
    else:
        assert choice == "required"
        assert call.function.arguments == "{}"


def test_the_result_of_a_call_goes_back(client: openai.OpenAI, stack: Stack) -> None:
    first = client.chat.completions.create(
        model=stack.model, messages=ASK, tools=[WEATHER], tool_choice=NAMED, temperature=0
    )
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain, then sun."}
    second = client.chat.completions.create(
        model=stack.model, messages=[*ASK, message, result], tools=[WEATHER], tool_choice="none", max_tokens=16
    )
    assert second.choices[0].message.content
    assert second.choices[0].message.tool_calls is None


def test_a_streamed_call(client: openai.OpenAI, stack: Stack) -> None:
    arguments: dict[str, Any] = {
        "model": stack.model, "messages": ASK, "tools": [WEATHER], "tool_choice": NAMED, "temperature": 0
    }  # fmt: skip
    whole = client.chat.completions.create(**arguments).choices[0]
    with client.chat.completions.stream(**arguments) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert final.message.tool_calls
    assert whole.message.tool_calls
    assert final.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments
    check_weather(final.message.tool_calls[0].function.arguments)


def test_a_call_that_is_cut_off_is_none(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=ASK, tools=[WEATHER], tool_choice=NAMED, max_tokens=20, temperature=0
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None


def test_several_choices_of_calls(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=ASK, tools=[WEATHER, CLOCK], tool_choice=NAMED, n=3, seed=4
    )
    ids = set()
    for choice in answer.choices:
        assert choice.message.tool_calls
        check_weather(choice.message.tool_calls[0].function.arguments)
        ids.add(choice.message.tool_calls[0].id)
    assert len(ids) == 3


def test_parse_gives_an_object(client: openai.OpenAI, stack: Stack) -> None:
    prompt: list[Any] = [{"role": "user", "content": "Ada is 36 years old and married. Answer in JSON."}]
    answer = client.chat.completions.parse(model=stack.model, messages=prompt, response_format=Person, seed=2)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model=stack.model, messages=prompt, response_format=Person, seed=2) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[A-C]{3}-[0-9]"}, r"[A-C]{3}-[0-9]"),
        ({"structured_outputs": {"choice": ["positive", "negative"]}}, "positive|negative"),
        ({"guided_grammar": 'start: ("la" | "lo") "!"'}, "l[ao]!"),
    ],
    ids=str,
)
def test_vllms_formats(client: openai.OpenAI, stack: Stack, extra: dict[str, Any], pattern: str) -> None:
    answer = client.chat.completions.create(model=stack.model, messages=ASK, extra_body=extra)
    assert re.fullmatch(pattern, answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_schema_that_can_not_be_enforced(client: openai.OpenAI, stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    format_: Any = {"type": "json_schema", "json_schema": {"name": "odd", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="`not`") as caught:
        client.chat.completions.create(model=stack.model, messages=ASK, response_format=format_)
    assert caught.value.param == "response_format"


def test_an_echo_with_logprobs_adds_up(client: openai.OpenAI, stack: Stack) -> None:
    prompt = "The capital of France is Paris, and the capital of Italy is"
    cold, warm = (
        client.completions.create(
            model=stack.model, prompt=prompt, max_tokens=3, echo=True, logprobs=2, temperature=0
        ).choices[0]
        for _ in range(2)
    )
    assert cold.text.startswith(prompt)
    assert cold.logprobs is not None
    assert warm.logprobs is not None
    tokens, offsets = cold.logprobs.tokens, cold.logprobs.text_offset
    values = cold.logprobs.token_logprobs
    assert tokens is not None
    assert offsets is not None
    assert values is not None
    assert "".join(tokens) == cold.text
    assert [cold.text[at : at + len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])
    assert warm.logprobs.token_logprobs is not None
    assert warm.logprobs.token_logprobs[1:] == pytest.approx(values[1:], abs=1e-3)
    paris = tokens.index(" Paris")
    assert values[paris] > -3  # the model does know that

"""The Responses and Messages APIs over the real model, through their own clients: prefixes stay warm across turns."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.e2e.conftest import Stack

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0}  # a field that the newest client has no argument for
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    stack.until_all_up()
    with anthropic.Anthropic(base_url=stack.base_url, api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_a_conversation_by_messages_stays_where_it_is_warm(
    claude: anthropic.Anthropic, stack: Stack, long_prompt: str
) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    system = [billing, {"type": "text", "text": long_prompt, "cache_control": {"type": "ephemeral"}}]
    messages: list = [{"role": "user", "content": "Say hello."}]
    first = claude.messages.with_raw_response.create(
        model=stack.model, max_tokens=8, extra_body=GREEDY, system=system, messages=messages
    )
    answer = first.parse()
    counted = claude.messages.count_tokens(model=stack.model, system=system, messages=messages)
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And again?"}]
    system[0] = {"type": "text", "text": "x-anthropic-billing-header: cch=2"}
    with claude.messages.stream(
        model=stack.model, max_tokens=8, extra_body=GREEDY, system=system, messages=messages
    ) as stream:
        second = stream.get_final_message()
        assert stream.response.headers["x-warmgate-replica"] == first.headers["x-warmgate-replica"]
    assert second.usage.cache_read_input_tokens > counted.input_tokens // 2
    # What the stream's start said of the prompt was the gateway's own count.
    recounted = claude.messages.count_tokens(model=stack.model, system=system, messages=messages)
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == recounted.input_tokens


def test_the_three_apis_say_the_same_and_share_what_is_cached(
    client: openai.OpenAI, claude: anthropic.Anthropic, stack: Stack, long_prompt: str
) -> None:
    messages = [{"role": "user", "content": long_prompt}]
    chat = client.chat.completions.create(model=stack.model, messages=messages, max_tokens=12, temperature=0)
    response = client.responses.create(model=stack.model, input=long_prompt, max_output_tokens=12, temperature=0)
    message = claude.messages.create(model=stack.model, messages=messages, max_tokens=12, extra_body=GREEDY)
    text = chat.choices[0].message.content
    assert response.output_text == text
    assert message.content[0].text == text
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.input_tokens_details.cached_tokens > chat.usage.prompt_tokens // 2
    assert message.usage.cache_read_input_tokens > chat.usage.prompt_tokens // 2


def test_a_conversation_by_responses_goes_on_by_its_id(client: openai.OpenAI, stack: Stack, long_prompt: str) -> None:
    first = client.responses.create(model=stack.model, input=long_prompt, max_output_tokens=8, temperature=0)
    stream = client.responses.create(
        model=stack.model,
        input="Go on.",
        previous_response_id=first.id,
        max_output_tokens=8,
        temperature=0,
        stream=True,
    )
    *_, last = stream
    assert last.response.previous_response_id == first.id
    assert first.usage is not None
    assert last.response.usage.input_tokens > first.usage.input_tokens
    assert last.response.usage.input_tokens_details.cached_tokens > first.usage.input_tokens // 2


class TestTools:
    """Forced, since a model this small seldom calls by itself."""

    def test_by_messages(self, claude: anthropic.Anthropic, stack: Stack) -> None:
        tools = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
        arguments = {
            "model": stack.model,
            "max_tokens": 60,
            "extra_body": GREEDY,
            "messages": [{"role": "user", "content": "How is the weather in Rome for two days?"}],
            "tools": tools,
            "tool_choice": {"type": "tool", "name": "weather"},
        }
        whole = claude.messages.create(**arguments)
        with claude.messages.stream(**arguments) as stream:
            streamed = stream.get_final_message()
        for answer in (whole, streamed):
            assert answer.stop_reason == "tool_use"
            [block] = answer.content
            assert block.name == "weather"
            assert block.input["city"] in ("Paris", "Rome")

    def test_by_responses(self, client: openai.OpenAI, stack: Stack) -> None:
        tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
        arguments = {
            "model": stack.model,
            "input": "How is the weather in Rome for two days?",
            "tools": tools,
            "tool_choice": {"type": "function", "name": "weather"},
            "max_output_tokens": 60,
            "temperature": 0,
        }
        whole = client.responses.create(**arguments)
        *_, last = client.responses.create(**arguments, stream=True)
        for answer in (whole, last.response):
            [item] = answer.output
            assert (item.type, item.name) == ("function_call", "weather")
            assert json.loads(item.arguments)["city"] in ("Paris", "Rome")


def test_structured_output(client: openai.OpenAI, stack: Stack) -> None:
    text = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(
        model=stack.model, input="A trip, please.", text=text, max_output_tokens=60, temperature=0
    )
    trip = json.loads(answer.output_text)
    assert trip["city"] in ("Paris", "Rome")
    assert 1 <= trip["days"] <= 9

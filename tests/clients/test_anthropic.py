"""Anthropic's client through the gateway, onto chat completions."""

from __future__ import annotations

import time

import anthropic
import httpx
import pytest

from tests.clients.test_openai import left, until_left

MODEL = "claude-any-4"  # an alias
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def client(base: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base, api_key="unused", max_retries=0, timeout=60)


def ask(client: anthropic.Anthropic, text: str, **fields: object) -> anthropic.types.Message:
    messages = [{"role": "user", "content": text}]
    return client.messages.create(**{"model": MODEL, "max_tokens": 50, "messages": messages, **fields})


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = ask(client, "say hello there", system="be kind")
    assert [block.text for block in answer.content] == ["hello there"]
    assert (answer.stop_reason, answer.role, answer.type) == ("end_turn", "assistant", "message")
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (10, 10)
    assert answer.usage.output_tokens == 2
    assert answer._request_id


def test_a_stream(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "say one two three"}]
    with client.messages.stream(model=MODEL, max_tokens=50, messages=messages) as stream:
        assert "".join(stream.text_stream) == "one two three"
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens, final.usage.cache_read_input_tokens) == ("end_turn", 3, 5)


def test_the_events_of_a_stream(base: str) -> None:
    """On the wire, since the client hides pings and names."""
    body = {"model": MODEL, "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "say a b"}]}
    response = httpx.post(f"{base}/v1/messages", json=body, timeout=60)
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "[DONE]" not in response.text


def test_a_tool_loop(client: anthropic.Anthropic) -> None:
    messages: list = [{"role": "user", "content": [{"type": "text", "text": "call weather clock"}]}]
    tools = [WEATHER, CLOCK, {"type": "web_search_20250305", "name": "web_search"}]
    with client.messages.stream(model=MODEL, max_tokens=50, messages=messages, tools=tools) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    assert [(block.name, block.input) for block in first.content] == [
        ("weather", {"city": "x", "days": 7}),
        ("clock", {}),
    ]
    whole = client.messages.create(model=MODEL, max_tokens=50, messages=messages, tools=tools)
    assert [(block.name, block.input) for block in whole.content] == [(b.name, b.input) for b in first.content]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": block.name}]}
        for block in first.content
    ]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(model=MODEL, max_tokens=50, messages=messages, tools=tools)
    assert second.content[0].text == "the result is clock"


def test_a_forced_tool(client: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "clock"}
    answer = ask(client, "hm", tools=[WEATHER, CLOCK], tool_choice=choice)
    assert [block.name for block in answer.content] == ["clock"]


def test_thinking_is_a_block_of_its_own(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "think hard now | done"}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(model=MODEL, max_tokens=2000, messages=messages, thinking=thinking) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert (final.content[0].thinking, final.content[1].text) == ("hard now", "done")


def test_an_answer_cut_by_its_limit_says_so(client: anthropic.Anthropic) -> None:
    assert ask(client, "say a b c", max_tokens=2).stop_reason == "max_tokens"


def test_tokens_are_counted(client: anthropic.Anthropic, scripted: str) -> None:
    """By the replica's own tokenizer where the gateway has none: this one counts words."""
    messages = [{"role": "user", "content": "one two three"}]
    assert client.messages.count_tokens(model=MODEL, messages=messages, system="four five").input_tokens == 5


def test_models(client: anthropic.Anthropic) -> None:
    assert "scripted" in [model.id for model in client.models.list()]
    assert client.models.retrieve("scripted").id == "scripted"


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (400, anthropic.BadRequestError),
            (401, anthropic.AuthenticationError),
            (500, anthropic.InternalServerError),
        ],
    )
    def test_statuses_map_to_exceptions(self, client: anthropic.Anthropic, status: int, kind: type) -> None:
        with pytest.raises(kind, match="told to fail") as caught:
            ask(client, f"fail {status} 99")
        assert caught.value.body["type"] == "error"
        assert caught.value.request_id

    def test_an_unknown_model(self, client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError) as caught:
            ask(client, "hi", model="no/such")
        assert caught.value.body["error"]["type"] == "not_found_error"

    def test_a_wrong_field(self, client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            ask(client, "hi", max_tokens=-1)

    def test_a_break_in_mid_stream(self, client: anthropic.Anthropic) -> None:
        messages = [{"role": "user", "content": "break"}]
        with (
            pytest.raises(anthropic.APIError, match="told to break"),
            client.messages.stream(model=MODEL, max_tokens=50, messages=messages) as stream,
        ):
            stream.get_final_message()

    def test_retries_until_it_works(self, client: anthropic.Anthropic) -> None:
        answer = ask(client.with_options(max_retries=2), f"fail 500 2 {time.time_ns()}")
        assert answer.content[0].text == "fine"


def test_a_stream_that_is_closed_reaches_the_replica(client: anthropic.Anthropic, scripted: str) -> None:
    before = left(scripted)
    messages = [{"role": "user", "content": "hang"}]
    with client.messages.stream(model=MODEL, max_tokens=50, messages=messages) as stream:
        next(iter(stream))
    until_left(scripted, before)

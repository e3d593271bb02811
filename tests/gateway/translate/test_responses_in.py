"""Responses requests become the chat requests that mean the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_worker.contract.errors import ApiError
from gateway.translate.responses import ResponsesTranslation
from gateway.translate.store import ResponseStore


def chat(store: ResponseStore | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "input": "hi", **fields}
    translation = ResponsesTranslation(store or ResponseStore(10_000))
    return msgspec.json.decode(translation.request(msgspec.json.encode(body)))


def test_plain_fields():
    got = chat(
        instructions="be brief",
        max_output_tokens=5,
        temperature=0.5,
        reasoning={"effort": "low", "summary": "auto"},
        prompt_cache_key="k",
        top_k=3,
        store=False,
        metadata={"a": "b"},
        include=["reasoning.encrypted_content"],
        truncation="auto",
        service_tier="auto",
    )
    assert got == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
        "temperature": 0.5,
        "prompt_cache_key": "k",
        "top_k": 3,
    }


def test_a_turns_items_are_one_message():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "ask"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "thanks"},
    ]
    assert chat(input=items)["messages"] == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
            ],
            "reasoning_content": "ask",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "user", "content": "thanks"},
    ]


def test_function_tools_pass_and_others_are_left_out():
    parameters = {"type": "object", "properties": {"z": {}, "a": {}}}
    tools = [
        {"type": "web_search"},
        {"type": "function", "name": "f", "parameters": parameters, "strict": True, "description": None},
        {"type": "mcp", "server_label": "s"},
    ]
    got = chat(tools=tools, tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    assert got["tools"] == [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    assert got["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert got["parallel_tool_calls"] is False
    assert "tools" not in chat(tools=[{"type": "web_search"}], tool_choice="auto")
    assert "tool_choice" not in chat(tools=[{"type": "web_search"}], tool_choice="auto")


def test_formats():
    wanted = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": wanted})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat(text={"format": {"type": "text"}, "verbosity": "low"})


def test_logprobs_are_asked_for_by_either_name():
    assert chat(include=["message.output_text.logprobs"])["logprobs"] is True
    assert chat(top_logprobs=3)["top_logprobs"] == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"model": None}, "model"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_place(fields: dict, param: str):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


class TestStore:
    def put(self, store: ResponseStore, name: str, previous: str | None, text: str) -> None:
        item = {
            "type": "message",
            "id": f"msg_{name}",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text}],
        }
        store.put({"id": name, "output": [item]}, previous, [{"role": "user", "content": f"ask {name}"}])
        store.check_invariants()

    def test_a_conversation_goes_on_from_a_stored_answer(self):
        store = ResponseStore(10_000)
        self.put(store, "a", None, "one")
        self.put(store, "b", "a", "two")
        got = chat(store, previous_response_id="b", input="next")
        assert [message["content"] for message in got["messages"]] == ["ask a", "one", "ask b", "two", "next"]

    def test_references_stand_for_their_items(self):
        store = ResponseStore(10_000)
        self.put(store, "a", None, "one")
        got = chat(store, input=[{"role": "user", "content": "q"}, {"type": "item_reference", "id": "msg_a"}])
        assert got["messages"][1] == {"role": "assistant", "content": "one"}

    def test_the_oldest_go_first_and_a_broken_chain_is_refused(self):
        store = ResponseStore(2_000)
        for i in range(9):
            self.put(store, str(i), str(i - 1) if i else None, "x" * 100)
        assert store.get("0") is None
        assert store.get("8") is not None
        assert store.history("8") is None
        assert store.item("msg_0") is None
        assert store.delete("8")
        assert not store.delete("8")
        store.check_invariants()

    def test_a_store_of_nothing_keeps_nothing(self):
        store = ResponseStore(0)
        self.put(store, "a", None, "one")
        assert store.get("a") is None

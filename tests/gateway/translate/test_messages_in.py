"""Messages requests become the chat requests that mean the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_worker.contract.errors import ApiError
from gateway.translate.messages_in import chat_request, read_messages


def chat(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_request(*read_messages(json.dumps(body).encode()))


def test_plain_fields():
    got = chat(
        system="be brief", temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END"], metadata={"user_id": "u"}
    )
    assert got == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
    }


def test_a_stream_asks_for_its_usage():
    assert chat(stream=True)["stream_options"] == {"include_usage": True}


def test_what_changes_with_every_request_is_no_part_of_the_prompt():
    def turn(bill: str, mark: dict) -> dict:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={bill}"},
            {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Always."},
        ]
        return chat(system=system, messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **mark}]}])

    assert turn("a1", {"cache_control": {"type": "ephemeral"}}) == turn("b2", {})
    assert turn("a1", {})["messages"] == [
        {"role": "system", "content": "You help.\nAlways."},
        {"role": "user", "content": "hi"},
    ]


def test_a_tool_loop():
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ask", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Zürich", "days": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    tools = [
        {"name": "weather", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    got = chat(messages=messages, tools=tools)
    assert got["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "ask",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "user", "content": "and now?"},
    ]
    [tool] = got["tools"]
    assert tool == {"type": "function", "function": {"name": "weather", "description": "d", "parameters": schema}}
    assert list(tool["function"]["parameters"]["properties"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "t", "disable_parallel_tool_use": True},
            {"tool_choice": {"type": "function", "function": {"name": "t"}}, "parallel_tool_calls": False},
        ),
    ],
)
def test_tool_choice(choice: dict, expected: dict):
    got = chat(tools=[{"name": "t", "input_schema": {}}], tool_choice=choice)
    assert {name: got[name] for name in ("tool_choice", "parallel_tool_calls") if name in got} == expected


def test_images_pass_as_parts():
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    content = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
    assert chat(messages=[{"role": "user", "content": content}])["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            ],
        }
    ]


def test_an_answer_that_the_client_began_is_continued():
    got = chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}])
    assert (got["add_generation_prompt"], got["continue_final_message"]) == (False, True)


def test_thinking_effort_and_format():
    got = chat(
        thinking={"type": "disabled"},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert got["chat_template_kwargs"] == {"enable_thinking": False}
    assert got["reasoning_effort"] == "high"
    assert got["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"system": [{"type": "text"}]}, "system.0.text"),
        ({"tools": [{"name": "t"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "t", "input_schema": {}}], "tool_choice": {"type": "odd"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
    ],
)
def test_wrong_values_name_their_place(fields: dict, param: str):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)

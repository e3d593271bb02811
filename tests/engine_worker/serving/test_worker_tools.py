"""Tool calls, formats and echoes over HTTP. The fake model repeats its prompt, so a prompt with calls makes calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine_worker.serving.running_worker import RunningWorker, events

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "now"}}


def call_text(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = f"{call_text('add', {'a': 1, 'é': '😀'})}\n{call_text('now', {})}"


def ask(worker: RunningWorker, content: str, **fields: Any) -> Any:
    """The fake model's answer to the bare text (through a chat whose system message holds the tools)."""
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], "tools": [TOOL, CLOCK], **fields}
    response = worker.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return events(response.text) if fields.get("stream") else response.json()


def test_calls_in_a_whole_answer(worker: RunningWorker) -> None:
    choice = ask(worker, CALLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert [(call["type"], call["function"]["name"]) for call in calls] == [("function", "add"), ("function", "now")]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1, "é": "😀"}, {}]
    assert len({call["id"] for call in calls}) == 2
    assert CALLS not in (choice["message"]["content"] or "")


def test_the_stream_says_the_same_by_the_rules(worker: RunningWorker) -> None:
    whole = ask(worker, CALLS)["choices"][0]
    chunks = ask(worker, CALLS, stream=True, n=2)
    assert chunks.pop() == "[DONE]"
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
        assert [set(part) for part in parts if "id" in part] == [{"index", "id", "type", "function"}] * 2
        assert all(set(part) == {"index", "function"} for part in parts if "id" not in part)
        assert sum("name" in part["function"] for part in parts) == 2
        for at, call in enumerate(whole["message"]["tool_calls"]):
            mine = "".join(part["function"].get("arguments", "") for part in parts if part["index"] == at)
            assert mine == call["function"]["arguments"]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert reasons == ["tool_calls"]
        assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == (whole["message"]["content"] or "")
        assert all(choice["delta"].get("tool_calls") != [] for choice in choices)


def test_one_call_only(worker: RunningWorker) -> None:
    choice = ask(worker, CALLS, parallel_tool_calls=False)["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_cut_off_by_a_stop_string_is_none(worker: RunningWorker, streamed: bool) -> None:
    answer = ask(worker, call_text("add", {"a": "STOP"}), stop="STOP", stream=streamed)
    if streamed:
        reasons = [c["finish_reason"] for chunk in answer[:-1] for c in chunk["choices"] if c["finish_reason"]]
        assert reasons == ["stop"]
    else:
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in answer["choices"][0]["message"]


def test_plain_text_has_no_calls(worker: RunningWorker) -> None:
    answer = ask(worker, "hello", logprobs=True)
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = ask(worker, "hello", stream=True, logprobs=True)[:-1]
    assert not any("tool_calls" in choice["delta"] for chunk in chunks for choice in chunk["choices"])
    tokens = [
        entry["token"]
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert tokens == [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"tools": [], "guided_regex": "("}, "guided_regex"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_name_the_field(worker: RunningWorker, fields: dict[str, Any], param: str) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], **fields}
    response = worker.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_an_echo(worker: RunningWorker) -> None:
    body = worker.complete(["hello é", "ab"], echo=True, n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["hello éhello é"] * 2 + ["abab"] * 2
    chunks = events(worker.complete("hello é", echo=True, stream=True).text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello éhello é"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_prompt_alone(worker: RunningWorker, streamed: bool) -> None:
    response = worker.complete("hello", echo=True, max_tokens=0, stream=streamed)
    choices = [e["choices"][0] for e in events(response.text)[:-1]] if streamed else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hello"
    assert choices[-1]["finish_reason"] == "length"
    if not streamed:
        assert response.json()["usage"]["completion_tokens"] == 0
    assert worker.complete("hello", max_tokens=0).status_code == 400

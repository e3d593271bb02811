"""Calls read by transformers' parser, for a notation that is not known here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.state import TokenizerBundle
from engine_worker.core.types import FinishReason
from engine_worker.serving.requests import ChatRequest, convert
from engine_worker.serving.tool_reply import ChoiceCalls
from engine_worker.serving.tool_use import ToolPlanner, ToolUse
from tests.engine_worker.serving.fake_engine import make_tokenizer

pytest.importorskip("transformers.utils.chat_parsing", reason="came with transformers 5.24")

pytestmark = pytest.mark.engine

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<|call|>",
            "close": "<|/call|>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def planner(response_template: str) -> ToolPlanner:
    return ToolPlanner(
        PromptRenderer(
            TokenizerBundle(
                fingerprint="",
                tokenizer_json=make_tokenizer().to_str(),
                chat_template="{{ tools }}<|call|>",
                special_tokens={},
                max_model_len=100,
                response_template=response_template,
            )
        )
    )


def use_of(**fields: Any) -> ToolUse:
    request = convert({"model": "m", "messages": [], "tools": [ADD], **fields}, ChatRequest)
    use, grammar = planner(json.dumps(TEMPLATE)).plan(request, None)
    assert use is not None
    assert grammar == ""
    return use


def call(name: str = "add", **arguments: Any) -> str:
    return f"<|call|>{json.dumps({'name': name, 'arguments': arguments})}<|/call|>"


def read(text: str, reason: FinishReason = FinishReason.STOP, **fields: Any) -> tuple[Any, list[Any], str]:
    calls = ChoiceCalls(use_of(**fields))
    for char in text:
        calls.push(char, is_end=False)
    calls.push("", is_end=True)
    message = calls.message()
    found = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message["content"], found, calls.finish_reason(reason)


def test_calls_are_found() -> None:
    assert read(f"Well. {call(a=1)}{call(a=2)}") == ("Well. ", [{"a": 1}, {"a": 2}], "tool_calls")
    assert read("Just text.") == ("Just text.", [], "stop")
    assert read(f"{call(a=1)}{call(a=2)}", parallel_tool_calls=False)[1] == [{"a": 1}]


@pytest.mark.parametrize("text", [call(a=1)[:30], "<|call|>nonsense<|/call|>", '<|call|>{"name": "add", "arg'])
def test_what_is_not_whole_is_no_call(text: str) -> None:
    _, found, reason = read(text, FinishReason.STOP)
    assert (found, reason) == ([], "stop")


def test_an_unknown_function_is_text() -> None:
    content, found, reason = read(call("rm"))
    assert ("rm" in content, found, reason) == (True, [], "stop")


@pytest.mark.parametrize("template", ["", "{}", "[", '{"fields": 1}', '{"version": 9}'])
def test_a_template_that_can_not_be_read_is_none(template: str) -> None:
    request = convert({"model": "m", "messages": [], "tools": [ADD]}, ChatRequest)
    with pytest.raises(Exception, match="notation"):
        planner(template).plan(request, None)

"""Tools told to a model whose template knows of none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_worker.contract.prompt import PromptRenderer
from tests.support.tiny_tokenizer import CHATML, tiny_bundle

TOOL = {"type": "function", "function": {"name": "wetter", "parameters": {"properties": {"ort": {}}, "type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "wetter", "arguments": '{"ort": "Köln"}'}}
USER = {"role": "user", "content": "Regnet es?"}
PARTS = (
    "{% for message in messages %}<{{ message.role }}>{% for part in message.content %}{{ part.text }}{% endfor %}"
    "{% endfor %}"
)


def rendered(messages: list[dict[str, Any]], template: str = CHATML, **kwargs: Any) -> str:
    return PromptRenderer(tiny_bundle(template)).render_chat(messages, **kwargs)


def test_without_tools_nothing_changes() -> None:
    assert (
        rendered([USER])
        == rendered([USER], tools=[])
        == "<|im_start|>user\nRegnet es?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_tools_are_described_in_the_system_message(template: str) -> None:
    text = rendered([USER], template, tools=[TOOL, TOOL])
    lines = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == [TOOL, TOOL]
    assert list(json.loads(lines[0])["function"]["parameters"]) == ["properties", "type"]  # the client's key order
    assert text.index("system") < text.index("<tools>") < text.index("Regnet")


def test_a_system_message_of_ones_own_stays_in_front() -> None:
    text = rendered([{"role": "system", "content": "Sei knapp."}, USER], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nSei knapp.\n\n")
    assert text.count("system") == 1 + text.count("system message")


@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_calls_and_results_are_text(template: str) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "ja"}
    text = rendered([USER, {"role": "assistant", "tool_calls": [CALL, CALL]}, result, result], template, tools=[TOOL])
    call = '<tool_call>\n{"name": "wetter", "arguments": {"ort": "Köln"}}\n</tool_call>'
    assert f"{call}\n{call}" in text
    answer = "<tool_response>\nja\n</tool_response>"
    assert f"{answer}\n{answer}" in text
    assert text.count("user") == 2
    assert "None" not in text


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    text = rendered(
        [USER], "{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}{% endfor %}", tools=[TOOL]
    )
    assert text == "wetterRegnet es?"

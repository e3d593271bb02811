"""A forced answer ends in front of a call that was there before, and no part of that call gets out."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.core.types import FinishReason
from engine_worker.serving.repeated_calls import RepeatedCalls
from engine_worker.serving.tool_parser import CallStyle, ToolParser
from engine_worker.serving.tool_use import HERMES, LLAMA, MISTRAL
from tests.engine_worker.serving.marked import CHAT, Bench

FUNCTIONS = {"add": {}, "now": {}}
ADD, ADD_MORE, NOW = ('"add", "%s": {"a": 1}', '"add", "%s": {"a": 12, "b": "}{"}', '"now", "%s": {}')


def written(style: CallStyle, calls: list[str]) -> tuple[str, list[int]]:
    """An answer with these calls, and where each of them ends."""
    text, ends = style.begin + "[" if style.is_list else "", []
    between = {"Hermes": "\n", "Llama": "; ", "Mistral": ", "}[name_of(style)]
    for number, call in enumerate(calls):
        text += between if number else ""
        text += f"{style.begin}\n" if style == HERMES else ""
        text += '{"name": ' + call % style.arguments_key + "}"
        ends.append(len(text))
        text += f"\n{style.end}" if style == HERMES else ""
    return text + ("]" if style.is_list else ""), ends


def name_of(style: CallStyle) -> str:
    return {HERMES: "Hermes", LLAMA: "Llama", MISTRAL: "Mistral"}[style]


def released(style: CallStyle, text: str, cuts: list[int]) -> tuple[str, bool]:
    """What gets out of a text that comes in pieces, and whether it was ended."""
    watch = RepeatedCalls(ToolParser(style, FUNCTIONS))
    held = out = ""
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for begin, end in itertools.pairwise(edges):
        before = len(held)
        held += text[begin:end]
        found = watch.feed(text[begin:end])
        if found is not None:
            assert before + found >= 0, "part of a repeated call is out"
            return out + held[: before + found], True
        keep = len(held) - watch.num_held
        out, held = out + held[:keep], held[keep:]
    return out + held, False


@pytest.mark.parametrize("style", [HERMES, LLAMA, MISTRAL], ids=name_of)
@given(cuts=st.lists(st.integers(0, 400), max_size=60))
def test_it_ends_behind_the_last_call_that_is_new(style: CallStyle, cuts: list[int]) -> None:
    text, ends = written(style, [ADD, ADD_MORE, NOW, ADD_MORE, ADD])
    assert released(style, text, cuts) == (text[: ends[2]], True)


@pytest.mark.parametrize("style", [HERMES, LLAMA, MISTRAL], ids=name_of)
@given(cuts=st.lists(st.integers(0, 400), max_size=60))
def test_calls_that_differ_are_left_alone(style: CallStyle, cuts: list[int]) -> None:
    text, _ = written(style, [ADD, NOW, ADD_MORE])
    assert released(style, text, cuts) == (text, False)


def test_nothing_is_held_back_but_what_may_be_a_repeat() -> None:
    watch = RepeatedCalls(ToolParser(LLAMA, FUNCTIONS))
    shown = ""
    for char in written(LLAMA, [ADD, NOW])[0]:
        watch.feed(char)
        shown += str(min(watch.num_held, 1))
    first, behind = len('{"name": "add", "parameters": {"a": 1}}'), len('; {"name": "')
    assert shown == "0" * first + "1" * behind + "0" * (len(shown) - first - behind)


async def test_the_answer_of_a_model_that_can_not_stop_has_the_call_once() -> None:
    bench = Bench()
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    tokens = bench.renderer.encode(call * 16, add_special_tokens=False)
    tools = [{"type": "function", "function": {"name": "now"}}]
    asked = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "tools": tools, "temperature": 0}
    body = {**asked, "tool_choice": "required", "max_tokens": 2000}
    events = (await bench.stream(CHAT, body, tokens, reason=FinishReason.LENGTH)).events()
    *chunks, last = [json.loads(event) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert [part["function"].get("name") for part in calls if "id" in part] == ["now"]
    assert "".join(part["function"]["arguments"] for part in calls) == "{}"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert last["usage"]["completion_tokens"] < 2.2 * len(tokens) / 16

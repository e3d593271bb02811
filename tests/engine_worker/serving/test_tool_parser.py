"""Calls found in text: the same ones however the text is cut, and only whole ones."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.serving.json_call import Arguments, Begin, Content, End, Event
from engine_worker.serving.tool_parser import CallStyle, ToolParser
from engine_worker.serving.tool_use import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN_XML

FUNCTIONS: dict[str, Any] = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}}},
    "now": {},
}
ADD = ("add", {"a": 1, "b": {"c": ["}", '"{']}})
NOW = ("now", {})


def events_of(style: CallStyle, pieces: list[str], limit: int | None = None) -> tuple[list[Event], ToolParser]:
    """Events with neighbours of one kind joined."""
    parser = ToolParser(style, FUNCTIONS, limit)
    joined: list[Event] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match joined[-1:], event:
            case [Content(text=before)], Content(text=text):
                joined[-1] = Content(before + text)
            case [Arguments(text=before)], Arguments(text=text):
                joined[-1] = Arguments(before + text)
            case _:
                joined.append(event)
    return joined, parser


def found(style: CallStyle, text: str, limit: int | None = None) -> tuple[str, list[tuple[str, Any]]]:
    """(the text for the user, the complete calls)."""
    events, _ = events_of(style, [text], limit)
    calls: list[tuple[str, Any]] = []
    name = arguments = ""
    for event in events:
        match event:
            case Begin(name=name):
                arguments = ""
            case Arguments(text=arguments):
                pass
            case End():
                calls.append((name, json.loads(arguments)))
    return "".join(event.text for event in events if isinstance(event, Content)), calls


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def llama(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=note>\n4 </x>\n5\n</parameter>\n"
    "</function>\n</tool_call>"
)
CASES: dict[str, tuple[CallStyle, str, str, list[Any]]] = {
    "plain text": (HERMES, " just < text <tool_cal ", " just < text <tool_cal ", []),
    "one call": (HERMES, hermes(*ADD), "", [ADD]),
    "text, then calls": (HERMES, f"Let me see.\n\n{hermes(*ADD)}\n{hermes(*NOW)}\n", "Let me see.", [ADD, NOW]),
    "text between and behind": (HERMES, f"{hermes(*ADD)} so {hermes(*NOW)} done", "so done", [ADD, NOW]),
    "calls without an end mark": (HERMES, f"<tool_call>{llama(*ADD)}{hermes(*NOW)}", "", [ADD, NOW]),
    "arguments first": (
        HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", {"a": 1})]
    ),
    "arguments in a string": (
        HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    "an unknown function": (HERMES, hermes("rm", {}), hermes("rm", {}), []),
    "no JSON": (HERMES, "<tool_call>later</tool_call>", "<tool_call>later</tool_call>", []),
    "a list": (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "no name": (HERMES, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    "cut off in the name": (HERMES, '<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', []),
    "cut off in the arguments": (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1', "", []),
    "broken inside": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": }} x', "", []),
    "xml": (QWEN_XML, f"Well.\n{XML}", "Well.", [("add", {"a": 3, "note": "4 </x>\n5"})]),
    "json where xml is usual": (QWEN_XML, f"{hermes(*ADD)}\n{XML}", "", [ADD, ("add", {"a": 3, "note": "4 </x>\n5"})]),
    "unfinished xml": (QWEN_XML, "<tool_call>\n<function=add>\n", "<tool_call>\n<function=add>\n", []),
    "llama": (LLAMA, f"{llama(*ADD)}; {llama(*NOW)}", "", [ADD, NOW]),
    "llama with its mark": (LLAMA, f"<|python_tag|>{llama(*ADD)}", "", [ADD]),
    "llama answers in json": (LLAMA, '{"answer": {"name": "add"}}', '{"answer": {"name": "add"}}', []),
    "llama speaks of json": (LLAMA, f"It is {llama(*ADD)}", f"It is {llama(*ADD)}", []),
    "mistral": (
        MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now"}]', "", [("add", {"a": 1}), NOW]
    ),
    "mistral's names": (
        MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "", [("add", {"a": 1}), NOW]
    ),
    "mistral without a mark between": (MISTRAL_NAMED, '[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
}  # fmt: skip


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES.values(), ids=CASES)
def test_what_is_found(style: CallStyle, text: str, content: str, calls: list[Any]) -> None:
    assert found(style, text) == (content, calls)


@pytest.mark.parametrize(("style", "text"), [case[:2] for case in CASES.values()], ids=CASES)
def test_every_cut_finds_the_same(style: CallStyle, text: str) -> None:
    whole, _ = events_of(style, [text])
    for at in range(len(text) + 1):
        assert events_of(style, [text[:at], text[at:]])[0] == whole
    assert events_of(style, list(text))[0] == whole


@pytest.mark.parametrize("name", ["cut off in the arguments", "broken inside"])
def test_a_call_that_is_not_whole_never_ends(name: str) -> None:
    style, text = CASES[name][:2]
    events, parser = events_of(style, [text])
    assert Begin("add") in events
    assert End() not in events
    assert parser.is_inside


def test_at_most_one_call_where_no_more_are_wanted() -> None:
    text = f"{hermes(*ADD)}\n{hermes(*NOW)} and more"
    assert found(HERMES, text, limit=1) == ("", [ADD])


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ToolParser(HERMES, FUNCTIONS)
    assert parser.feed('<tool_call>\n{"name": "ad') == []
    assert parser.feed('d", "argu') == [Begin("add")]
    assert parser.feed('ments": {"a"') == [Arguments('{"a"')]
    assert parser.feed(": 1}") == [Arguments(": 1}")]
    assert parser.feed("}") == [End()]


SNIPPETS = st.sampled_from(
    [
        *(hermes(*ADD), hermes(*NOW), hermes("rm", {}), XML, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "{"),
        *("<|python_tag|>", '{"name": "now"}', '"name"', ": ", "\n", " text ", "é😀", "add[ARGS]{}", "<function=add>"),
        *("}", '"'),
    ]
)


@given(
    st.sampled_from([HERMES, QWEN_XML, LLAMA, MISTRAL, MISTRAL_NAMED]),
    st.lists(SNIPPETS, max_size=6),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_any_text_cut_anywhere(style: CallStyle, snippets: list[str], cuts: list[int]) -> None:
    text = "".join(snippets)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole, parser = events_of(style, [text])
    cut, other = events_of(style, pieces)
    assert cut == whole
    assert (parser.num_complete, parser.is_inside) == (other.num_complete, other.is_inside)
    begun = [event for event in whole if isinstance(event, Begin)]
    assert len(begun) - parser.num_complete in (0, 1)

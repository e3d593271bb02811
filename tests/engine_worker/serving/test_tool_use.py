"""Tools: what is refused, what each tool_choice lets the model write, and that what it writes is found again."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken

from engine_worker.config import GRAMMAR_LIMITS
from engine_worker.contract.errors import ApiError
from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.state import TokenizerBundle
from engine_worker.core.types import FinishReason
from engine_worker.serving.requests import ChatRequest, convert
from engine_worker.serving.structured import wanted_format
from engine_worker.serving.tool_reply import ChoiceCalls
from engine_worker.serving.tool_use import MAX_FORCED_CALLS, ToolPlanner, ToolUse
from tests.engine_worker.serving.fake_engine import make_tokenizer

TOKENIZER = make_tokenizer()
TOKENIZER.add_special_tokens([AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")])
TOKENIZER.add_tokens(["<tool_call>"])
EOS = TOKENIZER.token_to_id("<|eos|>")
LL_TOKENIZER = LLTokenizer(TOKENIZER.to_str(), eos_token=[EOS])

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
SCHEMAS = {"get_weather": PARAMETERS, "now": {"type": "object", "maxProperties": 0}}
TEMPLATES = {
    "no tools": "{{ messages }}",
    "hermes": "{{ tools }}<tool_call>",
    "qwen-coder": "{{ tools }}<tool_call><function=",
    "llama": "{{ tools }}<|python_tag|>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "mistral-named": "{{ tools }}[TOOL_CALLS][ARGS]",
    "another": "{{ tools }}<|call|>",
}


def planner(template: str) -> ToolPlanner:
    return ToolPlanner(
        PromptRenderer(
            TokenizerBundle(
                fingerprint="",
                tokenizer_json=TOKENIZER.to_str(),
                chat_template=TEMPLATES[template],
                special_tokens={},
                max_model_len=100,
            )
        )
    )


def plan(template: str = "no tools", **fields: Any) -> tuple[ToolUse | None, str]:
    body = {"model": "m", "messages": [], "tools": [WEATHER, NOW], **fields}
    request = convert(body, ChatRequest)
    return planner(template).plan(request, wanted_format(request))


def written(grammar: str, seed: int, limit: int = 600) -> tuple[str, bool]:
    """A random output under the grammar, and whether it came to its end."""
    rng = random.Random(seed)
    matcher = LLMatcher(LL_TOKENIZER, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while len(ids) < limit:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        token_id = int(rng.choice(allowed))
        if token_id == EOS:
            return TOKENIZER.decode(ids, skip_special_tokens=False), True
        assert matcher.consume_token(token_id)
        ids.append(token_id)
        if matcher.is_stopped():
            return TOKENIZER.decode(ids, skip_special_tokens=False), True
    return TOKENIZER.decode(ids, skip_special_tokens=False), False


def read(use: ToolUse, text: str) -> dict[str, Any]:
    calls = ChoiceCalls(use)
    calls.push(text, is_end=True)
    return {**calls.message(), "reason": calls.finish_reason(FinishReason.STOP)}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_forced_calls_are_calls_whatever_the_model_says(template: str, choice: Any) -> None:
    use, grammar = plan(template, tool_choice=choice)
    assert use is not None
    num_ended = 0
    for seed in range(12):
        text, ended = written(grammar, seed)
        if not ended:
            continue
        num_ended += 1
        message = read(use, text)
        assert message["reason"] == "tool_calls"
        assert message["content"] is None
        assert 1 <= len(message["tool_calls"]) <= (MAX_FORCED_CALLS if choice == "required" else 1)
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
            assert choice == "required" or call["function"]["name"] == "get_weather"
    assert num_ended >= 3


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_forced_call_that_is_cut_off_is_no_text(template: str) -> None:
    """Wherever max_tokens cuts: complete calls are there, and nothing else is."""
    use, grammar = plan(template, tool_choice="required", parallel_tool_calls=True)
    assert use is not None
    text = next(text for seed in range(100) if (text := written(grammar, seed)[0]) and len(text) > 40)
    for end in range(len(text)):
        message = read(use, text[:end])
        assert message["content"] is None
        for call in message.get("tool_calls", []):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        calls = ChoiceCalls(use)
        deltas = [delta for at in range(end) for delta in calls.push(text[at], is_end=at == end - 1)]
        assert not any("content" in delta for delta in deltas)


@pytest.mark.parametrize("parallel", [{}, {"parallel_tool_calls": True}, {"parallel_tool_calls": False}], ids=str)
def test_one_function_may_be_called_several_times_unless_the_client_wants_one_call(parallel: dict[str, bool]) -> None:
    """Absent means true, as at OpenAI; but for repeats, which are kept only where they are asked for by name."""
    use, grammar = plan("hermes", tools=[WEATHER], tool_choice="required", **parallel)
    assert use is not None
    matcher = LLMatcher(LL_TOKENIZER, grammar, log_level=0)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Rome"}}\n</tool_call>'
    ids = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in (call, "\n" + call)]
    assert matcher.consume_tokens(ids[0])
    num_more = 0
    while matcher.validate_tokens(ids[1]) == len(ids[1]):
        assert matcher.consume_tokens(ids[1])
        num_more += 1
    is_single = parallel.get("parallel_tool_calls") is False
    assert num_more == (0 if is_single else MAX_FORCED_CALLS - 1)
    assert (use.repeats() is not None) == (parallel == {})


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "another"])
def test_strict_functions_are_called_by_their_schema_or_not_at_all(template: str) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    use, grammar = plan(template, tools=[strict])
    assert use is not None
    mark = use.style.begin
    right = {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Rome"}}\n</tool_call>',
        "llama": '{"name": "get_weather", "parameters": {"city":"Rome"}}',
        "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city":"Rome"}}]',
        "mistral-named": '[TOOL_CALLS]get_weather[ARGS]{"city":"Rome"}',
    }
    text = right.get(template, right["hermes"])
    assert allows(grammar, text)
    assert allows(grammar, "Just text, with {braces} and <tags>.")
    assert not allows(grammar, text.replace("Rome", "Oslo"))
    assert read(use, text)["reason"] == "tool_calls"
    if not use.style.is_bare:
        assert allows(grammar, f"Let me see.\n{text}")
        assert not allows(grammar, f"{mark} what")


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LL_TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(TOKENIZER.encode(text).ids)) and bool(matcher.is_accepting())


def test_auto_constrains_nothing() -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}):
        use, grammar = plan(**fields)
        assert use is not None
        assert grammar == ""
        assert use.limit == (1 if fields.get("parallel_tool_calls") is False else None)


def test_none_and_no_tools_look_for_nothing() -> None:
    assert plan(tool_choice="none") == (None, "")
    assert plan(tools=[]) == plan(tools=None, tool_choice="none") == (None, "")
    assert plan("another", tool_choice="none") == (None, "")


def test_a_format_or_a_call() -> None:
    use, grammar = plan(response_format={"type": "json_object"})
    assert use is not None
    assert allows(grammar, '{"city": "Rome"}')
    assert allows(grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not allows(grammar, "text")
    use, grammar = plan(response_format={"type": "json_object"}, tool_choice="none")
    assert use is None
    assert allows(grammar, "{}")


def test_allowed_tools_narrow_the_choice() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    use, grammar = plan(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert use is not None
    assert list(use.functions) == ["now"]
    assert "get_weather" not in grammar


def test_keywords_that_can_not_be_enforced() -> None:
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}
    loose = {"type": "function", "function": odd}
    assert plan(tools=[loose], tool_choice="required")[1] != ""  # as far as possible
    for choice in ("auto", "required"):
        with pytest.raises(ApiError, match="`uniqueItems`") as caught:
            plan(tools=[{"type": "function", "function": {**odd, "strict": True}}], tool_choice=choice)
        assert caught.value.status == 400


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"tools": [{"type": "function"}]}, "tools[0]"),
    "another type": ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1]"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "a bad name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    "parameters": (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters",
    ),
    "twice": ({"tools": [NOW, NOW]}, "tools"),
    "too many": ({"tools": [NOW] * 129}, "tools"),
    "forced without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "named without tools": (
        {"tools": None, "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"
    ),
    "an unknown name": ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
    "no choice": ({"tool_choice": "always"}, "tool_choice"),
    "no object": ({"tool_choice": {"type": "function"}}, "tool_choice"),
    "allowed tools": ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
    "a grammar beside": ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=BAD)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_unknown_notation_is_not_guessed_at() -> None:
    with pytest.raises(ApiError, match="notation") as caught:
        plan("another")
    assert caught.value.code == "unsupported_parameter"


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    assert planner("mistral").special_marks == {TOKENIZER.token_to_id("[TOOL_CALLS]")}
    assert planner("llama").special_marks == {TOKENIZER.token_to_id("<|python_tag|>")}
    assert planner("hermes").special_marks == set()


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        (CALL, FinishReason.STOP, "tool_calls"),
        (CALL, FinishReason.LENGTH, "length"),
        ("text", FinishReason.STOP, "stop"),
        (f"{CALL}{CALL[:42]}", FinishReason.LENGTH, "length"),
        (f"{CALL}{CALL[:42]}", FinishReason.STOP, "stop"),  # a stop string cut the second one
    ],
)
def test_only_whole_calls_are_a_reason_to_call(text: str, reason: FinishReason, expected: str) -> None:
    use, _ = plan()
    assert use is not None
    calls = ChoiceCalls(use)
    calls.push(text, is_end=True)
    assert calls.finish_reason(reason) == expected
    assert len(calls.message().get("tool_calls", [])) == (1 if "tool_call" in text else 0)


def test_deltas_follow_the_rules() -> None:
    use, _ = plan()
    assert use is not None
    calls = ChoiceCalls(use)
    text = f'Well. <tool_call>{{"name": "get_weather", "arguments": {{"city": "Rome"}}}}</tool_call>\n{CALL}'
    deltas = [delta for char in text for delta in calls.push(char, is_end=False)] + calls.push("", is_end=True)
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert all(isinstance(part["index"], int) for part in parts)
    for index, name in enumerate(("get_weather", "now")):
        first, *rest = [part for part in parts if part["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert first["function"]["name"] == name
        assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in rest)
        arguments = "".join(part["function"]["arguments"] for part in (first, *rest))
        assert json.loads(arguments) == ({"city": "Rome"} if name == "get_weather" else {})
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    assert all(delta.get("tool_calls") != [] and None not in delta.values() for delta in deltas)

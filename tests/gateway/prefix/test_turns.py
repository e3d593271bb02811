"""Templates that are read must say what jinja2 and transformers write, for each message by itself."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.contract.prompt import PromptError, PromptRenderer
from gateway.prefix.reading import Unknown
from gateway.prefix.turns import Turns, turns_of
from tests.support.chat_templates import BEYOND, READ
from tests.support.tiny_tokenizer import CHATML, tiny_bundle, tiny_tokenizer

CONTENTS = st.sampled_from(
    ["", " ", "Hi", "  two\n", "<|im_end|>\n", "a</think>\n\nb", "<think>", "日本語 🙂", "Größe\t", "</think>"]
) | st.text(max_size=8)
PLAIN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "user", "assistant", "developer", "tool"]), "content": CONTENTS}
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ODD = st.sampled_from(
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "So.", "reasoning_content": "Because."},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "named", "name": "Ann"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user"},
        {"role": "a b", "content": "x"},
        {"content": "x"},
    ]
)
CHATS = st.lists(PLAIN | ODD, min_size=1, max_size=5)
TURNS = st.lists(CONTENTS, min_size=1, max_size=6)


def turns_and_renderer(template: str) -> tuple[Turns | None, PromptRenderer]:
    renderer = PromptRenderer(tiny_bundle(template))
    return turns_of(renderer), renderer


READERS = {name: turns_and_renderer(template) for name, template in READ.items()}


def told(turns: Turns, messages: list[dict[str, Any]], ask: bool) -> list[str] | None:
    try:
        return turns.texts(messages, 0, len(messages), ask)
    except Unknown:
        return None


def rendered(renderer: PromptRenderer, messages: list[dict[str, Any]], ask: bool) -> str | None:
    try:
        return renderer.render_chat(messages, None, ask)
    except PromptError:
        return None


@pytest.mark.parametrize("name", READ)
@settings(max_examples=80, deadline=None)
@given(messages=CHATS, ask=st.booleans())
def test_what_is_read_is_what_is_rendered(name: str, messages: list[dict[str, Any]], ask: bool) -> None:
    turns, renderer = READERS[name]
    assert turns is not None
    before = copy.deepcopy(messages)
    texts = told(turns, messages, ask)
    assert messages == before
    if texts is None:
        return
    assert "".join(texts) == rendered(renderer, messages, ask)
    for start in range(1, len(messages)):
        assert turns.texts(messages, start, len(messages), ask) == texts[start:]


@pytest.mark.parametrize("name", READ)
@settings(max_examples=40, deadline=None)
@given(contents=TURNS, more=TURNS, ask=st.booleans())
def test_a_messages_text_is_its_own(name: str, contents: list[str], more: list[str], ask: bool) -> None:
    """Plain conversations are read, and what follows a message changes nothing, but that it isn't the last."""
    turns, renderer = READERS[name]
    assert turns is not None
    roles = ["user", "assistant"] * (len(contents) + len(more))
    both = [{"role": role, "content": text} for role, text in zip(roles, [*contents, *more], strict=False)]
    short = both[: len(contents)]
    texts = turns.texts(both, 0, len(both), ask)
    assert "".join(texts) == rendered(renderer, both, ask)
    num_same = len(short) - turns.looks_ahead
    assert turns.texts(short, 0, len(short), not ask)[:num_same] == texts[:num_same]


def test_only_some_look_ahead() -> None:
    ahead = {name for name, (turns, _) in READERS.items() if turns is not None and turns.looks_ahead}
    assert ahead == {"mistral with a system message", "vicuna", "qwen", "marks the last"}


@pytest.mark.parametrize("name", BEYOND)
def test_templates_that_know_of_more_than_a_message_are_not_read(name: str) -> None:
    turns, renderer = turns_and_renderer(BEYOND[name])
    assert renderer.has_chat_template
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert turns is None or told(turns, chat, True) is None


def test_no_template_and_a_broken_one_are_not_read() -> None:
    for template in (None, "{% for", "{{ messages }}" * 3):
        assert turns_of(PromptRenderer(tiny_bundle(template))) is None


def test_a_reading_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = PromptRenderer(tiny_bundle())
    monkeypatch.setattr(renderer, "render_chat", lambda *args: "something else")
    assert turns_of(renderer) is None


@pytest.mark.engine
@pytest.mark.parametrize("name", READ)
def test_equals_apply_chat_template(name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), chat_template=READ[name],
        bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>",
    )  # fmt: skip
    turns, _ = READERS[name]
    assert turns is not None
    num_read = 0
    for contents in (["Hi"], [" a ", "b</think>\n\nc\n", "d"], ["", "\n", "日本", "x</think>"]):
        for roles in (["user", "assistant"] * 2, ["system", *["user", "assistant"] * 2], ["tool"] * 4):
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
            for ask in (True, False):
                texts = told(turns, messages, ask)
                if texts is not None:
                    theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
                    assert "".join(texts) == theirs
                    num_read += 1
    assert num_read >= 6


# Templates made up from the part of the language that is read, and a little beyond.

ATOMS = [
    "message.content", "message['role']", "messages[0].content", "messages[0]['role']", "bos_token", "x", "y", "'a'",
    "' b\\n'", "''", "1", "2", "none", "true", "loop.first", "loop.last", "loop.index", "loop.index0", "message.name",
    "message", "tools", "nothing", "message.tool_calls", "message.items", "loop.length", "add_generation_prompt",
    "documents", "range",
]  # fmt: skip
OPERATORS = [" + ", " ~ ", " == ", " != ", " and ", " or ", " in ", " not in ", " < ", " % "]
ENDINGS = [
    " is defined", " is not defined", " is string", " is none", " is mapping", " is true", " is not none",
    " is undefined", "|trim", "|upper", "|lower", "|string", ".strip()", ".split('a')[0]", ".split('a')[-1]",
    ".upper()", ".startswith('a')", ".rstrip('b')",
]  # fmt: skip


def value(rng: random.Random, depth: int = 2) -> str:
    kind = rng.randrange(8) if depth else 0
    if kind < 3:
        return rng.choice(ATOMS)
    one, two, three = (value(rng, depth - 1) for _ in range(3))
    if kind == 3:
        return f"({one}{rng.choice(OPERATORS)}{two})"
    if kind == 4:
        return f"({one} if {two} else {three})"
    if kind == 5:
        return f"({one} if {two})"
    return f"({one}{rng.choice(ENDINGS)})" if kind == 6 else f"(not {one})"


def stretch(rng: random.Random, depth: int) -> str:
    return "".join(statement(rng, depth) for _ in range(rng.randint(0, 3)))


def statement(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(5) if depth else rng.randrange(1, 5)
    if kind == 0:
        then, other, otherwise = (stretch(rng, depth - 1) for _ in range(3))
        return f"{{% if {value(rng)} %}}{then}{{% elif {value(rng)} %}}{other}{{% else %}}{otherwise}{{% endif %}}"
    if kind == 1:
        return f"{{% set {rng.choice(['x', 'y', 'bos_token', 'add_generation_prompt'])} = {value(rng)} %}}"
    return rng.choice(["text ", "\n", "<|im_end|>"]) if kind == 2 else f"{{{{ {value(rng)} }}}}"


@pytest.mark.parametrize("seed", range(3))
def test_made_up_templates_are_read_as_jinja_runs_them(seed: int) -> None:
    rng, num_read = random.Random(seed), 0
    for _ in range(80):
        over = rng.choice(["messages", "messages[1:]", "x"])
        head = ("{% set x = messages %}" if over == "x" else "") + stretch(rng, 1)
        template = f"{head}{{% for message in {over} %}}{stretch(rng, 2)}{{% endfor %}}{stretch(rng, 1)}"
        renderer = PromptRenderer(tiny_bundle(template))
        assert renderer.template is not None
        try:
            turns = Turns(renderer, renderer.template)  # without a look at whether it reads right
        except Unknown:
            continue
        for _ in range(3):
            messages = [
                {
                    "role": rng.choice(["system", "user", "assistant"]),
                    "content": rng.choice(["", " ", "Hi", " a b\n", "B"]),
                }
                for _ in range(rng.randint(1, 3))
            ]
            for ask in (True, False):
                texts = told(turns, messages, ask)
                if texts is not None:
                    assert "".join(texts) == rendered(renderer, messages, ask), template
                    num_read += 1
    assert num_read > 0


def test_an_assignment_that_jinja_would_refuse_is_not_passed_over() -> None:
    for refused in ("raise_exception('no')", "nothing.items", "1 + 'a'"):
        turns, renderer = turns_and_renderer(f"{{% set x = {refused} %}}" + CHATML)
        chat = [{"role": "user", "content": "Hi"}]
        assert rendered(renderer, chat, True) is None
        assert turns is None

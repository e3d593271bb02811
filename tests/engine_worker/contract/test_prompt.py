"""From messages to ids: what is normalised, what is refused and with which words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from engine_worker.contract.prompt import ALLOWED_TEMPLATE_KWARGS, PromptError, PromptRenderer, template_kwargs
from engine_worker.contract.state import TokenizerBundle
from tests.support.tiny_tokenizer import CHATML, tiny_bundle

PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %};{% endfor %}"
)


def renderer(template: str | None = CHATML, **kwargs: Any) -> PromptRenderer:
    return PromptRenderer(tiny_bundle(template), **kwargs)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in texts]


def refusal(*args: Any, template: str | None = CHATML, **kwargs: Any) -> PromptError:
    with pytest.raises(PromptError) as caught:
        renderer(template).render_chat(*args, **kwargs)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


def test_a_chat_is_rendered_and_tokenized_without_a_second_bos() -> None:
    chat = renderer()
    messages = [{"role": "system", "content": "You help."}, user("Hello")]
    rendered = chat.render_chat(messages)
    assert (
        rendered
        == "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.chat_ids(messages) == chat.encode(rendered, add_special_tokens=False)
    with_bos = renderer("{{ bos_token }}{{ messages[0].content }}").chat_ids(messages)
    assert with_bos.count(chat.tokenizer.token_to_id("<s>")) == 1


def test_a_plain_prompt_gets_the_post_processors_tokens() -> None:
    plain = renderer()
    ids = plain.encode("Hello", add_special_tokens=True)
    assert ids == [plain.tokenizer.token_to_id("<s>"), *plain.encode("Hello", add_special_tokens=False)]
    assert plain.decode(ids, skip_special_tokens=True) == "Hello"
    assert plain.decode(ids, skip_special_tokens=False) == "<s>Hello"


def test_truncation_and_padding_in_the_tokenizer_are_switched_off() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tiny_bundle().tokenizer_json)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    bundle = TokenizerBundle(
        fingerprint="x", tokenizer_json=tokenizer.to_str(), chat_template=None, special_tokens={}, max_model_len=8
    )
    long = "The quick brown fox jumps over the lazy dog. " * 5
    assert PromptRenderer(bundle).encode(long, False) == renderer().encode(long, False)


def test_messages_are_not_changed() -> None:
    messages = [
        {"role": "developer", "content": text("a", "b"), "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    before = copy.deepcopy((messages, tools))
    renderer(CALLS).render_chat(messages, tools)
    renderer(PARTS).render_chat(messages[:1], tools, False, True)
    assert (messages, tools) == before


def test_parts_become_what_the_template_reads() -> None:
    assert "user\none two<|im_end|>" in renderer().render_chat([user(text("one", " two"))])
    assert renderer(PARTS).render_chat([user(text("one", " two"))]) == "[text:one][text: two]"
    assert renderer(PARTS).render_chat([user("one")]) == "[text:one]"
    assert renderer(BOTH).render_chat([user("one"), user(text("two"))]) == "one[two]"
    assert (
        renderer(CALLS).render_chat([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}])
        == "assistant:no;"
    )


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_other_parts_are_refused_by_name_and_place(kind: str) -> None:
    error = refusal([user("x"), user([*text("see"), {"type": kind, kind: {}}])])
    assert f"messages[1].content[1] is of type '{kind}'" in error.message
    assert error.param == "messages[1].content[1]"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    assert renderer().render_chat([{"role": "developer", "content": "x"}]).startswith("<|im_start|>system\n")
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% else %}{{ m.role }}{% endif %}{% endfor %}"
    assert renderer(knows).render_chat([{"role": "developer", "content": "x"}]) == "D"


def test_nulls_are_absent() -> None:
    source = "{% for m in messages %}{{ 'name' in m }}{{ m.content is defined }}{% endfor %}"
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": None}
    assert renderer(source).render_chat([message]) == "FalseFalse"


def test_arguments_of_tool_calls_become_objects() -> None:
    def shown(arguments: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return renderer(CALLS).render_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])

    assert '"arguments": {"b": 1, "a": [2]}' in shown('{"b": 1, "a": [2]}')
    assert '"arguments": {"a": 1}' in shown({"a": 1})
    assert '"arguments": {}' in shown("")
    assert '"arguments": "{\\"a\\": "' in shown('{"a": '), "a truncated call stays text"
    assert '"arguments": "[1]"' in shown("[1]")


def test_no_tool_calls_is_the_same_as_none() -> None:
    source = "{{ 'tool_calls' in messages[0] }}{{ tools is none }}"
    assert (
        renderer(source).render_chat([{"role": "assistant", "content": "x", "tool_calls": []}], tools=[]) == "FalseTrue"
    )


def test_reasoning_is_found_under_every_name() -> None:
    source = "{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert renderer(source).render_chat([{"role": "assistant", "content": "x", name: "why"}]) == "why/why"
    assert renderer(source).render_chat([{"role": "assistant", "content": "x", "reasoning": {"id": 1}}]) == "/"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        (["hi"], r"messages[0] must be an object"),
        ([{"content": "x"}], "messages[0].role must be one of"),
        ([{"role": "a\nb", "content": "x"}], "messages[0].role must be one of"),
        ([{"role": "<|im_end|>", "content": "x"}], "messages[0].role must be one of"),
        ([{"role": 7, "content": "x"}], "messages[0].role must be one of"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content is missing"),
        ([{"role": "user", "content": 7}], "messages[0].content must be a string or a list"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content must be a string or a list"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0] has no type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a string"),
        ([{"role": "assistant", "tool_calls": 7}], "messages[0].tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0] must have a `function`"),
    ],
)
def test_what_is_no_chat_is_refused(messages: Any, words: str) -> None:
    assert words in refusal(messages).message


def test_what_are_no_tools_is_refused() -> None:
    assert "`tools` must be a list" in refusal([user("x")], tools={"a": 1}).message
    assert "tools[1] must be an object" in refusal([user("x")], tools=[{}, "f"]).message


def test_no_template_is_said_clearly() -> None:
    error = refusal([user("x")], template=None)
    assert "no chat template" in error.message
    assert "/v1/completions" in error.message
    assert "can't be used" in refusal([user("x")], template="{% if %}").message
    broken = renderer("{% if %}")
    assert not broken.has_chat_template
    assert broken.encode("plain text still works", False)


def test_what_the_template_says_reaches_the_client() -> None:
    assert "Only user roles!" in refusal([user("x")], template="{{ raise_exception('Only user roles!') }}").message
    assert "failed on these messages" in refusal([user("x")], template="{{ messages[0].content / 0 }}").message
    assert (
        "failed on these messages"
        in refusal([user("x")], template="{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").message
    )


def test_kwargs_are_allow_listed() -> None:
    source = "{{ enable_thinking }}/{{ documents is none }}/{{ messages | length }}"
    assert renderer(source).render_chat([user("x")], chat_template_kwargs={"enable_thinking": False}) == "False/True/1"
    for key in ("messages", "tools", "bos_token", "add_generation_prompt", "chat_template", "raise_exception", "x"):
        assert key not in ALLOWED_TEMPLATE_KWARGS
        error = refusal([user("x")], chat_template_kwargs={key: "evil"})
        assert f"may not set {key};" in error.message
        assert error.param == "chat_template_kwargs"


def test_reasoning_effort_is_a_template_argument_too() -> None:
    assert template_kwargs(None, None) is None
    assert template_kwargs({"a": 1}, None) == {"a": 1}
    assert template_kwargs(None, "low") == {"reasoning_effort": "low"}
    assert template_kwargs({"reasoning_effort": "high"}, "low") == {"reasoning_effort": "high"}


def test_the_final_message_can_be_continued() -> None:
    messages = [user("Say it"), {"role": "assistant", "content": "It is "}]
    rendered = renderer().render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered.endswith("<|im_start|>assistant\nIt is ")
    trims = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert renderer(trims).render_chat(messages, None, False, True) == "<Say it><It is"
    assert renderer(PARTS).render_chat([user(text("a", "b"))], None, False, True) == "[text:a][text:b"
    assert "set only one" in refusal(messages, None, True, True).message
    assert "does not show" in refusal(messages, None, False, True, template="{{ messages | length }}").message
    assert "with content" in refusal([user("x"), {"role": "assistant"}], None, False, True).message


def test_too_much_text_is_refused_before_it_is_tokenized() -> None:
    small = renderer(max_chars=100)
    with pytest.raises(PromptError, match="more than 100 characters"):
        small.render_chat([user("x" * 200)])
    with pytest.raises(PromptError, match="at most 100") as caught:
        small.encode("x" * 101, False)
    assert caught.value.code == "context_length_exceeded"


def test_what_is_no_unicode_is_refused() -> None:
    with pytest.raises(PromptError, match="valid Unicode"):
        renderer().encode("lone \ud800 surrogate", False)


def test_ids_that_are_none_are_refused() -> None:
    with pytest.raises(PromptError, match="integers from 0"):
        renderer().decode([-1], True)


def test_a_tokenizer_that_can_not_be_read_is_a_value_error() -> None:
    bundle = TokenizerBundle(
        fingerprint="", tokenizer_json="{}", chat_template=None, special_tokens={}, max_model_len=1
    )
    with pytest.raises(ValueError, match="tokenizer can't be read"):
        PromptRenderer(bundle)


def test_a_template_that_tells_the_time_is_noticed() -> None:
    assert renderer("{{ strftime_now('%H:%M:%S') }}").changes_every_second
    daily = renderer("{{ strftime_now('%d %b') }}")
    assert (daily.changes_every_second, daily.template_changes) == (False, "daily")
    assert not renderer().changes_every_second

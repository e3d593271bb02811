"""Rendering and tokenizing against transformers' own `apply_chat_template`, with templates of many habits."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from typing import Any

import pytest

from engine_worker.contract.messages import template_messages
from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.state import TokenizerBundle
from engine_worker.contract.tools import with_tools_as_text
from tests.support.tiny_tokenizer import CHATML, tiny_bundle, tiny_tokenizer

pytestmark = pytest.mark.engine

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Ort> & 'Tag'",
        "parameters": {"type": "object", "properties": {"ort": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"ort": "Köln", "days": 2}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": ' Hi, what\'s <up> & "so"?\n'}],
    "turns": [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two.\n", "reasoning_content": "One plus one."},
        {"role": "user", "content": "日本語 🙂?"},
    ],
    "twice": [*({"role": "user", "content": "Hello?"},) * 2, {"role": "assistant", "content": "Yes."}],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ],
}
TEMPLATES = {
    "chatml": CHATML,
    "bos, and a refusal": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim + '\n\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest if message.role != 'tool' %}
    {%- if loop.index0 % 2 == 0 and message.role != 'user' %}
        {{- raise_exception('Roles must take turns, but message ' ~ loop.index ~ ' is of ' ~ message.role) }}
    {%- endif %}
    {%- set asked = '[INST] ' ~ (system if loop.first else '') ~ message.content %}
    {{- asked if message.role == 'user' else message.content ~ eos_token }}
{%- endfor %}
""",
    "tools as json": """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and ns.last < 0 %}{% set ns.last = loop.revindex0 %}{% endif %}
{%- endfor %}
{%- if tools %}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{{ tools[0].function | tojson(indent=4) }}
</tools>
{% endif %}
{%- macro args(call) -%}
    {%- for key, value in call.arguments.items() %}
        {{- key }}={{ value | tojson if value is not string else value }};
    {%- endfor -%}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
        {{- '\n<tool_response>' + message.content + '</tool_response>' }}
        {%- continue %}
    {%- endif %}
    <|im_start|>{{ message.role + ('*' if loop.index0 == ns.last else '') }}
    {%- if message.reasoning_content is defined and enable_thinking is not false -%}
        <think>{{ message.reasoning_content }}</think>
    {%- endif %}
{{ message.content if message.content is defined else '' }}
    {%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{{ args(call.function) }}
    {%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "generation and blocks": """{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {% generation %}{{ message['content'] | default('-', true) }}{{ eos_token }}{% endgeneration %}
    {% else %}
        {% set text %}{{ message.role | upper }}: {{ message.content.split('\n')[0].strip() }}{% endset %}
        {{ text ~ '\n' }}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ 'assistant:' if add_generation_prompt else '' }}{{ documents is none }}{{ dict(a=1) | tojson }}""",
    "the date": "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message.content }}{% endfor %}",
    "parts": "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}|{% endfor %}{% endif %}{% endfor %}",
}  # fmt: skip


def transformers_tokenizer(template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(),
        chat_template=template,
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
    )


def theirs(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> tuple[Any, Any]:
    """transformers' text and ids, or the refusal twice."""
    try:
        text = tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **kwargs)
        ids = tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=True, return_dict=False, **kwargs)
    except Exception as error:
        return "refused", type(error).__name__
    return text, ids


def ours(renderer: PromptRenderer, messages: list[dict[str, Any]], **kwargs: Any) -> tuple[Any, Any]:
    wire = copy.deepcopy(messages)
    for message in wire:  # as they come from a client: arguments are text
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    kwargs = {"chat_template_kwargs": {k: kwargs.pop(k) for k in ("enable_thinking",) if k in kwargs}, **kwargs}
    try:
        return renderer.render_chat(wire, **kwargs), renderer.chat_ids(wire, **kwargs)
    except Exception:
        return "refused", None


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_equals_apply_chat_template(template: str, chat: str) -> None:
    tokenizer = transformers_tokenizer(TEMPLATES[template])
    renderer = PromptRenderer(tiny_bundle(TEMPLATES[template]))
    messages = CHATS[chat]
    for kwargs in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": [TOOL]},
        {"add_generation_prompt": True, "enable_thinking": False},
    ):
        shown, their_kwargs = messages, kwargs
        if not renderer.knows_tools:  # then tools are text, and the template sees no others
            plain = template_messages(messages, "string", "developer" in TEMPLATES[template])
            shown = with_tools_as_text(plain, kwargs.get("tools"))
            their_kwargs = {key: value for key, value in kwargs.items() if key != "tools"}
        before = datetime.now().date()
        expected, got = theirs(tokenizer, shown, **their_kwargs), ours(renderer, messages, **kwargs)
        if datetime.now().date() != before:  # midnight fell in between
            expected, got = theirs(tokenizer, shown, **their_kwargs), ours(renderer, messages, **kwargs)
        assert got[0] == expected[0]
        assert expected[0] == "refused" or got[1] == list(expected[1])


def test_most_of_the_comparison_is_of_text_and_not_of_refusals() -> None:
    texts = [
        ours(PromptRenderer(tiny_bundle(template)), messages, add_generation_prompt=True)[0]
        for template in TEMPLATES.values()
        for messages in CHATS.values()
    ]
    assert texts.count("refused") <= 5
    assert "refused" in texts


@pytest.mark.parametrize("template", ["chatml", "parts", "generation and blocks"])
def test_equals_continue_final_message(template: str) -> None:
    tokenizer = transformers_tokenizer(TEMPLATES[template])
    renderer = PromptRenderer(tiny_bundle(TEMPLATES[template]))
    for content in ("It is", "It is "):
        messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": content}]
        expected = theirs(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
        assert ours(renderer, messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_plain_prompts_equal_the_tokenizers_call() -> None:
    tokenizer, renderer = transformers_tokenizer(CHATML), PromptRenderer(tiny_bundle())
    for text in ("", "The quick <s>brown<|im_end|>\n fox", " 🙂\n\n日本"):
        for add in (True, False):
            assert renderer.encode(text, add) == tokenizer(text, add_special_tokens=add)["input_ids"]
        ids = tokenizer(text)["input_ids"]
        for skip in (True, False):
            assert renderer.decode(ids, skip) == tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


@pytest.fixture(scope="module")
def demo() -> tuple[TokenizerBundle, Any]:
    from transformers import AutoTokenizer

    from engine_worker.model.checkpoint_source import resolve
    from engine_worker.model.tokenizer import load_tokenizer

    folder = resolve("demo", with_weights=False, trust_remote_code=False, progress=lambda line: None).folder
    return load_tokenizer(folder, 2048), AutoTokenizer.from_pretrained(folder)


def test_the_demo_model_equals_transformers(demo: tuple[TokenizerBundle, Any]) -> None:
    bundle, tokenizer = demo
    renderer = PromptRenderer(bundle)
    for messages in (CHATS["one"], CHATS["turns"]):
        for add in (True, False):
            expected = theirs(tokenizer, messages, add_generation_prompt=add)
            assert ours(renderer, messages, add_generation_prompt=add) == (expected[0], list(expected[1]))
    text = "  Plain <|im_start|> prompt\n\n  naïve 日本語 🙂 12345"
    assert renderer.encode(text, True) == tokenizer(text)["input_ids"]

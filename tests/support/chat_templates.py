"""Chat templates in the manner of well-known models', written for tests."""

from __future__ import annotations

from tests.support.tiny_tokenizer import CHATML

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are helpful.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<s>' + message['role'] + "
    "'</s>\n\n'+ message['content'] | trim + '<|im_end|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + "
    "content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant</s>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}"
    "{% endfor %}"
)
MISTRAL_SYSTEM = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "<tool>" + system_message + "\n\n" + message["content"] + "</s>" }}
        {%- else %}
            {{- "<tool>" + message["content"] + "</s>" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {%- set first_user_prefix = messages[0]['content'] | trim + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<|im_start|>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<|im_start|>model\n'}}{%- endif -%}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}{{- '<tool>' + (tool_call.function.arguments | tojson) }}{%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""  # noqa: E501
THINKING = """{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content and message.role == 'assistant' %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ ' ' ~ loop.index ~ '\n' ~ (content if content else '-') ~ '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else eos_token }}"""
VICUNA = (
    "{% for message in messages %}{{ message.role | upper + ': ' + message.content }}{% if not loop.last %}{{ '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\nASSISTANT:' }}{% endif %}"
)
# What each writes for a message comes of that message, its place and the first one.
READ = {
    "chatml": CHATML,
    "smollm": SMOLLM,
    "llama 3": LLAMA_3,
    "mistral": MISTRAL,
    "mistral with a system message": MISTRAL_SYSTEM,
    "gemma": GEMMA,
    "qwen": QWEN,
    "thinking": THINKING,
    "vicuna": VICUNA,
    "marks the last": CHATML.replace("+ '<|im_end|>'", "+ ('!' if loop.last else '') + '<|im_end|>'"),
}
# What these write depends on the messages together, or on the day.
BEYOND = {
    "counts": "{{ messages | length }}" + CHATML,
    "counts in the loop": CHATML.replace("'<|im_end|>'", "'<|im_end|>' + messages | length | string"),
    "looks at the last": "{% for message in messages %}{{ message.content }}{{ messages[-1].role }}{% endfor %}",
    "looks back": "{% for m in messages %}{{ m.content }}{{ loop.previtem.role if not loop.first }}{% endfor %}{{ 1 }}",
    "keeps something": "{% set ns = namespace(n='') %}{% for m in messages %}{% set ns.n = ns.n + m.content %}"
    "{{ ns.n }}{% endfor %}",
    "two loops": CHATML + CHATML,
    "backwards": CHATML.replace("in messages", "in messages[::-1]"),
    "the date": "{{ strftime_now('%d %b %Y') }}" + CHATML,
    "only some": CHATML.replace("in messages", "in messages if message.role != 'tool'"),
    "doubles": "{% for m in messages %}{% set x = m.content %}" + "{% set x = x + x %}" * 30 + "{{ x }}{% endfor %}",
    "no loop": "{{ messages[0].content }}",
    "parts": "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
}

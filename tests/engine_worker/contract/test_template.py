"""Chat templates: transformers' dialect of jinja2, and what a hostile one can't do."""

from __future__ import annotations

import threading

import pytest
from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError

from engine_worker.contract.template import ChatTemplate, TemplateLimit, TemplateRefused


def rendered(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(variables)


def test_blocks_leave_no_blank_lines() -> None:
    assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loop_controls_work() -> None:
    body = "{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
    assert rendered("{% for i in range(9) %}" + body + "{% endfor %}") == "02"


def test_tojson_keeps_order_html_and_letters() -> None:
    value = {"b": "<é & '>", "a": [1, None, True]}
    assert rendered("{{ v | tojson }}", v=value) == '{"b": "<é & \'>", "a": [1, null, true]}'
    assert rendered("{{ v | tojson(indent=2) }}", v={"a": 1}) == '{\n  "a": 1\n}'
    assert rendered("{{ v | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}", v=value).startswith(
        '{"a":[1,null,true],"b":"<\\u00e9'
    )


def test_generation_marks_render_as_their_body() -> None:
    assert rendered("{% generation %}{{ x }}{% set y = 1 %}{% endgeneration %}{{ y }}", x="hi") == "hi"


def test_concatenation_of_anything() -> None:
    assert rendered("{{ 1 ~ 'a' ~ none ~ missing ~ [2] }}") == "1aNone[2]"
    assert rendered("{% set x %}<{{ 'y' }}>{% endset %}{{ x | upper }}{{ x is string }}") == "<Y>True"
    assert rendered("{% set x | upper %}y{% endset %}{{ x }}") == "Y"


def test_namespaces_and_dicts_can_be_made() -> None:
    source = "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
    assert rendered(source) == "3"
    assert rendered("{{ dict(a=1, **{'b': 2}) }}") == "{'a': 1, 'b': 2}"


def test_raise_exception_refuses() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_a_broken_template_is_a_syntax_error() -> None:
    with pytest.raises(TemplateSyntaxError):
        ChatTemplate("{% if %}")
    with pytest.raises(TemplateLimit):
        ChatTemplate("x" * 1_000_001)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ dict.__globals__.keys() }}",
        "{{ raise_exception.__globals__.keys() }}",
    ],
)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(SecurityError):
        rendered(source, messages=[])


BOMBS = {
    "multiplied": "{{ 'a' * 10**10 }}",
    "multiplied from the left": "{{ 10**10 * 'a' }}",
    "a list": "{% set x = [1] * 10**9 %}",
    "a power": "{{ 9 ** 99999999 }}",
    "doubled": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "added": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "captured": "{% set s = 'ab' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='ab') %}"
    "{% for a in range(99) %}{% set ns.s = m(ns.s) %}{% endfor %}",
    "printf": "{{ '%1000000000d' % 3 }}",
    "printf filter": "{{ '%1000000000d' | format(3) }}",
    "computed width": "{{ '%*d' % (10**9, 3) }}",
    "format": "{{ '{:1000000000}'.format(3) }}",
    "nested format": "{{ '{:{w}}'.format(3, w=10**9) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "indented json": "{{ [1] | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "join": "{% set x = 'a' * 1000000 %}{{ (['b', 'c'] * 9) | join(x) }}{{ (['b'] * 1000) | join(x) }}",
    "str.join": "{% set x = 'a' * 1000000 %}{{ x.join(['b'] * 1000) }}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "str.replace": "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "output": "{% for a in range(99999) %}{{ 'abcdefghij' * 10 }}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_can_not_make_much(name: str) -> None:
    template = ChatTemplate(BOMBS[name], max_chars=4_000_000, max_seconds=60.0)
    with pytest.raises(TemplateLimit):
        template.render({})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
        "{% macro m() %}{% for a in range(99999) %}{{ '' ~ '' }}{% endfor %}{% endmacro %}"
        "{% for a in range(99999) %}{{ m() }}{% endfor %}",
    ],
)
def test_a_template_can_not_run_for_long(source: str) -> None:
    template = ChatTemplate(source, max_seconds=0.05)
    with pytest.raises(TemplateLimit, match="too long"):
        template.render({})


def test_one_threads_limit_is_not_anothers() -> None:
    """A render that runs out of time in one thread leaves the others' renders alone."""
    endless = ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(999) %}{{ b }}{% endfor %}{% endfor %}", max_seconds=0.05
    )
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with pytest.raises(TemplateLimit):
                endless.render({})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert rendered("{{ 'ok' ~ 1 }}") == "ok1"
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "string"),
        ("{% for m in messages %}{{ m.content.split('x')[0] }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "parts"),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}",
            "parts",
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            "both",
        ),
    ],
)
def test_how_content_is_read(source: str, style: str) -> None:
    assert ChatTemplate(source).content_style == style


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("{{ messages }}", "never"),
        ("{{ strftime_now('%d %b %Y') }}", "daily"),
        ("{{ strftime_now('100%% on %Y-%m-%d') }}", "daily"),
        ("{% if strftime_now is defined %}{{ strftime_now('%B') }}{% endif %}", "daily"),
        ("{{ strftime_now('%H:%M') }}", "every_second"),
        ("{{ strftime_now('%-I') }}", "every_second"),
        ("{{ strftime_now('%c') }}", "every_second"),
        ("{{ strftime_now(format) }}", "every_second"),
        ("{% set now = strftime_now %}{{ now('%Y') }}", "every_second"),
    ],
)
def test_how_often_the_prompt_changes_by_itself(source: str, changes: str) -> None:
    assert ChatTemplate(source).changes == changes

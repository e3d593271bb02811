"""A model's chat template, run with transformers' semantics and without trusting it.

Templates come with the model, often from a hub, so they are somebody else's program. What they may do:

* See plain data only, inside jinja2's immutable sandbox: no attribute that starts with an underscore, no mutation of
  the messages, `range` limited by the sandbox.
* Write at most `max_chars`, and take at most `max_seconds`. jinja2 has no such limits, so they are checked wherever
  the template hands control back: at each piece of output, each call, each operator that can make something large.
  String methods and filters run whole between two checks; their results are measured afterwards.

What transformers gives a template, and therefore this: `trim_blocks`, `lstrip_blocks`, loop controls, a `tojson` that
does not escape HTML, `raise_exception`, `strftime_now` and the `generation` block (which marks an assistant's text for
training and renders as its body).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEMPLATE_CHARS = 1_000_000

ContentStyle = Literal["string", "parts", "both"]
Changes = Literal["never", "daily", "every_second"]

_TIME_OF_DAY = frozenset("HIMSfpcXTRrsz")  # strftime's directives that move within a day

_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")  # a printf format of a thousand columns or more


class TemplateRefused(Exception):
    """The template called raise_exception: it does not accept this conversation."""


class TemplateLimit(Exception):
    """The template wrote too much or ran too long."""


class ChatTemplate:
    """A compiled chat template. Safe to render from several threads.

    content_style  how the template reads `message.content`: as a "string", as a list of "parts", or "both"
    changes        how often the same messages render differently: "daily" or "every_second" break prefix caching at
                   that pace (a template that prints the date or the time)
    knows_developer  whether the template has its own idea of the role `developer`
    Raises jinja2.TemplateSyntaxError where `source` is no template, and TemplateLimit where it is absurdly long.
    """

    def __init__(self, source: str, *, max_chars: int = 8_000_000, max_seconds: float = 5.0) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateLimit(f"the chat template is {len(source)} characters long; {MAX_TEMPLATE_CHARS} is the most")
        self._environment = _Sandbox()
        tree = self._environment.parse(source)
        self._template = self._environment.from_string(tree)
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self.source = source
        self.content_style: ContentStyle = _content_style(tree)
        self.changes: Changes = _changes(tree)
        self.knows_developer = "developer" in source

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises TemplateRefused, TemplateLimit or whatever else the template's own faults raise."""
        pieces: list[str] = []
        num_chars = 0
        with self._environment.limited(self._max_chars, self._max_seconds) as check:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise TemplateLimit(f"the chat template wrote more than {self._max_chars} characters")
                check()
                pieces.append(piece)
        return "".join(pieces)


class _Limits(threading.local):
    max_chars: int = 0
    deadline: float = float("inf")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with transformers' additions and our limits. The limits are the rendering thread's own."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._limits = _Limits()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _SafeNamespace
        self.globals["dict"] = _make_dict

    @contextmanager
    def limited(self, max_chars: int, max_seconds: float) -> Iterator[Any]:
        """Limits for the renders of this thread inside the block. Gives the check to call now and then."""
        self._limits.max_chars = max_chars
        self._limits.deadline = time.monotonic() + max_seconds
        try:
            yield self._check_time
        finally:
            self._limits.deadline = float("inf")

    def _check_time(self) -> None:
        if time.monotonic() > self._limits.deadline:
            raise TemplateLimit("the chat template took too long")

    def _check_size(self, num_chars: int) -> None:
        if num_chars > self._limits.max_chars:
            raise TemplateLimit(f"the chat template built a value of more than {self._limits.max_chars} characters")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._check_time()
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str):
            self._check_size(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._check_time()
        match operator:
            case "*":
                self._check_size(_size(left) * right if isinstance(right, int) else 0)
                self._check_size(_size(right) * left if isinstance(left, int) else 0)
            case "**":
                self._check_size(abs(right) if isinstance(right, int) else 0)
            case "+":
                self._check_size(_size(left) + _size(right))
            case "%" if isinstance(left, str) and _WIDE.search(left):
                raise TemplateLimit("the chat template formats with a huge or computed field width")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """How large repeating or joining `value` would be: characters or items; nothing for plain numbers."""
    return len(value) if isinstance(value, str | list | tuple) else 0


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as transformers has it: a `set` inside must not leak out of it.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Any) -> str:
        text: str = caller()
        return text


class _SafeNamespace(Namespace):
    """jinja2's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, positional = args[0], args[1:]
        values = dict(*positional, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the chat template stores {name!r} on a namespace")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` in a template, without the class and its methods, which could change a dict that is passed in."""
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _content_style(tree: nodes.Template) -> ContentStyle:
    """How a template reads content: does it loop over it, and does it ask first what it is?"""
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset())
    }
    loops = any(_is_content(loop.iter, frozenset(names)) for loop in tree.find_all(nodes.For))
    if not loops:
        return "string"
    asks = any(test.name in {"string", "iterable", "mapping", "sequence"} for test in tree.find_all(nodes.Test))
    return "both" if asks else "parts"


def _is_content(node: nodes.Node, names: frozenset[str]) -> bool:
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case nodes.Filter(node=inner, name="list" | "selectattr" | "rejectattr") if inner is not None:
            return _is_content(inner, names)
    return False


def _changes(tree: nodes.Template) -> Changes:
    """From the formats handed to strftime_now; a computed format counts as the worst."""
    if not any(name.name == "strftime_now" for name in tree.find_all(nodes.Name)):
        return "never"
    calls = [
        call
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Name) and call.node.name == "strftime_now"
    ]
    for call in calls:
        if len(call.args) != 1 or not isinstance(call.args[0], nodes.Const):
            return "every_second"
        if _TIME_OF_DAY & _directives(str(call.args[0].value)):
            return "every_second"
    return "daily" if calls else "every_second"


def _directives(format: str) -> frozenset[str]:
    """The letters that follow a percent sign in a strftime format (GNU's `-` flag skipped)."""
    pieces = format.replace("%%", "").split("%")[1:]
    return frozenset(piece.lstrip("-_0^#")[:1] for piece in pieces)

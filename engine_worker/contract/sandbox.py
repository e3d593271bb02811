"""The jinja2 environment that chat templates run in: what transformers gives them, and limits.

jinja2's sandbox keeps a template from reaching Python's insides. It does not keep it from looping for ever or from
asking for a terabyte of text, so this one also checks, for the rendering thread:

* the time, at every call, every operator and every piece of output;
* the size of what can grow, before it is made where that can be told (`*`, `+`, `~`, padding, joining, replacing,
  formatting, captured blocks), and afterwards in any case.

Chat templates do nothing that comes near the limits.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")  # a printf format of a thousand columns or more
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")  # the same for str.format
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
# Filters whose numbers say how much to make.
_GUARDED_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "string", "tojson", "wordwrap")
_MOST_PADDING = 10_000
_SHORT = 10_000  # adding up texts shorter than this is no work worth timing


class TemplateRefused(Exception):
    """The template called raise_exception: it does not accept this conversation."""


class TemplateLimit(Exception):
    """The template wrote too much or ran too long."""


class _Limits(threading.local):
    max_chars: int = 0
    deadline: float = float("inf")


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Compile with `parsed` and `from_string`; render inside `limited`. Safe in several threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._limits = _Limits()
        for name in _GUARDED_FILTERS:
            self.filters[name] = self._guarded(self.filters[name])
        self.filters["tojson"] = self._guarded(_tojson)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _SafeNamespace
        self.globals["dict"] = _make_dict
        del self.globals["lipsum"]

    def parsed(self, source: str) -> nodes.Template:
        """The template's tree, with what jinja2 would do unseen made into calls. Raises TemplateSyntaxError."""
        tree: nodes.Template = _Visible().visit(self.parse(source))
        tree.set_environment(self)
        return tree

    @contextmanager
    def limited(self, max_chars: int, max_seconds: float) -> Iterator[None]:
        """Limits for what this thread renders inside the block."""
        self._limits.max_chars = max_chars
        self._limits.deadline = time.monotonic() + max_seconds
        try:
            yield
        finally:
            self._limits.deadline = float("inf")

    def check_time(self) -> None:
        if time.monotonic() > self._limits.deadline:
            raise TemplateLimit("the chat template took too long")

    def _check_size(self, num_chars: int) -> None:
        if num_chars > self._limits.max_chars:
            raise TemplateLimit(f"the chat template built a value of more than {self._limits.max_chars} characters")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is LoopContext:  # `loop.first` and the like, in every turn of every loop: answered quickly
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        if isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, str):
            self._check_method(obj.__self__, obj.__name__, args)
        elif isinstance(getattr(obj, "__wrapped__", None), BuiltinMethodType):  # the sandbox's own str.format
            self._check_format(obj.__wrapped__.__self__)
        return self._checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            text = left + right  # templates do little else: at most the limit's double, so looked at afterwards
            if len(text) > _SHORT:
                self.check_time()
                self._check_size(len(text))
            return text
        self.check_time()
        match operator:
            case "*":
                self._check_size(_size(left) * right if isinstance(right, int) else 0)
                self._check_size(_size(right) * left if isinstance(left, int) else 0)
            case "**":
                self._check_padding((right,))
            case "+":
                self._check_size(_size(left) + _size(right))
            case "%" if isinstance(left, str):
                self._check_format(left)
        return super().call_binop(context, operator, left, right)

    def joined(self, *values: Any) -> str:
        """`a ~ b`, which jinja2 would compile to a join that nobody sees."""
        texts = [str(value) for value in values]
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, str):
            self._check_size(len(value))
        return value

    def _check_method(self, text: str, name: str, args: tuple[Any, ...]) -> None:
        if name in _PADDING:
            self._check_padding(args)
        elif name == "join" and args and isinstance(args[0], list | tuple):
            self._check_size(sum(map(_size, args[0])) + len(text) * len(args[0]))
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self._check_size(len(text) + text.count(args[0]) * len(args[1]))

    def _check_padding(self, args: tuple[Any, ...]) -> None:
        if any(isinstance(arg, int) and arg > _MOST_PADDING for arg in args):
            raise TemplateLimit(f"the chat template pads, groups or raises by more than {_MOST_PADDING}")

    def _check_format(self, text: str) -> None:
        if _WIDE.search(text) or _WIDE_BRACES.search(text):
            raise TemplateLimit("the chat template formats with a huge or computed field width")

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with the same limits. What jinja2 passes first (an environment, a context) is left alone."""

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            plain = [arg for arg in args if isinstance(arg, str | int | list | tuple)]
            self._check_padding((*plain, *kwargs.values()))
            if plain and isinstance(plain[0], str):
                if function.__name__ == "do_format":
                    self._check_format(plain[0])
                elif function.__name__ == "do_replace":
                    self._check_method(plain[0], "replace", tuple(plain[1:]))
            elif plain and function.__name__ == "do_join":
                between = plain[1] if len(plain) > 1 and isinstance(plain[1], str) else ""
                self._check_method(between, "join", (plain[0],))
            return self._checked(function(*args, **kwargs))

        return guarded


class _Visible(NodeTransformer):
    """Puts the environment's checks where compiled templates would build strings on their own."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined", lineno=node.lineno)
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        """A captured block passes through a guarded filter (which leaves a string as it is)."""
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "string", [], [], None, None, lineno=node.lineno)
        return node


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
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(lineno)

    def body(self, caller: Any) -> str:
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

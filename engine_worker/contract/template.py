"""A model's chat template: compiled, looked at, and run with transformers' semantics.

Templates come with the model, often from a hub, so they are somebody else's program. They see plain data only, in the
sandbox of sandbox.py, which also limits how much they write and how long they take.

What a template does with a conversation can be read from its syntax tree: whether it loops over content parts, whether
it prints the date or the time.
"""

from __future__ import annotations

from typing import Any, Literal

from jinja2 import nodes

from engine_worker.contract.sandbox import ChatSandbox, TemplateLimit, TemplateRefused

__all__ = ["Changes", "ChatTemplate", "ContentStyle", "TemplateLimit", "TemplateRefused"]

MAX_TEMPLATE_CHARS = 1_000_000

ContentStyle = Literal["string", "parts", "both"]
Changes = Literal["never", "daily", "every_second"]

_TIME_OF_DAY = frozenset("HIMSfpcXTRrsz")  # strftime's directives that move within a day


class ChatTemplate:
    """A compiled chat template. Safe to render from several threads.

    content_style  how the template reads `message.content`: as a "string", as a list of "parts", or "both"
    changes        how often the same messages render differently: "daily" or "every_second" break prefix caching at
                   that pace (a template that prints the date or the time)
    knows_developer  whether the template has its own idea of the role `developer`
    knows_tools    whether the template shows tools to the model
    Raises jinja2.TemplateSyntaxError where `source` is no template, and TemplateLimit where it is absurdly long.
    """

    def __init__(self, source: str, *, max_chars: int = 8_000_000, max_seconds: float = 5.0) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateLimit(f"the chat template is {len(source)} characters long; {MAX_TEMPLATE_CHARS} is the most")
        self._sandbox = ChatSandbox()
        tree = self._sandbox.parsed(source)
        self._template = self._sandbox.from_string(tree)
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self.source = source
        self.content_style: ContentStyle = _content_style(tree)
        self.changes: Changes = _changes(tree)
        self.knows_developer = "developer" in source
        self.knows_tools = any("tools" in name.name for name in tree.find_all(nodes.Name))

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises TemplateRefused, TemplateLimit or whatever else the template's own faults raise."""
        pieces: list[str] = []
        num_chars = 0
        with self._sandbox.limited(self._max_chars, self._max_seconds):
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise TemplateLimit(f"the chat template wrote more than {self._max_chars} characters")
                self._sandbox.check_time()
                pieces.append(piece)
        return "".join(pieces)


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

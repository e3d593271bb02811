"""A chat template as one text a message, so that a chat's known part need not be rendered again.

A template that is read here (reading.py) is lines, one loop over the messages, and lines. What is read can look at few
things: the first message, the message that the loop is at and its number, and whether that is the last one. So the text
of message i depends on the first message and on itself, and on no other; with `looks_ahead`, on being the last besides.
What stands before the loop depends on the first message, what stands behind it on `add_generation_prompt`, too.

That is no guess about a template's habits. All else that it may do (ask for another message, count them, keep
something from one turn for the next) is beyond what is read, and raises Unknown where a chat comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jinja2
from jinja2 import nodes

from engine_worker.contract.messages import PromptError, template_messages
from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.sandbox import ChatSandbox
from engine_worker.contract.template import ChatTemplate
from gateway.prefix.reading import (
    MISSING,
    UNREAD,
    Choice,
    Comparison,
    Constant,
    Expression,
    Field,
    Filtered,
    Item,
    Joined,
    Messages,
    Method,
    Name,
    Place,
    Question,
    Remainder,
    Rest,
    Sum,
    TheMessage,
    Truth,
    Turn,
    Unknown,
    plain,
    text_of,
)  # fmt: skip

MAX_NODES: Final = 3_000  # a longer template is a program that only jinja2 should run
_METHODS: Final = frozenset({"strip", "lstrip", "rstrip", "upper", "lower", "startswith", "endswith", "split"})
_FILTERS: Final = frozenset({"trim", "upper", "lower", "string"})
_TESTS: Final = frozenset({"defined", "undefined", "string", "mapping", "none", "true", "false"})
_COMPARISONS: Final = frozenset({"eq", "ne", "lt", "lteq", "gt", "gteq", "in", "notin"})
_PLACES: Final = frozenset({"first", "last", "index0", "index"})
_BEYOND: Final = Expression()
_SYSTEM: Final = {"role": "system", "content": " Be brief.\n"}
_USER: Final = {"role": "user", "content": "  One, \n</think> two? \n"}
_ANSWER: Final = {"role": "assistant", "content": "<think>\nSo.\n</think>\n\n Three. "}
_PROBES: Final = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER], [_SYSTEM, _USER, _ANSWER, _USER, _ANSWER])


class Statement:
    """Beyond us, unless a class below says what to do."""

    def run(self, turn: Turn) -> None:
        raise Unknown


class Write(Statement):
    def __init__(self, parts: list[Expression]) -> None:
        self.parts = parts

    def run(self, turn: Turn) -> None:
        for part in self.parts:
            turn.write(text_of(part.value(turn)))


class Assign(Statement):
    def __init__(self, name: str, expression: Expression) -> None:
        self.name = name
        self.expression = expression

    def run(self, turn: Turn) -> None:
        turn.names[self.name] = self.expression.value(turn)


class If(Statement):
    def __init__(self, branches: list[tuple[Expression, list[Statement]]], otherwise: list[Statement]) -> None:
        self.branches = branches
        self.otherwise = otherwise

    def run(self, turn: Turn) -> None:
        for test, body in self.branches:
            if plain(test.value(turn)):
                run_all(body, turn)
                return
        run_all(self.otherwise, turn)


def run_all(statements: list[Statement], turn: Turn) -> None:
    for statement in statements:
        statement.run(turn)


class Reader:
    """Turns a stretch of a template (what is before the loop, in it, or behind it) into statements.

    target  the loop's name for the message, "" outside the loop
    own     names that the loop's body assigns; jinja2 has rules for reading one before that we stay away from
    """

    def __init__(self, target: str, own: frozenset[str]) -> None:
        self._target = target
        self._own = own
        self.looks_ahead = False

    def statements(self, body: Sequence[nodes.Node]) -> list[Statement]:
        return [self._statement(node) for node in body]

    def _statement(self, node: nodes.Node) -> Statement:
        match node:
            case nodes.Output(nodes=parts):
                return Write([self.expression(part) for part in parts])
            case nodes.Assign(target=nodes.Name(name=name), node=value):
                return Assign(name, self.expression(value))
            case nodes.Macro(name=name):
                return Assign(name, Constant(UNREAD))  # it does nothing until it is called, which is beyond us
            case nodes.If(test=test, body=body, elif_=others, else_=otherwise):
                branches = [(self.expression(test), self.statements(body))]
                branches += [(self.expression(other.test), self.statements(other.body)) for other in others]
                return If(branches, self.statements(otherwise))
        return Statement()

    def expression(self, node: nodes.Node | None) -> Expression:
        match node:
            case nodes.TemplateData(data=text):
                return Constant(text)
            case nodes.Const(value=value) if value is None or type(value) in (str, int, bool):
                return Constant(value)
            case nodes.List(items=items) | nodes.Tuple(items=items):
                constants = [self.expression(item) for item in items]
                if all(isinstance(constant, Constant) for constant in constants):
                    return Constant([constant.constant for constant in constants if isinstance(constant, Constant)])
            case nodes.Name(name=name) if name != "loop":
                return TheMessage() if name == self._target else Name(name, self._own)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=what) if self._target and what in _PLACES:
                self.looks_ahead |= what == "last"
                return Place(what)
            case nodes.Getattr(node=of, attr=field) | nodes.Getitem(node=of, arg=nodes.Const(value=str(field))):
                return _BEYOND if hasattr(dict, field) else Field(self.expression(of), field)
            case nodes.Getitem(node=of, arg=nodes.Const(value=int(number))):
                return Item(self.expression(of), number)
            case nodes.Getitem(node=of, arg=nodes.Neg(node=nodes.Const(value=int(number)))):
                return Item(self.expression(of), -number)
            case nodes.Getitem(node=of, arg=nodes.Slice(start=nodes.Const(value=1), stop=None, step=None)):
                return Rest(self.expression(of), 1)
            case nodes.Add(left=left, right=right):
                return Sum(self.expression(left), self.expression(right))
            case nodes.Mod(left=left, right=right):
                return Remainder(self.expression(left), self.expression(right))
            case nodes.Concat(nodes=parts):
                return Joined([self.expression(part) for part in parts])
            case nodes.Compare(expr=left, ops=[nodes.Operand(op=op, expr=right)]) if op in _COMPARISONS:
                return Comparison(op, self.expression(left), self.expression(right))
            case nodes.And(left=left, right=right):
                return Truth("and", self.expression(left), self.expression(right))
            case nodes.Or(left=left, right=right):
                return Truth("or", self.expression(left), self.expression(right))
            case nodes.Not(node=of):
                return Truth("not", self.expression(of), _BEYOND)
            case nodes.CondExpr(test=test, expr1=then, expr2=otherwise):
                other = Constant(MISSING) if otherwise is None else self.expression(otherwise)
                return Choice(self.expression(test), self.expression(then), other)
            case nodes.Test(node=of, name=test, args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if test in _TESTS:
                return Question(test, self.expression(of))
            case nodes.Filter(node=of, name=filter, args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if (
                of is not None and filter in _FILTERS
            ):
                return Filtered(filter, self.expression(of))
            case nodes.Call(
                node=nodes.Getattr(node=of, attr=method), args=args, kwargs=[], dyn_args=None, dyn_kwargs=None
            ) if method in _METHODS:
                return Method(self.expression(of), method, [self.expression(arg) for arg in args])
        return _BEYOND


class Turns:
    """One template, read. `texts` is what is wanted of it.

    looks_ahead  whether a message's text may depend on its being the last
    Raises Unknown where the template is beyond us as a whole.
    """

    def __init__(self, renderer: PromptRenderer, template: ChatTemplate) -> None:
        tree = ChatSandbox().parse(template.source)
        if template.content_style == "parts" or sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
            raise Unknown
        at = [i for i, node in enumerate(tree.body) if isinstance(node, nodes.For)]
        loop = tree.body[at[0]] if len(at) == 1 else None
        if not isinstance(loop, nodes.For) or not isinstance(loop.target, nodes.Name) or loop.else_ or loop.recursive:
            raise Unknown
        target = loop.target.name
        own = frozenset(name.name for part in loop.body for name in _names(part) if name.ctx != "load")
        if loop.test is not None or target in own or target in ("loop", "messages") or "loop" in own:
            raise Unknown
        outside, inside = Reader("", frozenset()), Reader(target, own)
        self._head = outside.statements(tree.body[: at[0]])
        self._list = outside.expression(loop.iter)
        self._body = inside.statements(loop.body)
        self._tail = outside.statements(tree.body[at[0] + 1 :])
        self.looks_ahead = inside.looks_ahead
        self._knows_developer, self._knows_tools = template.knows_developer, template.knows_tools
        self._style = template.content_style
        # Of what a sandbox's templates can name, functions are beyond us.
        variables: dict[str, object] = {
            **dict.fromkeys(ChatSandbox().globals, UNREAD), **renderer.bundle.special_tokens,
            "documents": None, "messages": Messages(0), "tools": None,
        }  # fmt: skip
        unread = dict.fromkeys(_stored_first(tree.body) & {*variables, "add_generation_prompt"}, UNREAD)
        self._asks: dict[str, object] = {**variables, "add_generation_prompt": True, **unread}
        self._ends: dict[str, object] = {**variables, "add_generation_prompt": False, **unread}
        self._roles: set[str] = set()

    def texts(self, messages: Sequence[Any], start: int, stop: int, add_generation_prompt: bool) -> list[str]:
        """What is written for each message from number `start` on and before `stop`, and what comes after all of them.

        The first message's text has what is written before it in front. Raises Unknown.
        """
        first = self._prepared(messages[0])
        variables = self._asks if add_generation_prompt else self._ends
        turn = Turn(first, variables)
        run_all(self._head, turn)
        looped = self._list.value(turn)
        if not isinstance(looped, Messages):
            raise Unknown
        head, names, last = turn.pieces, turn.names, len(messages) - 1
        turn.outer = {**variables, **names} if names else variables
        texts = []
        for i in range(start, stop):
            turn.pieces = head if i == 0 else []
            message = first if i == 0 else self._prepared(messages[i])
            if i >= looped.offset:
                turn.names, turn.message = {}, message
                turn.index, turn.is_last = i - looped.offset, i == last
                run_all(self._body, turn)
            texts.append("".join(turn.pieces))
        turn.pieces, turn.names, turn.message, turn.outer = [], names, None, variables
        run_all(self._tail, turn)
        texts.append("".join(turn.pieces))
        return texts

    def _prepared(self, message: Any) -> dict[str, Any]:
        """As the template gets it (messages.py); the usual message is one already."""
        if type(message) is dict and len(message) == 2:
            role, content = message.get("role"), message.get("content")
            if type(role) is str and type(content) is str and role in self._roles:
                return message
        try:
            prepared = template_messages([message], self._style, self._knows_developer)[0]
        except PromptError:
            raise Unknown from None
        role = prepared["role"]
        if not self._knows_tools and (role == "tool" or "tool_calls" in prepared):
            raise Unknown  # tools.py may put it together with others
        if role == message["role"] and len(self._roles) < 16:
            self._roles.add(role)
        return prepared


def _stored_first(body: Sequence[nodes.Node]) -> set[str]:
    """Names that the template assigns outside its loop before it has surely looked at them: what jinja2 takes for their
    value until then depends on more than the way that is gone."""
    looked_at: set[str] = set()
    stored: set[str] = set()
    for node in body:
        match node:
            case nodes.If(test=looks) | nodes.Assign(node=looks) | nodes.For(iter=looks) | (nodes.Output() as looks):
                looked_at |= {name.name for name in _names(looks) if name.ctx == "load"} - stored
        if not isinstance(node, nodes.For):
            stored |= {name.name for name in _names(node) if name.ctx != "load"}
            stored |= {macro.name for macro in [node, *node.find_all(nodes.Macro)] if isinstance(macro, nodes.Macro)}
    return stored - looked_at


def _names(node: nodes.Node) -> list[nodes.Name]:
    found = list(node.find_all(nodes.Name))
    return [*found, node] if isinstance(node, nodes.Name) else found


def turns_of(renderer: PromptRenderer) -> Turns | None:
    """None for a template that is beyond us, or that turns out to differ from what was read."""
    template = renderer.template
    if template is None:
        return None
    try:
        turns = Turns(renderer, template)
        return turns if _reads_right(turns, renderer) else None
    except (Unknown, jinja2.TemplateError, RecursionError):
        return None


def _reads_right(turns: Turns, renderer: PromptRenderer) -> bool:
    """Whether it reads chats at all, and as jinja2 writes them."""
    num_read = 0
    for messages in _PROBES:
        for add_generation_prompt in (True, False):
            try:
                read = "".join(turns.texts(messages, 0, len(messages), add_generation_prompt))
            except Unknown:
                continue
            try:
                is_right = renderer.render_chat(messages, None, add_generation_prompt) == read
            except PromptError:
                is_right = False
            if not is_right:
                return False
            num_read += 1
    return num_read > 0

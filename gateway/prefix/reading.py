"""What a chat template writes for one message, without running the template: the part of Jinja that chats need.

Most templates are a few lines before a loop over the messages, the loop, and a line after it, and what the loop writes
for a plain message comes of the message, its place and constants. Here such expressions and statements are read from
jinja2's own syntax tree into objects that can be asked for their value, at a tenth of what the sandbox takes.

This is a part of the language, and knows that: whatever it meets beyond it (a call, a filter, an inner loop, a value of
a kind that a rule below doesn't name) raises Unknown, at the moment it is reached and not before, and then the template
is run as ever. So a template with branches for tools is read as long as no message goes there. Nothing is guessed:
what is supported does here what jinja2 does there, and tests hold them against each other over made-up templates.

Nothing here loops, so the time is bounded by the template's length; texts are bounded by MAX_CHARS.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

MAX_CHARS: Final = 1_000_000  # of any value, and of all that a turn writes


class Unknown(Exception):
    """This is beyond what is read here."""


class Missing:
    """jinja2's undefined."""

    def __bool__(self) -> bool:
        return False


class Messages:
    """The list of messages from number `offset` on. Of it, only the first message may be looked at."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


MISSING: Final = Missing()
UNREAD: Final = object()  # the value of a name that was given something beyond us
_ORDER: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "lt": operator.lt, "lteq": operator.le, "gt": operator.gt, "gteq": operator.ge,
}  # fmt: skip


class Turn:
    """What a piece of template is read with.

    first     the chat's first message
    message   the one that the loop is at (None outside the loop), `index` its number in the loop
    names     what was assigned so far in this stretch: in the loop's body they are forgotten at its end
    outer     what can be seen besides: the template's variables, in the loop also what was assigned before it
    """

    __slots__ = ("first", "index", "is_last", "message", "names", "num_chars", "outer", "pieces")

    def __init__(self, first: dict[str, Any], outer: Mapping[str, object]) -> None:
        self.first = first
        self.outer = outer
        self.message: dict[str, Any] | None = None
        self.index = 0
        self.is_last = False
        self.names: dict[str, object] = {}
        self.pieces: list[str] = []
        self.num_chars = 0

    def write(self, text: str) -> None:
        self.num_chars += len(text)
        if self.num_chars > MAX_CHARS:
            raise Unknown
        self.pieces.append(text)


def plain(value: object) -> object:
    """`value`, where it is of a kind that jinja2's rules are followed for."""
    if value is UNREAD or isinstance(value, Messages):
        raise Unknown
    return value


def text_of(value: object) -> str:
    """As it is printed."""
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    if value is MISSING:
        return ""
    raise Unknown


class Expression:
    """Beyond us, unless a class below says what it is worth."""

    def value(self, turn: Turn) -> object:
        raise Unknown


class Constant(Expression):
    def __init__(self, constant: object) -> None:
        self.constant = constant

    def value(self, turn: Turn) -> object:
        return self.constant


class Name(Expression):
    """`own` are the names that are assigned somewhere in the same stretch, if reading them too soon is beyond us."""

    def __init__(self, name: str, own: frozenset[str]) -> None:
        self.name = name
        self.is_own = name in own

    def value(self, turn: Turn) -> object:
        found = turn.names.get(self.name, turn)
        if found is turn:
            if self.is_own:
                raise Unknown
            found = turn.outer.get(self.name, MISSING)
        if found is UNREAD:
            raise Unknown
        return found


class TheMessage(Expression):
    def value(self, turn: Turn) -> object:
        if turn.message is None:
            raise Unknown
        return turn.message


class Place(Expression):
    """`loop.first` and the like."""

    def __init__(self, what: str) -> None:
        self.what = what

    def value(self, turn: Turn) -> object:
        if turn.message is None:
            raise Unknown
        if self.what == "first":
            return turn.index == 0
        if self.what == "last":
            return turn.is_last
        return turn.index if self.what == "index0" else turn.index + 1


class Field(Expression):
    """A message's field, however it is spelled. Names that dicts have as attributes were left out before."""

    def __init__(self, of: Expression, field: str) -> None:
        self.of = of
        self.field = field

    def value(self, turn: Turn) -> object:
        whole = self.of.value(turn)
        if type(whole) is not dict:
            raise Unknown
        return whole.get(self.field, MISSING)


class Item(Expression):
    """`list[number]`; of the messages the first one."""

    def __init__(self, of: Expression, number: int) -> None:
        self.of = of
        self.number = number

    def value(self, turn: Turn) -> object:
        whole = self.of.value(turn)
        if isinstance(whole, Messages) and whole.offset == 0 and self.number == 0:
            return turn.first
        if type(whole) is list and -len(whole) <= self.number < len(whole):
            return whole[self.number]
        raise Unknown


class Rest(Expression):
    """`messages[number:]`."""

    def __init__(self, of: Expression, number: int) -> None:
        self.of = of
        self.number = number

    def value(self, turn: Turn) -> object:
        whole = self.of.value(turn)
        if not isinstance(whole, Messages):
            raise Unknown
        return Messages(whole.offset + self.number)


class Sum(Expression):
    def __init__(self, left: Expression, right: Expression) -> None:
        self.left = left
        self.right = right

    def value(self, turn: Turn) -> object:
        left, right = self.left.value(turn), self.right.value(turn)
        if type(left) is not str or type(right) is not str:
            raise Unknown
        text = left + right
        if len(text) > MAX_CHARS:
            raise Unknown
        return text


class Joined(Expression):
    """`a ~ b`."""

    def __init__(self, parts: list[Expression]) -> None:
        self.parts = parts

    def value(self, turn: Turn) -> object:
        text = "".join([text_of(part.value(turn)) for part in self.parts])
        if len(text) > MAX_CHARS:
            raise Unknown
        return text


class Remainder(Expression):
    def __init__(self, left: Expression, right: Expression) -> None:
        self.left = left
        self.right = right

    def value(self, turn: Turn) -> object:
        left, right = self.left.value(turn), self.right.value(turn)
        if type(left) is not int or type(right) is not int or right == 0:
            raise Unknown
        return left % right


class Comparison(Expression):
    def __init__(self, op: str, left: Expression, right: Expression) -> None:
        self.op = op
        self.left = left
        self.right = right

    def value(self, turn: Turn) -> object:
        left, right, op = plain(self.left.value(turn)), plain(self.right.value(turn)), self.op
        if op == "eq":
            return left == right
        if op == "ne":
            return left != right
        if op == "in" or op == "notin":
            return _contains(right, left) is (op == "in")
        if type(left) is not int or type(right) is not int:
            raise Unknown
        return _ORDER[op](left, right)


def _contains(whole: object, part: object) -> bool:
    if type(whole) is str and type(part) is str:
        return part in whole
    if (type(whole) is list or type(whole) is dict) and type(part) is str:
        return part in whole
    raise Unknown


class Truth(Expression):
    """`and`, `or` and `not`, and what stands behind `if`."""

    def __init__(self, op: str, left: Expression, right: Expression) -> None:
        self.op = op
        self.left = left
        self.right = right

    def value(self, turn: Turn) -> object:
        left = plain(self.left.value(turn))
        if self.op == "not":
            return not left
        return left if bool(left) is (self.op == "or") else plain(self.right.value(turn))


class Choice(Expression):
    """`a if test else b`."""

    def __init__(self, test: Expression, then: Expression, otherwise: Expression) -> None:
        self.test = test
        self.then = then
        self.otherwise = otherwise

    def value(self, turn: Turn) -> object:
        return self.then.value(turn) if plain(self.test.value(turn)) else self.otherwise.value(turn)


class Question(Expression):
    """`a is defined` and the like."""

    def __init__(self, test: str, of: Expression) -> None:
        self.test = test
        self.of = of

    def value(self, turn: Turn) -> object:
        value = self.of.value(turn)
        if self.test == "defined":
            return value is not MISSING
        if self.test == "undefined":
            return value is MISSING
        plain(value)
        if self.test == "string":
            return type(value) is str
        if self.test == "mapping":
            return type(value) is dict
        if self.test == "none":
            return value is None
        return value is (self.test == "true")


class Filtered(Expression):
    """Filters without arguments."""

    def __init__(self, filter: str, of: Expression) -> None:
        self.filter = filter
        self.of = of

    def value(self, turn: Turn) -> object:
        text = self.of.value(turn)
        if type(text) is not str:
            raise Unknown
        if self.filter == "trim":
            return text.strip()
        if self.filter == "upper":
            return text.upper()
        return text.lower() if self.filter == "lower" else text


class Method(Expression):
    """A text's own methods, with texts as arguments."""

    def __init__(self, of: Expression, method: str, arguments: list[Expression]) -> None:
        self.of = of
        self.method = method
        self.arguments = arguments

    def value(self, turn: Turn) -> object:
        text = self.of.value(turn)
        arguments = [argument.value(turn) for argument in self.arguments]
        if type(text) is not str or not all(type(argument) is str and argument for argument in arguments):
            raise Unknown
        try:
            return getattr(text, self.method)(*arguments)
        except (TypeError, ValueError):
            raise Unknown from None

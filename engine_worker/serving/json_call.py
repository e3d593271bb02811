"""One tool call in JSON, read character by character: `{"name": "f", "arguments": {...}}`.

Only as much of JSON is followed as is needed to know where strings, the arguments and the object end; when it has
ended, a real parser judges all of it. Arguments are passed on as soon as the name is known.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A call to the function of this name; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments' JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The call is complete, its arguments are a JSON object."""


Event = Content | Begin | Arguments | End


class JsonCall:
    """Reads one call to one of `names`. With `name` given, the object read is the arguments alone.

    `state` is open until the object has ended (done) or can't be a call any more (bad).
    """

    def __init__(self, names: Container[str], name: str | None = None) -> None:
        self._names = names
        self._name = name
        self._is_bare = name is not None
        self._depth = 0
        self._in_string = self._escaped = False
        self._string = ""  # the string being read, or the last one read, at depth 1
        self._key: str | None = None
        self._raw = ""
        self._arguments = ""
        self._in_arguments = False
        self._num_sent = 0
        self.has_begun = False
        self.state: Literal["open", "done", "bad"] = "open"

    def feed(self, text: str) -> tuple[int, list[Event]]:
        """(characters used, events): all of `text` unless the call ends or turns out bad in it."""
        num_read = 0
        for char in text:
            self._read(char)
            num_read += 1
            if self.state != "open":
                break
        self._raw += text[:num_read]
        if self.state == "done":
            self._judge()
        return num_read, self._events()

    def _events(self) -> list[Event]:
        events: list[Event] = []
        if self._name is None:
            return events
        if not self.has_begun:
            self.has_begun = True
            events.append(Begin(self._name))
        if self._num_sent < len(self._arguments):
            events.append(Arguments(self._arguments[self._num_sent :]))
            self._num_sent = len(self._arguments)
        if self.state == "done":
            events.append(End())
        return events

    def _read(self, char: str) -> None:
        if self._in_string:
            self._in_string_char(char)
        elif char == '"':
            self._in_string = True
            self._string = char
        elif char in "{[":
            self._depth += 1
            opens = self._depth == 1 if self._is_bare else self._depth == 2 and self._key in _ARGUMENT_KEYS
            if opens and char == "{" and not self._arguments:
                self._in_arguments = True
        elif char in "}]":
            self._depth -= 1
        elif self._depth == 1 and not self._is_bare:
            if char == ":":
                self._key = self._decoded()
            elif char == ",":
                self._key = None
        elif self._depth == 0 and not char.isspace():
            self.state = "bad"
        if self._in_arguments:
            self._arguments += char
            if char in "}]" and not self._in_string and self._depth == (0 if self._is_bare else 1):
                self._in_arguments = False
        if char in "}]" and not self._in_string and self._depth <= 0:
            self.state = "done" if self._depth == 0 else "bad"

    def _in_string_char(self, char: str) -> None:
        if self._depth == 1:
            self._string += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._key == "name" and not self._is_bare and self._name is None:
                self._name = self._decoded()
                if self._name not in self._names:
                    self._name, self.state = None, "bad"

    def _decoded(self) -> str | None:
        try:
            value = json.loads(self._string)
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def _judge(self) -> None:
        """The object has ended: is it a call?"""
        try:
            value = json.loads(self._raw)
        except (ValueError, RecursionError):
            self.state = "bad"
            return
        if self._is_bare:
            return
        arguments: object = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
        if isinstance(arguments, str) and not self._arguments:  # JSON within JSON
            self._arguments, arguments = arguments, _parsed(arguments)
        if self._name is None or value.get("name") != self._name or not isinstance(arguments, dict):
            self.state = "bad"
        elif not self._arguments:
            self._arguments = "{}"


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

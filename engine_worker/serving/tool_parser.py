"""Tool calls in a model's text, found while the text arrives.

The text comes in pieces, cut anywhere; what is found does not depend on the cuts. Text that could still become the
beginning of a call is held back, and so are blanks in front of one. A call's name is known before its arguments are
passed on, and arguments are passed on as they come, in the model's own notation.

What only looks like a call (no JSON object, or a function that the client did not offer) is text, and is given as text.
A call that the text's end cuts off never ends: whoever reads the events must not take it for a call.

Formats, by `CallStyle`:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>            Hermes, Qwen
    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>    Qwen3-Coder
    {"name": "f", "parameters": {...}}; {...}                           Llama 3
    [TOOL_CALLS][{"name": "f", "arguments": {...}}]                     Mistral, until version 7
    [TOOL_CALLS]f[ARGS]{...}                                            Mistral, from version 11 on
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_worker.serving.json_call import Arguments, Begin, Content, End, Event, JsonCall

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a model writes calls.

    begin         what comes before a call, or before the first of several; it also may stand before each
    end           what comes after each; "" where nothing does
    is_bare       a call may begin without `begin` where it is the very first thing
    arguments_key the name of the arguments in the JSON object
    is_list       calls come as a JSON list
    is_named      the name comes before the object of arguments, with `between` in the middle
    is_xml        the model's own notation is `<function=f>...`; JSON is understood, too
    """

    begin: str
    end: str = ""
    is_bare: bool = False
    arguments_key: str = "arguments"
    is_list: bool = False
    is_named: bool = False
    between: str = ""
    is_xml: bool = False


class ToolParser:
    """One answer's text to events. `functions`: name -> JSON schema of its parameters. At most `limit` calls are given.

    States: text, begun (behind `begin`), call (in a JSON object), name, xml, ended (behind a call), swallow.
    """

    def __init__(self, style: CallStyle, functions: Mapping[str, Any], limit: int | None = None) -> None:
        self._style = style
        self._functions = functions
        self._limit = limit
        self._state = "text"
        self._buffer = ""  # not handled yet
        self._raw = ""  # of the call that is being read, for the case that it is none
        self._call: JsonCall | None = None
        self._at_start = True
        self._after_call = False
        self._has_content = False
        self.num_complete = 0

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The text has ended."""
        events: list[Event] = []
        if self._state in ("begun", "name", "xml") or (self._call is not None and not self._call.has_begun):
            self._give_up(events)
        if self._state == "text" and self._buffer and not (self._after_call and not self._buffer.strip()):
            events.append(Content(self._buffer))
        self._buffer = ""
        return events

    @property
    def is_inside(self) -> bool:
        """A call has begun and not ended."""
        return self._call is not None or self._state == "swallow"

    # Each returns whether there may be more to do with what is in the buffer.

    def _step(self, events: list[Event]) -> bool:
        match self._state:
            case "text":
                return self._text(events)
            case "begun":
                return self._begun(events)
            case "call":
                return self._in_call(events)
            case "name":
                return self._name(events)
            case "xml":
                return self._xml(events)
            case "ended":
                return self._ended()
            case _:
                self._buffer = ""
                return False

    def _text(self, events: list[Event]) -> bool:
        style, buffer = self._style, self._buffer
        if style.is_bare and (self._at_start or self._after_call):
            rest = buffer.lstrip()
            if not rest:
                return False
            if rest[0] == "{":
                self._open(events, "", len(buffer) - len(rest))
                return True
        at = buffer.find(style.begin)
        if at >= 0:
            self._emit(events, buffer[:at].rstrip())
            self._open(events, style.begin, at)
            return True
        keep = len(buffer) - _overlap(buffer, style.begin)
        end = len(buffer[:keep].rstrip())
        self._emit(events, buffer[:end])
        self._buffer = buffer[end:]
        return False

    def _emit(self, events: list[Event], text: str) -> None:
        if self._after_call and not self._has_content:
            text = text.lstrip()
        if text:
            events.append(Content(text))
            self._has_content = True
            self._at_start = self._after_call = False

    def _open(self, events: list[Event], begin: str, at: int) -> None:
        self._raw = begin
        self._buffer = self._buffer[at + len(begin) :]
        self._state = "begun"

    def _begun(self, events: list[Event]) -> bool:
        style, rest = self._style, self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == "{" or (style.is_list and rest[0] == "["):
            if rest[0] == "[":
                self._take(len(self._buffer) - len(rest) + 1)
                return True
            self._call = JsonCall(self._functions)
            self._state = "call"
        elif style.is_xml and rest[0] == "<":
            self._state = "xml"
        elif style.is_named and rest[0] not in "[{":
            self._state = "name"
        else:
            self._give_up(events)
        return True

    def _take(self, num_chars: int) -> None:
        self._raw += self._buffer[:num_chars]
        self._buffer = self._buffer[num_chars:]

    def _in_call(self, events: list[Event]) -> bool:
        call = self._call
        assert call is not None
        if not self._buffer:
            return False
        num_read, found = call.feed(self._buffer)
        self._take(num_read)
        events += found
        if call.state == "bad":
            if call.has_begun:
                self._state = "swallow"  # part of it is out; the rest can't make it right
            else:
                self._give_up(events)
        elif call.state == "done":
            self._complete()
        return True

    def _complete(self) -> None:
        self._call = None
        self.num_complete += 1
        self._after_call = True
        done = self._limit is not None and self.num_complete >= self._limit
        self._state = "done" if done else "ended"

    def _name(self, events: list[Event]) -> bool:
        between = self._style.between
        at = self._buffer.find("{")
        if at < 0 and len(self._buffer) < 200:
            return False
        head = self._buffer[: max(at, 0)].strip()
        name = head.removesuffix(between).strip() if between else head
        if name not in self._functions:
            self._give_up(events)
            return True
        self._take(at)
        self._call = JsonCall(self._functions, name)
        self._state = "call"
        return True

    def _xml(self, events: list[Event]) -> bool:
        at = self._buffer.find(self._style.end)
        if at < 0:
            return False
        found = _FUNCTION.fullmatch(self._buffer[:at])
        if found is None or found[1].strip() not in self._functions:
            self._give_up(events)
            return True
        name = found[1].strip()
        arguments = _typed(dict(_PARAMETER.findall(found[2])), self._functions[name])
        events += [Begin(name), Arguments(json.dumps(arguments, ensure_ascii=False)), End()]
        self._take(at)
        self._complete()
        return True

    def _ended(self) -> bool:
        """Behind a call: past what closes it or joins it to the next."""
        style = self._style
        rest = self._buffer.lstrip()
        if style.end and len(rest) < len(style.end) and style.end.startswith(rest):
            return False  # it may still come
        if style.end and rest.startswith(style.end):
            self._buffer = rest[len(style.end) :]
        elif style.is_list or style.is_bare:
            joints = "],; \n\t\r" if style.is_list else "; \n\t\r"
            rest = self._buffer.lstrip(joints)
            self._buffer = rest
            if not rest:
                return False
            if style.is_list and rest[0] == "{":
                self._raw, self._state = "", "begun"
                return True
        self._state = "text"
        return True

    def _give_up(self, events: list[Event]) -> None:
        """What was read is no call: it is text, and what follows is looked at anew."""
        self._emit(events, self._raw)
        self._raw, self._call, self._state = "", None, "text"
        self._at_start = False


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with (all of `mark` excepted)."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def _typed(values: dict[str, str], schema: Any) -> dict[str, Any]:
    """Texts as what the schema says they are; text where it says nothing or the text is nothing of the kind."""
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    result: dict[str, Any] = {}
    for name, text in values.items():
        wanted = properties.get(name)
        kind = wanted.get("type") if isinstance(wanted, dict) else None
        if kind == "string":
            result[name] = text
            continue
        try:
            result[name] = json.loads(text)
        except (ValueError, RecursionError):
            lowered = text.strip().lower()
            result[name] = lowered == "true" if kind == "boolean" and lowered in ("true", "false") else text
    return result

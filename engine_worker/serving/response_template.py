"""Tool calls found by transformers' response parser, for models whose tokenizer brings a `response_template`.

Such a template says declaratively how the model writes its answers; transformers knows how to read it while the text
arrives, and needs no torch for that. It gives a call when the call is over, so its arguments come in one piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine_worker.serving.json_call import Arguments, Begin, Content, End, Event

Json = dict[str, Any]


def usable(template: str) -> Json | None:
    """The template as an object, or None where this transformers can't read it (or is none at all)."""
    if not template:
        return None
    try:
        from transformers.utils.chat_parsing import ResponseParser

        spec: Json = json.loads(template)
        ResponseParser(spec, prefix="")
    except (ImportError, ValueError, TypeError, KeyError):
        return None
    return spec


class TemplateParser:
    """Like tool_parser.ToolParser. `prefix` is the end of the prompt: it may have begun the answer."""

    def __init__(self, template: Json, functions: Mapping[str, Any], limit: int | None, prefix: str) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        tools: list[Any] = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in functions.items()
        ]
        self._parser = ResponseParser(template, prefix=prefix, tools=tools)
        self._functions = functions
        self._limit = limit
        self._is_broken = False
        self.num_complete = 0
        self.is_inside = False

    def feed(self, text: str) -> list[Event]:
        if self._is_broken:
            return []
        try:
            return self._events(self._parser.feed(text))
        except ValueError:  # a region that is not what the template says it is
            self._is_broken = self.is_inside = True
            return []

    def finish(self) -> list[Event]:
        """The text has ended. What can't be read as a call by then is none."""
        if self._is_broken:
            return []
        try:
            _, events = self._parser.finalize()
        except ValueError:
            self.is_inside = True
            return []
        return self._events(events)

    def _events(self, events: list[Json]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            is_call = event["field"] == "tool_calls"
            match event["type"]:
                case "region_open" if is_call:
                    self.is_inside = True
                case "region_chunk" if not is_call and not self._is_done:
                    found.append(Content(event["text"]))
                case "region_close" if is_call:
                    values = event["value"]
                    for value in values if isinstance(values, list) else [values]:
                        found += self._call(value)
        return found

    @property
    def _is_done(self) -> bool:
        return self._limit is not None and self.num_complete >= self._limit

    def _call(self, value: Any) -> list[Event]:
        function = value.get("function", value) if isinstance(value, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments", {}), dict):
            return []  # is_inside stays: it never became a call
        self.is_inside = False
        if self._is_done:
            return []
        name, arguments = function.get("name"), json.dumps(function.get("arguments", {}), ensure_ascii=False)
        if not isinstance(name, str) or name not in self._functions:
            return [Content(json.dumps(function, ensure_ascii=False))]
        self.num_complete += 1
        return [Begin(name), Arguments(arguments), End()]

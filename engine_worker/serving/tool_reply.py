"""One choice's tool calls on their way out: as stream deltas, and as the message of a whole answer.

A call's `id`, `type` and name come in its first delta only (clients join the pieces of every string), `index` in each.
`tool_calls` is the finish reason only of an answer that the model ended itself and whose calls are all complete: a call
that max_tokens or a stop string cut off is never reported as one that could be carried out, and a whole answer leaves
it out.
"""

from __future__ import annotations

import uuid
from typing import Any

from engine_worker.core.types import FinishReason
from engine_worker.serving.json_call import Arguments, Begin, Content, End
from engine_worker.serving.tool_use import ToolUse

Json = dict[str, Any]


class ChoiceCalls:
    """Reads one choice's text and keeps what was found."""

    def __init__(self, use: ToolUse) -> None:
        self._parser = use.parser()
        self._only_calls = use.only_calls
        self._content = ""
        self._calls: list[Json] = []
        self._num_ended = 0

    def push(self, text: str, is_end: bool) -> list[Json]:
        """The deltas that this text makes."""
        events = self._parser.feed(text)
        if is_end:
            events += self._parser.finish()
        deltas: list[Json] = []
        for event in events:
            match event:
                case Content(text=content):
                    if self._only_calls:
                        continue
                    self._content += content
                    _join_content(deltas, content)
                case Begin(name=name):
                    function = {"name": name, "arguments": ""}
                    call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
                    self._calls.append(call)
                    first = {"index": len(self._calls) - 1, **call, "function": dict(function)}
                    deltas.append({"tool_calls": [first]})
                case Arguments(text=arguments):
                    self._calls[-1]["function"]["arguments"] += arguments
                    _join_arguments(deltas, len(self._calls) - 1, arguments)
                case End():
                    self._num_ended += 1
        return deltas

    def finish_reason(self, reason: FinishReason) -> str:
        """The answer's, given why generation ended."""
        if reason is FinishReason.STOP and self._num_ended and not self._parser.is_inside:
            return "tool_calls"
        return reason

    def message(self) -> Json:
        calls = self._calls[: self._num_ended]
        message: Json = {"role": "assistant", "content": self._content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if calls or self._only_calls:
            message["content"] = self._content or None
        return message


def _join_content(deltas: list[Json], text: str) -> None:
    if deltas and "content" in deltas[-1]:
        deltas[-1]["content"] += text
    else:
        deltas.append({"content": text})


def _join_arguments(deltas: list[Json], index: int, text: str) -> None:
    """To the call's own delta, where that is the last one."""
    if deltas and "tool_calls" in deltas[-1]:
        [last] = deltas[-1]["tool_calls"]
        if last["index"] == index:
            last["function"]["arguments"] += text
            return
    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

"""The end of an answer that is made to be calls, by a model that can't stop calling.

Where a client forces calls, any number of them may come, and a small model says the same one again and again. So an
answer ends in front of a call that is the very text of one before it. Until a call differs from all earlier ones what
has come of it is held back, with all that stands between it and the call before, so that nobody ever sees a part of a
call that is cut off. Like a stop string's, the outcome does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

from typing import Protocol

from engine_worker.serving.json_call import Event


class CallReader(Protocol):
    """What finds calls in a text: see tool_parser.ToolParser."""

    num_complete: int

    def feed(self, text: str) -> list[Event]: ...


class RepeatedCalls:
    """Watches one sequence's text. `num_held` characters at the end of what was fed may be part of a repeated call."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._said: set[str] = set()  # calls, as the JSON that they are
        self._behind = ""  # what came behind the last of them
        self.num_held = 0

    def feed(self, text: str) -> int | None:
        """Where the answer ends, relative to the start of `text` (it may be negative), or None.

        After an end the object is spent.
        """
        for at, char in enumerate(text, 1):
            self._behind += char
            num_complete = self._reader.num_complete
            self._reader.feed(char)
            if self._reader.num_complete > num_complete:
                call = _call_in(self._behind)
                if call in self._said:
                    return at - len(self._behind)
                self._said.add(call)
                self._behind = ""
        begun = _call_in(self._behind)
        self.num_held = len(self._behind) if any(call.startswith(begun) for call in self._said) else 0
        return None


def _call_in(text: str) -> str:
    """What is there of a call's JSON: nothing that may stand before it in a notation of several calls has a brace."""
    _, brace, rest = text.partition("{")
    return brace + rest

"""A head that was parsed before, known again by its bytes.

On one connection heads hardly differ: a client sends the same ones with each request, a replica with each answer, but
for the length of the body. What they meant once they mean again. So who has parsed one keeps what it needs of it, and
the next message with that head is not parsed at all: its head is compared, its length read, its body cut off.

Only bytes that a parser has accepted count. What is new goes through the parser, which has seen nothing of the messages
that were known, and so is where the last one that it parsed has left it.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

T = TypeVar("T")
_LENGTH: Final = b"\r\ncontent-length:"
_MAX_DIGITS: Final = 9
_MAX_HEAD_BYTES: Final = 8192
_MAX_PAUSE: Final = 63


class HeadMemory(Generic[T]):
    """The last head of a connection.

    length  of the body behind the head that `recall` found
    facts   what was kept of it
    """

    __slots__ = ("_after", "_before", "_num_before", "_pause", "_pause_left", "facts", "length")

    def __init__(self) -> None:
        self._before = b""
        self._after = b""
        self._num_before = 0
        self._pause = self._pause_left = 0
        self.length = 0
        self.facts: T | None = None

    def recall(self, data: bytes) -> int:
        """Where the body begins in `data`, if that begins with the whole head; else 0."""
        start = self._num_before
        if not start or not data.startswith(self._before):
            return 0
        end = data.find(b"\r", start, start + _MAX_DIGITS + 1)
        if end < 0 or not data.startswith(self._after, end):
            return 0
        digits = data[start:end]
        if not digits.isdigit():
            return 0
        self.length = int(digits)
        self._pause = self._pause_left = 0
        return end + len(self._after)

    def learn(self, data: bytes, num_headers: int, length: int, facts: T) -> None:
        """A parser has taken `data` for one whole message, with so many headers and a body of `length` bytes.

        Where heads always differ (an id in each) this would be for nothing, so it is tried ever more seldom there.
        """
        if self._pause_left:
            self._pause_left -= 1
            return
        self._pause = self._pause_left = min(2 * self._pause + 1, _MAX_PAUSE)
        end = data.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES) + 4
        if end < 4 or len(data) - end != length:
            return
        head = data[:end]
        lower = head.lower()
        start = lower.find(_LENGTH)
        # A line for each header: then none is folded, and none ends otherwise.
        if start < 0 or lower.count(_LENGTH) != 1 or head.count(b"\n") != num_headers + 2:
            return
        start += len(_LENGTH)
        while head[start : start + 1] == b" ":
            start += 1
        stop = head.find(b"\r", start)
        digits = head[start:stop]
        if digits.isdigit() and len(digits) <= _MAX_DIGITS and int(digits) == length:
            self._before, self._after, self._num_before, self.facts = head[:start], head[stop:], start, facts

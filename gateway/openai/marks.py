"""A scanner for marked streams (contract/resume.py): takes the marks out, and keeps what they told.

Only what a mark vouches for is passed on, so that what the client has and what `told` says never differ: events up to
the last marked one, and the others when [DONE] has come. Marks stand at the beginning of a line, where JSON, which has
no line ends in it, can't put anything.
"""

from __future__ import annotations

from engine_worker.contract.resume import MARK
from gateway.openai.sse import StreamScanner

_LATER_MARK = b"\n" + MARK
_DONE = b"data: [DONE]\n\n"
_ERROR = b'data: {"error"'


class MarkedScanner(StreamScanner):
    """`told` gets the ids of the tokens that went into what `feed` returned, as decimal numbers, each with a comma."""

    __slots__ = ("_loose", "told")

    def __init__(self, max_event_bytes: int, told: bytearray, strip_usage: bool = False) -> None:
        super().__init__(max_event_bytes, strip_usage=strip_usage)
        self.told = told
        self._loose = bytearray()  # behind the last marked event

    def feed(self, chunk: bytes) -> bytes:
        if not self._loose and chunk.startswith(MARK) and chunk.find(b"\n\n") == len(chunk) - 2:  # nearly always
            end = chunk.index(b"\n")
            if end > 4:
                self.told += chunk[4:end] + b","
            return super().feed(chunk[end + 1 :])
        loose = self._loose
        seam = max(0, len(loose) - 1)
        loose += chunk
        if loose.find(b"\n\n", seam) < 0:
            self._check_size()
            return b""
        return self._release(bytes(loose))

    def _release(self, data: bytes) -> bytes:
        whole = data.rfind(b"\n\n") + 2
        later = data.rfind(_LATER_MARK, 0, whole) + 1
        mark = later or (0 if data.startswith(MARK) else -1)
        cut = data.find(b"\n\n", mark) + 2 if mark >= 0 else 0
        out = super().feed(self._without_marks(data[:cut])) if cut else b""
        if not self.done and _at_line(data, _DONE, cut, whole) >= 0:
            end = super().feed(data[cut:whole])
            return out if self.broken else out + end
        error = -1 if self.done else _at_line(data, _ERROR, cut, whole)
        if error >= 0:  # nothing comes behind it, and what it broke off no mark vouches for
            super().feed(data[error:whole])
            return out
        self._loose = bytearray(data[cut:])
        self._check_size()
        return out

    def _without_marks(self, data: bytes) -> bytes:
        head, *marked = (b"\n" + data).split(_LATER_MARK)
        kept = [head]
        for piece in marked:
            ids, _, event = piece.partition(b"\n")
            if ids:
                self.told += ids + b","
            kept.append(event)
        return b"\n".join(kept)[1:]

    def _check_size(self) -> None:
        if len(self._loose) > self._max_bytes and not self.done:
            self._break(f"the replica sent an event of more than {self._max_bytes} bytes without an end")

    def check_invariants(self) -> None:
        super().check_invariants()
        assert not self._parts, "what comes here are whole events"
        assert self.done or len(self._loose) <= self._max_bytes


def _at_line(data: bytes, what: bytes, start: int, end: int) -> int:
    """Where a line in data[start:end], which begins with a line, begins with `what`; -1 for nowhere."""
    if data.startswith(what, start, end):
        return start
    at = data.find(b"\n" + what, start, end)
    return at + 1 if at >= 0 else -1

"""A scanner for marked streams (contract/resume.py): takes the marks out, and keeps what they told.

Only what a mark vouches for is passed on, so that what the client has and what `told` says never differ: events up to
the last marked one, and the others when [DONE] has come. Marks stand at the beginning of a line, where JSON, which has
no line ends in it, can't put anything.

Nearly every read brings one marked event of one token. Only bundled workers mark their streams, and by the end of such
an event of theirs it is known that nothing in it needs looking at; so a marked stream costs less than another.
"""

from __future__ import annotations

from engine_worker.contract.resume import MARK
from gateway.openai.sse import StreamScanner

_LATER_MARK = b"\n" + MARK
_DONE = b"data: [DONE]\n\n"
_ERROR = b'data: {"error"'
_PLAIN = b'"finish_reason":null}]}\n\n'
_NULL_USAGE = b',"usage":null}\n\n'
_PLAIN_WITH_USAGE = _PLAIN[:-3] + _NULL_USAGE


class MarkedScanner(StreamScanner):
    """`told` gets the ids of the tokens that went into what `feed` returned: a line a mark, see `told_ids` and
    `told_drafts`."""

    __slots__ = ("_loose", "told")

    def __init__(self, max_event_bytes: int, told: bytearray, strip_usage: bool = False) -> None:
        super().__init__(max_event_bytes, strip_usage=strip_usage)
        self.told = told
        self._loose = bytearray()  # behind the last marked event

    def feed(self, chunk: bytes) -> bytes:
        if chunk.startswith(MARK) and not self._loose:
            start = chunk.find(b"\n") + 1
            if chunk.find(b"\n\n", start) == len(chunk) - 2:  # nearly always
                self.told += chunk[4:start]
                if self._strips_usage and chunk.endswith(_PLAIN_WITH_USAGE):
                    self.num_events += 1
                    return chunk[start : -len(_NULL_USAGE)] + b"}\n\n"
                if chunk.endswith(_PLAIN):
                    self.num_events += 1
                    return chunk[start:]
                return super().feed(chunk[start:])
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
            self.told += ids + b"\n"
            kept.append(event)
        return b"\n".join(kept)[1:]

    def _check_size(self) -> None:
        if len(self._loose) > self._max_bytes and not self.done:
            self._break(f"the replica sent an event of more than {self._max_bytes} bytes without an end")

    def check_invariants(self) -> None:
        super().check_invariants()
        assert not self._parts, "what comes here are whole events"
        assert self.done or len(self._loose) <= self._max_bytes


def told_ids(told: bytes | bytearray) -> list[int]:
    """The tokens in order. Raises ValueError where marks held anything else."""
    marks = (line.partition(b";")[0] for line in told.split(b"\n"))
    return [int(part) for ids in marks if ids for part in ids.split(b",")]


def told_drafts(told: bytes | bytearray) -> tuple[int, int]:
    """Tokens speculated for these, and those of them that were right. Raises ValueError where marks held anything
    else."""
    last = told[told.rfind(b";") + 1 :] if b";" in told else b"0,0"
    drafts, accepted = last.partition(b"\n")[0].split(b",")
    return int(drafts), int(accepted)


def num_told(told: bytes | bytearray) -> int:
    """How many tokens, as far as they can be counted without reading them."""
    marks = (line.partition(b";")[0] for line in told.split(b"\n"))
    return sum(ids.count(b",") + 1 for ids in marks if ids)


def _at_line(data: bytes, what: bytes, start: int, end: int) -> int:
    """Where a line in data[start:end], which begins with a line, begins with `what`; -1 for nowhere."""
    if data.startswith(what, start, end):
        return start
    at = data.find(b"\n" + what, start, end)
    return at + 1 if at >= 0 else -1

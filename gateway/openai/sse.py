"""Watching a server-sent-event stream go by, without I/O and without touching its bytes.

The relay sends the very bytes that the replica sent, but only whole events: what `feed` returns ends at a blank line,
so an error event may follow at any time without gluing itself to half a frame. Lines end in LF, CRLF or CR and arrive
split anywhere. An event that grows past the cap breaks the stream, it does not fill memory.

Almost every chunk is one plain content frame. A few substring counts tell that a chunk holds nothing but such frames;
only the others (finish_reason, usage, error, [DONE]) are decoded. A quote inside JSON text is always escaped, so
`"finish_reason"` in the raw bytes can only be a key.

Where the gateway asked for the usage and the client did not, its traces are taken out: the chunk that tells it, and
`"usage":null` at the end of the others. All else stays, byte for byte.

The end of a stream is held back: from the event with the finish_reason to [DONE], so that a stream cut between the
two reaches the client as an error and never as a success (for one choice; with several, the others still run on).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gateway.openai.frames import FRAME, Usage

_BOUNDARY = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_SPECIAL = (b'"finish_reason"', b'"usage"', b'"error"', b"[DONE]")
_NULLS = (b'"finish_reason":null', b'"finish_reason": null', b'"usage":null', b'"usage": null')
_LINE_END = re.compile(rb"\r\n|\n|\r")
_TAIL_BYTES: Final = 1024  # hold a stream's finish, usage and end
# At an event's end, so outside of any string: a line end in JSON text is escaped.
_NULL_USAGES = ((b',"usage":null}\n\n', b"}\n\n"), (b', "usage": null}\n\n', b"}\n\n"))


class SseError(Exception):
    """A replica's stream was cut short or breaks the protocol; the message says how."""


class StreamScanner:
    """Feed chunks, relay what comes back, look at the fields.

    num_events  data events seen so far (complete ones)
    finished    a finish_reason went by
    done        nothing more is to come: [DONE] went by, or the stream is broken
    broken      how the stream breaks its rules, "" while it doesn't. What `feed` returned may still be relayed
    usage       the last usage seen; `error`: the error event's object, which ends the stream and is not in what `feed`
                returns: the relay says it in the shape that clients read
    """

    __slots__ = (
        "_held",
        "_hold",
        "_max_bytes",
        "_parts",
        "_parts_size",
        "_seam",
        "_strips_usage",
        "broken",
        "done",
        "error",
        "finished",
        "num_events",
        "usage",
    )

    def __init__(self, max_event_bytes: int, hold_end: bool = True, strip_usage: bool = False) -> None:
        self.num_events = 0
        self.finished = False
        self.done = False
        self.broken = ""
        self.usage: Usage | None = None
        self.error: dict[str, Any] | None = None
        self._max_bytes = max_event_bytes
        self._hold = hold_end
        self._strips_usage = strip_usage
        self._held = b""
        self._parts: list[bytes] = []
        self._parts_size = 0
        self._seam = b""

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that may be relayed now."""
        if self._parts or not chunk.endswith(b"\n\n"):
            chunk = self._complete(chunk)
            if not chunk:
                return b""
        if self._strips_usage and chunk.rfind(b'"usage"') >= 0:
            chunk = self._take_usage(chunk)
        if self._held:
            return self._look(chunk)
        cut = _tail(chunk)
        if not _is_plain(chunk[:cut]):
            return self._look(chunk)
        if cut < len(chunk) and not _is_plain(chunk[cut:]):
            return self._look(chunk, cut)
        self.num_events += _num_events(chunk)
        return chunk

    def close(self) -> bytes:
        """The replica ended the stream: what may still be relayed. `broken` says so when it was cut short."""
        rest = b"".join(self._parts)
        self._parts, self._parts_size, self._seam = [], 0, b""
        if self._strips_usage and b'"usage"' in rest:
            rest = self._take_usage(rest)
        out = self._look(rest) if rest.strip() else rest
        if self.done:
            return out
        self._break("the replica ended its stream before [DONE]")
        return b""  # half an event, or an end that was held back

    def check_invariants(self) -> None:
        assert self._parts_size == sum(map(len, self._parts))
        assert self._seam == b"".join(self._parts)[-3:]
        assert self.done or self._parts_size <= self._max_bytes
        assert not self._held or (self._hold and self.finished)
        assert not (self.broken and not self.done)

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        self.done = True

    def _complete(self, chunk: bytes) -> bytes:
        """Join `chunk` to the unfinished event before it; returns up to the last blank line and keeps the rest."""
        # A boundary may straddle the seam, so the search starts up to three bytes before it.
        window = self._seam + chunk
        end = _last_boundary(window)
        if end < 0:
            self._keep(chunk)
            return b""
        whole = b"".join([*self._parts, chunk])
        cut = len(whole) - (len(window) - end)
        self._parts, self._parts_size, self._seam = [], 0, b""
        if cut < len(whole):
            self._keep(whole[cut:])
        return whole[:cut]

    def _keep(self, part: bytes) -> None:
        self._parts.append(part)
        self._parts_size += len(part)
        self._seam = (self._seam + part[-3:])[-3:]
        if self._parts_size > self._max_bytes:
            self._break(f"the replica sent an event of more than {self._max_bytes} bytes without an end")

    def _take_usage(self, chunk: bytes) -> bytes:
        """Read the usage that the client didn't ask for, and take its traces out; other bytes stay as they are."""
        begin = max(0, _last_boundary(chunk[: chunk.find(b'"usage"')]))
        before, chunk = chunk[:begin], chunk[begin:]
        for null, without in _NULL_USAGES:
            chunk = chunk.replace(null, without)
        usage = chunk.find(b'"usage"')
        if usage < 0:
            return before + chunk
        kept = [before]
        at = 0
        for start, end, data in _spans(chunk, max(0, _last_boundary(chunk[:usage]))):
            if b'"usage"' in data and self._read(data):
                kept.append(chunk[at:start])
                at = end
        return b"".join([*kept, chunk[at:]])

    def _look(self, chunk: bytes, skip: int = 0) -> bytes:
        """Decode the events of a chunk that holds more than content; returns what of it may be relayed. An event that
        needs decoding stands at `skip`, where one begins, or behind it."""
        cut = len(chunk)
        special = _first_special(chunk[skip:])
        if special >= 0:
            skip += max(0, _last_boundary(chunk[skip : skip + special]))
        self.num_events += _num_events(chunk[:skip])
        for start, data in events(chunk, skip):
            self.num_events += 1
            if data == b"[DONE]":
                if not self.finished and self.error is None:
                    self._break("the replica ended its stream without a finish_reason")
                    return chunk[:start]
                self.done = True
                continue
            self._read(data)
            if self.error is not None:
                self.done = True
                return b"" if self._held else chunk[: min(cut, start)]
            if self._hold and self.finished and cut == len(chunk):
                cut = start
        if not (self._hold and self.finished) or self.done:
            out, self._held = self._held + chunk, b""
            return out
        if self._held:
            cut = 0
        self._held += chunk[cut:]
        return chunk[:cut]

    def _read(self, data: bytes) -> bool:
        """Whether it is a chunk that only tells the usage."""
        try:
            frame = FRAME.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return False  # not JSON, or none of ours: relayed as it is, for the client to judge
        if frame.usage is not None:
            self.usage = frame.usage
        if frame.failure is not None:
            self.error = frame.failure
        self.finished = self.finished or frame.finished
        return frame.usage is not None and frame.choices == []


def _tail(chunk: bytes) -> int:
    """Where the last events of a large chunk begin, which alone need a close look when a stream ends; else its size."""
    size = len(chunk)
    if size < 2 * _TAIL_BYTES or b"\r" in chunk:
        return size
    at = chunk.rfind(b"\n\n", 0, size - _TAIL_BYTES)
    return at + 2 if at >= 0 else size


def _is_plain(chunk: bytes) -> bool:
    """No finish, usage, error or end in it: nothing that needs decoding."""
    # What is not there `rfind` finds out in half the time of `in`.
    if chunk.rfind(b'"error"') >= 0 or chunk.rfind(b"[DONE]") >= 0:
        return False
    num_reasons = chunk.count(b'"finish_reason"')
    if num_reasons:
        num_nulls = chunk.count(b'"finish_reason":null')
        if num_nulls != num_reasons and num_nulls + chunk.count(b'"finish_reason": null') != num_reasons:
            return False
    if chunk.rfind(b'"usage"') < 0:
        return True
    return chunk.count(b'"usage"') == chunk.count(b'"usage":null') + chunk.count(b'"usage": null')


def _first_special(chunk: bytes) -> int:
    """Where the first key stands that an event must be decoded for, at the latest; -1 where none does."""
    for null in _NULLS:
        chunk = chunk.replace(null, b" " * len(null))
    return min((at for at in map(chunk.find, _SPECIAL) if at >= 0), default=-1)


def _last_boundary(data: bytes) -> int:
    """The offset just past the last blank line, or -1."""
    if b"\r" not in data:
        at = data.rfind(b"\n\n")
        return at + 2 if at >= 0 else -1
    # A CR at the very end may be half of a CRLF: leave it for the next chunk.
    end = -1
    for match in _BOUNDARY.finditer(data, 0, len(data) - 1 if data.endswith(b"\r") else len(data)):
        end = match.end()
    return end


def _num_events(chunk: bytes) -> int:
    """Data events in a chunk that starts at an event's start, by their first lines."""
    count = chunk.count(b"\ndata:") + chunk.startswith(b"data:")
    return count + chunk.count(b"\rdata:") if b"\r" in chunk else count


def events(chunk: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    """Each data event's offset in the chunk, from `start` on, and its data (lines joined by LF, as SSE's rules say)."""
    for event_start, _, data in _spans(chunk, start):
        yield event_start, data


def _spans(chunk: bytes, start: int) -> Iterator[tuple[int, int, bytes]]:
    """As `events`, with the offset just past each."""
    if b"\r" not in chunk:
        yield from _lf_spans(chunk, start)
        return
    lines: list[bytes] = []
    event_start = start
    while start < len(chunk):
        end_match = _LINE_END.search(chunk, start)
        end, after = end_match.span() if end_match else (len(chunk), len(chunk))
        if end == start:
            if lines:
                yield event_start, after, b"\n".join(lines)
            lines, event_start = [], after
        elif chunk.startswith(b"data:", start):
            skip = 6 if chunk.startswith(b"data: ", start) else 5
            lines.append(chunk[start + skip : end])
        start = after
    if lines:
        yield event_start, len(chunk), b"\n".join(lines)


def _lf_spans(chunk: bytes, start: int) -> Iterator[tuple[int, int, bytes]]:
    """The same where all lines end in LF: by far the most streams, and no regular expression is needed for them."""
    size = len(chunk)
    while start < size:
        if chunk.startswith(b"\n", start):  # a blank line more than one
            start += 1
            continue
        end = chunk.find(b"\n\n", start)
        end, after = (end, end + 2) if end >= 0 else (size, size)
        parts = (line[5:] for line in chunk[start:end].split(b"\n") if line.startswith(b"data:"))
        lines = [part[1:] if part.startswith(b" ") else part for part in parts]
        if lines:
            yield start, after, b"\n".join(lines)
        start = after

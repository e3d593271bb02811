"""Watching a server-sent-event stream go by, without I/O and without touching its bytes.

The relay sends the very bytes that the replica sent, but only whole events: what `feed` returns ends at a blank line,
so an error event may follow at any time without gluing itself to half a frame. Lines end in LF, CRLF or CR and arrive
split anywhere. An event that grows past the cap is an error (`SseError`), not memory.

Almost every chunk is one plain content frame. A few substring counts tell that a chunk holds nothing but such frames;
only the others (finish_reason, usage, error, [DONE]) are decoded. A quote inside JSON text is always escaped, so
`"finish_reason"` in the raw bytes can only be a key.

The end of a stream is held back: from the event with the finish_reason to [DONE], so that a stream cut between the
two reaches the client as an error and never as a success (for one choice; with several, the others still run on).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_BOUNDARY = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class SseError(Exception):
    """The replica's stream is broken; the message says how."""


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class Frame(msgspec.Struct, frozen=True):
    """The parts of a response or of one streamed chunk that the gateway looks at."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None

    @property
    def finished(self) -> bool:
        return any(choice.finish_reason for choice in self.choices or ())

    @property
    def failure(self) -> dict[str, Any] | None:
        """The error that this frame reports, in any of the shapes in use."""
        if self.error is not None:
            return self.error if isinstance(self.error, dict) else {"message": str(self.error)}
        if self.object == "error":
            return {"message": self.message, "code": self.code}
        return None


FRAME = msgspec.json.Decoder(Frame)


class StreamScanner:
    """Feed chunks, relay what comes back, look at the fields.

    num_events  data events seen so far (complete ones)
    finished    a finish_reason went by; `done`: [DONE] did
    usage       the last usage seen; `error`: the error event's object
    """

    __slots__ = (
        "_held",
        "_hold",
        "_max_bytes",
        "_parts",
        "_parts_size",
        "_seam",
        "done",
        "error",
        "finished",
        "num_events",
        "usage",
    )

    def __init__(self, max_event_bytes: int, hold_end: bool = True) -> None:
        self.num_events = 0
        self.finished = False
        self.done = False
        self.usage: Usage | None = None
        self.error: dict[str, Any] | None = None
        self._max_bytes = max_event_bytes
        self._hold = hold_end
        self._held = b""
        self._parts: list[bytes] = []
        self._parts_size = 0
        self._seam = b""

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that may be relayed now. Raises SseError."""
        if self._parts or not chunk.endswith(b"\n\n"):
            chunk = self._complete(chunk)
            if not chunk:
                return b""
        if _is_plain(chunk) and not self._held:
            self.num_events += chunk.count(b"\ndata:") + chunk.startswith(b"data:")
            return chunk
        return self._look(chunk)

    def close(self) -> bytes:
        """The replica ended the stream: what may still be relayed. Raises SseError when the stream is cut short."""
        rest = b"".join(self._parts)
        self._parts, self._parts_size, self._seam = [], 0, b""
        out = self._look(rest) if rest.strip() else rest
        if self.error is None and not self.done:
            raise SseError("the replica ended the stream before [DONE]")
        return out

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
            raise SseError(f"the replica sent an event of more than {self._max_bytes} bytes without an end")

    def _look(self, events: bytes) -> bytes:
        for data in _payloads(events):
            self.num_events += 1
            if data == b"[DONE]":
                if not self.finished and self.error is None:
                    raise SseError("the replica ended the stream without a finish_reason")
                self.done = True
                continue
            try:
                frame = FRAME.decode(data)
            except msgspec.ValidationError:
                continue  # JSON of another shape: nothing of ours in it
            except (msgspec.DecodeError, RecursionError):
                if _is_plain(data):
                    continue  # relayed as it is; the client's parser judges it
                raise SseError("the replica sent an event that is not JSON") from None
            if frame.usage is not None:
                self.usage = frame.usage
            if frame.failure is not None:
                self.error = frame.failure
            self.finished = self.finished or frame.finished
        if self._hold and self.finished and not self.done and self.error is None:
            self._held += events
            return b""
        events, self._held = self._held + events, b""
        return events


def _is_plain(chunk: bytes) -> bool:
    """No finish, usage, error or end in it: nothing that needs decoding."""
    num_reasons = chunk.count(b'"finish_reason"')
    if num_reasons and num_reasons != chunk.count(b'"finish_reason":null') + chunk.count(b'"finish_reason": null'):
        return False
    if b"[DONE]" in chunk or b'"error"' in chunk:
        return False
    num_usages = chunk.count(b'"usage"')
    return not num_usages or num_usages == chunk.count(b'"usage":null') + chunk.count(b'"usage": null')


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


def _payloads(events: bytes) -> list[bytes]:
    """The data of each event, lines of one event joined by LF, as the SSE specification says."""
    payloads: list[bytes] = []
    lines: list[bytes] = []
    for line in _LINE_END.split(events):
        if not line:
            if lines:
                payloads.append(b"\n".join(lines))
                lines = []
        elif line.startswith(b"data:"):
            lines.append(line[6:] if line[5:6] == b" " else line[5:])
    if lines:
        payloads.append(b"\n".join(lines))
    return payloads

"""One JSON line a request, without prompts or answers.

Lines are gathered and written in batches by a thread, so a slow disk or a full pipe delays lines and never a request.
What can't be written in time is dropped and counted, not kept without bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

import msgspec
from msgspec import UNSET, UnsetType

from gateway.observe.record import EndState, RequestRecord

_log = logging.getLogger("warmgate.access")
_FLUSH_EVERY_S = 0.1
_MAX_LINES = 20_000
_MAX_NAME = 128


class _Line(msgspec.Struct):
    """A line's fields in their order; what is UNSET is left out."""

    time: float
    request_id: str
    endpoint: str
    model: str
    stream: bool
    status: int
    end: EndState | None
    replica: str | None
    policy: str | None
    reason: str | None
    attempts: int
    prompt_tokens: int | None
    matched_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    ttft_ms: float | None
    total_ms: float
    failed_over_from: list[str] | UnsetType = UNSET
    resumed_from: list[str] | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    admission: str | UnsetType | None = UNSET
    error: str | UnsetType = UNSET


class AccessLog:
    """`target` is "-" (standard output), "" (none) or a file that is appended to. Raises OSError for the latter."""

    def __init__(self, target: str) -> None:
        self.enabled = target != ""
        self.num_dropped = 0
        self._lines: list[RequestRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._owns_fd = target not in ("", "-")
        self._fd = -1
        if self._owns_fd:
            self._fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        elif self.enabled:
            self._fd = sys.stdout.fileno()
        self._encoder = msgspec.json.Encoder()
        self._wall_offset = time.time() - time.monotonic()

    def write(self, record: RequestRecord) -> None:
        """Queue the line of a request that has ended."""
        if not self.enabled:
            return
        if len(self._lines) >= _MAX_LINES:
            self.num_dropped += 1
            return
        self._lines.append(record)
        if self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_EVERY_S, self._flush)

    async def close(self) -> None:
        """Write what is queued. The log can't be used after it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._lines:
            lines, self._lines = self._lines, []
            await asyncio.to_thread(self._write_out, lines)
        self.enabled = False
        if self._owns_fd:
            os.close(self._fd)

    def _flush(self) -> None:
        self._timer = None
        lines, self._lines = self._lines, []
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write_out, lines)
        self._writing.add_done_callback(self._written)

    def _written(self, future: asyncio.Future[None]) -> None:
        self._writing = None
        if not future.cancelled() and (error := future.exception()) is not None:
            _log.warning("the access log could not be written: %s", error)
        if self._lines and self.enabled and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_EVERY_S, self._flush)

    def _write_out(self, records: list[RequestRecord]) -> None:
        data = self._encoder.encode_lines(map(self._line, records))
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _line(self, record: RequestRecord) -> _Line:
        ended_at = record.ended_at if record.ended_at is not None else record.started_at
        ttft_s = record.ttft_s
        line = _Line(
            round(ended_at + self._wall_offset, 3),
            record.request_id,
            record.endpoint,
            record.model or _printable(record.asked_model),
            record.stream,
            record.status,
            record.end,
            record.replica_id or None,
            record.policy or None,
            record.reason or None,
            record.num_attempts,
            record.prompt_tokens,
            record.matched_tokens,
            record.cached_tokens,
            record.output_tokens,
            None if ttft_s is None else round(ttft_s * 1000, 2),
            round((ended_at - record.started_at) * 1000, 2),
        )
        if record.failed_at:
            line.failed_over_from = record.failed_at
        if record.broken_at:
            line.resumed_from = record.broken_at
        if record.tenant:
            line.tenant, line.key, line.admission = record.tenant, record.key_id, record.admission or None
        if record.error:
            line.error = record.error
        return line


def _printable(name: str) -> str:
    """What a client wrote, in bounds and without characters that act on a terminal or can't be written."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name[:_MAX_NAME])

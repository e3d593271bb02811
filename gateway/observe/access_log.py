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
from typing import Any

import msgspec

from gateway.observe.record import RequestRecord

_log = logging.getLogger("warmgate.access")
_FLUSH_EVERY_S = 0.1
_MAX_LINES = 20_000
_MAX_NAME = 128


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
        data = b"".join(self._encoder.encode(self._line(record)) + b"\n" for record in records)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _line(self, record: RequestRecord) -> dict[str, Any]:
        ended_at = record.ended_at if record.ended_at is not None else record.started_at
        ttft_s = record.ttft_s
        line = {
            "time": round(ended_at + self._wall_offset, 3),
            "request_id": record.request_id,
            "endpoint": record.endpoint,
            "model": record.model or _printable(record.asked_model),
            "stream": record.stream,
            "status": record.status,
            "end": record.end,
            "replica": record.replica_id or None,
            "policy": record.policy or None,
            "reason": record.reason or None,
            "attempts": record.num_attempts,
            "prompt_tokens": record.prompt_tokens,
            "matched_tokens": record.matched_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "ttft_ms": None if ttft_s is None else round(ttft_s * 1000, 2),
            "total_ms": round((ended_at - record.started_at) * 1000, 2),
        }
        if record.broken_at:
            line["resumed_from"] = record.broken_at
        if record.tenant:
            line |= {"tenant": record.tenant, "key": record.key_id, "admission": record.admission or None}
        if record.error:
            line["error"] = record.error
        return line


def _printable(name: str) -> str:
    """What a client wrote, in bounds and without characters that act on a terminal or can't be written."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name[:_MAX_NAME])

"""One JSON line a request, without prompts or answers."""

from __future__ import annotations

import logging
import os
import sys
import time

import msgspec
from msgspec import UNSET, UnsetType

from gateway.observe.batches import Batches
from gateway.observe.record import EndState, RequestRecord

_log = logging.getLogger("warmgate.access")
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


class AccessLog(Batches[RequestRecord]):
    """`target` is "-" (standard output), "" (none) or a file that is appended to. Raises OSError for the latter."""

    name = "the access log"

    def __init__(self, target: str) -> None:
        is_file = target not in ("", "-")
        fd = -1
        if is_file:
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        elif target:
            fd = sys.stdout.fileno()
        super().__init__(fd, is_file, _MAX_LINES, _log)
        self._encoder = msgspec.json.Encoder()
        self._wall_offset = time.time() - time.monotonic()

    def write(self, record: RequestRecord) -> None:
        """Queue the line of a request that has ended."""
        self.add(record)

    def render(self, entries: list[RequestRecord]) -> bytes:
        return self._encoder.encode_lines(map(self._line, entries))

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

"""How much prefill a request is expected to need, told by the gateway to a worker.

The gateway has seen the prompt and keeps a picture of the replica's cache, so it knows before the worker does; the
worker orders those who wait by it (core/waiting_queue.py). The number is no privilege: a larger one makes a request
wait longer, and the least there is, none at all, is first come, first served.
"""

from __future__ import annotations

from engine_worker.contract.errors import ApiError

WORK_HEADER = b"x-warmgate-work"
MAX_WORK_S = 3600.0


def work_line(seconds: float) -> bytes:
    """The header as a line of a request."""
    return b"%b: %.4f\r\n" % (WORK_HEADER, min(max(seconds, 0.0), MAX_WORK_S))


def read_work(value: bytes | None) -> float:
    """Seconds; 0 without the header. Raises ApiError 400 for what is no number from 0 to MAX_WORK_S."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= MAX_WORK_S:
        raise ApiError(400, f"The header x-warmgate-work must be a number of seconds from 0 to {MAX_WORK_S:.0f}.")
    return seconds

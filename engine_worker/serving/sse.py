"""Server-sent events, as OpenAI's clients read them.

A frame is `data: ...` and an empty line; never `id:`, `retry:` or `event:` (an earlier `id:` makes one client parse
comments as events). Keep-alives are comments. A stream that succeeded ends with `[DONE]`; one that failed ends with an
error event and nothing after it.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_worker.contract.errors import ApiError

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream otherwise
]
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def frames(payloads: Iterable[bytes]) -> bytes:
    """One frame for each JSON text. JSON from an encoder has no line breaks, so one `data:` line is enough."""
    return b"".join(b"data: " + payload + b"\n\n" for payload in payloads)


def error_event(error: ApiError) -> bytes:
    return frames([error.body()])

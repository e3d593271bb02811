"""uvicorn's HTTP protocol, with what a gateway needs of it: bounded headers, a drop, and one write for a small answer.

uvicorn writes a response's head and its body apart. Each write is a system call and a wake-up of the client, the
largest single cost of a short answer, so the head is held until the body's first bytes follow it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine_worker.contract.errors import ApiError

_CONTINUE = b"HTTP/1.1 100 "


class CorkedTransport:
    """A transport that joins a response's head to the write after it. Everything else goes straight through."""

    __slots__ = ("_head", "_transport", "get_extra_info", "is_closing", "pause_reading", "resume_reading")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        if self._head:
            data = self._head + data
            self._head = b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n") and not data.startswith(_CONTINUE):
            self._head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection:
    """What the application may do with its client's connection: scope["extensions"]["warmgate.connection"].

    `on_gone` is called once when the client leaves, at once; the application sets it while it serves a request. It
    saves a task a request that would wait for `http.disconnect` (answer.py falls back to that elsewhere).
    """

    __slots__ = ("abort", "on_gone")

    def __init__(self, abort: Callable[[], None]) -> None:
        self.abort = abort
        self.on_gone: Callable[[], None] | None = None


class GatewayProtocol(HttpToolsProtocol):
    """Refuses headers of more than `header_limit` bytes (431) and those that don't come in `header_s` seconds (408)."""

    header_limit = 64 * 1024
    header_s = 30.0
    _header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport))  # type: ignore[arg-type]
        self._extensions = {"warmgate.connection": Connection(transport.abort)}
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_header_timer()
        connection = self._extensions["warmgate.connection"]
        if connection.on_gone is not None:
            connection.on_gone()
            connection.on_gone = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(self.header_s, self._headers_late)
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        self._refuse(ApiError(408, "The request's headers did not arrive in time."))

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self.header_limit:
            raise ValueError("headers too large")  # the parser turns it into send_400_response

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]  # a head without a body: HEAD, 204
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser can't go on from, in the shape of every other error."""
        error = ApiError(400, msg)
        if self._header_bytes > self.header_limit:
            error = ApiError(431, f"The request's headers are larger than {self.header_limit} bytes.")
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        self._stop_header_timer()
        body = error.body()
        if self.cycle is None or self.cycle.response_complete:  # else an answer is on its way, which this would break
            self.transport.write(
                STATUS_LINE[error.status]
                + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()

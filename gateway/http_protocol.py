"""uvicorn's HTTP protocol, with what a gateway needs of it: bounded headers, a drop, and one write for a small answer.

uvicorn writes a response's head and its body apart. Each write is a system call and a wake-up of the client, the
largest single cost of a short answer, so the head is held until the body's first bytes follow it at once.
"""

from __future__ import annotations

import asyncio
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


class GatewayProtocol(HttpToolsProtocol):
    """Refuses headers of more than `header_limit` bytes (431); gives the application `warmgate.abort`."""

    header_limit = 64 * 1024
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport))  # type: ignore[arg-type]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self.scope["extensions"] = {"warmgate.abort": {"call": self.transport.abort}}

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
        body = error.body()
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()

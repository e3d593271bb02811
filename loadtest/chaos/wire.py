"""An HTTP/1.1 client as small as it can be, so that what is seen is what was on the wire: framing, ends, resets.

One exchange at a time a connection, kept alive between them. Slow readers have a small receive buffer and pause after
each read, so that the gateway's writes really meet a full one.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import cast

import httptools

SLOW_BUFFER_BYTES = 4096
SLOW_PAUSE_S = 0.04


class Wire(asyncio.Protocol):
    """A connection. `exchange` sends a request and returns when its answer has ended, well or not."""

    def __init__(self, slow: bool) -> None:
        self._slow = slow
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._on_body: Callable[[bytes], None] = lambda data: None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended_well = False
        self.first_byte_at: float | None = None
        self.is_closed = False
        self._parser = httptools.HttpResponseParser(self)

    async def exchange(self, head: bytes, body: bytes, on_body: Callable[[bytes], None]) -> None:
        """`status` stays 0 when no answer came; `ended_well` tells whether its framing was complete."""
        assert self._transport is not None
        self.status, self.headers, self.ended_well, self.first_byte_at = 0, {}, False, None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        if self.is_closed:
            return
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        await self._done

    def abort(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self.first_byte_at = self.first_byte_at or time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()
            return
        if self._slow and not self.is_closed and not self.ended_well:
            assert self._transport is not None
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(SLOW_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self.is_closed and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._on_body(data)

    def on_message_complete(self) -> None:
        self.ended_well = True
        if not self._parser.should_keep_alive():
            self.abort()
        self._end()


async def connect(host: str, port: int, slow: bool = False) -> Wire:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if slow:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        await loop.sock_connect(own, (host, port))
        _, wire = await loop.create_connection(lambda: Wire(slow), sock=own)
    except BaseException:
        own.close()
        raise
    return wire


def request_head(path: str, port: int, request_id: str, num_body_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {num_body_bytes}\r\n\r\n"
    ).encode()

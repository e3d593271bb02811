"""One request and its response on a client's connection, with writes that go to the socket directly.

The ASGI way costs a message and several calls for each piece of a response, which for a stream of tokens is most of
what the gateway does. So the application finds the exchange itself in its scope (`Cycle`), and may write from any
callback: a head is held until the first bytes of the body, and goes out with them. ASGI's `send` and `receive` work as
ever beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

Headers = Sequence[tuple[bytes, bytes]]


class Connection:
    """What the application may do with its client's connection: scope["extensions"]["warmgate.connection"].

    close      end it behind what has been written, letting a client that still sends read that first
    on_gone    called once when the client leaves, at once
    on_paused  called with True when the client reads too slowly for what is written, with False when it caught up
    The application sets them while it serves a request.
    """

    __slots__ = ("abort", "close", "cycle", "on_gone", "on_paused")

    def __init__(self, abort: Callable[[], None], close: Callable[[], None]) -> None:
        self.abort = abort
        self.close = close
        self.cycle: Cycle
        self.on_gone: Callable[[], None] | None = None
        self.on_paused: Callable[[bool], None] | None = None


class Cycle(RequestResponseCycle):
    """One request and its response. `begin`, `push` and `finish` are `send` without its messages."""

    _head = b""
    _bodiless = False

    def begin(self, status: int, headers: Headers) -> None:
        """The status line and headers, which go out with what follows. Their values hold no line ends."""
        assert not self.response_started
        self.response_started = True
        self.waiting_for_100_continue = False
        parts = [STATUS_LINE[status], joined(self.default_headers)]
        self._bodiless = status in (204, 304) or self.scope["method"] == "HEAD"
        self.chunked_encoding = not self._bodiless and self.scope["http_version"] != "1.0"
        for name, value in headers:
            if name == b"content-length":
                self.chunked_encoding = False
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                continue
            parts += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self.chunked_encoding else b"\r\n")
        self._head = b"".join(parts)

    def push(self, data: bytes) -> None:
        """A piece of the body."""
        if self.disconnected or not data:  # an empty chunk would be the last
            return
        head, self._head = self._head, b""
        if self.chunked_encoding:
            self.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        else:
            self.transport.write(head if self._bodiless else head + data)

    def finish(self, data: bytes = b"") -> None:
        """The last piece of the body, which may be empty."""
        assert not self.response_complete
        if self.disconnected:
            return
        head, self._head = self._head, b""
        if not self.chunked_encoding:
            self.transport.write(head if self._bodiless else head + data)
        elif data:
            self.transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(data), data))
        else:
            self.transport.write(head + b"0\r\n\r\n")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            connection: Any = self.scope["extensions"]["warmgate.connection"]
            connection.close()
        self.on_response()

    @property
    def is_paused(self) -> bool:
        """The client has more to read than should be buffered for it."""
        return self.flow.write_paused and not self.disconnected

    async def drain(self) -> None:
        """Returns when the client has caught up, or is gone."""
        if self.is_paused:
            await self.flow.drain()


_joined: tuple[Any, bytes] = (None, b"")


def joined(headers: Headers) -> bytes:
    """The server's own headers (the date) as lines, made once for all responses of a second."""
    global _joined
    of, lines = _joined
    if of is not headers:
        lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
        _joined = (headers, lines)
    return lines

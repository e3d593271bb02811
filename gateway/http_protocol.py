"""uvicorn's HTTP protocol, with what a gateway needs of it: bounded headers, a client's leaving, and direct writes.

Responses are written by cycle.py. One that ends a connection on which the client still sends is let be read.

Timers are as few as will do: one for idle connections that looks again when it fires, and one for headers that didn't
come in one read.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from engine_worker.contract.errors import ApiError
from gateway.cycle import Connection, Cycle

LINGER_S = 5.0
_MAX_PATHS = 256
_MAX_PATH_BYTES = 128


class _Flow(FlowControl):
    """Reads nothing more while requests wait for their turn, or one connection could have us keep any number of them:
    uvicorn reads on for each answer, and for each request that is looked at."""

    def __init__(self, transport: asyncio.Transport, waiting: deque[Any]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class GatewayProtocol(HttpToolsProtocol):
    """Refuses headers of more than `header_limit` bytes (431) and those that don't come in `header_s` seconds (408)."""

    header_limit = 64 * 1024
    header_s = 30.0
    _paths: dict[bytes, tuple[str, bytes, bytes]] = {}  # noqa: RUF012  # shared by all connections, bounded
    _header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _in_head = False
    _is_repeating = False
    _linger_timer: asyncio.TimerHandle | None = None
    _refusal: ApiError | None = None  # of what came behind requests that are still to be answered
    _active_at = 0.0
    _num_unread = 0  # bytes of answers, when it was last looked whether the connection is idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self._connection = Connection(transport.abort, self._close)
        self._extensions = {"warmgate.connection": self._connection}
        self._active_at = self.loop.time()
        self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        # With pipelined requests uvicorn knows the one read last; the one being answered has lost its client, too.
        turn = getattr(self._connection, "cycle", None)
        if turn is not None and not turn.response_complete:
            turn.disconnected = True
            turn.message_event.set()
        super().connection_lost(exc)
        self._stop_header_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        connection = self._connection
        if connection.on_gone is not None:
            connection.on_gone()
            connection.on_gone = None

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None or self._refusal is not None:
            return  # refused already
        if self.cycle is None or not self.cycle.response_complete or not self.cycle.more_body:
            self._active_at = self.loop.time()  # the rest of a body that nobody reads any more is no activity
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = data[upgrade.args[0] :]
                    self._decline_upgrade()
        except httptools.HttpParserError as error:
            self.send_400_response(f"The request is not valid HTTP: {error}.")
            return
        if self._in_head:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(self.header_s, self._headers_late)
        elif self._header_timer is not None:
            self._stop_header_timer()

    def _decline_upgrade(self) -> None:
        """Go on as if no upgrade had been offered (some clients offer h2c with every request).

        The parser takes what follows for another protocol, so another parser reads on, behind a head that tells it
        only how long the body is.
        """
        framing = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        head = b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in framing) + b"\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self._is_repeating = True
        self.parser.feed_data(head)
        self._is_repeating = False
        if not framing:
            self.on_message_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade() and not self._is_repeating:
            super().on_message_complete()

    def on_message_begin(self) -> None:
        if self._is_repeating:
            return
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._header_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        if self._is_repeating:
            return
        self.url += url
        self._header_bytes += len(url)
        if self._header_bytes > self.header_limit:
            raise ValueError("URL too large")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_repeating:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        if self._in_head:  # what a chunked body has behind it says nothing that is asked of headers
            self.headers.append((name, value))
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self.header_limit:
            raise ValueError("headers too large")  # the parser turns it into send_400_response

    def on_headers_complete(self) -> None:
        if self._is_repeating:
            return
        self._in_head = False
        parser = self.parser
        http_version = parser.get_http_version()
        keep_alive = http_version != "1.0" and parser.should_keep_alive()
        method = parser.get_method().decode("ascii")
        existing = self.cycle
        cycle = self._new_cycle(method, self.url, self.headers, http_version, keep_alive, self.expect_100_continue)
        self.cycle = cycle
        if existing is None or existing.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def _new_cycle(
        self, method: str, url: bytes, headers: list[tuple[bytes, bytes]], http_version: str, keep_alive: bool,
        expects_100_continue: bool = False,
    ) -> Cycle:  # fmt: skip
        path, raw_path, query = self._paths.get(url) or self._parse_url(url)
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": http_version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": method,
            "root_path": self.root_path,
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
            "state": self.app_state.copy(),
            "extensions": self._extensions,  # type: ignore[typeddict-item]
        }
        return Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        assert isinstance(cycle, Cycle)
        self._connection.cycle = cycle  # whose turn it is: with pipelined requests not the one read last
        super()._start_asgi_task(cycle, app)

    def _parse_url(self, url: bytes) -> tuple[str, bytes, bytes]:
        """Path, raw path and query; kept for the few short URLs that nearly all requests have."""
        parsed = httptools.parse_url(url)  # what it refuses, the parser reports
        raw_path = parsed.path or b"/"
        path = raw_path.decode("ascii")
        found = (urllib.parse.unquote(path) if "%" in path else path, raw_path, parsed.query or b"")
        if len(url) <= _MAX_PATH_BYTES and len(self._paths) < _MAX_PATHS:
            self._paths[url] = found
        return found

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        self._active_at = self.loop.time()
        waiting = self.pipeline.pop() if self.pipeline else None
        self.flow.resume_reading()
        if self._refusal is not None and (waiting is None or waiting[0].more_body):
            self._end_with(self._refusal)
        elif waiting is not None:
            self._start_asgi_task(*waiting)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._connection.on_paused is not None:
            self._connection.on_paused(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._connection.on_paused is not None:
            self._connection.on_paused(False)

    def _look_if_idle(self) -> None:
        """Close a connection on which nothing has happened for the keep-alive time and nothing is going on."""
        left_s = self._active_at + self.timeout_keep_alive - self.loop.time()
        num_before, self._num_unread = self._num_unread, self.transport.get_write_buffer_size()
        if self._in_head or (self.cycle is not None and not self.cycle.response_complete):
            left_s = self.timeout_keep_alive
        elif left_s <= 0 and self._num_unread != num_before:  # the client still reads the last answer
            self._active_at = self.loop.time()
            left_s = self.timeout_keep_alive
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._look_if_idle)
        else:
            self._idle_timer = None
            if self._num_unread:
                self.transport.abort()  # the client doesn't read: closing would wait for it
            else:
                self.transport.close()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if self.flow.read_paused:  # they may be there: it is we who don't read
            self._header_timer = self.loop.call_later(self.header_s, self._headers_late)
            return
        self._refuse(ApiError(408, "The request's headers did not arrive in time."))

    def send_400_response(self, msg: str) -> None:
        """What the parser can't go on from, in the shape of every other error."""
        error = ApiError(400, msg)
        if self._header_bytes > self.header_limit:
            error = ApiError(431, f"The request's headers are larger than {self.header_limit} bytes.")
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        self._stop_header_timer()
        cycle = self.cycle
        turn = getattr(self._connection, "cycle", None)
        is_own_body = cycle is not None and turn is cycle and cycle.more_body and not cycle.response_started
        # Else an answer is on its way, which this would break, or be taken for.
        if not (cycle is None or cycle.response_complete or is_own_body):
            if turn is None or turn.more_body:
                self.transport.close()
            else:
                self._refusal = error
            return
        if cycle is not None and is_own_body:  # whoever reads it need not go on
            cycle.disconnected = True
            cycle.message_event.set()
        self._end_with(error)

    def _end_with(self, error: ApiError) -> None:
        """The connection's last answer."""
        body = error.body()
        if self._linger_timer is None:
            self.transport.write(
                STATUS_LINE[error.status]
                + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                + body
            )
        self._close(may_send=True)

    def _close(self, may_send: bool = False) -> None:
        """Close behind what was written. A kernel that gets data for a closed socket resets the connection, and the
        client loses the answer that it hasn't read yet. So while it may still be sending (a body too large, say), only
        our direction ends; what comes is thrown away until the client closes, for LINGER_S at most."""
        cycle = self.cycle
        if not (may_send or (cycle is not None and cycle.more_body)) or not self.transport.can_write_eof():
            self.transport.close()
        elif self._linger_timer is None and not self.transport.is_closing():
            self.transport.write_eof()
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)
            self.pipeline.clear()
            self.flow.resume_reading()

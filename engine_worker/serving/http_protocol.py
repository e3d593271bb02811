"""uvicorn's HTTP protocol with limits on a request's head, and a way to drop a connection.

A head (request line and headers) may have `header_limit` bytes and take `header_timeout_s`: a client that sends its
headers a byte a minute would hold a connection for ever. What can't be parsed is answered in the API's error shape.
The application finds two extensions in the scope. `warmgate.abort` drops the connection with whatever a client that
doesn't read has left in the buffer. `warmgate.write` (a DirectWriter) writes a part of the body at once, where ASGI's
`send` would have to be awaited.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from engine_worker.contract.errors import ApiError

_LINGER_S = 2.0  # how long a refused client may go on sending before its connection is closed


class BodyWriter:
    """http.DirectWriter for one answer."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        is_begun = bool(cycle.chunked_encoding) and not cycle.response_complete
        return is_begun and not cycle.disconnected and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Not empty, and only while the answer is open."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class WorkerProtocol(HttpToolsProtocol):
    header_limit = 64 * 1024
    header_timeout_s = 30.0
    _num_head_bytes = 0
    _refused = False
    _head_timer: asyncio.TimerHandle | None = None
    _turn: RequestResponseCycle | None = None  # being answered: with pipelined requests not the one read last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._end_turn()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._turn = cycle
        cycle.scope["extensions"]["warmgate.write"] = BodyWriter(cycle)
        super()._start_asgi_task(cycle, app)

    def _end_turn(self) -> None:
        """The application must neither wait for the rest of a request nor write an answer any more."""
        if self._is_answering:
            assert self._turn is not None
            self._turn.disconnected = True
            self._turn.waiting_for_100_continue = False
            self._turn.message_event.set()

    @property
    def _is_answering(self) -> bool:
        return self._turn is not None and not self._turn.response_complete

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._start_timer()
        self.scope["extensions"] = {"warmgate.abort": {"call": self.transport.abort}}

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.header_limit:
            raise ValueError("headers too large")  # the parser hands it on to send_400_response

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"The request's headers did not arrive within {self.header_timeout_s:.0f} s."))

    def send_400_response(self, msg: str) -> None:
        if self._num_head_bytes > self.header_limit:
            self._refuse(ApiError(431, f"The request's headers are larger than {self.header_limit} bytes."))
        else:
            self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        turn = self._turn
        is_own_body = turn is self.cycle and turn is not None and turn.more_body and not turn.response_started
        if self._is_answering and not is_own_body:  # a refusal would be read as the answer, or as part of it
            self._refused = True
            self.transport.close()
            return
        self._end_turn()
        body = error.body()
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        # A close with unread input would reset the connection, and the client might lose the answer.
        self._refused = True
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

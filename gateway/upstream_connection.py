"""One TCP connection to a replica: HTTP/1.1 by httptools, one exchange at a time, bodies relayed from the callback.

Theory. A proxy pays for every layer between a socket's read and the next socket's write. So there is one: the bytes of
one read are parsed, joined, and handed on at once, either to whoever awaits `read_some`, or to a sink in the very
callback (`pipe`), without a task being woken for each token.

Where a body ends decides whether an answer is whole: by its length, by its last chunk, or (where it has neither) by
the replica's closing of the connection. Any other end is a truncation, and an error. What arrives without furthering
a body (heads, 1xx answers, chunk extensions, trailers) is bounded in bytes, what is buffered for a slow reader by
pausing the socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

import httptools

from gateway.answer_head import AnswerHead
from gateway.known_head import HeadMemory
from gateway.upstream_types import Phase, Sink, UpstreamError, broken, why

MAX_SILENT_BYTES: Final = 256 * 1024  # of head, chunk extensions or trailers at a time
SOCKET_BUFFER_BYTES: Final = 128 * 1024  # of the kernel, for each direction of a stream (Linux takes twice that)
MAX_BUFFERED_BYTES: Final = 256 * 1024


class Connection:
    """An asyncio protocol (by its methods: as one of asyncio's classes it could not be compiled well).

    `on_closed` is called once, when the connection is gone; the pool forgets it then.

    answered      a byte of the current answer has come; error: why it will never be whole
    num_served    exchanges before the current one
    idle_since    the pool's note
    """

    __slots__ = (
        "_body", "_close_delimited", "_facts", "_informational", "_is_paused", "_keep_alive", "_memory",
        "_num_body_bytes", "_num_silent_bytes", "_on_closed", "_on_news", "_parser", "_sink", "_transport",
        "_waiter", "answered", "error", "headers", "idle_since", "num_served", "phase", "status",
    )  # fmt: skip

    def __init__(self, on_closed: Callable[[Connection], None]) -> None:
        self._on_closed = on_closed
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self.phase = Phase.IDLE
        self.num_served = 0
        self.idle_since = 0.0
        self._is_paused = False
        self._memory: HeadMemory[AnswerHead] = HeadMemory()
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.answered = False
        self._body: list[bytes] = []
        self._facts: AnswerHead | None = None
        self._num_body_bytes = 0
        self._num_silent_bytes = 0
        self._close_delimited = False
        self._informational = False
        self._keep_alive = False
        self.error: UpstreamError | None = None
        self._on_news: Callable[[], None] | None = None
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None

    # The exchange

    def send(self, head: bytes, body: bytes) -> None:
        """Begin an exchange. The connection must be idle."""
        assert self.phase is Phase.IDLE
        self.phase = Phase.HEAD
        self._transport.write(head + body if len(body) < 65536 else head)
        if len(body) >= 65536:
            self._transport.write(body)

    async def head(self) -> None:
        """Returns when status and headers are there. Raises UpstreamError."""
        while self.phase is Phase.HEAD:
            await self._wait()
        if self.error is not None and not self.status:
            raise self.error

    async def read_some(self) -> bytes:
        """All that has arrived, or what arrives next; empty at the end. Raises UpstreamError after the last byte."""
        while not self._body:
            if self.error is not None:
                raise self.error
            if self.phase is not Phase.BODY:
                return b""
            await self._wait()
        return self.take()

    def take_whole(self) -> bytes | None:
        """All that is left of the body where the rest of it has arrived already, else None."""
        return self.take() if self.phase is Phase.WHOLE and self._body and self.error is None else None

    def watch(self, on_news: Callable[[], None]) -> None:
        """Call back once, when the answer is whole, is too large to be kept, or will never be (`error` says why)."""
        assert self._on_news is None
        self._on_news = on_news

    def whole(self) -> bytes | None:
        """The whole body, which stays here until it is taken; None where there is none (yet)."""
        if self.phase is not Phase.WHOLE:
            return None
        if len(self._body) != 1:
            self._body = [b"".join(self._body)]
        return self._body[0]

    def answer_head(self) -> AnswerHead:
        """The head of the current answer, which must have come."""
        if self._facts is None:
            self._facts = AnswerHead(self.status, self.headers, self._keep_alive)
        return self._facts

    def pipe(self, sink: Sink) -> None:
        """Give what has arrived, and all that will, to `sink`."""
        assert self._sink is None
        self._sink = sink
        if self._body:
            sink.on_data(self.take())
        if self.phase is not Phase.BODY and self._sink is not None:
            self._end_pipe()

    def unpipe(self) -> None:
        self._sink = None

    def pause(self) -> None:
        if not self._is_paused and self.phase is Phase.BODY:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self.phase is not Phase.CLOSED:
                self._transport.resume_reading()

    @property
    def at_end(self) -> bool:
        """The body is whole and read."""
        return self.phase is not Phase.BODY and not self._body

    def done(self) -> bool:
        """End the exchange; True when the connection can serve another one, else it is closed."""
        reusable = (
            self.phase is Phase.WHOLE
            and not self._body
            and not self._close_delimited
            and not self._is_paused
            and self._keep_alive
            and not self._transport.get_write_buffer_size()  # an answer that came before all was sent
        )
        if reusable:
            self.phase = Phase.IDLE
            self.num_served += 1
            self._reset()
        else:
            self.close()
        return reusable

    def close(self) -> None:
        """Drop the connection with whatever is on its way, which tells the replica to stop."""
        self._sink = self._on_news = None
        if self.phase is not Phase.CLOSED:
            self._transport.abort()

    @property
    def is_closing(self) -> bool:
        return self.phase is Phase.CLOSED or self._transport.is_closing()

    async def _wait(self) -> None:
        assert self._waiter is None, "one reader at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """All that has arrived."""
        body = self._body
        data = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        self._num_body_bytes = 0
        self.resume()
        return data

    # What the socket says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is none of asyncio's classes
        own_socket = transport.get_extra_info("socket")
        if own_socket is not None and own_socket.family in (socket.AF_INET, socket.AF_INET6):
            own_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.phase is Phase.IDLE or self.phase is Phase.WHOLE:
            self._transport.abort()  # words that nobody asked for: nothing on this connection can be trusted any more
            return
        if not self.answered and self._is_known(data):
            self._deliver()
            return
        is_first, self.answered = not self.answered, True
        num_before = self._num_body_bytes
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"its answer is not HTTP ({error})")
            return
        if self._num_body_bytes == num_before:
            self._num_silent_bytes += len(data)
            if self._num_silent_bytes > MAX_SILENT_BYTES:
                self._fail("it sent headers without end")
                return
        else:
            self._num_silent_bytes = 0
        if is_first:
            self._learn(data)
        self._deliver()

    def _learn(self, data: bytes) -> None:
        if self.phase is Phase.WHOLE:
            self._memory.learn(data, len(self.headers), self._num_body_bytes, self.answer_head())

    def _is_known(self, data: bytes) -> bool:
        """Whether this is a whole answer with the head that the last ones had; then it has been taken in."""
        memory = self._memory
        begin = memory.recall(data)
        if not begin or len(data) - begin != memory.length:
            return False
        assert memory.facts is not None
        self.answered = True
        self._facts = facts = memory.facts
        self.status, self.headers, self._keep_alive = facts.status, facts.headers, facts.keep_alive
        self._body.append(data[begin:])
        self._num_body_bytes = memory.length
        self.phase = Phase.WHOLE
        return True

    def _deliver(self) -> None:
        """Pass on what one read brought."""
        sink = self._sink
        if sink is not None:
            if self._body:
                sink.on_data(self.take())
            if self.phase is not Phase.BODY and self._sink is not None:
                self._end_pipe()
            return
        is_much = self._num_body_bytes > MAX_BUFFERED_BYTES
        if is_much:
            self.pause()
        if self._on_news is not None:
            if is_much or self.phase is Phase.WHOLE:
                self._tell()
        elif self.phase is not Phase.HEAD:
            self._wake()

    def _end_pipe(self) -> None:
        sink, self._sink = self._sink, None
        assert sink is not None
        sink.on_end(self.error)

    def _tell(self) -> None:
        on_news, self._on_news = self._on_news, None
        if on_news is not None:
            on_news()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        phase, self.phase = self.phase, Phase.CLOSED
        if phase is Phase.HEAD:
            self.error = self.error or broken(f"the replica closed the connection before answering{why(exc)}")
        elif phase is Phase.BODY and not (self._close_delimited and exc is None):
            self.error = self.error or broken(f"the replica broke off its answer{why(exc)}")
        self._on_closed(self)
        if self._sink is not None:
            self._end_pipe()
        self._tell()
        self._wake()

    def _fail(self, why: str) -> None:
        self.error = self.error or broken(why)
        self._transport.abort()

    def eof_received(self) -> None:
        """What comes of it is told by connection_lost."""

    def pause_writing(self) -> None:
        """A request's body is in memory anyway."""

    def resume_writing(self) -> None:
        pass

    # What the parser says

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is Phase.HEAD:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.phase is not Phase.HEAD:
            raise ValueError("an answer after the answer")  # the parser reports it, and the exchange fails
        status = self._parser.get_status_code()
        if status < 200:
            self._informational = True
            self.headers = []
            return
        self.status = status
        self.phase = Phase.BODY
        self._close_delimited = not (status in (204, 304) or self._has_length())

    def _has_length(self) -> bool:
        for name, value in self.headers:
            if name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
                return True
        return False

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._num_body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._informational:
            self._informational = False
        else:
            self.phase = Phase.WHOLE
            self._keep_alive = self._parser.should_keep_alive()

    def check_invariants(self) -> None:
        assert self._num_body_bytes == sum(map(len, self._body))
        if self.phase is Phase.IDLE:
            assert not self._body
            assert self._sink is None
            assert self._on_news is None
            assert self._waiter is None
            assert not self.headers

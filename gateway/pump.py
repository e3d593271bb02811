"""A stream on its way from a replica's socket to its client's, from callback to callback.

Nothing is awaited for a token: the replica's connection hands over what one read brought, the scanner says what of it
may go on, and it is written. The task that owns the exchange sleeps until the stream has ended, one way or another.

A client that reads slowly fills its socket's buffer; then the replica's socket is not read on until the buffer has
drained. So one stream holds a bounded number of bytes, and the phase that may time out is the client's, not the
replica's. Nor is it read for a moment where many fast streams keep the gateway busy (joining.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from gateway.answer import Answer
from gateway.guard import Guard, Interrupt
from gateway.joining import Joiner
from gateway.observe.histogram import Buckets
from gateway.openai.sse import StreamScanner
from gateway.upstream import UpstreamError, UpstreamResponse

_MUCH_BYTES: Final = 16 * 1024  # in one piece: nothing is saved by joining more to it


class Pump:
    """Relays one stream. `itl` gets the time between two reads."""

    __slots__ = (
        "_answer",
        "_ended",
        "_guard",
        "_idle_s",
        "_is_stalled",
        "_is_waiting",
        "_itl",
        "_joiner",
        "_last_at",
        "_push",
        "_read_at",
        "_response",
        "_rest",
        "_scanner",
    )

    def __init__(
        self, scanner: StreamScanner, response: UpstreamResponse, answer: Answer, guard: Guard, idle_s: float,
        itl: Buckets, joiner: Joiner,
    ) -> None:  # fmt: skip
        self._scanner = scanner
        self._response = response
        self._answer = answer
        self._push = answer.push
        self._guard = guard
        self._idle_s = idle_s
        self._itl = itl
        self._joiner = joiner
        self._is_stalled = False  # the client reads too slowly
        self._is_waiting = False  # for what may be joined
        self._last_at = self._read_at = time.monotonic()  # the latter as the joiner was told
        self._rest = b""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> bytes:
        """Relay until the scanner is done; returns the last bytes, not sent yet. Raises UpstreamError, and what
        `push` raises."""
        connection, joiner = self._answer.connection, self._joiner
        connection.on_paused = self._on_paused
        joiner.begins()
        try:
            self._guard.extend(Interrupt.STREAM_IDLE, self._last_at + self._idle_s)
            self._response.pipe(self)
            if connection.cycle.is_paused:
                self._on_paused(True)
            await self._ended
            return self._rest
        finally:
            joiner.ends(self._read_at)
            connection.on_paused = None
            self._ended.cancel()  # however it ended, it has
            self._response.unpipe()
            self._response.resume()

    def on_data(self, data: bytes) -> None:
        now = time.monotonic()
        elapsed_s = now - self._last_at
        self._itl.observe(elapsed_s)
        self._last_at = now
        scanner = self._scanner
        out = scanner.feed(data)
        if scanner.done:
            self._rest = out
            self._response.unpipe()
            self._end(None)
            return
        self._guard.extend(Interrupt.STREAM_IDLE, now + self._idle_s)
        if out:
            try:
                self._push(out)
            except Exception as error:
                self._response.unpipe()
                self._end(error)
                return
        pause_s = self._joiner.pause_s(now, self._read_at)
        self._read_at = now
        # After a pause a piece comes a little later than that.
        if pause_s and elapsed_s < 2 * pause_s and len(data) < _MUCH_BYTES:
            self._wait(now + pause_s)

    def _wait(self, until: float) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._response.pause()
            self._joiner.add(self, until)

    def read_on(self) -> None:
        """What there was to join has come (Joiner)."""
        self._is_waiting = False
        if not self._is_stalled and not self._ended.done():
            self._response.resume()

    def on_end(self, error: UpstreamError | None) -> None:
        if error is None:
            self._rest = self._scanner.close()
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():  # the exchange was interrupted in this very turn of the loop
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _on_paused(self, is_paused: bool) -> None:
        until = time.monotonic() + self._idle_s
        self._is_stalled = is_paused
        if is_paused:
            self._guard.extend(Interrupt.CLIENT_STALLED, until)
            self._response.pause()
        else:
            self._guard.extend(Interrupt.STREAM_IDLE, until)
            if not self._is_waiting:
                self._response.resume()

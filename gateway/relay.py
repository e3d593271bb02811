"""From the replica's answer to the client's: the commit point, and the bytes after it.

Nothing goes to the client before the replica has given its first token (streaming) or its whole body (not streaming).
Up to there every failure is raised with nothing sent, so another replica may be asked and the status stays true. After
it bytes are relayed as they came; what is raised then ends in an error event, or another replica goes on with the
answer, which comes through here again (proxy.py, resume.py).
"""

from __future__ import annotations

import asyncio
import codecs
import time

from gateway.config import GatewaySettings
from gateway.exchange import Exchange, Failure, ReplicaRefused
from gateway.guard import Interrupt
from gateway.joining import Joiner
from gateway.observe.metrics import Metrics
from gateway.observe.record import EndState
from gateway.openai.errors import error_in, in_shape
from gateway.openai.frames import Frame
from gateway.openai.sse import SseError, StreamScanner
from gateway.outcome import error_failure, finish, read_frame, reused
from gateway.pump import Pump
from gateway.resume import Resumer, can_resume
from gateway.router import Lease
from gateway.upstream import UpstreamError, UpstreamFailure, UpstreamResponse
from policies.events import FailureKind

_MAX_ERROR_BYTES = 1024 * 1024
_DRAIN_S = 1.0
_RESUMED = b": resumed on another replica\n\n"
_BOM = codecs.BOM_UTF8


class Relay:
    """Relays answers of any number of exchanges at once."""

    def __init__(self, metrics: Metrics, resumer: Resumer, settings: GatewaySettings) -> None:
        self._resumer = resumer
        self._metrics = metrics
        self._idle_s = settings.stream_idle_s
        self._max_response_bytes = settings.max_response_bytes
        self._max_event_bytes = settings.max_sse_line_bytes
        joiner = self._joiner = Joiner(settings.stream_join_s)
        metrics.num_stream_pauses = lambda: joiner.num_pauses

    async def relay(self, exchange: Exchange, lease: Lease, response: UpstreamResponse) -> None:
        """Raises UpstreamError, SseError and ReplicaRefused; the exchange has ended when it returns."""
        if not 200 <= response.status < 300:
            raise ReplicaRefused(await _refusal(response))
        if exchange.parsed.stream and response.content_type.startswith("text/event-stream"):
            if response.header(b"content-encoding") not in (None, "identity"):
                raise UpstreamError(UpstreamFailure.BROKEN, "it compressed a stream that was asked for as it is")
            await self._stream(exchange, lease, response)
        elif exchange.answer.started:
            raise UpstreamError(UpstreamFailure.BROKEN, "it was asked to go on with a stream, and its answer is none")
        else:
            await self._whole(exchange, lease, response)

    async def _whole(self, exchange: Exchange, lease: Lease, response: UpstreamResponse) -> None:
        body = await response.read_all(self._max_response_bytes)
        frame = Frame()
        if response.header(b"content-encoding") in (None, "identity"):
            frame = read_frame(body)
        cached = reused(response.cached_tokens, frame.usage)
        exchange.cached(cached)
        finish(exchange.record, lease, frame.usage, 0, 0, cached)
        exchange.ended(EndState.COMPLETED, 200)
        lease.replica.waiting.discard(exchange.guard)
        exchange.guard.enter(Interrupt.CLIENT_STALLED, self._idle_s)
        await exchange.answer.whole(response.status, response.headers(), body)

    async def _stream(self, exchange: Exchange, lease: Lease, response: UpstreamResponse) -> None:
        num_before = exchange.transcript.num_tokens if exchange.transcript is not None else 0
        scanner = self._resumer.scanner(exchange, lease.replica, response, self._max_event_bytes)
        exchange.scanner = scanner
        bom, chunk = await _opened(response)
        first = await self._first_events(scanner, response, chunk)
        now = time.monotonic()
        lease.first_token(response.cached_tokens)
        self._resumer.begun(exchange, lease, scanner, first, response.cached_tokens)
        exchange.guard.relax()
        exchange.guard.enter(Interrupt.CLIENT_STALLED, self._idle_s)
        if exchange.answer.started:
            first = _RESUMED + first
        else:
            exchange.record.first_token_at = now
            exchange.cached(response.cached_tokens)
            await exchange.answer.start(response.status, response.headers())
            if bom and exchange.answer.is_verbatim:
                first = bom + first
        rest = first
        if exchange.answer.connection is None:
            rest = await self._write_on(exchange, scanner, response, first, now)
        elif not scanner.done:
            exchange.answer.push(first)
            itl, guard = self._metrics.itl, exchange.guard
            pump = Pump(scanner, response, exchange.answer, guard, self._idle_s, itl, self._joiner)
            rest = await pump.run()
        lease.replica.waiting.discard(exchange.guard)
        if scanner.broken:
            if rest:
                await exchange.answer.write(rest)
            raise SseError(scanner.broken)
        if scanner.error is not None:
            told = error_failure(scanner.error)
            if can_resume(exchange.transcript, told):
                if rest:
                    await exchange.answer.write(rest)
                raise ReplicaRefused(told)
            lease.fail(FailureKind.BROKEN)
            exchange.ended(EndState.FAILED, response.status, told.message[:500])
            rest += b"data: " + (told.body or b"") + b"\n\n"
        else:
            finish(exchange.record, lease, scanner.usage, scanner.num_events, num_before, response.cached_tokens)
            exchange.ended(EndState.COMPLETED, 200)
        exchange.guard.enter(Interrupt.CLIENT_STALLED, self._idle_s)
        await exchange.answer.end(rest)
        await self._drain(exchange, response)

    async def _first_events(self, scanner: StreamScanner, response: UpstreamResponse, chunk: bytes) -> bytes:
        """Everything up to and with the first data event, of a stream that begins with `chunk`."""
        parts: list[bytes] = []
        size = 0
        while not scanner.num_events:
            if not chunk:
                raise UpstreamError(UpstreamFailure.BROKEN, "it ended its stream before the first token")
            part = scanner.feed(chunk)
            parts.append(part)
            size += len(part)
            if scanner.broken:
                raise SseError(scanner.broken)
            if size > self._max_event_bytes:
                raise UpstreamError(UpstreamFailure.BROKEN, "it sent comments without end and no token")
            if not scanner.num_events:
                chunk = await response.read_some()
        if scanner.error is not None:
            raise ReplicaRefused(error_failure(scanner.error))
        return b"".join(parts)

    async def _write_on(
        self, exchange: Exchange, scanner: StreamScanner, response: UpstreamResponse, out: bytes, last: float
    ) -> bytes:
        """Relay by ASGI's messages until the end; returns the last bytes, not sent yet. Pump's way is the usual one."""
        read, write, guard = response.read_some, exchange.answer.write, exchange.guard
        clock, idle_s, observe_itl = time.monotonic, self._idle_s, self._metrics.itl.observe
        while not scanner.done:
            if out:
                guard.extend(Interrupt.CLIENT_STALLED, last + idle_s)
                await write(out)
            guard.extend(Interrupt.STREAM_IDLE, last + idle_s)
            chunk = await read()
            if not chunk:
                return scanner.close()
            now = clock()
            observe_itl(now - last)
            last = now
            out = scanner.feed(chunk)
        return out

    async def _drain(self, exchange: Exchange, response: UpstreamResponse) -> None:
        """The client has all; read what ends the replica's body, so that its connection can serve again."""
        if response.at_end:
            return
        exchange.guard.enter(Interrupt.STREAM_IDLE, _DRAIN_S)
        try:
            while await response.read_some():
                pass
        except UpstreamError:
            return
        except asyncio.CancelledError as error:
            exchange.guard.translate(error)


async def _opened(response: UpstreamResponse) -> tuple[bytes, bytes]:
    """A byte order mark, where the stream begins with one (of the first event it is no part), and what comes next."""
    chunk = await response.read_some()
    while chunk and len(chunk) < len(_BOM) and _BOM.startswith(chunk):
        more = await response.read_some()
        if not more:
            return b"", chunk
        chunk += more
    if not chunk.startswith(_BOM):
        return b"", chunk
    return _BOM, chunk[len(_BOM) :] or await response.read_some()


async def _refusal(response: UpstreamResponse) -> Failure:
    """An error status with the replica's own words, in the shape that clients read."""
    # Engines say 422 where OpenAI says 400, which is what clients know how to read.
    status = 400 if response.status == 422 else response.status if 400 <= response.status < 600 else 502
    body = await response.read_all(_MAX_ERROR_BYTES)
    retry_after = response.header(b"retry-after")
    if response.status >= 400 and not in_shape(body):
        body = error_in(body, status).body()
    return Failure(
        FailureKind.REJECTED,
        status,
        f"The replica answered {response.status}.",
        body=body if response.status >= 400 else None,
        retry_after_s=float(retry_after) if retry_after is not None and retry_after.isdigit() else None,
        upstream_status=status,
    )

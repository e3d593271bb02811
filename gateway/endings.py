"""How a request ends that is not served, or not to its end: what its client is told, and what is noted."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from engine_worker.contract.errors import ApiError
from gateway.answer import Answer, Headers
from gateway.exchange import CLIENT_CLOSED_REQUEST, Exchange, Failure, of_interrupt
from gateway.guard import Guard, Interrupt
from gateway.observe.record import EndState, RequestRecord
from policies.retry import GiveUp


async def end_broken(exchange: Exchange, failure: Failure, error: ApiError | None = None) -> None:
    """The answer had begun and nobody goes on with it."""
    answer = exchange.answer
    exchange.ended(EndState.FAILED, answer.status, failure.log_text)
    if answer.completed:
        return
    exchange.guard.enter(Interrupt.CLIENT_STALLED, 1.0)
    if error is None and failure.body is not None:
        await answer.end(b"data: " + failure.body + b"\n\n")
    else:
        await answer.error(error or failure.as_error())


async def give_up(exchange: Exchange, failure: Failure, step: GiveUp, idle_s: float) -> None:
    """The last failure is the answer: the replica's own words where it had any, if the client reads in `idle_s`."""
    if failure.final:
        raise failure.as_error()
    if not step.relay or failure.body is None:
        # The step's message says what the client can do; the failure's own is for the log.
        exchange.record.error = failure.log_text
        raise ApiError(step.status, sentence(step.message), code=step.code, retry_after_s=step.retry_after_s)
    exchange.ended(EndState.REJECTED, failure.status, failure.log_text)
    headers: Headers = [(b"content-type", failure.content_type.encode("latin-1"))]
    if step.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(step.retry_after_s))))
    exchange.guard.enter(Interrupt.CLIENT_STALLED, idle_s)
    await exchange.answer.whole(failure.status, headers, failure.body)


async def reject(record: RequestRecord, answer: Answer, error: ApiError) -> None:
    record.ended_at = time.monotonic()
    record.status = error.status
    record.error = record.error or error.code or error.type
    record.end_as(EndState.REJECTED)
    await answer.error(error)


async def interrupted(record: RequestRecord, guard: Guard, answer: Answer, cancelled: asyncio.CancelledError) -> None:
    """Interrupted outside an attempt: while the body came, while waiting for a place, while answering."""
    reason = guard.translate(cancelled).reason
    if reason is Interrupt.CLIENT_STALLED:
        answer.abandon()
    if record.end is not None:
        return
    if reason is Interrupt.BODY_TIMEOUT:
        await reject(record, answer, ApiError(408, "The request's body did not arrive in time."))
        return
    failure = of_interrupt(reason)
    if failure.status != CLIENT_CLOSED_REQUEST and answer.started and not answer.completed:
        record.ended_at = time.monotonic()
        record.status = answer.status
        record.error = failure.log_text
        record.end_as(EndState.FAILED)
        guard.enter(Interrupt.CLIENT_STALLED, 1.0)
        with contextlib.suppress(asyncio.CancelledError):
            await answer.error(failure.as_error())
        return
    if failure.status == CLIENT_CLOSED_REQUEST or answer.started:
        record.ended_at = time.monotonic()
        record.status = CLIENT_CLOSED_REQUEST
        record.end_as(EndState.CLIENT_GONE)
        return
    await reject(record, answer, failure.as_error())


def quarantined() -> ApiError:
    message = (
        "Two replicas died while they were at this request, so it is not given to another one. "
        "It is refused for some minutes; a changed request is not."
    )
    return ApiError(422, message, code="request_quarantined", should_retry=False)


def sentence(message: str) -> str:
    return message[:1].upper() + message[1:].rstrip(".") + "."

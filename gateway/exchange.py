"""One request on its way through the gateway, and the ways in which an attempt at it can fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_worker.contract.errors import ApiError
from gateway.admission import ANYONE, Claim
from gateway.answer import Answer, Headers, Watch
from gateway.answer_head import RawHeaders
from gateway.guard import Guard, Interrupt
from gateway.observe.record import EndState, RequestRecord
from gateway.openai.fields import ParsedRequest
from gateway.openai.sse import StreamScanner
from gateway.replicas.registry import Replica
from gateway.router import Lease
from gateway.tenancy.service import Visit
from gateway.upstream import UpstreamError, UpstreamFailure, request_headers
from policies.events import FailureKind

if TYPE_CHECKING:
    from gateway.resume import Transcript

_CODES = {FailureKind.BROKEN: "replica_failed", FailureKind.TIMEOUT: "timeout"}
_ENGINE_DIED = b'"engine_restarting"'  # the code in a bundled worker's answer then
_ENGINE_AWAY = b'"engine_not_ready"'  # and until the next one is there
# Who is told of requests that got their whole answer: what they were, the replica's path for them, and where they went
Served = Callable[[ParsedRequest, str, Lease, RequestRecord], None]
CLIENT_CLOSED_REQUEST = 499  # nginx's status, for metrics and the log only: nobody is there to get it


@dataclass(slots=True, eq=False)
class Errand:
    """What a request needs from its first step to its last."""

    record: RequestRecord
    answer: Answer
    guard: Guard
    watch: Watch
    visit: Visit | None = None

    @property
    def claim(self) -> Claim:
        return self.visit.claim if self.visit is not None else ANYONE


@dataclass(slots=True, eq=False)
class Exchange:
    """What the attempts at one request share.

    transcript  what the client has of a stream that can be continued elsewhere; `order` asks for the rest (resume.py)
    """

    record: RequestRecord
    parsed: ParsedRequest
    guard: Guard
    answer: Answer
    client_headers: RawHeaders
    path: str
    transcript: Transcript | None = None
    order: bytes = b""
    scanner: StreamScanner | None = None
    visit: Visit | None = None

    def settle(self) -> float:
        """Let the tenant pay for what is known to be used, if that has not been done. Returns the service it got."""
        if self.visit is None:
            return 0.0
        num_tokens = self.scanner.num_events if self.scanner is not None else 0
        if self.transcript is not None:
            num_tokens = self.transcript.num_tokens
        self.visit.end(self.record, num_tokens)
        return self.visit.service

    def upstream_headers(self, api_key: str | None) -> bytes:
        return request_headers(self.client_headers, self.record.request_id, api_key)

    def placed(self, lease: Lease, base_headers: Headers) -> None:
        """Note where the request went, in the record and in the response's headers."""
        note_place(self.record, lease)
        decision = lease.decision
        self.answer.headers = [
            *base_headers,
            (b"x-warmgate-replica", lease.replica.replica_id.encode("ascii")),
            (b"x-warmgate-policy", decision.policy.encode("ascii")),
            (b"x-warmgate-matched-tokens", b"%d" % decision.matched_tokens),
        ]

    def moved(self, lease: Lease) -> None:
        """Another replica goes on with the answer; its beginning, and what is said of it, stay as they are."""
        self.record.num_attempts += 1
        self.record.broken_at.append(self.record.replica_id)
        self.record.replica_id = lease.replica.replica_id

    def failed_over(self) -> str:
        """An attempt came to nothing and another follows. Returns the replica that it was made at."""
        self.record.failed_at.append(self.record.replica_id)
        return self.record.replica_id

    def again(self) -> None:
        """It is sent to the same replica once more, over another connection."""
        self.record.num_attempts += 1

    def cached(self, cached_tokens: int | None) -> None:
        """What the replica said that it reused."""
        self.record.cached_tokens = cached_tokens
        if cached_tokens is not None:
            self.answer.headers.append((b"x-warmgate-cached-tokens", b"%d" % cached_tokens))

    def ended(self, end: EndState, status: int, error: str = "") -> None:
        record = self.record
        record.end_as(end)
        record.status = status
        record.error = error
        record.ended_at = time.monotonic()
        self.settle()


def body_for(parsed: ParsedRequest, replica: Replica) -> bytes:
    """The body, without our salt for a replica that doesn't know the field."""
    return parsed.body if parsed.unsalted is None or replica.keeps_apart else parsed.unsalted


def note_place(record: RequestRecord, lease: Lease) -> None:
    """Where the request went."""
    decision = lease.decision
    record.placed_at = record.placed_at or lease.dispatched_at
    record.num_attempts += 1
    record.replica_id = lease.replica.replica_id
    record.policy = decision.policy
    record.reason = decision.reason
    record.matched_tokens = decision.matched_tokens
    record.prompt_tokens = decision.num_tokens


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed. `status` is what the client gets if nothing else is tried; `body` the replica's own words.

    message          for the client; `detail`, for the log, says more where there is more to say
    upstream_status  the replica's own status, for REJECTED
    final            no other replica is asked, whatever the retry rule says (the deadline passed, the gateway stops)
    """

    kind: FailureKind
    status: int
    message: str
    body: bytes | None = None
    content_type: str = "application/json"
    retry_after_s: float | None = None
    final: bool = False
    upstream_status: int | None = None
    detail: str = ""

    def as_error(self) -> ApiError:
        # What took as long as the client would wait takes as long again.
        should_retry = False if self.final and self.kind is FailureKind.TIMEOUT else None
        return ApiError(
            self.status,
            self.message,
            code=_CODES.get(self.kind),
            retry_after_s=self.retry_after_s,
            should_retry=should_retry,
        )

    @property
    def is_gone(self) -> bool:
        """The replica, or the engine behind it, is no more: what it had must go elsewhere."""
        if self.kind is FailureKind.REJECTED:
            return self.body is not None and (_ENGINE_DIED in self.body or _ENGINE_AWAY in self.body)
        return self.kind in (FailureKind.CONNECT, FailureKind.BROKEN)

    @property
    def is_suspicious(self) -> bool:
        """The request may have brought the replica down. (An engine can die behind an API that says so.)"""
        if self.kind is FailureKind.REJECTED:
            return self.status == 500 or (self.body is not None and _ENGINE_DIED in self.body)
        return self.kind is FailureKind.BROKEN

    @property
    def log_text(self) -> str:
        return self.detail or self.message


class ReplicaRefused(Exception):
    """The replica answered with an error: a status, or an error in place of the first token."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


BROKEN_OFF = "The replica broke off before its answer was complete."
_UPSTREAM = {
    UpstreamFailure.CONNECT: (FailureKind.CONNECT, 503, "The replica could not be reached."),
    UpstreamFailure.BROKEN: (FailureKind.BROKEN, 502, BROKEN_OFF),
    UpstreamFailure.TIMEOUT: (FailureKind.TIMEOUT, 504, "The replica did not answer in time."),
}


def of_upstream(error: UpstreamError) -> Failure:
    kind, status, message = _UPSTREAM[error.kind]
    return Failure(kind, status, message, detail=str(error))


def of_interrupt(reason: Interrupt) -> Failure:
    """CLIENT_GONE and CLIENT_STALLED aren't the replica's failure: kind CANCELLED."""
    match reason:
        case Interrupt.CLIENT_GONE | Interrupt.CLIENT_STALLED:
            return Failure(FailureKind.CANCELLED, CLIENT_CLOSED_REQUEST, "The client left.", final=True)
        case Interrupt.SHUTDOWN:
            message = "The gateway is shutting down."
            return Failure(FailureKind.CANCELLED, 503, message, retry_after_s=2.0, final=True)
        case Interrupt.FIRST_TOKEN_TIMEOUT:
            return Failure(FailureKind.TIMEOUT, 504, "The replica gave no first token in time.")
        case Interrupt.REPLICA_STUCK:
            return Failure(FailureKind.TIMEOUT, 504, "The replica stopped answering.")
        case Interrupt.STREAM_IDLE:
            return Failure(FailureKind.TIMEOUT, 504, "The replica's stream stalled.")
        case Interrupt.DEADLINE | Interrupt.BODY_TIMEOUT:
            return Failure(FailureKind.TIMEOUT, 504, "The request took longer than its deadline allows.", final=True)

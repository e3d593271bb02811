"""One request on the straight way (straight.py): an exchange between two sockets' callbacks.

While it lasts, it stands in for the ASGI cycle with the client's protocol, for a guard with the wheel and the replica,
and for a task with the server that shuts down.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from engine_worker.contract.work import work_line
from gateway.admission import ANYONE, Claim
from gateway.answer import Receive, Scope, Send, new_id
from gateway.answer_head import AnswerHead
from gateway.begun import Begun
from gateway.cycle import joined
from gateway.endings import quarantined
from gateway.exchange import Failure, ReplicaRefused, body_for, note_place, of_interrupt, of_upstream
from gateway.guard import Interrupt
from gateway.heads import Head
from gateway.observe.record import EndState, RequestRecord
from gateway.openai.fields import ParsedRequest
from gateway.openai.frames import Frame
from gateway.outcome import finish, read_frame, reused
from gateway.router import Lease
from gateway.tenancy.directory import Identity
from gateway.tenancy.refusals import Rates
from gateway.tenancy.service import Visit
from gateway.upstream import Target, UpstreamError, UpstreamResponse, with_forwarded
from gateway.upstream_connection import Connection
from gateway.upstream_types import Phase
from policies.events import FailureKind
from policies.types import RouteRequest

if TYPE_CHECKING:
    from gateway.plain_protocol import PlainProtocol
    from gateway.straight import Straight

_LAST_WORDS_S: Final = 1.0  # for telling a client that its time is up


class _NoEvent:
    """What nobody waits for."""

    def set(self) -> None:
        pass


_NO_EVENT: Final = _NoEvent()


class Run:
    """One request on the straight way.

    disconnected, keep_alive, message_event, more_body, response_complete, response_started
              as of a cycle
    """

    __slots__ = (
        "_claim", "_connection", "_deadline_at", "_head", "_identity", "_is_admitted", "_is_open", "_lease", "_parsed",
        "_protocol", "_rates", "_record", "_route", "_sent_at", "_straight", "_target", "_tick", "_visit",
        "disconnected", "keep_alive", "response_complete", "response_started",
    )  # fmt: skip
    message_event: ClassVar[_NoEvent] = _NO_EVENT
    more_body: ClassVar[bool] = False

    def __init__(self, straight: Straight, protocol: PlainProtocol, head: Head) -> None:
        self._straight = straight
        self._protocol = protocol
        self._head = head
        self._record = RequestRecord(
            request_id=head.given_id or new_id(), endpoint=head.endpoint, started_at=time.monotonic()
        )
        self._rates = Rates()
        self._identity: Identity | None = None
        self._parsed: ParsedRequest | None = None
        self._visit: Visit | None = None
        self._claim: Claim = ANYONE
        self._is_admitted = False
        self._route: RouteRequest | None = None
        self._lease: Lease | None = None
        self._target: Target | None = None
        self._connection: Connection | None = None
        self._sent_at = 0.0
        patience_s = head.patience_s
        seconds = straight.request_s if patience_s is None else min(patience_s, straight.request_s)
        self._deadline_at = straight.loop.time() + seconds
        self._tick = straight.wheel.add(self, self._deadline_at)
        self._is_open = True
        self.disconnected = False
        self.keep_alive = head.keep_alive
        self.response_started = False
        self.response_complete = False

    @property
    def is_paused(self) -> bool:
        return self._protocol.flow.write_paused and not self.disconnected

    # From the client to the replica

    def begin(self, body: bytes) -> None:
        """As far as the writing of the request to a replica; from there on by the general way if need be."""
        try:
            if not self._send(body):
                self._hand_over()
        except Exception as error:
            self._hand_over(error=error)

    def _send(self, body: bytes) -> bool:
        """False where something must be waited for. Raises ApiError."""
        straight, head, record = self._straight, self._head, self._record
        identity = self._identity = straight.tenancy.identify_caller(head.caller, record)
        parsed = self._parsed = straight.intake.parse(head.endpoint, body, identity, record)
        if parsed.stream:
            return False
        if straight.quarantine.holds(head.path, parsed.body):
            raise quarantined()
        if identity is not None:
            if straight.tenancy.shared is not None:
                return False
            self._visit = straight.tenancy.admit_here(identity, parsed, record, self._rates)
            self._claim = self._visit.claim
        if not straight.admission.try_enter(self._claim):
            return False
        self._is_admitted = True
        spaces = straight.intake.key_spaces(parsed, record)
        assert parsed.source is not None
        chains = straight.prefix.chains_now(parsed.source, spaces)
        if chains is None:
            return False
        route = straight.intake.route(parsed, record, chains)
        lease = straight.router.place_now(route)
        if lease is None:
            return False
        self._route, self._lease = route, lease
        replica = lease.replica
        headers = with_forwarded(head.forwarded, record.request_id, replica.api_key)
        if replica.model_fingerprint and lease.decision.work_s is not None:
            headers += work_line(lease.decision.work_s)
        self._target = replica.target(head.path)
        connection = straight.upstream.try_post(self._target, headers, body_for(parsed, replica), self._on_news)
        if connection is None:
            return False
        self._connection = connection
        self._sent_at = lease.dispatched_at
        replica.waiting.add(self)
        return True

    # From the replica to the client

    def _on_news(self) -> None:
        """The replica's connection has the whole answer, too much of it, or has failed."""
        try:
            if not self._finish():
                self._hand_over_news()
        except Exception as error:
            self._hand_over(error=error)

    def _finish(self) -> bool:
        """Pass on a whole answer. False, with nothing done, for anything else."""
        connection, lease, target = self._connection, self._lease, self._target
        assert connection is not None
        assert lease is not None
        assert target is not None
        body = connection.whole()
        if body is None or not self._is_usual(connection.status, body):
            return False
        head = connection.answer_head()
        try:
            frame = Frame() if head.is_coded else read_frame(body)
        except (UpstreamError, ReplicaRefused):
            return False  # it is found once more there
        straight, record, parsed = self._straight, self._record, self._parsed
        assert parsed is not None
        cached = reused(head.cached_tokens, frame.usage)
        note_place(record, lease)
        record.cached_tokens = cached
        finish(record, lease, frame.usage, 0, 0, cached)
        record.end_as(EndState.COMPLETED)
        record.status = 200
        record.ended_at = time.monotonic()
        if self._visit is not None:
            self._visit.end(record, 0)
        self._answer(head, lease, body)
        connection.take()
        straight.upstream.done(target, connection)
        self._close()
        if straight.proxy.on_served is not None:
            straight.proxy.on_served(parsed, self._head.path, lease, record)
        straight.admission.leave(self._claim, self._visit.service if self._visit is not None else 0.0)
        straight.proxy.conclude(record)
        if self._visit is not None:
            straight.tenancy.figures.ended(record)
        self._protocol.on_response_complete()
        return True

    def _is_usual(self, status: int, body: bytes) -> bool:
        return 200 <= status < 300 and status != 204 and len(body) <= self._straight.max_response_bytes and (
            not self.is_paused
        )  # fmt: skip

    def _answer(self, head: AnswerHead, lease: Lease, body: bytes) -> None:
        record, decision, protocol = self._record, lease.decision, self._protocol
        own = (
            f"content-length: {len(body)}\r\nx-request-id: {record.request_id}\r\n"
            f"x-warmgate-replica: {record.replica_id}\r\nx-warmgate-policy: {decision.policy}\r\n"
            f"x-warmgate-matched-tokens: {decision.matched_tokens}\r\n"
        )
        if record.cached_tokens is not None:
            own += f"x-warmgate-cached-tokens: {record.cached_tokens}\r\n"
        date = joined(protocol.server_state.default_headers)
        if self._visit is not None:
            own += self._rates.lines()
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        parts = (STATUS_LINE[head.status], date, head.lines, own.encode("ascii"), end, body)
        self.response_started = self.response_complete = True
        protocol.transport.write(b"".join(parts))
        if not self.keep_alive:
            protocol.close_turn()

    # Whatever is not usual

    def look(self, now: float) -> None:
        """The wheel has come to this run's place."""
        if now >= self._deadline_at:
            self.interrupt(Interrupt.DEADLINE)
        else:
            self._tick = self._straight.wheel.add(self, self._deadline_at)

    def gone(self) -> None:
        """The client left."""
        self.interrupt(Interrupt.CLIENT_GONE)

    def cancel(self, msg: object = None) -> None:
        """The server ends what is under way. Not at once, since it is walking through the set that this is in."""
        self._straight.loop.call_soon(self.interrupt, Interrupt.SHUTDOWN)

    def interrupt(self, reason: Interrupt) -> None:
        """From a callback, as of a guard."""
        connection = self._connection
        if self._is_open and connection is not None:
            connection.close()
            self._hand_over(failure=of_interrupt(reason))

    def _hand_over_news(self) -> None:
        connection, target = self._connection, self._target
        assert connection is not None
        assert target is not None
        if connection.status:
            self._hand_over(response=self._straight.upstream.response_of(target, connection))
            return
        error = connection.error
        assert connection.phase is Phase.CLOSED
        assert error is not None
        if self._straight.upstream.may_repeat(connection, self._sent_at):
            self._hand_over(is_again=True)
        else:
            self._hand_over(failure=of_upstream(error))

    def _hand_over(
        self, response: UpstreamResponse | None = None, failure: Failure | None = None, is_again: bool = False,
        error: Exception | None = None,
    ) -> None:  # fmt: skip
        """Go on by the general way."""
        if error is not None:
            self._let_go()
        self._close()
        proxy, now, head, record = self._straight.proxy, self._straight.loop.time(), self._head, self._record
        least_s = _LAST_WORDS_S if failure is not None and failure.final else 0.0
        begun = Begun(
            record=record, path=head.path,
            left_s=max(record.started_at + self._straight.request_s - now, least_s),
            patience_s=None if head.patience_s is None else max(self._deadline_at - now, least_s),
            headers=[(b"x-request-id", record.request_id.encode("ascii")), *self._rates.headers()],
            identity=self._identity, parsed=self._parsed, visit=self._visit, is_admitted=self._is_admitted,
            route=self._route, lease=self._lease,
            response=response, failure=failure, is_again=is_again, error=error,
        )  # fmt: skip

        def go_on(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            return proxy.take_over(scope, receive, send, begun)

        self._protocol.hand_over(self, self._head, go_on)

    def _let_go(self) -> None:
        """Give back what was taken for a request that is refused, or that a bug of ours ends."""
        if self._lease is not None and self._lease.is_open:
            self._lease.fail(FailureKind.CANCELLED)
        if self._connection is not None:
            self._connection.close()
        if self._is_admitted:
            self._is_admitted = False
            self._straight.admission.leave(self._claim)

    def _close(self) -> None:
        """Nobody calls back any more."""
        if not self._is_open:
            return
        self._is_open = False
        self._straight.wheel.remove(self, self._tick)
        if self._lease is not None:
            self._lease.replica.waiting.discard(self)
        self._connection = None
        self._protocol.end_turn(self)

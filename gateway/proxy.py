"""A request's way through the gateway: read, parse, place, attempt, and one more attempt where that is allowed.

    read the body -> parse -> chains -> place -> attempt -> (failed before the commit point: place elsewhere, once)
                                                         -> (failed behind it: go on elsewhere, where resume.py can)

Every request leaves through `conclude`, in one of the end states of observe/record.py. Every lease that was taken is
ended once, by the relay when the answer is whole, else by `_attempt`. Whatever interrupts the request (the client
left, a timeout, the deadline) reaches its wait through its guard, and closes the connection: so a replica learns of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from engine_worker.contract.errors import ApiError
from gateway.admission import Admission
from gateway.answer import Answer, ClientGone, Receive, Scope, Send, Watch, patience_s, read_body, request_id, sized
from gateway.begun import Begun
from gateway.config import GatewaySettings
from gateway.embedders import Embedders
from gateway.endings import end_broken, give_up, interrupted, quarantined, reject, sentence
from gateway.exchange import (
    BROKEN_OFF,
    CLIENT_CLOSED_REQUEST,
    Errand,
    Exchange,
    Failure,
    ReplicaRefused,
    Served,
    of_interrupt,
    of_upstream,
)
from gateway.guard import Guard, Interrupt
from gateway.intake import Intake
from gateway.observe.access_log import AccessLog
from gateway.observe.metrics import Metrics
from gateway.observe.record import EndState, RequestRecord
from gateway.openai.fields import Endpoint
from gateway.openai.sse import SseError
from gateway.prefix.service import PrefixService
from gateway.quarantine import Quarantine
from gateway.relay import Relay
from gateway.replicas.registry import Registry, Replica
from gateway.resume import Resumer, can_resume
from gateway.router import Lease, NoReplica, Router
from gateway.tenancy.directory import Identity
from gateway.tenancy.service import Tenancy
from gateway.translate.answer import TranslatedAnswer, Translation
from gateway.upstream import Upstream, UpstreamError
from policies.events import FailureKind
from policies.retry import GiveUp, Outcome, Retry, allows_retry, next_step
from policies.types import ReplicaStatus, RouteRequest


class Proxy:
    """Serves the hot routes. `on_trouble` is told of replicas that refused or broke a connection."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: Registry,
        router: Router,
        prefix: PrefixService,
        upstream: Upstream,
        metrics: Metrics,
        access_log: AccessLog,
        on_trouble: Callable[[Replica, Failure], None],
        quarantine: Quarantine,
        admission: Admission,
        tenancy: Tenancy,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._router = router
        self._prefix = prefix
        self._upstream = upstream
        self._metrics = metrics
        self._access_log = access_log
        self._on_trouble = on_trouble
        self._quarantine = quarantine
        self._admission = admission
        self._tenancy = tenancy
        self.intake = Intake(settings, registry, router)
        self._embedders = Embedders(time.monotonic)
        self._num_retrying = 0
        self.on_served: Served | None = None
        secret = settings.secret.get_secret_value() if settings.secret is not None else None
        self._resumer = Resumer(settings.resume, secret, registry, router)
        self._relay = Relay(metrics, self._resumer, settings)

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, endpoint: Endpoint, path: str,
        translation: Translation | None = None,
    ) -> None:  # fmt: skip
        """Serve one request to `path` (the replica's path for it), by way of `translation` if the client speaks
        another API."""
        guard = Guard(self._settings.request_s, Interrupt.BODY_TIMEOUT, self._settings.body_s)
        record = RequestRecord(request_id=request_id(scope), endpoint=endpoint, started_at=time.monotonic())
        answer = Answer(scope, send)
        if translation is not None:
            record.endpoint = translation.name
            answer = TranslatedAnswer(scope, send, translation, record)
        answer.headers = [(b"x-request-id", record.request_id.encode("ascii"))]
        errand = Errand(record, answer, guard, Watch(scope, guard))
        await self._conduct(errand, self._from_start(errand, scope, receive, endpoint, path, translation))

    async def take_over(self, scope: Scope, receive: Receive, send: Send, begun: Begun) -> None:
        """Go on with a request that straight.py has begun."""
        guard = Guard(begun.left_s)
        if begun.patience_s is not None:
            guard.hurry(begun.patience_s)
        answer = Answer(scope, send)
        answer.headers = begun.headers
        errand = Errand(begun.record, answer, guard, Watch(scope, guard), begun.visit)
        await self._conduct(errand, self._from_begun(errand, begun, scope, receive))

    async def _conduct(self, errand: Errand, way: Awaitable[None]) -> None:
        """A request's way to its end, whichever that is."""
        record, answer, guard = errand.record, errand.answer, errand.guard
        try:
            await way
        except ApiError as error:
            await reject(record, answer, error)
        except ClientGone:
            record.ended_at = time.monotonic()
            record.status = CLIENT_CLOSED_REQUEST
            record.end_as(EndState.CLIENT_GONE)
        except asyncio.CancelledError as cancelled:
            await interrupted(record, guard, answer, cancelled)
        finally:
            guard.close()
            errand.watch.stop()
            self.conclude(record)
            if errand.visit is not None:
                errand.visit.end(record, 0)
                self._tenancy.figures.ended(record)

    async def _from_start(
        self, errand: Errand, scope: Scope, receive: Receive, endpoint: Endpoint, path: str,
        translation: Translation | None,
    ) -> None:  # fmt: skip
        record, guard = errand.record, errand.guard
        identity = self._tenancy.identify(scope, record)
        body = await read_body(scope, receive, self._settings.max_body_bytes)
        guard.leave()
        if translation is not None:
            translation.owner = identity.tenant if identity is not None else ""
            body = sized(translation.request(body), self._settings.max_body_bytes)  # stored answers come with it
        parsed = self.intake.parse(endpoint, body, identity, record)
        if (patience := patience_s(scope["headers"])) is not None:
            guard.hurry(patience)
        errand.watch.start(receive)
        exchange = Exchange(record, parsed, guard, errand.answer, scope["headers"], path)
        await self._enter(errand, exchange, identity)
        await self._within(errand, exchange)

    async def _from_begun(self, errand: Errand, begun: Begun, scope: Scope, receive: Receive) -> None:
        if begun.error is not None:
            raise begun.error
        assert begun.parsed is not None
        errand.watch.start(receive)
        exchange = Exchange(begun.record, begun.parsed, errand.guard, errand.answer, scope["headers"], begun.path)
        exchange.visit = begun.visit
        if not begun.is_admitted:
            if errand.answer.is_gone:
                raise ClientGone
            await self._enter(errand, exchange, begun.identity)
        await self._within(errand, exchange, begun)

    async def _enter(self, errand: Errand, exchange: Exchange, identity: Identity | None) -> None:
        """Take a place among the requests under way, as its key and the gateway's bounds allow."""
        parsed = exchange.parsed
        if self._quarantine.holds(exchange.path, parsed.body):
            raise quarantined()
        if identity is not None and errand.visit is None:
            headers = errand.answer.headers
            errand.visit = exchange.visit = await self._tenancy.admit(identity, parsed, errand.record, headers)
        await self._admission.enter(errand.claim)

    async def _within(self, errand: Errand, exchange: Exchange, begun: Begun | None = None) -> None:
        try:
            await self._serve(exchange, begun)
        finally:
            self._admission.leave(errand.claim, exchange.settle())

    async def _serve(self, exchange: Exchange, begun: Begun | None = None) -> None:
        """Place and attempt until the exchange has ended. Raises ApiError and ClientGone where it has not."""
        base_headers = exchange.answer.headers
        if begun is not None and begun.route is not None and begun.lease is not None:
            route, lease = begun.route, begun.lease
        else:
            route, begun = await self._route_request(exchange), None
            lease = await self._place(route, exchange)
        exchange.placed(lease, base_headers)
        attempt, is_counted = 1, False
        try:
            while True:
                failure = await self._attempt(exchange, lease, begun)
                begun = None
                if failure is None:
                    if self.on_served is not None and exchange.record.end is EndState.COMPLETED:
                        self.on_served(exchange.parsed, exchange.path, lease, exchange.record)
                    return
                if exchange.answer.started:
                    route = replace(route, excluded=route.excluded | {lease.replica.replica_id})
                    onward = await self._go_on(exchange, route, failure, lease.replica)
                    if onward is None:
                        return
                    route, lease = onward
                    if not failure.is_gone and not is_counted:
                        self._num_retrying += 1
                        is_counted = True
                    continue
                if failure.is_suspicious and await self._quarantine.settled(exchange.path, exchange.parsed.body):
                    exchange.record.error = failure.log_text
                    raise quarantined()
                route = replace(route, excluded=route.excluded | {lease.replica.replica_id})
                if exchange.parsed.endpoint == "embeddings" and self._embedders.lacks(lease.replica, failure):
                    lease = await self._place(self._embedders.only(route, self._router), exchange)
                    exchange.placed(lease, base_headers)
                    continue
                step = self._next_step(failure, attempt, route, lease.replica)
                if isinstance(step, GiveUp):
                    return await give_up(exchange, failure, step, self._settings.stream_idle_s)
                self._num_retrying += not is_counted
                is_counted = True
                attempt += 1
                self._metrics.failed_over(failure.kind.value, exchange.failed_over())
                lease = await self._place(route, exchange)
                exchange.placed(lease, base_headers)
        finally:
            self._num_retrying -= is_counted

    def _place(self, route: RouteRequest, exchange: Exchange) -> Awaitable[Lease]:
        return self._router.place(route, exchange.guard.remaining_s)

    def _next_step(self, failure: Failure, attempt: int, route: RouteRequest, replica: Replica) -> Retry | GiveUp:
        """policies/retry.py decides; here it is told what is left.

        The fleet-wide budget keeps refusals and timeouts of an overloaded fleet from doubling its load. It doesn't
        count where a replica is gone: what waited there is moved once, and loads the others as it would have anyway.
        """
        num_left = 0 if failure.final else self._router.num_candidates(route)
        if not self._has_budget(failure, replica):
            num_left = 0
        outcome = Outcome(failure.kind, False, failure.upstream_status, failure.retry_after_s)
        return next_step(outcome, attempt, num_left)

    def _has_budget(self, failure: Failure, replica: Replica) -> bool:
        is_gone = failure.is_gone or replica.status is not ReplicaStatus.READY
        return is_gone or allows_retry(self._router.stats.num_in_flight, self._num_retrying)

    async def _go_on(
        self, exchange: Exchange, route: RouteRequest, failure: Failure, replica: Replica
    ) -> tuple[RouteRequest, Lease] | None:
        """Where an answer goes on that broke at `replica`; None when it has ended, in an error event."""
        exchange.guard.leave()
        onward, error = None, None
        if can_resume(exchange.transcript, failure) and self._has_budget(failure, replica):
            if failure.is_suspicious and await self._quarantine.settled(exchange.path, exchange.parsed.body):
                error = quarantined()
            else:
                onward = self._resumer.elsewhere(exchange, route)
        if onward is not None:
            with contextlib.suppress(NoReplica):
                lease = await self._place(onward, exchange)
                exchange.moved(lease)
                self._metrics.resumed(failure.kind.value, "resumed")
                return onward, lease
        self._metrics.resumed(failure.kind.value, "given_up")
        if exchange.record.broken_at and failure.kind is FailureKind.REJECTED:  # words on our order, not the client's
            failure = Failure(FailureKind.BROKEN, 502, BROKEN_OFF, detail=failure.log_text)
        await end_broken(exchange, failure, error)
        return None

    async def _route_request(self, exchange: Exchange) -> RouteRequest:
        parsed, record = exchange.parsed, exchange.record
        spaces = self.intake.key_spaces(parsed, record)
        chains = await self._prefix.chains(parsed.source, spaces) if parsed.source is not None else {}
        route = self.intake.route(parsed, record, chains)
        return self._embedders.only(route, self._router) if parsed.endpoint == "embeddings" else route

    async def _attempt(self, exchange: Exchange, lease: Lease, begun: Begun | None) -> Failure | None:
        """One replica's turn, `begun` or not. None: the exchange has ended. Raises ClientGone."""
        if begun is not None and (failure := begun.failure_of(exchange.answer)) is not None:
            return await self._after(exchange, lease, failure)
        replica, guard = lease.replica, exchange.guard
        replica.waiting.add(guard)
        response = begun.response if begun is not None else None
        try:
            if exchange.parsed.stream:
                guard.enter(Interrupt.FIRST_TOKEN_TIMEOUT, self._settings.first_token_s)
            else:
                guard.leave()
            if response is None:
                is_again = begun is not None and begun.is_again
                response = await self._upstream.post(*self._resumer.request(exchange, lease), is_again, exchange.again)
            await self._relay.relay(exchange, lease, response)
            if exchange.record.end is EndState.FAILED:  # the stream ended in the replica's own error event
                self._quarantine.suspect(exchange.path, exchange.parsed.body, replica)
            return None
        except UpstreamError as error:
            failure = of_upstream(error)
        except SseError as error:
            failure = Failure(FailureKind.BROKEN, 502, sentence(str(error)))
        except ReplicaRefused as error:
            failure = error.failure
        except asyncio.CancelledError as cancelled:
            interrupted = guard.translate(cancelled)
            failure = of_interrupt(interrupted.reason)
            if interrupted.reason is Interrupt.CLIENT_STALLED:
                exchange.answer.abandon()
        finally:
            replica.waiting.discard(guard)
            if response is not None:
                response.close()
        return await self._after(exchange, lease, failure)

    async def _after(self, exchange: Exchange, lease: Lease, failure: Failure) -> Failure | None:
        """End the failed attempt's lease. What was committed and can't go on elsewhere ends in an error event, the rest
        is the caller's."""
        if not lease.is_open:  # complete, and interrupted while the last bytes were going out
            return None
        lease.fail(failure.kind, failure.upstream_status)
        if failure.is_suspicious:
            self._quarantine.suspect(exchange.path, exchange.parsed.body, lease.replica)
        if failure.kind in (FailureKind.CONNECT, FailureKind.BROKEN):
            self._on_trouble(lease.replica, failure)
        answer = exchange.answer
        if failure.status == CLIENT_CLOSED_REQUEST:
            raise ClientGone
        if not answer.started or exchange.transcript is not None:
            return failure
        await end_broken(exchange, failure)
        return None

    def conclude(self, record: RequestRecord) -> None:
        """Every request leaves through here."""
        if record.end is None:  # a bug of ours raised: say so in the figures too
            record.ended_at = time.monotonic()
            record.status = 500
            record.end_as(EndState.FAILED)
        self._metrics.ended(record)
        self._access_log.write(record)

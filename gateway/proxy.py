"""A request's way through the gateway: read, parse, place, attempt, and one more attempt where that is allowed.

    read the body -> parse -> chains -> place -> attempt -> (failed before the commit point: place elsewhere, once)
                                                         -> (failed behind it: go on elsewhere, where resume.py can)

Every request leaves through `_conclude`, in one of the end states of observe/record.py. Every lease that was taken is
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
from gateway.admission import ANYONE, Admission
from gateway.aliases import Aliases
from gateway.answer import Answer, ClientGone, Receive, Scope, Send, Watch, patience_s, read_body, request_id, sized
from gateway.config import GatewaySettings
from gateway.embedders import Embedders
from gateway.endings import end_broken, give_up, interrupted, quarantined, reject, sentence
from gateway.exchange import (
    BROKEN_OFF,
    CLIENT_CLOSED_REQUEST,
    Exchange,
    Failure,
    ReplicaRefused,
    of_interrupt,
    of_upstream,
)
from gateway.guard import Guard, Interrupt
from gateway.observe.access_log import AccessLog
from gateway.observe.metrics import Metrics
from gateway.observe.record import EndState, RequestRecord
from gateway.openai.parse import Endpoint, ParsedRequest, parse_request, with_model
from gateway.openai.sse import SseError
from gateway.prefix.service import PrefixService
from gateway.quarantine import Quarantine
from gateway.relay import Relay
from gateway.replicas.registry import Registry, Replica
from gateway.resume import Resumer, can_resume
from gateway.router import Lease, NoReplica, Router
from gateway.tenancy.directory import Identity
from gateway.tenancy.refusals import shut_out
from gateway.tenancy.service import Tenancy
from gateway.translate.answer import TranslatedAnswer, Translation
from gateway.upstream import Upstream, UpstreamError
from policies.events import FailureKind
from policies.retry import GiveUp, Outcome, Retry, allows_retry, next_step
from policies.types import ReplicaStatus, RouteRequest

_BYTES_PER_TOKEN = 4  # an estimate, for requests that have no chain


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
        self._keeps_apart = settings.unsalted_replicas == "refuse"
        self._aliases = Aliases(settings.model_aliases)
        self._embedders = Embedders(time.monotonic)
        self._num_retrying = 0
        self.on_served: Callable[[ParsedRequest, str, Lease], None] | None = None  # prompts worth keeping (warmup.py)
        secret = settings.secret.get_secret_value() if settings.secret is not None else None
        self._resumer = Resumer(settings.resume, secret, registry, router)
        self._relay = Relay(
            metrics, self._resumer, settings.stream_idle_s, settings.max_response_bytes, settings.max_sse_line_bytes
        )

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        endpoint: Endpoint,
        path: str,
        translation: Translation | None = None,
    ) -> None:
        """Serve one request to `path` (the replica's path for it), by way of `translation` if the client speaks
        another API."""
        guard = Guard(self._settings.request_s, Interrupt.BODY_TIMEOUT, self._settings.body_s)
        record = RequestRecord(request_id=request_id(scope), endpoint=endpoint, started_at=time.monotonic())
        answer = Answer(scope, send)
        if translation is not None:
            record.endpoint = translation.name
            answer = TranslatedAnswer(scope, send, translation, record)
        answer.headers = [(b"x-request-id", record.request_id.encode("ascii"))]
        watch = Watch(scope, guard)
        visit, claim = None, ANYONE
        try:
            identity = self._tenancy.identify(scope, record)
            parsed = await self._read(scope, receive, guard, endpoint, translation, identity, record)
            if (patience := patience_s(scope)) is not None:
                guard.hurry(patience)
            record.stream = parsed.stream
            watch.start(receive)
            exchange = Exchange(record, parsed, guard, answer, scope["headers"], path)
            if self._quarantine.holds(path, parsed.body):
                raise quarantined()
            if identity is not None:
                visit = exchange.visit = await self._tenancy.admit(identity, parsed, record, answer.headers)
                claim = visit.claim
            await self._admission.enter(claim)
            try:
                await self._serve(exchange)
            finally:
                self._admission.leave(claim, exchange.settle())
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
            watch.stop()
            self._conclude(record)
            if visit is not None:
                visit.end(record, 0)
                self._tenancy.figures.ended(record)

    async def _read(
        self, scope: Scope, receive: Receive, guard: Guard, endpoint: Endpoint, translation: Translation | None,
        identity: Identity | None, record: RequestRecord,
    ) -> ParsedRequest:  # fmt: skip
        body = await read_body(scope, receive, self._settings.max_body_bytes)
        guard.leave()
        if translation is not None:
            translation.owner = identity.tenant if identity is not None else ""
            body = sized(translation.request(body), self._settings.max_body_bytes)  # stored answers come with it
        parsed = parse_request(endpoint, body, identity.salted if identity is not None else None)
        if parsed.model is None:
            if identity is not None:
                identity.check_model(self._model(parsed))
            return parsed
        record.asked_model = parsed.model
        model = self._aliases.resolve(parsed.model, self._registry.model_names)
        if identity is not None:
            identity.check_model(parsed.model, model)
        return parsed if model == parsed.model else with_model(parsed, model)

    async def _serve(self, exchange: Exchange) -> None:
        """Place and attempt until the exchange has ended. Raises ApiError and ClientGone where it has not."""
        route = await self._route_request(exchange)
        base_headers = exchange.answer.headers
        lease = await self._place(route, exchange)
        exchange.placed(lease, base_headers)
        attempt, is_counted = 1, False
        try:
            while True:
                failure = await self._attempt(exchange, lease)
                if failure is None:
                    if self.on_served is not None and exchange.record.end is EndState.COMPLETED:
                        self.on_served(exchange.parsed, exchange.path, lease)
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
                    return await give_up(exchange, failure, step)
                self._num_retrying += not is_counted
                is_counted = True
                attempt += 1
                self._metrics.failed_over(failure.kind.value)
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
        model = self._model(parsed)
        self._router.check_model(model)
        record.model = model
        excluded = shut_out(self._registry, model) if exchange.visit is not None and self._keeps_apart else frozenset()
        chains = {}
        if parsed.source is not None:
            chains = await self._prefix.chains(parsed.source, self._registry.key_spaces(model))
        estimate = max(1, len(parsed.body) // _BYTES_PER_TOKEN)
        route = RouteRequest(
            request_id=self._router.new_id(),
            model=model,
            num_tokens=max((chain.num_tokens for chain in chains.values()), default=estimate),
            chains=chains,
            max_output_tokens=parsed.max_output_tokens,
            session=parsed.session,
            streamed=parsed.stream,
            tenant=record.tenant,
            excluded=excluded,
        )
        return self._embedders.only(route, self._router) if parsed.endpoint == "embeddings" else route

    def _model(self, parsed: ParsedRequest) -> str:
        """Routes that may leave the model out mean the only one there is."""
        if parsed.model is not None:
            return parsed.model
        models = self._registry.models()
        if len(models) == 1:
            return models[0]
        if not models:
            self._router.check_model("")
        raise ApiError(
            400, f"You must provide the parameter 'model'; models served: {', '.join(models)}.", param="model"
        )

    async def _attempt(self, exchange: Exchange, lease: Lease) -> Failure | None:
        """One replica's turn. None: the exchange has ended. Raises ClientGone."""
        replica, guard = lease.replica, exchange.guard
        replica.waiting.add(guard)
        response = None
        try:
            if exchange.parsed.stream:
                guard.enter(Interrupt.FIRST_TOKEN_TIMEOUT, self._settings.first_token_s)
            else:
                guard.leave()
            response = await self._upstream.post(*self._resumer.request(exchange, lease))
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

    def _conclude(self, record: RequestRecord) -> None:
        if record.end is None:  # a bug of ours raised: say so in the figures too
            record.ended_at = time.monotonic()
            record.status = 500
            record.end_as(EndState.FAILED)
        self._metrics.ended(record)
        self._access_log.write(record)

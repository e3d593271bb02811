"""Placing a request: a clock and an rng in front of the pure parts, policies.FleetState and a policy.

Choosing a replica and recording the dispatch is one synchronous block, so requests that arrive together see each
other. What comes back is a lease: the request's hold on its replica, which ends in exactly one of `finish` and `fail`.
A policy that holds requests back does so in policies/queue.py; `place` then waits for an event to let its request go.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine_worker.contract.errors import ApiError
from gateway.observe.metrics import Metrics
from gateway.observe.shadow import Shadows
from gateway.replicas.registry import Registry, Replica
from policies.events import (
    Dispatched,
    Event,
    Failed,
    FailureKind,
    Finished,
    FirstToken,
    Joined,
    StatsReported,
    StatusChanged,
)
from policies.fleet import FleetState
from policies.queue import Hold, QueueFull, RequestQueue
from policies.retry import Outcome, is_replicas_fault
from policies.stateful import observer_of
from policies.types import Decision, FleetSnapshot, Policy, PrefixChain, ReplicaStatus, RouteRequest

RETRY_AFTER_S = 2.0
_COMINGS = (Joined, StatusChanged)


class NoReplica(ApiError):
    """No replica may take the request now: 503 with Retry-After, or 404 for a model that nobody serves."""


class Lease:
    """A request's hold on a replica, from Dispatched to exactly one of Finished and Failed."""

    __slots__ = ("_emit", "_open", "chain", "decision", "dispatched_at", "replica", "request_id")

    def __init__(
        self, emit: Callable[[Event], None], request: RouteRequest, decision: Decision, chain: PrefixChain,
        replica: Replica,
    ) -> None:  # fmt: skip
        self._emit = emit
        self._open = True
        self.request_id = request.request_id
        self.decision = decision
        self.chain = chain
        self.replica = replica
        self.dispatched_at = time.monotonic()
        replica.num_leases += 1
        replica.gate.dispatched()
        emit(
            Dispatched(
                self.dispatched_at, replica.replica_id, self.request_id, chain, decision.matched_tokens,
                request.streamed, request.session,
            )
        )  # fmt: skip

    @property
    def is_open(self) -> bool:
        return self._open

    def first_token(self, cached_tokens: int | None) -> None:
        assert self._open, f"{self.request_id} has ended"
        now = time.monotonic()
        if self.replica.gate.succeeded(now):
            self.replica.breaker_closed()
        self._emit(FirstToken(now, self.replica.replica_id, self.request_id, cached_tokens))

    def finish(self, num_output_tokens: int, cached_tokens: int | None, num_prompt_tokens: int | None) -> None:
        now = time.monotonic()
        if self.replica.gate.succeeded(now):
            self.replica.breaker_closed()
        self._end(
            Finished(
                now, self.replica.replica_id, self.request_id, num_output_tokens, cached_tokens,
                num_prompt_tokens,
            )
        )  # fmt: skip

    def fail(self, kind: FailureKind, status: int | None = None) -> None:
        """`status` is the replica's own, where it answered."""
        now = time.monotonic()
        if is_replicas_fault(Outcome(kind, status=status)):
            if self.replica.gate.failed(now):
                self.replica.breaker_opened(f"{kind.value}, status {status}" if status else kind.value)
        else:
            self.replica.gate.cancelled()
        self._end(Failed(now, self.replica.replica_id, self.request_id, kind))

    def _end(self, event: Event) -> None:
        assert self._open, f"{self.request_id} has ended already"
        self._open = False
        self.replica.num_leases -= 1
        self._emit(event)


@dataclass(slots=True)
class RouterStats:
    num_in_flight: int = 0
    num_queued: int = 0


class Router:
    """Drives FleetState with the wall's clock. All fleet events of the gateway pass through `emit`."""

    def __init__(
        self, fleet: FleetState, policy: Policy, metrics: Metrics, seed: int | None = None, hold: Hold | None = None
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.stats = RouterStats()
        self.registry: Registry
        self._metrics = metrics
        self._observe = observer_of(policy)
        self._rng = random.Random(seed)
        self._ids = itertools.count(1)
        self._hold = hold
        self._queue = RequestQueue(hold)
        self._held: dict[str, asyncio.Future[Lease]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._gated: set[Replica] = set()  # whose gates may hold something back
        # Who is told of our own events; how many leases of other gateways the fleet holds (sharing/hub.py)
        self.listeners: list[Callable[[Event], None]] = []
        self.shadows: Shadows | None = None
        self.num_remote_leases: Callable[[], int] = int

    def emit(self, event: Event) -> None:
        """Apply what happened to the fleet, and tell the policy if it remembers."""
        self.fleet.apply(event)
        if self._observe is not None:
            self._observe(event)
        kind = type(event)
        if kind is Dispatched:
            self.stats.num_in_flight += 1
        elif kind is Finished:
            self.stats.num_in_flight -= 1
        elif isinstance(event, Failed):
            self.stats.num_in_flight -= 1
            replica = self.registry.get(event.replica_id)
            if replica.gate.is_open:
                self._gated.add(replica)
        elif isinstance(event, _COMINGS) and event.status is ReplicaStatus.READY and self.stats.num_in_flight:
            replica = self.registry.get(event.replica_id)  # without requests there is no crowd to hold back
            replica.gate.came_back(event.at)
            self._gated.add(replica)
        if self.shadows is not None:
            self.shadows.observe(event)
        for listener in self.listeners:
            listener(event)
        if self._held and kind is not Dispatched and kind is not StatsReported:
            self._poll()

    def apply_remote(self, event: Event) -> None:
        """Something that happened through another gateway: the fleet's state, and no request of ours."""
        self.fleet.apply(event)
        if self._observe is not None:
            self._observe(event)
        if self.shadows is not None:
            self.shadows.observe(event)
        if self._held and not isinstance(event, Dispatched):
            self._poll()

    def new_id(self) -> str:
        """A lease's id, unique in this process (clients may repeat theirs)."""
        return f"{next(self._ids):x}"

    async def place(self, request: RouteRequest, wait_s: float = math.inf) -> Lease:
        """Choose a replica and take a lease there, at once unless the policy holds the request back.

        Raises NoReplica, also when it was held for `wait_s`. A cancelled wait leaves nothing behind.
        """
        if (lease := self.place_now(request)) is not None:
            return lease
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        try:
            self._queue.arrive(request, now, now + wait_s)
        except QueueFull as error:
            raise NoReplica(503, f"{error}.", code="queue_full", retry_after_s=RETRY_AFTER_S) from None
        self._held[request.request_id] = future
        self._poll()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().fail(FailureKind.CANCELLED)
            raise
        finally:
            self._held.pop(request.request_id, None)
            self._queue.cancel(request.request_id)
            self.stats.num_queued = len(self._queue)

    def place_now(self, request: RouteRequest) -> Lease | None:
        """`place` without waiting; None where the policy may hold requests back. Raises NoReplica."""
        return self._place_now(request) if self._hold is None else None

    def _poll(self) -> None:
        """Let go what may go now, and wake up again when the next one has waited too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        polled = self._queue.poll(time.monotonic(), self._dispatch)
        for request in polled.expired:
            error = NoReplica(504, "The request waited too long for a replica.", code="queue_timeout")
            self._held[request.request_id].set_exception(error)
        self.stats.num_queued = len(self._queue)
        if (deadline := self._queue.next_deadline()) is not None:
            delay_s = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._poll)

    def _dispatch(self, request: RouteRequest) -> None:
        future = self._held[request.request_id]
        if future.done():
            return
        try:
            future.set_result(self._place_now(request))
        except NoReplica as error:
            future.set_exception(error)

    def gate_changed(self, replica: Replica) -> None:
        """Its gate may hold something back from now on."""
        self._gated.add(replica)

    def num_candidates(self, request: RouteRequest) -> int:
        return len(self._snapshot(request).replicas)

    def _snapshot(self, request: RouteRequest) -> FleetSnapshot:
        return self.fleet.snapshot(request, time.monotonic())

    def _place_now(self, request: RouteRequest) -> Lease:
        started = time.perf_counter()
        snapshot = self._snapshot(self._through_gates(request) if self._gated else request)
        if not snapshot.replicas:
            snapshot = self._snapshot(request)  # gates spread traffic, they don't refuse it
        if not snapshot.replicas:
            raise self._no_replica(request.model)
        decision = self.policy.choose(request, snapshot, self._rng)
        if self.shadows is not None:
            self.shadows.decide(request, snapshot, decision)
        replica = self.registry.get(decision.replica_id)
        chain = request.chains.get(replica.key_space)
        if chain is None:
            chain = PrefixChain((), max(1, replica.block_tokens), request.num_tokens)
        lease = Lease(self.emit, request, decision, chain, replica)
        self._metrics.route.observe(time.perf_counter() - started)
        self._metrics.decided(decision.policy, decision.reason)
        return lease

    def _through_gates(self, request: RouteRequest) -> RouteRequest:
        """The request with those replicas excluded whose gates are closed to it."""
        now = time.monotonic()
        self._gated = {replica for replica in self._gated if not replica.gate.is_plain(now)}
        ready = self.registry.ready(request.model)
        if not self._gated or not ready:
            return request
        mean = sum(replica.num_leases for replica in ready) / len(ready)
        closed = {
            replica.replica_id
            for replica in self._gated
            if not replica.gate.admits(now, replica.num_leases, mean, _place_of(request, replica))
        }
        return replace(request, excluded=request.excluded | closed) if closed else request

    def check_invariants(self) -> None:
        self.fleet.check_invariants()
        self._queue.check_invariants()
        held = self.stats.num_in_flight + self.num_remote_leases()
        assert held >= self.fleet.num_leases(), "a lease that no request holds"
        assert self.stats.num_queued == len(self._queue)
        assert len(self._queue) <= len(self._held), "each that waits in the queue has a caller that awaits it"
        self.registry.check_invariants()
        for replica in self.registry:
            assert (replica.replica_id in self.fleet.replica_ids()) == replica.joined

    def check_model(self, model: str, asked: str = "") -> None:
        """Raises NoReplica when no request for `model` can be placed now. `asked`: the client's own name for it."""
        if not self.registry.ready(model):
            raise self._no_replica(model, asked)

    def _no_replica(self, model: str, asked: str = "") -> NoReplica:
        known = self.registry.models()
        is_known = model in known
        if not is_known and self.registry.ready():
            wrong = f"The model {model[:128]!r} does not exist here"
            if asked and asked != model:
                wrong = f"{asked[:128]!r} stands for {model[:128]!r}, which no replica serves"
            return NoReplica(
                404,
                f"{wrong}; models served: {', '.join(known[:8])}.",
                param="model",
                code="model_not_found",
            )
        loading = any(replica.status is ReplicaStatus.LOADING for replica in self.registry)
        if not len(self.registry):
            message = "No replica is configured; start the gateway with --replica URL."
        elif loading:
            message = "No replica is ready yet: one is still loading its model. Try again shortly."
        else:
            message = "No replica is ready to take this request. Try again shortly."
        return NoReplica(503, message, code="no_replica", retry_after_s=RETRY_AFTER_S)


def _place_of(request: RouteRequest, replica: Replica) -> float:
    """The same for every request of a session, or for the same prompt; spread evenly over 0 to 1."""
    if not replica.gate.is_leaving:
        return 1.0
    chain = request.chains.get(replica.key_space)
    if request.session is None and chain is not None and chain.keys:
        return (chain.keys[-1] & 0xFFFFFFFF) / 2**32
    return zlib.crc32((request.session or request.request_id).encode()) / 2**32

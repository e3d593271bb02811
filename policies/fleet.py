"""The fleet as a machine without I/O or clock: events in, a snapshot for one request out.

Theory. Everything that the router knows comes in as an event (events.py); nothing else changes this state, so the
gateway and the simulator drive the same code, and a log of events replays to the same state. A replica is in one of
the states of ReplicaStatus; only READY ones appear in snapshots. What it holds is mirrored in the PrefixIndex, what it
is busy with in its ReplicaLoad, how fast it is in its SpeedModel:

    Joined        a new replica, or a changed description; another incarnation purges it first
    Restarted     index, leases, load and speed of the old process are gone
    Left          everything is gone
    Dispatched    a lease; its blocks predicted and pinned
    FirstToken    its blocks confirmed, load resynchronised, speed and capacity learned
    Finished      the lease is over, the blocks stay in the mirror as the youngest
    Failed        the lease is over; before the first token, what was predicted for it alone is refuted

Events about an unknown replica, and about a lease that is over, was purged or now lives on another replica, are late:
they are ignored. A second Dispatched for a live lease is a bug of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from policies.cost import SpeedModel
from policies.events import (
    BlocksCleared,
    BlocksRecalled,
    BlocksRemoved,
    BlocksStored,
    Dispatched,
    Event,
    Failed,
    FeedLost,
    Finished,
    FirstToken,
    Joined,
    Left,
    Restarted,
    StatsReported,
    StatusChanged,
)
from policies.fleet_config import FleetConfig
from policies.lease import Lease
from policies.load import ReplicaLoad
from policies.prefix_index import PrefixIndex
from policies.rate_book import RateBook
from policies.replica import Replica, ReplicaStats
from policies.retouch import Retouches
from policies.types import BlockKey, FleetSnapshot, KeySpace, ReplicaId, ReplicaStatus, RouteRequest
from policies.usual import Usual

__all__ = ["FleetConfig", "FleetState"]

NO_SPACE = KeySpace("")


class FleetState:
    """See the module's header. Not thread-safe: one driver, one thread."""

    def __init__(self, config: FleetConfig | None = None) -> None:
        self._config = config or FleetConfig()
        self._index = PrefixIndex(prediction_ttl_s=self._config.prediction_ttl_s, learns=self._config.mirror_learns)
        self._retouches = Retouches()
        self._replicas: dict[ReplicaId, Replica] = {}
        self._order: tuple[Replica, ...] = ()
        self._candidates: dict[str, tuple[Replica, ...]] = {}  # by model, as far as asked for
        self._leases: dict[str, Lease] = {}
        self._sequence = 0
        self._last_event_at = 0.0
        self._rates = RateBook()
        self._usual = Usual(self._config.initial_output_tokens)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Joined: self._joined,
            Left: self._left,
            Restarted: self._restarted,
            StatusChanged: self._status_changed,
            FirstToken: self._first_token,
            Failed: self._failed,
            StatsReported: self._stats_reported,
            BlocksStored: self._blocks_stored,
            BlocksRemoved: self._blocks_removed,
            BlocksCleared: self._blocks_cleared,
            FeedLost: self._feed_lost,
            BlocksRecalled: self._blocks_recalled,
        }

    # What drivers call

    def apply(self, event: Event) -> None:
        """Let one thing have happened. Late events are ignored."""
        if event.at > self._last_event_at:
            self._last_event_at = event.at
            self._index.advance(event.at)
        if isinstance(event, Dispatched):  # what every request brings goes without a look-up
            self._dispatched(event)
        elif isinstance(event, Finished):
            self._finished(event)
        else:
            self._handlers[type(event)](event)

    def snapshot(self, request: RouteRequest, now: float) -> FleetSnapshot:
        """The replicas that may take `request` now: READY, serving its model, not excluded; ordered by id."""
        self._index.expire(now)
        replicas = self._routable(request.model)
        if request.excluded:
            replicas = tuple([r for r in replicas if r.replica_id not in request.excluded])
        views, usual = [], self._usual
        held = nothing = self._index.nothing()
        matched: dict[KeySpace, list[int]] = {}
        space, num_tokens, block_tokens, most = NO_SPACE, request.num_tokens, 0, 0
        longest, chain = 0, None
        last: BlockKey | None = None  # of the longest match
        for replica in replicas:
            if replica.key_space is not space:  # of nearly all fleets only the first one's
                space = replica.key_space
                num_tokens, block_tokens, most, held = request.num_tokens, 0, 0, nothing
                chain = request.chains.get(space)
                if chain is not None:
                    num_tokens, block_tokens = chain.num_tokens, chain.block_tokens
                    # The last token is always computed, and so is a last block that this fills.
                    most = max(num_tokens - 1, 0) // block_tokens
                    if (known := matched.get(space)) is None:
                        known = matched[space] = self._index.match_slots(chain.keys)
                    held = known
            num_blocks = min(held[replica.slot], most)
            matched_tokens = num_blocks * block_tokens
            if matched_tokens > longest and chain is not None:
                longest, last = matched_tokens, chain.keys[num_blocks - 1]
            views.append(replica.view(num_tokens, matched_tokens, now, usual.num_output_tokens))
        num_alike = 0 if last is None else self._index.num_pins(last)
        return FleetSnapshot(now, self._sequence, tuple(views), usual.num_output_tokens, usual.queue, num_alike)

    def _routable(self, model: str) -> tuple[Replica, ...]:
        """The READY replicas that serve `model`."""
        found = self._candidates.get(model)
        if found is None:
            found = tuple([r for r in self._order if r.status is ReplicaStatus.READY and model in r.models])
            if found:  # a name that nobody serves is not kept: clients choose it
                self._candidates[model] = found
        return found

    def replica_ids(self) -> tuple[ReplicaId, ...]:
        return tuple(replica.replica_id for replica in self._order)

    def stats(self, replica_id: ReplicaId, now: float | None = None) -> ReplicaStats:
        """`now` ages the work clock; without it the time of the last event. Raises KeyError for an unknown replica."""
        return self._replicas[replica_id].stats(self._index, self._last_event_at if now is None else now)

    def num_leases(self) -> int:
        return len(self._leases)

    def has_lease(self, request_id: str) -> bool:
        return request_id in self._leases

    @property
    def index(self) -> PrefixIndex:
        """For reading alone."""
        return self._index

    def num_index_keys(self) -> int:
        return len(self._index)

    def check_invariants(self) -> None:
        self._index.check_invariants()
        self._retouches.check_invariants()
        for model, found in self._candidates.items():
            assert found == tuple(r for r in self._order if r.status is ReplicaStatus.READY and model in r.models)
        on_replicas: dict[str, Lease] = {}
        for replica in self._order:
            replica.load.check_invariants()
            for lease in (*replica.load.waiting.values(), *replica.load.running.values()):
                assert lease.replica_id == replica.replica_id
                on_replicas[lease.request_id] = lease
        assert on_replicas == self._leases, "a lease without a replica, or a load without its lease"
        assert [r.replica_id for r in self._order] == sorted(self._replicas)

    # Replicas come and go

    def _joined(self, event: Joined) -> None:
        self._candidates.clear()
        known = self._replicas.get(event.replica_id)
        if known is not None and known.incarnation == event.incarnation and known.key_space == event.key_space:
            known.rejoined(event)
            self._resize(known, event.num_blocks)
            self._rates.refresh(self._order)
            return
        if known is not None:
            self._purge(known)
        replica = Replica(
            event.replica_id, event.incarnation, event.models, event.key_space, event.block_tokens, event.num_blocks,
            event.status, ReplicaLoad(SpeedModel(), event.step_tokens, event.num_seats),
        )  # fmt: skip
        self._replicas[event.replica_id] = replica
        self._order = tuple(self._replicas[replica_id] for replica_id in sorted(self._replicas))
        self._mirror(replica)
        self._rates.refresh(self._order)

    def _left(self, event: Left) -> None:
        self._candidates.clear()
        replica = self._replicas.get(event.replica_id)
        if replica is not None:
            self._purge(replica)
            del self._replicas[event.replica_id]
            self._order = tuple(r for r in self._order if r is not replica)
            self._rates.refresh(self._order)

    def _restarted(self, event: Restarted) -> None:
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            return
        self._purge(replica)
        replica.incarnation = event.incarnation
        replica.num_blocks = event.num_blocks or replica.num_blocks
        replica.load = replica.load.anew(event.num_seats)
        replica.eviction_s = replica.typical_queue = replica.waited_s = 0.0
        self._mirror(replica)
        self._rates.refresh(self._order)

    def _status_changed(self, event: StatusChanged) -> None:
        replica = self._replicas.get(event.replica_id)
        if replica is not None:
            replica.status = event.status
            self._candidates.clear()

    def _purge(self, replica: Replica) -> None:
        for request_id in (*replica.load.waiting, *replica.load.running):
            del self._leases[request_id]
        replica.load.waiting.clear()
        replica.load.running.clear()
        self._index.remove(replica.replica_id)

    def _mirror(self, replica: Replica) -> None:
        guess = max(self._config.default_capacity_tokens // max(replica.block_tokens, 1), 1)
        self._index.add(replica.replica_id, replica.num_blocks, guess)
        replica.slot = self._index.slot(replica.replica_id)

    def _resize(self, replica: Replica, num_blocks: int | None) -> None:
        if num_blocks:
            replica.num_blocks = num_blocks
            self._index.resize(replica.replica_id, num_blocks)

    # Requests

    def _dispatched(self, event: Dispatched) -> None:
        replica = self._replicas.get(event.replica_id)
        self._sequence += 1
        if replica is None:
            return
        replica.load.advance(event.at)
        self._usual.dispatching(self._order, event.at)
        assert event.request_id not in self._leases, "a request dispatched twice without Failed in between"
        chain = event.chain
        matched = min(event.matched_tokens, max(chain.num_tokens - 1, 0))
        num_held, num_sure = self._index.pin(event.replica_id, chain.keys)
        prefill_s = replica.rates.prefill_s(chain.num_tokens - matched, matched)
        lease = Lease(
            event.request_id, event.replica_id, chain, matched, num_held, num_sure, prefill_s, event.at, event.streamed,
            replica.rates,
        )  # fmt: skip
        self._leases[event.request_id] = lease
        replica.load.dispatched(lease)
        self._retouches.touched(chain, event.at)
        if not self._config.mirror_pins:
            self._index.unpin(event.replica_id, chain.keys, event.at)
        self._cache_changed(replica)

    def _first_token(self, event: FirstToken) -> None:
        lease = self._live_lease(event.request_id, event.replica_id)
        if lease is not None:
            self._started(lease, event.at, event.cached_tokens)

    def _started(self, lease: Lease, at: float, cached_tokens: int | None) -> None:
        """The first token is here: whatever was predicted of this request's prefill is now known."""
        replica = self._replicas[lease.replica_id]
        self._index.computed(lease.replica_id, lease.chain.keys)
        self._realised(lease, cached_tokens)
        if replica.load.first_token(lease, at, cached_tokens):
            self._rates.learned(replica, self._order)

    def _realised(self, lease: Lease, cached_tokens: int | None) -> None:
        if cached_tokens is not None:
            num_cached = ceil(cached_tokens / max(lease.chain.block_tokens, 1))
            self._index.realised(lease.replica_id, lease.take_sure_blocks(), num_cached)

    def _finished(self, event: Finished) -> None:
        lease = self._live_lease(event.request_id, event.replica_id)
        if lease is None:
            return
        self._index.computed(lease.replica_id, lease.chain.keys)
        self._realised(lease, event.cached_tokens)
        self._usual.finished(event.num_output_tokens)
        self._end(lease, event.at, event.num_output_tokens, keep_blocks=None)

    def _failed(self, event: Failed) -> None:
        lease = self._live_lease(event.request_id, event.replica_id)
        if lease is not None:
            computed = lease.first_token_at is not None
            self._end(lease, event.at, None, keep_blocks=None if computed else lease.num_held_blocks)

    def _end(self, lease: Lease, at: float, num_output_tokens: int | None, keep_blocks: int | None) -> None:
        del self._leases[lease.request_id]
        replica = self._replicas[lease.replica_id]
        if self._config.mirror_pins:
            self._index.unpin(lease.replica_id, lease.chain.keys, at, keep_blocks)
        if replica.load.ended(lease, at, num_output_tokens):
            self._rates.learned(replica, self._order)
        self._cache_changed(replica)

    def _live_lease(self, request_id: str, replica_id: ReplicaId) -> Lease | None:
        lease = self._leases.get(request_id)
        return lease if lease is not None and lease.replica_id == replica_id else None

    def _cache_changed(self, replica: Replica) -> None:
        """Room for what runs, and what one more token costs in what it pushes out."""
        if replica.num_blocks and self._config.mirror_outputs:
            num_in_flight = len(replica.load.waiting) + len(replica.load.running)
            per_request = ceil(self._usual.num_output_tokens / max(replica.block_tokens, 1))
            self._index.reserve(replica.replica_id, num_in_flight * per_request)
        idle_s = self._index.idle_s(replica.replica_id)
        replica.eviction_s = 0.0 if idle_s is None else self._retouches.lost_s(idle_s, replica.rates)

    # Reports

    def _stats_reported(self, event: StatsReported) -> None:
        replica = self._replicas.get(event.replica_id)
        if replica is not None:
            self._resize(replica, event.num_blocks)
            replica.load.reported(event, replica.rates)

    def _blocks_stored(self, event: BlocksStored) -> None:
        if event.replica_id in self._replicas:
            self._index.store(event.replica_id, event.keys)

    def _blocks_removed(self, event: BlocksRemoved) -> None:
        if event.replica_id in self._replicas:
            self._index.discard(event.replica_id, event.keys)

    def _blocks_cleared(self, event: BlocksCleared) -> None:
        if event.replica_id in self._replicas:
            self._index.clear(event.replica_id)

    def _feed_lost(self, event: FeedLost) -> None:
        if event.replica_id in self._replicas:
            self._index.lose_feed(event.replica_id)

    def _blocks_recalled(self, event: BlocksRecalled) -> None:
        if event.replica_id in self._replicas:
            self._index.recall(event.replica_id, event.keys, event.used_at)

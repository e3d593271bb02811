"""One replica as FleetState keeps it, and what it tells about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.cost import SpeedModel
from policies.events import Joined
from policies.load import ReplicaLoad
from policies.prefix_index import PrefixIndex
from policies.types import KeySpace, Rates, ReplicaId, ReplicaStatus, ReplicaView


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What the router believes about one replica, for metrics and `explain`. `expected_prefill_tokens`: of the queued
    ones, those of our own requests whose first token will be seen."""

    replica_id: ReplicaId
    incarnation: str
    status: ReplicaStatus
    num_waiting: int
    num_running: int
    queued_prefill_tokens: int
    queued_prefill_s: float
    kv_usage: float
    num_index_blocks: int
    index_capacity_blocks: int
    authoritative: bool
    trust: float
    rates: Rates
    expected_prefill_tokens: int = 0


@dataclass(slots=True)
class Replica:
    """Description and state of one replica."""

    replica_id: ReplicaId
    incarnation: str
    models: frozenset[str]
    key_space: KeySpace
    block_tokens: int
    num_blocks: int
    status: ReplicaStatus
    load: ReplicaLoad
    rates: Rates = field(default_factory=lambda: SpeedModel().own_rates())
    eviction_s: float = 0.0
    typical_queue: float = 0.0  # see usual.py
    waited_s: float = 0.0  # by all its requests together, from a dispatch in the fleet to the next, the mean
    slot: int = -1  # in the prefix index

    def view(self, num_tokens: int, matched_tokens: int, now: float, answer_tokens: float) -> ReplicaView:
        """The replica as a policy sees it for a request of which it holds `matched_tokens`. Runs for every replica at
        every decision, hence the figures kept in `load`."""
        load = self.load
        if now >= load.stale_at:
            load.refresh(now, self.num_blocks)
        queued_s, overtaken_s, seat_wait_s = load.clear_at - now, 0.0, 0.0
        is_taken = 0 < load.num_seats <= load.num_waiting + load.num_running
        if is_taken or (queued_s > 0.0 and load.clock.step_tokens):
            prefill_s = self.rates.prefill_s(num_tokens - matched_tokens, matched_tokens)
            if queued_s > 0.0:
                overtaken_s = min(load.overtaken_s(prefill_s, now), queued_s)
            if is_taken:
                seat_wait_s = load.seat_wait_s(prefill_s, now, answer_tokens, self.rates)
        return ReplicaView(
            self.replica_id,
            self.incarnation,
            num_tokens,
            matched_tokens,
            load.queued_prefill_tokens,
            queued_s if queued_s > 0.0 else 0.0,
            load.num_waiting,
            load.num_running,
            load.kv_usage,
            self.rates,
            self.eviction_s,
            overtaken_s,
            self.typical_queue,
            seat_wait_s,
        )

    def rejoined(self, event: Joined) -> None:
        """The same process says anew what it is."""
        self.models, self.status = event.models, event.status
        self.load.told(event.step_tokens, event.num_seats)

    def stats(self, index: PrefixIndex, now: float) -> ReplicaStats:
        load = self.load.figures(now, self.num_blocks)
        return ReplicaStats(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            status=self.status,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            queued_prefill_tokens=load.queued_prefill_tokens,
            queued_prefill_s=load.queued_prefill_s,
            kv_usage=load.kv_usage,
            num_index_blocks=index.num_blocks(self.replica_id),
            index_capacity_blocks=index.capacity(self.replica_id),
            authoritative=index.authoritative(self.replica_id),
            trust=index.trust(self.replica_id),
            rates=self.rates,
            expected_prefill_tokens=self.load.expected_prefill_tokens(),
        )

"""AIBrix's `prefix-cache` routing.

If the busiest replica has more than 8 requests above the idlest, the fewest requests win. Otherwise the replicas that
match the prompt are tried from the longest match (then the fewest requests) down; the first whose requests are at most
the fleet's mean plus one standard deviation takes the request. If none is left, the fewest requests win. (Later
versions trip the gate when the most exceed twice (mean + 1) and lie 8 above the fewest, and then still look for a
match among the idlest replicas alone: `relative_gate`.)

What is where comes from the router's own table of block hashes, one for all replicas: 200,000 blocks of 128 characters
at most (a token is taken for 4 characters), the least recently used dropped for every replica at once, each 20 minutes
after its last use. Prompts are entered root first, so a root goes before its tail, and the tail is then out of reach.

Known weakness: counts stand for load, so one long prompt weighs as much as one short one. And the table may be smaller
than the fleet's caches: on the agents of loadtest/sim/compare.py that costs .04 of the hit ratio (.82 in place of .86,
as much as with a perfect picture of every cache).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from policies.decide import decision, least_requests
from policies.events import Dispatched, Event, Joined
from policies.peers.memory import ReplicaMemory
from policies.types import BlockKey, Decision, FleetSnapshot, ReplicaId, ReplicaView, RouteRequest, Score


@dataclass(frozen=True, slots=True)
class AibrixConfig:
    """`imbalance_requests` and `deviation_factor` as the peer's settings; `table_tokens` is its table's size."""

    imbalance_requests: int = 8
    deviation_factor: float = 1.0
    table_tokens: int = 200_000 * 128 // 4
    ttl_s: float = 1200.0
    relative_gate: bool = False


class BlockTable:
    """Block keys, the least recently used first, and the replicas that each was sent to."""

    def __init__(self, max_tokens: int, ttl_s: float) -> None:
        self._max_tokens = max_tokens
        self._ttl_s = ttl_s
        self._blocks: OrderedDict[BlockKey, tuple[float, int, set[ReplicaId]]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, keys: Sequence[BlockKey], block_tokens: int, replica_id: ReplicaId, at: float) -> None:
        """`replica_id` was sent this prompt."""
        for key in keys:
            known = self._blocks.pop(key, None)
            if known is None:
                self._num_tokens += block_tokens
                known = (at, block_tokens, set())
            known[2].add(replica_id)
            self._blocks[key] = (at, known[1], known[2])
        self._expire(at)

    def _expire(self, at: float) -> None:
        while self._blocks:
            key, (used_at, block_tokens, _) = next(iter(self._blocks.items()))
            if self._num_tokens <= self._max_tokens and used_at + self._ttl_s > at:
                return
            del self._blocks[key]
            self._num_tokens -= block_tokens

    def match(self, keys: Sequence[BlockKey], candidates: Container[ReplicaId], at: float) -> dict[ReplicaId, int]:
        """Leading blocks of `keys` at each of `candidates` that has any."""
        found: dict[ReplicaId, int] = {}
        left: set[ReplicaId] | None = None
        for place, key in enumerate(keys, start=1):
            used_at, _, holders = self._blocks.get(key, (at, 0, frozenset[ReplicaId]()))
            if used_at + self._ttl_s <= at:
                break
            left = {r for r in holders if r in candidates} if left is None else left & holders
            if not left:
                break
            found.update(dict.fromkeys(left, place))
        return found

    def forget(self, replica_id: ReplicaId) -> None:
        for _, _, holders in self._blocks.values():
            holders.discard(replica_id)

    def check_invariants(self) -> None:
        assert self._num_tokens == sum(block_tokens for _, block_tokens, _ in self._blocks.values())
        assert self._num_tokens <= self._max_tokens
        times = [used_at for used_at, _, _ in self._blocks.values()]
        assert times == sorted(times), "the table is not in the order of use"


class Aibrix:
    name = "aibrix"

    def __init__(self, config: AibrixConfig | None = None) -> None:
        self._config = config or AibrixConfig()
        self._table = BlockTable(self._config.table_tokens, self._config.ttl_s)
        self._members: ReplicaMemory[None] = ReplicaMemory(_nothing, self._table.forget)

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """`reason`: imbalance (the gate tripped), warm (a match within the bound), balance (every match is too busy)
        or cold (no match)."""
        views: Sequence[ReplicaView] = fleet.replicas
        imbalanced = self._is_imbalanced(views)
        if imbalanced:
            fewest = min(view.num_in_flight for view in views)
            views = [view for view in views if view.num_in_flight == fewest]
            if not self._config.relative_gate:
                return decision(self.name, least_requests(views, rng), fleet, "imbalance")
        matches = self._matches(request, fleet, views)
        bound = self._bound(fleet)
        scores = tuple(
            Score(v.replica_id, -matches.get(v.replica_id, 0.0), {"in_flight": float(v.num_in_flight), "bound": bound})
            for v in fleet.replicas
        )
        matched = [view for view in views if view.replica_id in matches]
        rng.shuffle(matched)
        matched.sort(key=lambda view: (-matches[view.replica_id], view.num_in_flight))
        for view in matched:
            if view.num_in_flight <= bound:
                return decision(self.name, view, fleet, "imbalance" if imbalanced else "warm", scores)
        reason = "imbalance" if imbalanced else "balance" if matched else "cold"
        return decision(self.name, least_requests(fleet.replicas, rng), fleet, reason, scores)

    def observe(self, event: Event) -> None:
        self._members.observe(event)
        if isinstance(event, Dispatched) and self._members.joined(event.replica_id) is not None:
            self._table.add(event.chain.keys, event.chain.block_tokens, event.replica_id, event.at)

    def _is_imbalanced(self, views: Sequence[ReplicaView]) -> bool:
        loads = [view.num_in_flight for view in views]
        gap = max(loads) - min(loads)
        if self._config.relative_gate:
            return gap >= self._config.imbalance_requests and max(loads) > 2.0 * (fmean(loads) + 1.0)
        return gap > self._config.imbalance_requests

    def _bound(self, fleet: FleetSnapshot) -> float:
        loads = [view.num_in_flight for view in fleet.replicas]
        return fmean(loads) + self._config.deviation_factor * pstdev(loads)

    def _matches(
        self, request: RouteRequest, fleet: FleetSnapshot, views: Sequence[ReplicaView]
    ) -> dict[ReplicaId, float]:
        """The matched share of the prompt at each of `views` that has any, in whole percent as the peer counts."""
        by_space: dict[str, set[ReplicaId]] = {}
        for view in views:
            joined = self._members.joined(view.replica_id)
            if joined is not None:
                by_space.setdefault(joined.key_space, set()).add(view.replica_id)
        shares: dict[ReplicaId, float] = {}
        for space, chain in request.chains.items():
            found = self._table.match(chain.keys, by_space.get(space, set()), fleet.now)
            shares |= {replica_id: float(n * 100 // len(chain.keys)) for replica_id, n in found.items()}
        return shares

    def check_invariants(self) -> None:
        self._members.check_invariants()
        self._table.check_invariants()
        known = {replica_id for replica_id, _ in self._members.items()}
        assert all(holders <= known for _, _, holders in self._table._blocks.values())


def _nothing(_: Joined) -> None:
    return None

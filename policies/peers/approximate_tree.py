"""The approximate tree of SGLang's gateway (`cache_aware`).

The rule keeps a radix tree of the prompts that it sent to each replica. When the loads are uneven (max - min > 64
requests and max > 1.5 min) the fewest requests win and the tree is not asked. Otherwise the replica with the longest
match takes the request if it matches more than 0.3 of the prompt (0.5 in older versions); if not, the replica with the
smallest tree does, as the one with most room. Later versions take the fewest requests there instead
(`below_threshold="load"`). Every prompt is inserted where it was sent; every 120 seconds the least recently used
leaves go, down to 67,108,864 characters a replica. (A token is taken for 4 characters.)

Among several replicas with the same longest match the peer takes the first in a hash map's order, so an arbitrary one
but always the same for that prefix; here the order is a hash of the prefix and the replica.

Known weaknesses: loads are counts, whatever a request costs; as long as the gate holds, a prefix sticks to its replica
without bound; when it trips, all locality is dropped at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from policies.decide import decision, least, least_requests
from policies.events import Dispatched, Event
from policies.peers.memory import HeldPrefixes, ReplicaMemory, matched_tokens, no_prefixes
from policies.peers.ring import hash_of, key_hash
from policies.types import Decision, FleetSnapshot, ReplicaView, RouteRequest, Score

CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class ApproximateTreeConfig:
    """Thresholds as the peer's flags call them; `max_tree_tokens` is its maximum tree size."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_s: float = 120.0
    max_tree_tokens: int = 67_108_864 // CHARACTERS_PER_TOKEN
    below_threshold: Literal["smallest_tree", "load"] = "smallest_tree"

    def __post_init__(self) -> None:
        if self.below_threshold not in ("smallest_tree", "load"):
            raise ValueError(f"below_threshold={self.below_threshold!r} is neither smallest_tree nor load")


class ApproximateTree:
    name = "approximate_tree"

    def __init__(self, config: ApproximateTreeConfig | None = None) -> None:
        self._config = config or ApproximateTreeConfig()
        self._trees: ReplicaMemory[HeldPrefixes] = ReplicaMemory(no_prefixes)
        self._next_eviction_at: float | None = None

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """`reason`: imbalance (the gate tripped), warm (the longest match), or cold (no match is long enough)."""
        if self._is_imbalanced(fleet):
            return decision(self.name, least_requests(fleet.replicas, rng), fleet, "imbalance")
        found = matched_tokens(self._trees, request, fleet)
        longest = max(tokens for _, tokens in found)
        scores = tuple(
            Score(v.replica_id, -tokens / max(v.num_tokens, 1), {"matched": float(tokens)}) for v, tokens in found
        )
        if longest > self._config.cache_threshold * request.num_tokens:
            holders = [view for view, tokens in found if tokens == longest]
            return decision(self.name, self._any_holder(request, holders), fleet, "warm", scores)
        if self._config.below_threshold == "load":
            return decision(self.name, least_requests(fleet.replicas, rng), fleet, "cold", scores)
        return decision(self.name, least(fleet.replicas, self._tree_tokens, rng), fleet, "cold", scores)

    def observe(self, event: Event) -> None:
        self._trees.observe(event)
        if not isinstance(event, Dispatched):
            return
        tree = self._trees.get(event.replica_id)
        if tree is not None:
            tree.touch(event.chain.keys)
        if self._next_eviction_at is None:
            self._next_eviction_at = event.at + self._config.eviction_interval_s
        elif event.at >= self._next_eviction_at:
            self._next_eviction_at = event.at + self._config.eviction_interval_s
            self._evict()

    def _is_imbalanced(self, fleet: FleetSnapshot) -> bool:
        loads = [view.num_in_flight for view in fleet.replicas]
        most, fewest = max(loads), min(loads)
        return most - fewest > self._config.balance_abs_threshold and most > self._config.balance_rel_threshold * fewest

    def _any_holder(self, request: RouteRequest, holders: list[ReplicaView]) -> ReplicaView:
        def order(view: ReplicaView) -> int:
            tree, chain = self._trees.get(view.replica_id), self._trees.chain(request, view.replica_id)
            assert tree is not None
            assert chain is not None
            return key_hash(chain.keys[tree.match(chain.keys) - 1], hash_of(view.replica_id))

        return min(holders, key=order)

    def _tree_tokens(self, view: ReplicaView) -> float:
        tree, joined = self._trees.get(view.replica_id), self._trees.joined(view.replica_id)
        return len(tree) * joined.block_tokens if tree is not None and joined is not None else 0.0

    def _evict(self) -> None:
        for replica_id, tree in self._trees.items():
            joined = self._trees.joined(replica_id)
            assert joined is not None
            tree.evict_to(self._config.max_tree_tokens // max(joined.block_tokens, 1))

    def check_invariants(self) -> None:
        self._trees.check_invariants()

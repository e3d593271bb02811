"""vLLM production-stack's `prefixaware` routing.

A trie of hashed chunks (128 characters) remembers which replicas each prefix was sent to. A request goes to one of the
replicas at the end of its longest match, by chance; without any match to any replica. It is then entered there. Nothing
is ever taken out.

Chunks are whole blocks here. So that memory ends somewhere, each replica's trie is bounded by `max_blocks`, far above
what a replica caches.

Known weaknesses: load plays no part, so a popular prefix drowns its replica; and the trie promises what the engine has
long evicted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from policies.decide import decision, pick
from policies.events import Dispatched, Event
from policies.peers.memory import HeldPrefixes, ReplicaMemory, matched_tokens, no_prefixes
from policies.types import Decision, FleetSnapshot, RouteRequest, Score


@dataclass(frozen=True, slots=True)
class ProductionStackConfig:
    """`min_match_tokens`: shorter matches count for nothing (the peer's default is 0)."""

    min_match_tokens: int = 0
    max_blocks: int = 2_000_000


class ProductionStack:
    name = "production_stack"

    def __init__(self, config: ProductionStackConfig | None = None) -> None:
        self._config = config or ProductionStackConfig()
        self._tries: ReplicaMemory[HeldPrefixes] = ReplicaMemory(no_prefixes)

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """`reason`: warm (the longest match) or cold (none)."""
        found = matched_tokens(self._tries, request, fleet)
        longest = max(tokens for _, tokens in found)
        if longest < self._config.min_match_tokens:
            longest = 0
        holders = [view for view, tokens in found if tokens >= longest]
        scores = tuple(Score(view.replica_id, -float(tokens)) for view, tokens in found)
        return decision(self.name, pick(holders, rng), fleet, "warm" if longest else "cold", scores)

    def observe(self, event: Event) -> None:
        self._tries.observe(event)
        if isinstance(event, Dispatched) and (trie := self._tries.get(event.replica_id)) is not None:
            trie.touch(event.chain.keys)
            trie.evict_to(self._config.max_blocks)

    def check_invariants(self) -> None:
        self._tries.check_invariants()
        assert all(len(trie) <= self._config.max_blocks for _, trie in self._tries.items())

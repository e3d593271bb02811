"""Consistent hashing with bounded loads on the first blocks of the prompt, as KubeAI's `PrefixHash`.

The first characters of the prompt (100 by default, about 25 tokens) are hashed onto a ring with 256 points a replica;
clockwise from there, the first replica whose requests in flight, this one included, stay within 1.25 times the mean of
all takes it. When none does, the first on the ring.

Whole blocks have keys here, so the prefix hashed is the first block where blocks are longer than 25 tokens. A prompt
without a full block cannot be hashed and goes to the least loaded.

Known weakness: a first block that every prompt has (a system prompt) sends everything to one place on the ring, and
only the bound spreads it, regardless of what is cached where.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from policies.decide import decision, least_requests
from policies.peers.ring import clockwise, key_hash, ring_of
from policies.types import Decision, FleetSnapshot, PrefixChain, ReplicaView, RouteRequest, Score


@dataclass(frozen=True, slots=True)
class BoundedHashConfig:
    """`load_factor`: share of the mean load that a replica may have; `num_points` on the ring for each replica;
    `prefix_tokens`: how much of the prompt is hashed."""

    load_factor: float = 1.25
    num_points: int = 256
    prefix_tokens: int = 25


class BoundedHash:
    name = "bounded_hash"

    def __init__(self, config: BoundedHashConfig | None = None) -> None:
        self._config = config or BoundedHashConfig()

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """`reason`: hash (the first on the ring), bounded (one further round), or load (nothing to hash)."""
        chain = _first_chain(request)
        if chain is None:
            return decision(self.name, least_requests(fleet.replicas, rng), fleet, "load")
        num_blocks = min(max(self._config.prefix_tokens // chain.block_tokens, 1), len(chain.keys))
        ring = ring_of(tuple(v.replica_id for v in fleet.replicas), self._config.num_points)
        by_id = {view.replica_id: view for view in fleet.replicas}
        order = [by_id[name] for name in clockwise(ring, key_hash(chain.keys[num_blocks - 1]))]
        bound = self._config.load_factor * (sum(v.num_in_flight for v in order) + 1) / len(order)
        chosen = next((view for view in order if view.num_in_flight + 1 <= bound), order[0])
        return decision(
            self.name, chosen, fleet, "hash" if chosen is order[0] else "bounded", _scores(fleet.replicas, bound)
        )


def _first_chain(request: RouteRequest) -> PrefixChain | None:
    """The prompt's chain in any one key space, always the same one."""
    spaces = sorted(space for space, chain in request.chains.items() if chain.keys)
    return request.chains[spaces[0]] if spaces else None


def _scores(views: tuple[ReplicaView, ...], bound: float) -> tuple[Score, ...]:
    return tuple(
        Score(v.replica_id, float(v.num_in_flight), {"in_flight": float(v.num_in_flight), "bound": bound})
        for v in views
    )

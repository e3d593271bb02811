"""NVIDIA Dynamo's KV router.

    cost = scale x max(active prefill + prompt - overlap, 0) + decode          (in KV blocks; the minimum wins)

active prefill  uncached prompt blocks of requests there without a first token yet
overlap         blocks of the prompt that the replica holds (from KV events, so this router's own index)
decode          blocks of the active requests there with this one among them, each distinct block once; those of the
                prompt only (by default output blocks are not tracked), and freed at a request's end

Temperature 0 (the default) takes the minimum, ties by chance; above it, a softmax over costs normalised to their range
draws. `prefill_load_scale` is 1 by default.

Known weakness: a decode block weighs as much as a block to prefill, so with long prompts the running ones swamp the
overlap and conversations wander.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

from policies.decide import decision, least_score, reason_of
from policies.events import Dispatched, Event, Failed, Finished, Joined
from policies.peers.memory import ReplicaMemory, leading
from policies.types import BlockKey, Decision, FleetSnapshot, PrefixChain, ReplicaId, ReplicaView, RouteRequest, Score


@dataclass(frozen=True, slots=True)
class DynamoConfig:
    prefill_load_scale: float = 1.0
    temperature: float = 0.0


@dataclass(slots=True)
class ActiveBlocks:
    """The blocks of a replica's active requests: full ones shared by key, begun ones each its own."""

    block_tokens: int
    uses: Counter[BlockKey] = field(default_factory=Counter)
    num_begun: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.uses) + self.num_begun

    def with_prompt(self, chain: PrefixChain) -> int:
        """Blocks if a request with this prompt ran too."""
        return self.num_blocks + len(chain.keys) - leading(self.uses, chain.keys) + _begun(chain)

    def add(self, chain: PrefixChain) -> None:
        self.uses.update(chain.keys)
        self.num_begun += _begun(chain)

    def remove(self, chain: PrefixChain) -> None:
        for key in chain.keys:
            self.uses[key] -= 1
            if not self.uses[key]:
                del self.uses[key]
        self.num_begun -= _begun(chain)


class Dynamo:
    name = "dynamo"

    def __init__(self, config: DynamoConfig | None = None) -> None:
        self._config = config or DynamoConfig()
        self._active: ReplicaMemory[ActiveBlocks] = ReplicaMemory(_no_blocks, self._forget)
        self._leases: dict[str, tuple[ReplicaId, PrefixChain]] = {}

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        scores = tuple(self._score(request, view) for view in fleet.replicas)
        if self._config.temperature > 0.0 and len(scores) > 1:
            chosen = self._draw(fleet, scores, rng)
        else:
            chosen = least_score(fleet, scores, rng)
        return decision(self.name, chosen, fleet, reason_of(chosen, fleet), scores)

    def observe(self, event: Event) -> None:
        self._active.observe(event)
        if isinstance(event, Dispatched):
            active = self._active.get(event.replica_id)
            if active is not None:
                active.add(event.chain)
                self._leases[event.request_id] = (event.replica_id, event.chain)
        elif isinstance(event, Finished | Failed):
            replica_id, chain = self._leases.get(event.request_id, (None, None))
            if replica_id == event.replica_id and chain is not None:
                del self._leases[event.request_id]
                active = self._active.get(event.replica_id)
                assert active is not None, "a lease outlived its replica"
                active.remove(chain)

    def _score(self, request: RouteRequest, view: ReplicaView) -> Score:
        active, chain = self._active.get(view.replica_id), self._active.chain(request, view.replica_id)
        block_tokens = chain.block_tokens if chain else active.block_tokens if active else 1
        prompt_tokens = view.queued_prefill_tokens + view.num_tokens - view.matched_tokens
        prefill = self._config.prefill_load_scale * max(prompt_tokens, 0) / block_tokens
        running = active.num_blocks if active else 0
        if active and chain:
            decode = float(active.with_prompt(chain))
        else:
            decode = running + math.ceil(view.num_tokens / block_tokens)
        return Score(view.replica_id, prefill + decode, {"prefill": prefill, "decode": float(decode)})

    def _draw(self, fleet: FleetSnapshot, scores: tuple[Score, ...], rng: random.Random) -> ReplicaView:
        lowest, highest = min(s.total for s in scores), max(s.total for s in scores)
        spread = (highest - lowest) * self._config.temperature or 1.0
        weights = [math.exp((lowest - score.total) / spread) for score in scores]
        return rng.choices(fleet.replicas, weights)[0]

    def _forget(self, replica_id: ReplicaId) -> None:
        self._leases = {rid: lease for rid, lease in self._leases.items() if lease[0] != replica_id}

    def check_invariants(self) -> None:
        self._active.check_invariants()
        for replica_id, active in self._active.items():
            chains = [chain for where, chain in self._leases.values() if where == replica_id]
            assert active.uses == Counter(key for chain in chains for key in chain.keys)
            assert active.num_begun == sum(map(_begun, chains))
        assert {where for where, _ in self._leases.values()} <= {replica_id for replica_id, _ in self._active.items()}


def _begun(chain: PrefixChain) -> int:
    """1 if the prompt ends inside a block."""
    return int(chain.num_tokens > len(chain.keys) * chain.block_tokens)


def _no_blocks(joined: Joined) -> ActiveBlocks:
    return ActiveBlocks(max(joined.block_tokens, 1))

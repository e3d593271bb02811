"""DualMap (Yuan et al., 2026): two candidates by two hashes of the prefix.

Two hash rings map the head of the prompt to two replicas, so prompts that share it meet again and others spread by the
power of two choices. Of the two the one with more of the prompt cached takes it, unless its expected time to first
token misses the objective: then the one with the shorter.

The head is as short as it may be: one block, and longer where a prefix is hot (above 6.12 % of the last 200 requests,
once there are 20), so that a system prompt everybody has doesn't bind all to two replicas; shorter again when the
prefix before it falls below 2 %.

(Moving requests that wait to their other candidate needs a queue before the replicas, and is left out.)

Known weakness: only two choices. When both drown, the rest of the fleet may idle.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from policies.decide import decision, least_requests, own_prefill_s, pick
from policies.events import Dispatched, Event, Joined
from policies.peers.memory import ReplicaMemory
from policies.peers.ring import clockwise, key_hash, ring_of
from policies.types import BlockKey, Decision, FleetSnapshot, PrefixChain, ReplicaView, RouteRequest, Score


@dataclass(frozen=True, slots=True)
class DualMapConfig:
    """`ttft_objective_s` decides between affinity and load; `num_points` on each ring for a replica."""

    ttft_objective_s: float = 5.0
    num_points: int = 100
    window: int = 200
    min_samples: int = 20
    hot_share: float = 0.0612
    cold_share: float = 0.02


class HotPrefixes:
    """How many blocks of a prompt are hashed. Of every request in the window, each prefix up to one block past its
    head is counted; a hot one is `expanded`: prompts that share it are told apart by their next block."""

    def __init__(self, config: DualMapConfig) -> None:
        self._config = config
        self._expanded: set[BlockKey] = set()
        self._window: deque[tuple[BlockKey, ...]] = deque()
        self._counts: Counter[BlockKey] = Counter()

    def depth(self, keys: tuple[BlockKey, ...]) -> int:
        """Blocks in the head of this prompt, at least one."""
        depth = 1
        while depth < len(keys) and keys[depth - 1] in self._expanded:
            depth += 1
        return depth

    def add(self, keys: tuple[BlockKey, ...]) -> None:
        path = keys[: self.depth(keys)]
        self._window.append(path)
        self._counts.update(path)
        if len(self._window) > self._config.window:
            self._drop(self._window.popleft())
        if len(self._window) < self._config.min_samples:
            return
        if self._share(path[-1]) >= self._config.hot_share and len(path) < len(keys):
            self._expanded.add(path[-1])

    def _drop(self, path: tuple[BlockKey, ...]) -> None:
        for key in path:
            self._counts[key] -= 1
            if key in self._expanded and self._share(key) < self._config.cold_share:
                self._expanded.discard(key)
            if not self._counts[key]:
                del self._counts[key]

    def _share(self, key: BlockKey) -> float:
        return self._counts[key] / len(self._window) if self._window else 0.0

    def check_invariants(self) -> None:
        assert len(self._window) <= self._config.window
        assert self._counts == Counter(key for path in self._window for key in path)
        assert self._expanded <= self._counts.keys(), "a prefix that left the window is still expanded"


class DualMap:
    name = "dualmap"

    def __init__(self, config: DualMapConfig | None = None) -> None:
        self._config = config or DualMapConfig()
        self._members: ReplicaMemory[None] = ReplicaMemory(_nothing)
        self._hot = HotPrefixes(self._config)

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """`reason`: warm (affinity), balance (affinity would miss the objective) or load (nothing to hash)."""
        chain = _hashed_chain(request)
        if chain is None:
            return decision(self.name, least_requests(fleet.replicas, rng), fleet, "load")
        candidates = self._candidates(chain, fleet)
        scores = tuple(
            Score(v.replica_id, _ttft_s(v), {"queue": v.queued_prefill_s, "prefill": own_prefill_s(v)})
            for v in candidates
        )
        most = max(view.matched_tokens for view in candidates)
        holders = [view for view in candidates if view.matched_tokens == most]
        warmest = holders[0] if len(holders) == 1 else _emptier(holders, rng)
        if _ttft_s(warmest) <= self._config.ttft_objective_s:
            return decision(self.name, warmest, fleet, "warm", scores)
        return decision(self.name, min(candidates, key=_ttft_s), fleet, "balance", scores)

    def observe(self, event: Event) -> None:
        self._members.observe(event)
        if not isinstance(event, Dispatched) or self._members.joined(event.replica_id) is None:
            return
        if event.chain.keys:
            self._hot.add(event.chain.keys)

    def _candidates(self, chain: PrefixChain, fleet: FleetSnapshot) -> list[ReplicaView]:
        """The replicas that the two rings name; another one from the second where they agree."""
        by_id = {view.replica_id: view for view in fleet.replicas}
        key, ids = chain.keys[self._hot.depth(chain.keys) - 1], tuple(by_id)
        first = next(clockwise(ring_of(ids, self._config.num_points, 1), key_hash(key, 1)))
        others = clockwise(ring_of(ids, self._config.num_points, 2), key_hash(key, 2))
        second = next((name for name in others if name != first), None)
        return [by_id[name] for name in (first, second) if name is not None]

    def check_invariants(self) -> None:
        self._members.check_invariants()
        self._hot.check_invariants()


def _hashed_chain(request: RouteRequest) -> PrefixChain | None:
    spaces = sorted(space for space, chain in request.chains.items() if chain.keys)
    return request.chains[spaces[0]] if spaces else None


def _ttft_s(view: ReplicaView) -> float:
    return view.queued_prefill_s + own_prefill_s(view)


def _emptier(views: list[ReplicaView], rng: random.Random) -> ReplicaView:
    fewest = min(view.kv_usage for view in views)
    return pick([view for view in views if view.kv_usage == fewest], rng)


def _nothing(_: Joined) -> None:
    return None

"""Preble's E2 (exploitation and exploration; Srivatsa et al., 2024).

The router keeps a radix tree of prompts a replica, an LRU of the replica's size. Is more of the prompt matched than
not, it *exploits*: the replica with the longest match, among several the least loaded. Otherwise it *explores*: the
least of

    load       the window's (3 minutes) prefill seconds of what was sent there, plus decode seconds of what runs there
    eviction   prefill seconds of the blocks that this prompt would push out, each times the share of the window's
               requests that used it
    prefill    seconds for the part that this replica doesn't hold

(The rebalancing after placement is left out, as it is switched off in the authors' code.)

Known weakness: a window of history is not a backlog. A replica that has just finished its work looks as busy as one
that is drowning.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from policies.decide import decision, least_score, pick
from policies.events import Dispatched, Event, Joined
from policies.peers.memory import HeldPrefixes, ReplicaMemory, matched_tokens, no_prefixes
from policies.types import BlockKey, Decision, FleetSnapshot, ReplicaView, RouteRequest, Score


@dataclass(frozen=True, slots=True)
class PrebleConfig:
    """`window_s` of history, at most `max_requests` of it; `default_num_blocks` where a replica tells no capacity."""

    window_s: float = 180.0
    max_requests: int = 20_000
    default_num_blocks: int = 16_384


@dataclass(slots=True)
class _Work:
    """Sums over the window's requests at a replica, which turn into seconds at its present rates."""

    num_requests: int = 0
    num_uncached: int = 0
    num_attended: float = 0.0

    def add(self, sent: _Sent, sign: int) -> None:
        self.num_requests += sign
        self.num_uncached += sign * sent.num_uncached
        self.num_attended += sign * sent.num_attended


@dataclass(frozen=True, slots=True)
class _Sent:
    at: float
    work: _Work
    keys: tuple[BlockKey, ...]
    num_uncached: int
    num_attended: float


class Preble:
    name = "preble"

    def __init__(self, config: PrebleConfig | None = None) -> None:
        self._config = config or PrebleConfig()
        self._trees: ReplicaMemory[HeldPrefixes] = ReplicaMemory(no_prefixes)
        self._work: ReplicaMemory[_Work] = ReplicaMemory(_no_work)
        self._window: deque[_Sent] = deque()
        self._uses: Counter[BlockKey] = Counter()

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """`reason`: warm (exploit) or explore."""
        found = matched_tokens(self._trees, request, fleet)
        longest = max(tokens for _, tokens in found)
        if longest > request.num_tokens - longest:
            holders = [view for view, tokens in found if tokens == longest]
            lightest = min(self._load_s(view, fleet) for view in holders) if len(holders) > 1 else 0.0
            ties = [v for v in holders if len(holders) == 1 or self._load_s(v, fleet) == lightest]
            return decision(self.name, pick(ties, rng), fleet, "warm")
        scores = tuple(self._score(request, fleet, view, tokens) for view, tokens in found)
        return decision(self.name, least_score(fleet, scores, rng), fleet, "explore", scores)

    def observe(self, event: Event) -> None:
        self._trees.observe(event)
        self._work.observe(event)
        self._age(event.at)
        if isinstance(event, Dispatched):
            self._sent(event)

    def _sent(self, event: Dispatched) -> None:
        tree, work, chain = self._trees.get(event.replica_id), self._work.get(event.replica_id), event.chain
        if tree is None or work is None:
            return
        cached = min(tree.match(chain.keys) * chain.block_tokens, max(chain.num_tokens - 1, 0))
        uncached = chain.num_tokens - cached
        sent = _Sent(event.at, work, chain.keys, uncached, uncached * (cached + uncached / 2))
        self._window.append(sent)
        self._uses.update(sent.keys)
        work.add(sent, 1)
        tree.touch(chain.keys)
        tree.evict_to(self._num_blocks(event))

    def _age(self, now: float) -> None:
        window = self._window
        while window and (window[0].at <= now - self._config.window_s or len(window) > self._config.max_requests):
            old = window.popleft()
            old.work.add(old, -1)
            for key in old.keys:
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._uses[key]

    def _num_blocks(self, event: Dispatched) -> int:
        joined = self._trees.joined(event.replica_id)
        assert joined is not None
        return joined.num_blocks or self._config.default_num_blocks

    def _score(self, request: RouteRequest, fleet: FleetSnapshot, view: ReplicaView, matched: int) -> Score:
        matched = min(matched, max(view.num_tokens - 1, 0))
        terms = {
            "load": self._load_s(view, fleet),
            "eviction": self._eviction_s(request, view, matched),
            "prefill": view.rates.prefill_s(view.num_tokens - matched, matched),
        }
        return Score(view.replica_id, sum(terms.values()), terms)

    def _load_s(self, view: ReplicaView, fleet: FleetSnapshot) -> float:
        work, rates = self._work.get(view.replica_id), view.rates
        decode = view.num_in_flight * fleet.expected_output_tokens * rates.decode_step_s
        if work is None:
            return decode
        prefill = rates.base_s * work.num_requests + rates.linear_s * work.num_uncached
        return decode + prefill + rates.quadratic_s * work.num_attended

    def _eviction_s(self, request: RouteRequest, view: ReplicaView, matched: int) -> float:
        tree, joined = self._trees.get(view.replica_id), self._trees.joined(view.replica_id)
        chain = self._trees.chain(request, view.replica_id)
        if tree is None or joined is None or chain is None or not self._window:
            return 0.0
        num_new = len(chain.keys) - matched // chain.block_tokens
        excess = len(tree) + num_new - (joined.num_blocks or self._config.default_num_blocks)
        if excess <= 0:
            return 0.0
        uses = sum(self._uses.get(key, 0) for key in tree.oldest(excess))
        return uses / len(self._window) * chain.block_tokens * view.rates.linear_s

    def check_invariants(self) -> None:
        self._trees.check_invariants()
        self._work.check_invariants()
        assert self._uses == Counter(key for sent in self._window for key in sent.keys)
        for _, work in self._work.items():
            mine = [sent for sent in self._window if sent.work is work]
            assert work.num_requests == len(mine)
            assert work.num_uncached == sum(sent.num_uncached for sent in mine)


def _no_work(_: Joined) -> _Work:
    return _Work()

"""`python -m loadtest.bench_index`: what a routing decision costs, and what a known block costs in memory.

A fleet is filled with conversations that share a system prompt: every replica's mirror to the brim, with requests in
flight. Then the next turns of random conversations are placed. A decision is the snapshot (prefix match included) and
the policy's choice; recording is Dispatched, and the rest of a request's events is given beside it. The memory is what
tracemalloc saw grow, over distinct keys, with the keys themselves.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from statistics import median

from policies.events import Dispatched, Finished, FirstToken, Joined
from policies.fleet import FleetState
from policies.registry import make_policy, policy_names
from policies.types import BlockKey, Decision, KeySpace, Policy, PrefixChain, ReplicaId, RouteRequest

SPACE = KeySpace("bench")
MODEL = "m"
BLOCK_TOKENS = 16
SYSTEM_BLOCKS = 60
TURN_BLOCKS = 40
IN_FLIGHT = 8


class Conversations:
    """Chains that grow by a turn at a time; keys are random 128-bit numbers as real ones are."""

    def __init__(self, count: int, num_turns: int, rng: random.Random) -> None:
        self._rng = rng
        system = self._blocks(SYSTEM_BLOCKS)
        self.keys = [system + self._blocks(TURN_BLOCKS * num_turns) for _ in range(count)]
        self._number = 0

    def _blocks(self, count: int) -> tuple[BlockKey, ...]:
        return tuple(BlockKey(self._rng.getrandbits(128)) for _ in range(count))

    def next_turn(self, index: int) -> tuple[RouteRequest, PrefixChain]:
        self.keys[index] += self._blocks(TURN_BLOCKS)
        return self.request(index)

    def request(self, index: int) -> tuple[RouteRequest, PrefixChain]:
        self._number += 1
        keys = self.keys[index]
        chain = PrefixChain(keys, BLOCK_TOKENS, len(keys) * BLOCK_TOKENS + 5)
        return RouteRequest(str(self._number), MODEL, chain.num_tokens, {SPACE: chain}), chain


class Bench:
    """One fleet of `num_replicas`, each with `num_blocks` of capacity."""

    def __init__(self, num_replicas: int, num_blocks: int, num_turns: int, policy: Policy) -> None:
        self.rng = random.Random(1)
        self.fleet = FleetState()
        self.policy = policy
        self.now = 0.0
        for i in range(num_replicas):
            name = ReplicaId(f"r{i:03}")
            self.fleet.apply(Joined(0.0, name, "one", frozenset({MODEL}), SPACE, BLOCK_TOKENS, num_blocks))
        count = num_replicas * num_blocks // (TURN_BLOCKS * num_turns) + 1
        self.conversations = Conversations(count, num_turns, self.rng)

    def decide(self, request: RouteRequest) -> Decision:
        return self.policy.choose(request, self.fleet.snapshot(request, self.now), self.rng)

    def dispatch(self, request: RouteRequest, chain: PrefixChain, decision: Decision) -> None:
        self.fleet.apply(Dispatched(self.now, decision.replica_id, request.request_id, chain, decision.matched_tokens))

    def end(self, request: RouteRequest, decision: Decision) -> None:
        cached = decision.matched_tokens
        self.fleet.apply(FirstToken(self.now, decision.replica_id, request.request_id, cached))
        self.fleet.apply(Finished(self.now + 0.5, decision.replica_id, request.request_id, 100, cached))

    def fill(self) -> None:
        """Serve every conversation once, then leave some in flight."""
        for i in range(len(self.conversations.keys)):
            request, chain = self.conversations.request(i)
            decision = self.decide(request)
            self.dispatch(request, chain, decision)
            self.now += 0.1
            self.end(request, decision)
            self.now += 1.0
        for _ in range(IN_FLIGHT * len(self.fleet.replica_ids())):
            request, chain = self.conversations.next_turn(self.rng.randrange(len(self.conversations.keys)))
            self.dispatch(request, chain, self.decide(request))

    def measure(self, num_requests: int) -> tuple[list[float], list[float], list[float]]:
        """Seconds of deciding, recording and ending, each request once."""
        decided, recorded, ended = [], [], []
        for _ in range(num_requests):
            request, chain = self.conversations.next_turn(self.rng.randrange(len(self.conversations.keys)))
            self.now += 0.01
            start = time.perf_counter()
            decision = self.decide(request)
            chosen = time.perf_counter()
            self.dispatch(request, chain, decision)
            placed = time.perf_counter()
            self.now += 0.05
            again = time.perf_counter()
            self.end(request, decision)
            over = time.perf_counter()
            decided.append(chosen - start)
            recorded.append(placed - chosen)
            ended.append(over - again)
        return decided, recorded, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=policy_names(), default="warm")
    parser.add_argument("--replicas", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--blocks", type=int, default=8000, help="KV blocks a replica")
    parser.add_argument("--turns", type=int, default=25, help=f"turns of {TURN_BLOCKS} blocks a conversation has had")
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    print("replicas  prompt blocks  decide us (p50, p99)  record us (p50, p99)  end us (p50, p99)  bytes a block")
    for num_replicas in options.replicas:
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        bench = Bench(num_replicas, options.blocks, options.turns, make_policy(options.policy))
        bench.fill()
        bench.conversations.keys = [keys[:SYSTEM_BLOCKS] for keys in bench.conversations.keys]
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        num_bytes = (held - before) / bench.fleet.num_index_keys()
        bench = Bench(num_replicas, options.blocks, options.turns, make_policy(options.policy))
        bench.fill()
        gc.collect()
        gc.freeze()
        times = bench.measure(options.requests)
        columns = "  ".join(f"{_micros(t, 0.5):9.1f} {_micros(t, 0.99):9.1f}" for t in times)
        blocks = median(len(keys) for keys in bench.conversations.keys)
        print(f"{num_replicas:8}  {blocks:13.0f}  {columns}  {num_bytes:13.0f}")


def _micros(seconds: list[float], quantile: float) -> float:
    return sorted(seconds)[int(quantile * (len(seconds) - 1))] * 1e6


if __name__ == "__main__":
    main()

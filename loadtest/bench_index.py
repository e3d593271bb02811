"""`python -m loadtest.bench_index`: what a routing decision costs, and what a known block costs in memory.

    python -m gateway.compiled --run loadtest.bench_index     as a gateway runs that was compiled

A fleet is filled with long conversations that share a system prompt: every replica's mirror to the brim, a million
blocks in all, prompts of about 100,000 tokens. Then next turns of them arrive, at half of what the replicas could
prefill; first tokens and ends come when they are due, so requests wait and run as they would. Timed are

    decide   the snapshot (prefix match included) and the policy's choice
    record   Dispatched, as the fleet and the policy take it
    end      FirstToken and Finished of a request

Minimum and median are to be trusted on a machine that does other things too. The memory is what tracemalloc saw grow,
over distinct keys, with the keys themselves.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import time
import tracemalloc
from dataclasses import replace
from statistics import median

import policies.fleet
from policies.events import Dispatched, Event, Finished, FirstToken, Joined
from policies.fleet import FleetState
from policies.registry import fleet_config, make_policy
from policies.stateful import observer_of
from policies.types import BlockKey, Decision, KeySpace, PrefixChain, ReplicaId, RouteRequest

SPACE = KeySpace("bench")
MODEL = "m"
BLOCK_TOKENS = 16
SYSTEM_BLOCKS = 60
TURN_BLOCKS = 40
OUTPUT_TOKENS = 100
SMALL_PROMPT_BLOCKS = 500
PREFILL_S = 3e-5  # a token
DECODE_S = 0.01  # a token
LOAD = 0.5
HISTORY = 0.6  # of the blocks are conversations, the others turns that went another way


class Conversations:
    """Prompts that share a system prompt, and next turns of them; keys are random 128-bit numbers as real ones are."""

    def __init__(self, count: int, num_blocks: int, rng: random.Random) -> None:
        self._rng = rng
        system = self._blocks(SYSTEM_BLOCKS)
        self.keys = [system + self._blocks(num_blocks - SYSTEM_BLOCKS) for _ in range(count)]
        self._number = 0

    def _blocks(self, count: int) -> tuple[BlockKey, ...]:
        return tuple(BlockKey(self._rng.getrandbits(128)) for _ in range(count))

    def next_turn(self, index: int) -> tuple[RouteRequest, PrefixChain]:
        return self.request(index, self._blocks(TURN_BLOCKS))

    def request(self, index: int, turn: tuple[BlockKey, ...] = ()) -> tuple[RouteRequest, PrefixChain]:
        self._number += 1
        keys = self.keys[index] + turn
        chain = PrefixChain(keys, BLOCK_TOKENS, len(keys) * BLOCK_TOKENS + 5)
        return RouteRequest(str(self._number), MODEL, chain.num_tokens, {SPACE: chain}), chain


class Bench:
    """One fleet of `num_replicas` that hold `num_blocks` together, in prompts of `prompt_blocks`."""

    def __init__(
        self, num_replicas: int, num_blocks: int, prompt_blocks: int, policy: str, history: float = HISTORY
    ) -> None:
        self.rng = random.Random(1)
        self.fleet = FleetState(fleet_config(policy))
        self.policy = make_policy(policy)
        self._observe = observer_of(self.policy)
        self.now = 0.0
        self._free_at: dict[ReplicaId, float] = {}
        self._due: list[tuple[float, int, FirstToken, Finished]] = []
        self.seconds: dict[str, list[float]] = {"decide": [], "record": [], "end": []}
        for i in range(num_replicas):
            name = ReplicaId(f"r{i:03}")
            self._apply(Joined(0.0, name, "one", frozenset({MODEL}), SPACE, BLOCK_TOKENS, num_blocks // num_replicas))
            self._free_at[name] = 0.0
        count = max(int(history * num_blocks) // prompt_blocks, num_replicas)
        self.conversations = Conversations(count, prompt_blocks, self.rng)

    def _apply(self, event: Event) -> None:
        self.fleet.apply(event)
        if self._observe is not None:
            self._observe(event)

    def place(self, request: RouteRequest, chain: PrefixChain, forced: ReplicaId | None = None) -> None:
        """One request arrives: decide, record, and note when its first token and its end are due."""
        start = time.perf_counter()
        snapshot = self.fleet.snapshot(request, self.now)
        decision = self.policy.choose(request, snapshot, self.rng)
        chosen = time.perf_counter()
        if forced is not None:
            [matched] = [view.matched_tokens for view in snapshot.replicas if view.replica_id == forced]
            decision = replace(decision, replica_id=forced, matched_tokens=matched)
        self._apply(Dispatched(self.now, decision.replica_id, request.request_id, chain, decision.matched_tokens))
        self.seconds["decide"].append(chosen - start)
        self.seconds["record"].append(time.perf_counter() - chosen)
        self._schedule(request.request_id, decision)

    def _schedule(self, request_id: str, decision: Decision) -> None:
        name, cached = decision.replica_id, decision.matched_tokens
        first_at = max(self._free_at[name], self.now) + PREFILL_S * (decision.num_tokens - cached)
        self._free_at[name] = first_at
        end_at = first_at + DECODE_S * OUTPUT_TOKENS
        first = FirstToken(first_at, name, request_id, cached)
        heapq.heappush(
            self._due, (first_at, int(request_id), first, Finished(end_at, name, request_id, OUTPUT_TOKENS, cached))
        )

    def advance(self, until: float) -> None:
        """Let everything happen that is due."""
        while self._due and self._due[0][0] <= until:
            at, number, first, finished = heapq.heappop(self._due)
            start = time.perf_counter()
            if at == first.at:
                self._apply(first)
                heapq.heappush(self._due, (finished.at, number, first, finished))
            else:
                self._apply(finished)
            self.seconds["end"].append(time.perf_counter() - start)
        self.now = until

    def fill(self) -> None:
        """Serve every conversation once, each replica in turn, so that all caches fill."""
        names = self.fleet.replica_ids()
        for i in range(len(self.conversations.keys)):
            self.place(*self.conversations.request(i), forced=names[i % len(names)])
            self.advance(self.now + 0.2)
        self.advance(self.now + 600.0)

    def run(self, num_requests: int) -> None:
        """Place turns of random conversations; after a warm-up of as many, `seconds` begins anew."""
        each_s = PREFILL_S * TURN_BLOCKS * BLOCK_TOKENS / (LOAD * len(self._free_at))
        for timed in (False, True):
            for _ in range(num_requests):
                self.advance(self.now + self.rng.expovariate(1 / each_s))
                self.place(*self.conversations.next_turn(self.rng.randrange(len(self.conversations.keys))))
            if not timed:
                self.seconds = {name: [] for name in self.seconds}
                gc.collect()
                gc.freeze()


def bytes_a_block(num_replicas: int, num_blocks: int, policy: str) -> float:
    """With prompts small enough to fill the mirrors to the brim."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    bench = Bench(num_replicas, num_blocks, SMALL_PROMPT_BLOCKS, policy, history=1.3)
    bench.fill()
    # the table keeps its own references to keys; the conversations' copies and the timings are not its cost
    bench.conversations.keys = []
    bench.seconds = {}
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (held - before) / bench.fleet.num_index_keys()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="warm", help="a policy, with settings if you like (warm:tau=4)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks that the fleet holds")
    parser.add_argument("--prompt-tokens", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    prompt_blocks = max(options.prompt_tokens // BLOCK_TOKENS, SYSTEM_BLOCKS + TURN_BLOCKS)
    how = "as Python" if (policies.fleet.__file__ or "").endswith(".py") else "compiled"
    print(f"us: min, p50, p99; {how}")
    print("replicas   blocks  prompt blocks             decide              record                 end  bytes a block")
    for num_replicas in options.replicas:
        num_bytes = bytes_a_block(num_replicas, options.blocks, options.policy)
        bench = Bench(num_replicas, options.blocks, prompt_blocks, options.policy)
        bench.fill()
        bench.run(options.requests)
        columns = "  ".join(_micros(bench.seconds[name]) for name in ("decide", "record", "end"))
        size = median(len(keys) for keys in bench.conversations.keys)
        known = bench.fleet.num_index_keys()
        print(f"{num_replicas:8} {known:8}  {size:13.0f}  {columns}  {num_bytes:13.0f}")
        gc.unfreeze()


def _micros(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return " ".join(f"{ordered[int(share * (len(ordered) - 1))] * 1e6:5.0f}" for share in (0.0, 0.5, 0.99)).rjust(18)


if __name__ == "__main__":
    main()

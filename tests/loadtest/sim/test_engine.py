"""The engine in simulated time: runs of decode steps taken at once against the same steps one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine_worker.core.types import RequestUpdate
from loadtest.sim.clock import Clock
from loadtest.sim.engine import Engine
from loadtest.sim.gpus import GPUS, Gpu
from loadtest.sim.job import Job
from loadtest.sim.prompts import PromptBook, SimKVCacheManager
from loadtest.sim.simulation import sim_request
from tests.loadtest.sim.traces import request

GPU = GPUS["h100"]


@dataclass
class Bench:
    """An engine, and what it reports, with the moments."""

    block_size: int = 512
    num_blocks: int = 60
    token_budget: int = 2048
    max_num_seqs: int = 4
    fast_forward: bool = True
    gpu: Gpu = GPU
    check: bool = True
    told: list[tuple[float, str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock, self.book = Clock(), PromptBook()
        kv = SimKVCacheManager(self.num_blocks, self.block_size, enable_kv_events=False)
        self.engine = Engine(
            self.clock, self.gpu, kv, self._told, self._checked if self.check else None,
            self.token_budget, self.max_num_seqs, self.fast_forward,
        )  # fmt: skip

    def _told(self, update: RequestUpdate) -> None:
        self.told.append((self.clock.now, update.request_id, update.finish_reason is not None))

    def _checked(self) -> None:
        self.engine.scheduler.check_invariants()

    def send(self, at_s: float, name: str, *block_ids: int, tail: int = 1, output: int = 4) -> None:
        traced = request(*block_ids, tail=tail, output=output, block_tokens=self.block_size)
        job = Job(name, traced, self.book.names(traced.block_ids), at_s)
        self.clock.at(at_s, lambda: self.engine.submit(sim_request(job)))


def test_one_request_takes_what_the_model_says() -> None:
    bench = Bench()
    bench.send(1.0, "a", 1, 2, tail=100, output=3)
    bench.clock.run()
    first = GPU.step_seconds([(1124, 0)], 0, 0)
    rest = GPU.step_seconds((), 1, 1125) + GPU.step_seconds((), 1, 1126)
    assert bench.told == [
        (pytest.approx(1.0 + first), "a", False),
        (pytest.approx(1.0 + first + rest), "a", True),
    ]
    assert (bench.engine.num_plans, bench.engine.num_steps) == (2, 3), "the two decodes are one run"
    assert bench.engine.num_computed_tokens == 1124 + 2


def test_a_request_that_comes_during_a_run_waits_for_the_step_under_way() -> None:
    bench = Bench()
    bench.send(0.0, "a", 1, output=200)
    bench.send(0.5, "b", 2, output=1)
    bench.clock.run()
    step, start = 0, GPU.step_seconds([(513, 0)], 0, 0)
    while start + GPU.decode_run_s(step, 1, 514) < 0.5:
        step += 1
    begin = start + GPU.decode_run_s(step, 1, 514)
    both = GPU.step_seconds([(513, 0)], 1, 514 + step)
    assert (pytest.approx(begin + both), "b", True) in bench.told


def test_a_hit_computes_only_the_rest() -> None:
    bench = Bench()
    bench.send(0.0, "a", 1, 2, 3, output=1)
    bench.send(10.0, "b", 1, 2, 9, output=1)
    bench.clock.run()
    assert bench.told[-1] == (pytest.approx(10.0 + GPU.step_seconds([(513, 1024)], 0, 0)), "b", True)


def play(fast_forward: bool, seed: int) -> Bench:
    """Random requests into a small engine: crowded, with hits, preemption and stalls."""
    rng = random.Random(seed)
    bench = Bench(
        block_size=64,
        num_blocks=rng.randint(14, 30),
        token_budget=rng.choice([16, 100, 2048]),
        max_num_seqs=rng.randint(1, 5),
        fast_forward=fast_forward,
        check=not fast_forward or seed % 3 == 0,
    )
    moment = 0.0
    for number in range(rng.randint(3, 14)):
        moment += rng.choice([0.0, 0.003, 0.1, 2.0]) * rng.random()
        shared = list(range(rng.randint(0, 3)))
        own = [100 + 10 * number + i for i in range(rng.randint(0, 2))]
        bench.send(moment, str(number), *shared, *own, tail=rng.randint(1, 63), output=rng.randint(1, 500))
    bench.clock.run()
    return bench


@pytest.mark.parametrize("seed", range(40))
def test_fast_forward_tells_the_same_as_step_by_step(seed: int) -> None:
    fast, slow = play(True, seed), play(False, seed)
    assert [(name, end) for _, name, end in fast.told] == [(name, end) for _, name, end in slow.told]
    assert [at for at, _, _ in fast.told] == pytest.approx([at for at, _, _ in slow.told], rel=1e-9)
    assert fast.engine.num_steps == slow.engine.num_steps
    assert fast.engine.num_computed_tokens == slow.engine.num_computed_tokens
    assert fast.engine.scheduler.stats() == slow.engine.scheduler.stats()
    assert slow.engine.num_plans == slow.engine.num_steps


def test_the_random_cases_reach_what_they_are_for() -> None:
    """The control: runs were taken, and there was preemption, among the cases above."""
    benches = [play(True, seed) for seed in range(40)]
    assert sum(bench.engine.scheduler.stats().num_preemptions for bench in benches) > 10
    assert sum(bench.engine.num_plans for bench in benches) < 0.1 * sum(bench.engine.num_steps for bench in benches)


def test_a_stopped_engine_says_nothing_more() -> None:
    bench = Bench()
    bench.send(0.0, "a", 1, output=50)
    bench.clock.at(0.05, bench.engine.stop, ["a"])
    bench.clock.run()
    assert bench.told == [(pytest.approx(GPU.step_seconds([(513, 0)], 0, 0)), "a", False)]


def test_a_cancel_leaves_the_others() -> None:
    bench = Bench()
    bench.send(0.0, "a", 1, output=100)
    bench.send(0.0, "b", 2, output=300)
    bench.clock.at(0.2, bench.engine.cancel, "a")
    bench.clock.run()
    assert [name for _, name, end in bench.told if end] == ["b"]
    assert bench.engine.scheduler.stats().num_free_blocks == bench.num_blocks

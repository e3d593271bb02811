"""Planning ahead: the same output as planning behind each commit, whatever ends or comes meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from engine_worker.core.ahead import PLACEHOLDER, runs_ahead
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.scheduler import Scheduler, SchedulerConfig
from engine_worker.core.types import FinishReason, Request, SampledToken, SamplingParams, StepPlan, StepResult
from tests.engine_worker.core.fake_runner import ROOT, next_token, solo_run

VOCAB = 30
MAX_MODEL_LEN = 64
EOS = frozenset({7})


@dataclass
class DeferringRunner:
    """Samples at launch, as a device would in its own time, and keeps the tokens that the host does not know yet."""

    block_size: int
    tokens: dict[int, list[int]] = field(default_factory=dict)  # id(request) -> all tokens, those under way too
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    num_ahead: int = 0

    def launch(self, plan: StepPlan) -> StepResult:
        sampled = {}
        for segment in plan.segments:
            request = segment.request
            known = [*request.prompt_ids, *request.output_ids]
            if segment.token_ids == (PLACEHOLDER,):
                self.num_ahead += 1
                known = self.tokens[id(request)]
            assert len(known) >= segment.end
            known = known[: segment.end]
            for position in range(segment.start, segment.end):
                self.slots[self._slot(segment.block_ids, position)] = (known[position], position)
            for position in range(segment.end):
                assert self.slots[self._slot(segment.block_ids, position)] == (known[position], position)
            if segment.sample:
                token = next_token(known, VOCAB)
                self.tokens[id(request)] = [*known, token]
                sampled[request.request_id] = SampledToken(token)
        return StepResult(sampled)

    def _slot(self, block_ids: Sequence[int], position: int) -> tuple[int, int]:
        return block_ids[position // self.block_size], position % self.block_size


class AsyncDriver:
    """The engine loop's order of things: launch what is planned ahead, then read and commit what was before."""

    def __init__(self, num_blocks: int, max_num_seqs: int = 4, budget: int = 16) -> None:
        self.kv = KVCacheManager(num_blocks, 4, ROOT)
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs, budget, MAX_MODEL_LEN, EOS), self.kv)
        self.runner = DeferringRunner(4)
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.ahead: tuple[StepPlan, StepResult] | None = None

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.outputs[request.request_id] = []

    def step(self, cancel: Sequence[str] = ()) -> None:
        plan = self.scheduler.plan(0.0) if self.ahead is None else self.ahead[0]
        result = self.runner.launch(plan) if self.ahead is None else self.ahead[1]
        behind = self.scheduler.plan_ahead(plan)
        self.ahead = None if behind is None else (behind, self.runner.launch(behind))
        for request_id in cancel:
            if self.scheduler.cancel(request_id):
                self.ends[request_id] = FinishReason.ABORT
        for update in self.scheduler.commit(plan, result):
            assert update.token is not None
            self.outputs[update.request_id].append(update.token.token_id)
            if update.finish_reason is not None:
                self.ends[update.request_id] = update.finish_reason
        self.scheduler.take_events()
        self.scheduler.check_invariants()

    def run(self) -> None:
        while self.scheduler.has_work() or self.ahead is not None:
            self.step()


def request(name: str, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(
        request_id=name, prompt_ids=tuple(prompt), params=SamplingParams(max_tokens=max_tokens), arrival_s=0.0
    )


@pytest.mark.parametrize("seed", range(12))
def test_output_is_that_of_a_solo_run(seed: int) -> None:
    """Requests come at any time, share prefixes, end at any token, are preempted and cancelled."""
    rng = random.Random(seed)
    driver = AsyncDriver(num_blocks=rng.choice([16, 20, 40]), max_num_seqs=rng.choice([2, 4]))
    prompts: dict[str, list[int]] = {}
    limits: dict[str, int] = {}
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    for number in range(14):
        name = f"r{number}"
        prompts[name] = shared[: rng.randrange(13)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        limits[name] = rng.randrange(1, 30)
        driver.add(request(name, prompts[name], limits[name]))
        for _ in range(rng.randrange(6)):
            if driver.scheduler.has_work() or driver.ahead is not None:
                driver.step([rng.choice(list(prompts))] if rng.random() < 0.05 else [])
    driver.run()
    for name, prompt in prompts.items():
        expected = solo_run(prompt, SamplingParams(max_tokens=limits[name]), VOCAB, EOS, MAX_MODEL_LEN)
        if driver.ends[name] is FinishReason.ABORT:
            assert driver.outputs[name] == expected[0][: len(driver.outputs[name])]
        else:
            assert (driver.outputs[name], driver.ends[name]) == expected
    assert driver.runner.num_ahead > 20
    assert driver.kv.num_free_blocks == driver.kv.num_blocks


def test_decodes_run_ahead_and_prompts_do_not() -> None:
    driver = AsyncDriver(num_blocks=32, budget=4)
    driver.add(request("a", [1, 2, 3, 4, 5, 6], 10))
    driver.step()
    assert driver.ahead is None  # the rest of the prompt comes next
    driver.step()
    assert driver.ahead is not None
    driver.add(request("b", [9], 3))
    driver.step()
    assert driver.ahead is None  # "b" may be admitted
    driver.step()
    assert driver.outputs["b"]


def test_nothing_is_planned_behind_the_last_token() -> None:
    driver = AsyncDriver(num_blocks=32)
    driver.add(request("a", [1], 2))
    driver.step()
    assert driver.ahead is not None
    driver.step()
    assert driver.ahead is None
    assert driver.ends == {"a": FinishReason.LENGTH}


def test_no_one_is_preempted_for_a_guess() -> None:
    driver = AsyncDriver(num_blocks=2, max_num_seqs=1)
    driver.add(request("a", [1, 2, 3, 4, 5, 6, 8], 2))
    driver.step()
    assert driver.ahead is not None  # position 7 has a slot
    other = AsyncDriver(num_blocks=3, max_num_seqs=2)
    other.add(request("a", [1, 2, 3, 4], 5))
    other.add(request("b", [5, 6, 8, 9], 5))
    other.step()
    assert other.ahead is None  # one block is left for two
    other.run()
    assert len(other.ends) == 2


@pytest.mark.parametrize(
    "params",
    [
        {"grammar": "x"},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.2},
        {"bad_words": ((1, 2),)},
        {"min_tokens": 3},
        {"num_prompt_logprobs": 0},
    ],
)
def test_who_must_know_its_tokens_waits_for_them(params: dict[str, object]) -> None:
    assert runs_ahead(SamplingParams(max_tokens=5, seed=3, top_p=0.5, num_logprobs=2))
    asked = SamplingParams(max_tokens=5, **params)  # type: ignore[arg-type]
    assert not runs_ahead(asked)
    driver = AsyncDriver(num_blocks=32)
    driver.add(Request(request_id="a", prompt_ids=(1,), params=asked, arrival_s=0.0))
    driver.step()
    assert driver.ahead is None

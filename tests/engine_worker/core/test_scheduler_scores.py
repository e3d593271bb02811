"""Prompt scores and complete grammars as the scheduler accounts for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.scheduler import Scheduler, SchedulerConfig
from engine_worker.core.types import FinishReason, Request, RequestUpdate, SampledToken, StepPlan, StepResult
from tests.engine_worker.core.fake_runner import ROOT, FakeRunner, make_request

Completes = Callable[[Request], bool]


def _never(_: Request) -> bool:
    return False


class Run:
    """A scheduler and a runner that scores what is asked for, step by step."""

    def __init__(
        self, num_blocks: int = 100, budget: int = 1000, completes: Completes = _never, joint: int = 512
    ) -> None:
        kv = KVCacheManager(num_blocks, 4, ROOT)
        self.scheduler = Scheduler(SchedulerConfig(8, budget, 1000, frozenset({7}), joint), kv)
        self._runner = FakeRunner(4)
        self._completes = completes
        self.scores: dict[str, list[int]] = {}
        self.ends: dict[str, RequestUpdate] = {}
        self.cached: dict[str, int] = {}

    def to_the_end(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work():
            plan = self.scheduler.plan(0.0)
            for update in self.scheduler.commit(plan, self._result(plan)):
                self.scores.setdefault(update.request_id, []).extend(t.token_id for t in update.prompt_logprobs)
                self.cached[update.request_id] = update.num_cached_tokens
                if update.finish_reason is not None:
                    self.ends[update.request_id] = update
            self.scheduler.take_events()
            self.scheduler.check_invariants()

    def _result(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        scores = {
            segment.request.request_id: tuple(
                SampledToken(segment.request.prompt_ids[position + 1]) for position in segment.scored
            )
            for segment in plan.segments
        }
        completed = frozenset(s.request.request_id for s in plan.segments if s.sample and self._completes(s.request))
        return StepResult(result.sampled, result.failed, completed, scores)


@pytest.mark.parametrize("budget", [1, 3, 16, 1000])
@pytest.mark.parametrize("num_prompt", [1, 2, 15, 16, 17])
def test_every_prompt_token_but_the_first_is_scored_once(budget: int, num_prompt: int) -> None:
    run = Run(budget=budget)
    prompt = range(20, 20 + num_prompt)
    run.to_the_end(make_request("warm the cache", prompt, max_tokens=2))
    run.to_the_end(make_request("a", prompt, max_tokens=3, num_prompt_logprobs=0))
    assert run.scores["a"] == list(prompt)[1:]
    assert run.cached["a"] == 0
    run.to_the_end(make_request("b", prompt, max_tokens=3))
    assert run.scores["b"] == []
    assert run.cached["b"] == (num_prompt - 1) // 4 * 4  # reads were skipped, writes were not


def test_preemption_repeats_no_score() -> None:
    run = Run(num_blocks=9, budget=5, joint=0)
    first = make_request("first", range(20, 32), max_tokens=12)
    last = make_request("last", range(40, 57), max_tokens=3, arrival_s=1.0, num_prompt_logprobs=2)
    run.to_the_end(first, last)
    assert run.scheduler.stats().num_preemptions > 0
    assert run.scores["last"] == list(range(41, 57))


def test_a_complete_grammar_ends_a_request() -> None:
    run = Run(completes=lambda request: len(request.output_ids) == 2)  # with its third token
    run.to_the_end(make_request("a", range(20, 25), max_tokens=9, ignore_eos=True))
    assert run.ends["a"].finish_reason is FinishReason.STOP
    assert run.ends["a"].is_complete


def test_the_last_token_allowed_may_complete_a_grammar() -> None:
    run = Run(completes=lambda request: len(request.output_ids) == 2)
    run.to_the_end(make_request("a", range(20, 25), max_tokens=3, ignore_eos=True))
    assert run.ends["a"].finish_reason is FinishReason.STOP


def test_a_stop_token_is_one_even_where_it_completes_a_grammar() -> None:
    run = Run(completes=lambda request: True)
    stops = tuple(range(50))  # whatever the model says
    run.to_the_end(make_request("a", range(20, 25), max_tokens=3, stop_token_ids=stops, ignore_eos=False))
    assert run.ends["a"].finish_reason is FinishReason.STOP
    assert not run.ends["a"].is_complete

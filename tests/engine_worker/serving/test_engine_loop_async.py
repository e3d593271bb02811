"""The loop with asynchronous scheduling: the same answers, and the same care for failures, one step later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest

from engine_worker.core.ahead import PLACEHOLDER
from engine_worker.core.types import FinishReason, RequestStatus, StepPlan, StepResult
from engine_worker.serving.engine_loop import MAX_FAILED_STEPS, EngineBroken
from engine_worker.serving.messages import Add, Cancel
from tests.engine_worker.serving.test_engine_loop import Harness, Runner, output, sequence


class _Later:
    def __init__(self, run: Callable[[], StepResult]) -> None:
        self.result = run


class LateRunner(Runner):
    """A device that works when its results are asked for: only then are the placeholders' tokens known."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ahead = 0

    def launch(self, plan: StepPlan) -> _Later:
        self.num_ahead += any(segment.token_ids == (PLACEHOLDER,) for segment in plan.segments)
        return _Later(lambda: self._run(plan))

    def _run(self, plan: StepPlan) -> StepResult:
        live = [s for s in plan.segments if s.request.status is RequestStatus.RUNNING]
        known = [replace(s, token_ids=s.request.token_ids(s.start, s.end)) for s in live]
        return self.execute(StepPlan(tuple(known), plan.preempted)) if known else StepResult({})


class AsyncHarness(Harness):
    def __init__(self, runner: LateRunner | None = None) -> None:
        self.late = runner or LateRunner()
        super().__init__(self.late)
        self.loop._launcher = self.late


def test_two_sequences_to_their_ends() -> None:
    harness = AsyncHarness()
    news = harness.run([Add([sequence("a", "hello world"), sequence("b", "bye")])])
    assert (output(news["a"]), output(news["b"])) == ("hello world", "bye")
    assert [updates[-1].finish_reason for updates in news.values()] == [FinishReason.STOP] * 2
    assert harness.late.num_ahead >= 5
    assert sorted(harness.runner.released) == ["a", "b"]  # type: ignore[attr-defined]
    assert harness.sent[-1].stats.num_free_blocks == 64


def test_a_newcomer_is_admitted_behind_the_step_under_way() -> None:
    news = AsyncHarness().run([Add([sequence("a", "hello world")])], [], [], [Add([sequence("b", "bye")])])
    assert (output(news["a"]), output(news["b"])) == ("hello world", "bye")


def test_a_cancel_between_two_steps_under_way() -> None:
    harness = AsyncHarness()
    news = harness.run([Add([sequence("a", "hello world"), sequence("b", "bye now")])], [], [Cancel(["a"])])
    assert output(news["b"]) == "bye now"
    assert news["a"][-1].finish_reason is None
    assert harness.sent[-1].stats.num_free_blocks == 64


def test_a_step_ahead_that_raises_fails_its_requests_when_its_turn_comes() -> None:
    class FailsAhead(LateRunner):
        def launch(self, plan: StepPlan) -> _Later:
            if self.num_ahead == 2:
                self.num_ahead += 1
                raise MemoryError
            return super().launch(plan)

    harness = AsyncHarness(FailsAhead())
    news = harness.run([Add([sequence("a", "hello world")])], *[[] for _ in range(8)], [Add([sequence("b", "bye")])])
    assert news["a"][-1].finish_reason is FinishReason.ERROR
    assert "too little memory" in (news["a"][-1].error or "")
    assert len([update for update in news["a"] if update.token]) == 3  # the prompt's and those of two steps ahead
    assert output(news["b"]) == "bye"
    assert harness.sent[-1].stats.num_free_blocks == 64


def test_without_memory_for_a_launch_the_largest_request_fails_and_the_others_go_on() -> None:
    """More often than an engine may fail otherwise. All prompts fit in one step: one could be planned behind it."""

    class Forgetful(LateRunner):
        def launch(self, plan: StepPlan) -> _Later:
            if plan.num_tokens > 9:
                raise MemoryError
            return super().launch(plan)

    small = [sequence("a", "hi"), sequence("b", "yo")]
    big = [sequence(f"big{i}", "too long a text") for i in range(MAX_FAILED_STEPS + 1)]
    script = [[Add([*small, big[0]])], *([Add([one])] for one in big[1:])]
    harness = AsyncHarness(Forgetful())
    news = harness.run(*script)
    assert (output(news["a"]), output(news["b"])) == ("hi", "yo")
    for one in big:
        assert "too little memory" in (news[one.request_id][-1].error or "")
    assert harness.sent[-1].stats.num_free_blocks == 64


def test_steps_that_keep_raising_end_the_engine() -> None:
    """What was planned ahead for those that failed comes back in between, and says nothing of the engine."""
    script = [[[Add([sequence(f"a{i}", "[boom]")])], []] for i in range(MAX_FAILED_STEPS)]
    with pytest.raises(EngineBroken):
        AsyncHarness().run(*chain.from_iterable(script))

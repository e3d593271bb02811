"""The engine loop against the real scheduler: failures stay with those who caused them, and nothing is left behind."""

from __future__ import annotations

from collections import deque

import pytest

from engine_worker.config import EngineConfig
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.scheduler import Scheduler, SchedulerConfig
from engine_worker.core.types import FinishReason, Request, SamplingParams, StepPlan, StepResult
from engine_worker.serving.engine_loop import MAX_FAILED_STEPS, EngineBroken, EngineLoop
from engine_worker.serving.messages import Add, Cancel, FromEngine, Sequence, Shutdown, Stats, Step, ToEngine, Update
from tests.engine_worker.serving.fake_engine import FakeRunner, make_tokenizer

TOKENIZER = make_tokenizer()


class Runner(FakeRunner):
    def __init__(self) -> None:
        super().__init__(EngineConfig(model="fake", kv_cache_memory=64 * 16))
        self.released: list[str] = []

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class Harness:
    """Feeds one list of messages a step; a step without messages left ends the run."""

    def __init__(self, runner: FakeRunner | None = None) -> None:
        self.runner = runner or Runner()
        info = self.runner.info
        kv = KVCacheManager(info.num_blocks, info.block_size, info.cache_root)
        limits = SchedulerConfig(8, 32, info.max_model_len, frozenset(info.eos_token_ids))
        self.script: deque[list[ToEngine]] = deque()
        self.sent: list[Step] = []
        self.loop = EngineLoop(Scheduler(limits, kv), self.runner, self, self._send, None, check_invariants=True)

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        if self.script:
            return self.script.popleft()
        return [Shutdown()] if timeout_ms else []

    def _send(self, message: FromEngine) -> None:
        assert isinstance(message, Step)
        self.sent.append(message)

    def run(self, *script: list[ToEngine]) -> dict[str, list[Update]]:
        self.script.extend(script)
        self.loop.run(lambda: False)
        news: dict[str, list[Update]] = {}
        for step in self.sent:
            for update in step.updates:
                news.setdefault(update.request_id, []).append(update)
        return news


def sequence(request_id: str, text: str, max_tokens: int = 50) -> Sequence:
    ids = TOKENIZER.encode(text).ids
    return Sequence(request_id, ids, SamplingParams(max_tokens=max_tokens), arrival_s=0.0)


def output(updates: list[Update]) -> str:
    return TOKENIZER.decode([update.token.token_id for update in updates if update.token])


def test_two_sequences_to_their_ends() -> None:
    harness = Harness()
    news = harness.run([Add([sequence("a", "hello world"), sequence("b", "bye")])])
    assert (output(news["a"]), output(news["b"])) == ("hello world", "bye")
    assert [updates[-1].finish_reason for updates in news.values()] == [FinishReason.STOP] * 2
    assert sorted(harness.runner.released) == ["a", "b"]
    assert harness.sent[-1].stats.num_free_blocks == 64
    assert harness.sent[-1].stats.num_running == 0


def test_choices_share_what_they_have_in_common() -> None:
    """One prompt for all, however many there are; seeds of their own; and the first alone scores the prompt."""
    harness = Harness()
    add, added = harness.loop._scheduler.add, list[Request]()

    def noted(request: Request) -> None:
        added.append(request)
        add(request)

    harness.loop._scheduler.add = noted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=50, num_prompt_logprobs=2, allowed_token_ids=(70, 71), seed=5)
    ids = TOKENIZER.encode("hello").ids
    news = harness.run([Add([Sequence("a", ids, params, 0.0, "salt", [("b", 6), ("c", 5)])])])
    assert [(r.request_id, r.leader_id, r.salt, r.params.seed) for r in added] == [
        ("a", None, "salt", 5),
        ("b", "a", "salt", 6),
        ("c", "a", "salt", 5),
    ]
    assert all(r.prompt_ids is added[0].prompt_ids for r in added)
    assert all(r.params.allowed_token_ids is added[0].params.allowed_token_ids for r in added)
    assert [r.params.num_prompt_logprobs for r in added] == [2, None, None]
    assert len({id(r.output_ids) for r in added}) == 3
    assert [updates[-1].finish_reason for updates in news.values()] == [FinishReason.STOP] * 3


def test_the_first_token_says_how_long_it_took() -> None:
    [first, *rest] = Harness().run([Add([sequence("a", "hello")])])["a"]
    assert first.queue_s is not None
    assert first.prefill_s is not None
    assert first.prefill_s >= 0
    assert all(update.queue_s is None for update in rest)


def test_a_cancel_frees_the_blocks_and_is_silent() -> None:
    harness = Harness()
    news = harness.run([Add([sequence("a", "x" * 100)])], [], [Cancel(["a", "unknown"])])
    assert "a" not in news  # still in prefill: 32 tokens a step
    assert harness.sent[-1].stats.num_free_blocks == 64
    assert harness.runner.released == ["a"]


def test_too_large_a_request_is_refused_alone() -> None:
    harness = Harness()
    news = harness.run([Add([sequence("a", "x" * 1100), sequence("b", "hello")])])
    [refused] = news["a"]
    assert (refused.finish_reason, refused.error_status) == (FinishReason.ERROR, 400)
    assert "KV cache" in (refused.error or "")
    assert output(news["b"]) == "hello"


def test_a_request_that_fails_alone() -> None:
    news = Harness().run([Add([sequence("a", "[sick]"), sequence("b", "hello")])])
    assert [update.error for update in news["a"]] == ["this request is sick"]
    assert output(news["b"]) == "hello"


def test_a_step_that_raises_fails_its_own_requests() -> None:
    harness = Harness()
    news = harness.run([Add([sequence("a", "[boom]"), sequence("b", "hello")])], [Add([sequence("c", "hello")])])
    assert [updates[-1].finish_reason for updates in (news["a"], news["b"])] == [FinishReason.ERROR] * 2
    assert output(news["c"]) == "hello"
    assert harness.sent[-1].stats.num_free_blocks == 64


def test_steps_that_keep_raising_end_the_engine() -> None:
    harness = Harness()
    with pytest.raises(EngineBroken):
        harness.run(*([Add([sequence(f"a{i}", "[boom]")])] for i in range(MAX_FAILED_STEPS)))


def test_a_good_step_between_bad_ones_saves_the_engine() -> None:
    harness = Harness()
    script: list[list[ToEngine]] = []
    for i in range(MAX_FAILED_STEPS + 1):
        script += [[Add([sequence(f"bad{i}", "[boom]")])], [Add([sequence(f"good{i}", "x", max_tokens=1)])]]
    news = harness.run(*script)
    assert all(output(news[f"good{i}"]) == "x" for i in range(MAX_FAILED_STEPS + 1))


def test_a_failed_step_leaves_no_stale_cache() -> None:
    """The tokens of a failed step were never committed, so the same prompt afterwards is no hit."""

    class FailsOnce(Runner):
        failed = False

        def execute(self, plan: StepPlan) -> StepResult:
            if not self.failed:
                self.failed = True
                raise MemoryError
            return super().execute(plan)

    news = Harness(FailsOnce()).run([Add([sequence("a", "x" * 30)])], [Add([sequence("b", "x" * 30)])])
    assert news["a"][-1].finish_reason is FinishReason.ERROR
    assert news["b"][0].num_cached_tokens == 0
    assert output(news["b"]) == "x" * 30


def test_an_idle_engine_says_nothing() -> None:
    harness = Harness()
    harness.run()
    assert len(harness.sent) <= 1
    assert all(step.stats == Stats(num_blocks=64, num_free_blocks=64) for step in harness.sent)


class Forgetful(Runner):
    """Finds no memory for more than so many tokens at once, and remembers of requests what a test says."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.num_checks = 0

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.num_tokens > self.most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return super().execute(plan)

    def check_idle(self) -> None:
        self.num_checks += 1


def test_without_memory_the_largest_request_fails_and_the_others_go_on() -> None:
    """More often than an engine may fail otherwise."""
    big = [sequence(f"big{i}", f"a much longer prompt than the others {i}") for i in range(MAX_FAILED_STEPS + 1)]
    harness = Harness(Forgetful(most=9))
    news = harness.run([Add([sequence("a", "hi"), sequence("b", "yo"), *big])])
    assert (output(news["a"]), output(news["b"])) == ("hi", "yo")
    for one in big:
        assert news[one.request_id][-1].finish_reason is FinishReason.ERROR
        assert "too little memory" in (news[one.request_id][-1].error or "")
    assert harness.sent[-1].stats.num_free_blocks == 64


class Idle(Harness):
    """Ends after some polls without a message."""

    def __init__(self, runner: FakeRunner, polls: int) -> None:
        super().__init__(runner)
        self.polls = polls

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        if not self.script and timeout_ms and self.polls:
            self.polls -= 1
            return []
        return super().receive(timeout_ms)


def test_the_books_are_checked_once_after_each_busy_time() -> None:
    runner = Forgetful(most=100)
    harness = Idle(runner, polls=3)
    harness.run([Add([sequence("a", "hello")])])
    assert runner.num_checks == 1
    assert harness.sent[-1].stats.num_idle_checks == 1


def test_a_leak_found_when_idle_ends_the_process() -> None:
    class Leaky(Forgetful):
        def check_idle(self) -> None:
            raise AssertionError("sampler state of a request that is over")

    with pytest.raises(AssertionError, match="sampler state"):
        Idle(Leaky(most=100), polls=2).run([Add([sequence("a", "hello")])])

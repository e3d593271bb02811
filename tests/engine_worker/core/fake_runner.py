"""A runner without a model, whose KV cache is checked on every read.

Its model is a function of the whole history, so one wrong position changes every token after it; the tests compare
with `solo_run`. Its cache remembers what each slot was computed from: token, position, salt and everything before it
(a digest), because a real KV entry depends on all of that. A segment reads every position that it attends to, so a
wrong table, a stale counter, a block freed in use, or a hit on another request's tokens fails at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from engine_worker.core.scheduler import Scheduler
from engine_worker.core.types import (
    FinishReason,
    Request,
    RequestUpdate,
    SampledToken,
    SamplingParams,
    Segment,
    StepPlan,
    StepResult,
)

Digest = int


def digests(salt: str, token_ids: Sequence[int]) -> list[Digest]:
    """What each position's KV depends on: the salt (for isolation) and the tokens up to it."""
    state, out = hash(("root", salt)), []
    for token_id in token_ids:
        state = hash((state, token_id))
        out.append(state)
    return out


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """The fake model: a token from the history alone."""
    return hash(tuple(token_ids)) % vocab_size


def solo_run(
    prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int, eos: Set[int], max_model_len: int
) -> tuple[list[int], FinishReason]:
    """What the request yields when it is alone in the world."""
    history, num_output = list(prompt_ids), 0
    while True:
        token_id = next_token(history, vocab_size)
        history.append(token_id)
        num_output += 1
        stops = set(params.stop_token_ids) | set(eos)
        if params.ignore_eos:
            stops -= set(eos)
        if token_id in stops and num_output > params.min_tokens:
            return history[len(prompt_ids) :], FinishReason.STOP
        if num_output == params.max_tokens or len(history) == max_model_len:
            return history[len(prompt_ids) :], FinishReason.LENGTH


@dataclass
class FakeRunner:
    """Executes plans. `fail` holds ids whose next segment fails alone; `steps` counts what ran."""

    block_size: int
    vocab_size: int = 50
    cache: dict[tuple[int, int], tuple[int, int, Digest]] = field(default_factory=dict)
    fail: set[str] = field(default_factory=set)
    num_steps: int = 0
    num_computed: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        ids = [segment.request.request_id for segment in plan.segments]
        assert len(set(ids)) == len(ids), "a request has two segments in one step"
        self.num_steps += 1
        self.num_computed += plan.num_tokens
        for segment in plan.segments:  # a layer writes all new keys and values before it attends
            self._write(segment)
        sampled, failed = {}, {}
        for segment in plan.segments:
            self._read(segment)
            request = segment.request
            if request.request_id in self.fail:
                failed[request.request_id] = "it failed"
            elif segment.sample:
                history = [*request.prompt_ids, *request.output_ids]
                assert segment.end == len(history), "a token is sampled from an old position"
                sampled[request.request_id] = SampledToken(next_token(history, self.vocab_size))
        return StepResult(sampled, failed)

    def _slot(self, segment: Segment, position: int) -> tuple[int, int]:
        return segment.block_ids[position // self.block_size], position % self.block_size

    def _expected(self, segment: Segment) -> list[tuple[int, int, Digest]]:
        request = segment.request
        history = [*request.prompt_ids, *request.output_ids][: segment.end]
        return list(zip(history, range(segment.end), digests(request.salt, history), strict=True))

    def _write(self, segment: Segment) -> None:
        assert segment.token_ids, "an empty segment"
        expected = self._expected(segment)
        assert segment.token_ids == tuple(token for token, _, _ in expected[segment.start :]), "wrong tokens"
        for position in range(segment.start, segment.end):
            self.cache[self._slot(segment, position)] = expected[position]

    def _read(self, segment: Segment) -> None:
        for position, expected in enumerate(self._expected(segment)):
            found = self.cache.get(self._slot(segment, position))
            assert found == expected, f"{segment.request.request_id} reads {found} at {position}, not {expected}"


@dataclass
class Driver:
    """Steps a scheduler with a fake runner, checks invariants all the time and collects what was streamed."""

    scheduler: Scheduler
    runner: FakeRunner
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    now: float = 0.0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.outputs[request.request_id] = []
        self.scheduler.check_invariants()

    def cancel(self, request_id: str) -> bool:
        cancelled = self.scheduler.cancel(request_id)
        if cancelled:
            self.ends[request_id] = FinishReason.ABORT
        self.scheduler.check_invariants()
        return cancelled

    def step(self, cancel_meanwhile: Iterable[str] = ()) -> StepPlan:
        """Plan, run, cancel some, commit."""
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        self.scheduler.check_invariants()
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        result = self.runner.execute(plan)
        for request_id in cancel_meanwhile:
            self.cancel(request_id)
        for update in self.scheduler.commit(plan, result):
            self._note(update)
        self.scheduler.check_invariants()
        return plan

    def run(self, most_steps: int = 10_000) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_work():
            assert len(plans) < most_steps, "no end in sight"
            plans.append(self.step())
        return plans

    def _note(self, update: RequestUpdate) -> None:
        request_id = update.request_id
        assert request_id not in self.ends, f"{request_id} goes on after its end"
        assert self.cached.setdefault(request_id, update.num_cached_tokens) == update.num_cached_tokens
        if update.token is not None:
            self.outputs[request_id].append(update.token.token_id)
        if update.finish_reason is not None:
            self.ends[request_id] = update.finish_reason

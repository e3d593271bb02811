"""A runner without a model, whose KV cache is checked on every read.

Its model is a function of the whole history, so one wrong position changes every token after it; the tests compare
with `solo_run`. Its cache remembers what each slot was computed from: token, position, salt and everything before it
(a digest), because a real KV entry depends on all of that. A segment reads every position that it attends to, so a
wrong table, a stale counter, a block freed in use, or a hit on another request's tokens fails at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from engine_worker.core import block_pool
from engine_worker.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.limits import JOINT_PREFILL_TOKENS
from engine_worker.core.scheduler import Scheduler, SchedulerConfig
from engine_worker.core.types import (
    BlockHash,
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
ROOT = b"fake model"


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
    num_copied: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        ids = [segment.request.request_id for segment in plan.segments]
        assert len(set(ids)) == len(ids), "a request has two segments in one step"
        self.num_steps += 1
        self.num_computed += plan.num_tokens
        self._copy(plan)
        for segment in plan.segments:  # a layer writes all new keys and values before it attends
            self._write(segment)
        sampled, failed, following = {}, {}, {}
        for segment in plan.segments:
            self._read(segment)
            request = segment.request
            if request.request_id in self.fail:
                failed[request.request_id] = "it failed"
            elif segment.sample:
                history = [*request.prompt_ids, *request.output_ids]
                assert segment.end == len(history) + segment.num_drafts, "a token is sampled from an old position"
                tokens = [next_token(history, self.vocab_size)]
                for draft_id in segment.draft_ids:
                    if tokens[-1] != draft_id:
                        break
                    history.append(draft_id)
                    tokens.append(next_token(history, self.vocab_size))
                sampled[request.request_id] = SampledToken(tokens[0])
                following[request.request_id] = tuple(map(SampledToken, tokens[1:]))
        return StepResult(sampled, failed, following=following)

    def _copy(self, plan: StepPlan) -> None:
        """The rows of all copies are read before any is written, as batched copies do."""
        rows = {}
        for segment in plan.segments:
            assert segment.copy_from == segment.request.copy_from
            if segment.copy_from is not None:
                num_rows, target = segment.start % self.block_size, segment.block_ids[segment.start // self.block_size]
                assert num_rows, "a copy of nothing"
                self.num_copied += num_rows
                rows |= {(target, row): self.cache.get((segment.copy_from, row)) for row in range(num_rows)}
        self.cache.update(rows)  # type: ignore[arg-type]

    def _slot(self, segment: Segment, position: int) -> tuple[int, int]:
        return segment.block_ids[position // self.block_size], position % self.block_size

    def _expected(self, segment: Segment) -> list[tuple[int, int, Digest]]:
        request = segment.request
        history = [*request.prompt_ids, *request.output_ids, *segment.draft_ids][: segment.end]
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
class CacheMirror:
    """The prefix cache as a reader of the events believes it to be; every event must make sense to it."""

    parents: dict[BlockHash, BlockHash | None] = field(default_factory=dict)

    def apply(self, event: BlocksStored | BlocksRemoved | AllBlocksCleared) -> None:
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                for block_hash in event.block_hashes:
                    assert block_hash not in self.parents.values(), "a parent is removed before its child"
                    del self.parents[block_hash]
            case AllBlocksCleared():
                self.parents.clear()

    def _store(self, event: BlocksStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert event.block_hashes
        assert len(event.token_ids) == size * len(event.block_hashes)
        for i, block_hash in enumerate(event.block_hashes):
            assert parent is None or parent in self.parents, "stored behind an unknown parent"
            assert block_hash not in self.parents, "stored twice"
            name_of_parent = parent or block_pool.root_hash(ROOT, event.salt)
            assert block_hash == block_pool.hash_block(name_of_parent, event.token_ids[i * size : (i + 1) * size])
            self.parents[block_hash] = parent
            parent = block_hash


@dataclass
class Driver:
    """Steps a scheduler with a fake runner, checks it all the time and collects what was streamed."""

    scheduler: Scheduler
    runner: FakeRunner
    mirror: CacheMirror = field(default_factory=CacheMirror)
    requests: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    first_starts: dict[str, int] = field(default_factory=dict)  # where each request's very first segment began
    now: float = 0.0
    guesses: random.Random | None = None  # speculate before every step: true continuations, some of them spoilt

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
        self.check()

    def cancel(self, request_id: str) -> bool:
        cancelled = self.scheduler.cancel(request_id)
        if cancelled:
            self.ends[request_id] = FinishReason.ABORT
        self.check()
        return cancelled

    def step(self, cancel_meanwhile: Iterable[str] = ()) -> StepPlan:
        """Plan, run, cancel some, commit."""
        self.now += 1.0
        if self.guesses is not None:
            self._speculate(self.guesses)
        plan = self.scheduler.plan(self.now)
        self.check()
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        for segment in plan.segments:
            self.first_starts.setdefault(segment.request.request_id, segment.start)
        result = self.runner.execute(plan)
        for request_id in cancel_meanwhile:
            self.cancel(request_id)
        for update in self.scheduler.commit(plan, result):
            self._note(update)
        self.check()
        return plan

    def _speculate(self, rng: random.Random) -> None:
        for request, room in self.scheduler.can_speculate(rng.choice([1, 3, 9])):
            history, drafts = [*request.prompt_ids, *request.output_ids], []
            for _ in range(rng.randint(0, room)):
                token_id = next_token(history, self.runner.vocab_size)
                drafts.append(token_id if rng.random() < 0.8 else rng.randrange(self.runner.vocab_size))
                history.append(drafts[-1])
            if drafts:
                self.scheduler.speculate(request, tuple(drafts))
                self.check()

    def run(self, most_steps: int = 10_000) -> list[StepPlan]:
        plans: list[StepPlan] = []
        while self.scheduler.has_work():
            assert len(plans) < most_steps, "no end in sight"
            plans.append(self.step())
        return plans

    def check(self) -> None:
        self.scheduler.check_invariants()
        for event in self.scheduler.take_events():
            self.mirror.apply(event)
        stats = self.scheduler.stats()
        assert stats.num_cached_blocks == len(self.mirror.parents), "the events tell another story"

    def solo(self, request_id: str) -> tuple[list[int], FinishReason]:
        request, config = self.requests[request_id], self.scheduler.config
        return solo_run(
            request.prompt_ids, request.params, self.runner.vocab_size, config.eos_token_ids, config.max_model_len
        )

    def check_ended(self) -> None:
        """After `run`: everybody got what a solo run gives, or a true beginning of it, and all blocks are back."""
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.queued_prefill_tokens) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.prefix_cache_hits == sum(self.first_starts.values())
        for request_id, output in self.outputs.items():
            expected, reason = self.solo(request_id)
            if self.ends[request_id] in (FinishReason.ABORT, FinishReason.ERROR):
                assert output == expected[: len(output)], request_id
            else:
                assert (output, self.ends[request_id]) == (expected, reason), request_id

    def _note(self, update: RequestUpdate) -> None:
        request_id = update.request_id
        assert request_id not in self.ends, f"{request_id} goes on after its end"
        assert update.num_cached_tokens == self.first_starts[request_id], "cached tokens misreported"
        if update.token is not None:
            self.outputs[request_id].append(update.token.token_id)
        if update.finish_reason is not None:
            self.ends[request_id] = update.finish_reason
            assert (update.error is not None) == (update.finish_reason is FinishReason.ERROR)


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """(request, start, end, sample) of each segment, in order."""
    return [(s.request.request_id, s.start, s.end, s.sample) for s in plan.segments]


def make_driver(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 1000,
    max_model_len: int = 1000,
    eos: frozenset[int] = frozenset(),
    enable_prefix_caching: bool = True,
    joint_prefill_tokens: int = JOINT_PREFILL_TOKENS,
    enable_partial_hits: bool = False,
) -> Driver:
    kv = KVCacheManager(num_blocks, block_size, ROOT, enable_prefix_caching, enable_partial_hits=enable_partial_hits)
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, eos, joint_prefill_tokens)
    return Driver(Scheduler(config, kv), FakeRunner(block_size))


def make_request(
    request_id: str,
    prompt_ids: Iterable[int],
    max_tokens: int = 1,
    *,
    arrival_s: float = 0.0,
    salt: str = "",
    priority: int = 0,
    work_s: float = 0.0,
    leader_id: str | None = None,
    **params: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        arrival_s=arrival_s,
        salt=salt,
        work_s=work_s,
        priority=priority,
        leader_id=leader_id,
    )

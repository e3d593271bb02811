"""The engine's life after loading: read messages, plan a step, run it, commit it, tell the others.

One thread does it all, so a cancel takes effect between two steps and nothing needs a lock. When there is nothing to
compute the loop sleeps on the inbox.

A step that raises (a fault in a kernel) fails the requests in that step and no others; the engine goes on. One that
finds no memory fails the request with most tokens in it, and the others are planned again. Three steps in a row that
raised otherwise mean that the engine itself is broken: the process ends, and the API process starts a fresh one. An
exception from the scheduler is our own bug and ends the process at once, before it can corrupt a cache.

After a second without work the engine checks that nothing is left of any request and that its books balance.

With asynchronous scheduling the next step is planned and queued on the device before this one's tokens are read,
wherever the scheduler can plan that far (core/ahead.py). Everything else is as it was, one step later.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from engine_worker.core.events import KVEvent
from engine_worker.core.scheduler import RequestTooLarge, Scheduler
from engine_worker.core.types import FinishReason, Refusal, Request, RequestStatus, RequestUpdate, StepPlan, StepResult
from engine_worker.serving.messages import Add, Cancel, FromEngine, Sequence, Shutdown, Stats, Step, ToEngine, Update
from engine_worker.serving.speculate import Speculator

MAX_FAILED_STEPS = 3
_IDLE_POLL_MS = 1000


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...

    def release(self, request_id: str) -> None: ...


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Waits for it. Raises what the step raised."""
        ...


class LaunchingRunner(Runner, Protocol):
    """A runner whose device works on its own: `launch` queues a step and returns."""

    def launch(self, plan: StepPlan) -> Launched: ...


class _Raised:
    """A step that could not even be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class Inbox(Protocol):
    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """All waiting messages; with none, wait up to `timeout_ms` for one."""
        ...


class Publisher(Protocol):
    def publish(self, events: list[KVEvent]) -> None: ...


class EngineBroken(Exception):
    """Steps keep failing; only a fresh process can help."""


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        send: Callable[[FromEngine], None],
        publisher: Publisher | None,
        check_invariants: bool = False,
        launcher: LaunchingRunner | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """With `launcher`, which is then `runner` itself, steps are scheduled asynchronously; without `speculator`."""
        assert launcher is None or speculator is None
        self._speculator = speculator
        self._scheduler = scheduler
        self._runner = runner
        self._launcher = launcher
        self._ahead: tuple[StepPlan, Launched] | None = None  # launched, and not committed
        self._inbox = inbox
        self._send = send
        self._publisher = publisher
        self._check_invariants = check_invariants
        self._untouched: dict[str, Request] = {}  # requests without a first token yet
        self._num_failed_steps = 0
        self._is_checked = False  # since the last step
        self._num_idle_checks = 0
        self._sent_stats: Stats | None = None

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Until told to stop. Raises EngineBroken."""
        while not should_stop():
            busy = self._scheduler.has_work() or self._ahead is not None
            refused: list[Update] = []
            messages = self._inbox.receive(0 if busy else _IDLE_POLL_MS)
            if not busy and not messages:
                self._check_idle()
            for message in messages:
                if isinstance(message, Shutdown):
                    return
                refused += self._handle(message)
            updates, num_tokens = self._step() if self._scheduler.has_work() or self._ahead else ([], 0)
            if self._check_invariants:
                self._scheduler.check_invariants()
            self._tell(refused + updates, num_tokens)

    def _check_idle(self) -> None:
        """Once after each busy time. A failed check is our own bug and ends the process before it serves on."""
        if self._is_checked:
            return
        self._scheduler.check_invariants()
        stats = self._scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks, "blocks are held though there is no request"
        assert not self._untouched, "a request that is over is waited for"
        for part in (self._runner, self._speculator):
            check = getattr(part, "check_idle", None)
            if check is not None:
                check()
        self._is_checked = True
        self._num_idle_checks += 1

    def _handle(self, message: Add | Cancel) -> list[Update]:
        """Take a message in. Gives updates for the sequences that can't be accepted."""
        match message:
            case Add(sequences=sequences):
                requests = [request for sequence in sequences for request in _requests_of(sequence)]
                return [update for request in requests if (update := self._add(request))]
            case Cancel(request_ids=request_ids):
                for request_id in request_ids:
                    if self._scheduler.cancel(request_id):
                        self._forget(request_id)
        return []

    def _add(self, request: Request) -> Update | None:
        try:
            self._scheduler.add(request)
        except RequestTooLarge as error:
            return Update(
                request.request_id,
                None,
                FinishReason.ERROR,
                error=str(error),
                error_status=400,
                error_code="context_length_exceeded",
            )
        self._untouched[request.request_id] = request
        return None

    def _step(self) -> tuple[list[Update], int]:
        self._is_checked = False
        if self._speculator is not None:
            return self._speculative_step(self._speculator)
        if self._launcher is None:
            plan = self._scheduler.plan(time.monotonic())
            plan, result = self._execute(plan, lambda: self._runner.execute(plan))
        else:
            plan, launched = self._ahead or self._launch(self._scheduler.plan(time.monotonic()), self._launcher)
            # A step that could not be launched is settled before anything counts on it.
            behind = None if isinstance(launched, _Raised) else self._scheduler.plan_ahead(plan)
            self._ahead = None if behind is None else self._launch(behind, self._launcher)
            plan, result = self._execute(plan, launched.result)
        updates = [self._update(update) for update in self._scheduler.commit(plan, result)]
        return updates, plan.num_tokens

    def _speculative_step(self, speculator: Speculator) -> tuple[list[Update], int]:
        speculator.before_plan()
        plan = self._scheduler.plan(time.monotonic())
        begin = time.perf_counter()
        settled, result = self._execute(plan, lambda: self._runner.execute(plan))
        if settled is plan:
            speculator.before_commit(plan, time.perf_counter() - begin)
        committed = self._scheduler.commit(settled, result)
        speculator.after_commit()
        return [self._update(update) for update in committed], plan.num_tokens

    def _launch(self, plan: StepPlan, launcher: LaunchingRunner) -> tuple[StepPlan, Launched]:
        try:
            return plan, launcher.launch(plan)
        except Exception as error:  # it counts when the step's turn comes
            return plan, _Raised(error)

    def _execute(self, plan: StepPlan, run: Callable[[], StepResult]) -> tuple[StepPlan, StepResult]:
        """What is to be committed: the plan and its result, or the part of it that the step's failure settles."""
        if not plan.segments:
            return plan, StepResult(sampled={})
        if all(segment.request.status is RequestStatus.FINISHED for segment in plan.segments):
            with suppress(Exception):  # planned ahead for requests that ended meanwhile: it says nothing of the engine
                run()
            return plan, StepResult(sampled={})
        try:
            result = run()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            if _is_out_of_memory(error) and self._ahead is None:  # what runs ahead already counts on this step
                return _only_largest(plan)
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise EngineBroken(f"{self._num_failed_steps} steps in a row failed") from error
            sentence = f"The engine failed in a step with this request ({type(error).__name__})."
            return plan, StepResult(sampled={}, failed={s.request.request_id: sentence for s in plan.segments})
        self._num_failed_steps = 0
        return plan, result

    def _update(self, update: RequestUpdate) -> Update:
        request_id = update.request_id
        queue_s = prefill_s = None
        request = self._untouched.pop(request_id, None) if update.token is not None else None
        if request is not None and request.first_planned_s is not None:
            queue_s = request.first_planned_s - request.arrival_s
            prefill_s = time.monotonic() - request.first_planned_s
        if update.finish_reason is not None:
            self._forget(request_id)
        return Update(
            request_id,
            update.token,
            update.finish_reason,
            update.num_cached_tokens,
            update.error and str(update.error),
            400 if isinstance(update.error, Refusal) else 500,
            queue_s=queue_s,
            prefill_s=prefill_s,
            is_complete=update.is_complete,
            prompt_logprobs=update.prompt_logprobs,
            num_draft_tokens=update.num_draft_tokens,
            num_accepted_tokens=update.num_accepted_tokens,
        )

    def _forget(self, request_id: str) -> None:
        self._untouched.pop(request_id, None)
        self._runner.release(request_id)
        if self._speculator is not None:
            self._speculator.release(request_id)

    def _tell(self, updates: list[Update], num_tokens: int) -> None:
        events = self._scheduler.take_events()
        if events and self._publisher is not None:
            self._publisher.publish(events)
        stats = self._stats()
        if updates or num_tokens or stats != self._sent_stats:
            self._send(Step(updates, stats, num_tokens))
            self._sent_stats = stats

    def _stats(self) -> Stats:
        stats = self._scheduler.stats()
        return Stats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            queued_prefill_tokens=stats.queued_prefill_tokens,
            num_preemptions=stats.num_preemptions,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_idle_checks=self._num_idle_checks,
            num_copied_tokens=stats.num_copied_tokens,
            is_speculating=self._speculator is not None and self._speculator.is_on,
        )


def _requests_of(sequence: Sequence) -> Iterator[Request]:
    """The sequence's own request, which leads, and those of its other choices, which find its blocks in the cache."""
    prompt_ids = tuple(sequence.prompt_ids)  # one for all of them, as the parameters are where no seed is given
    unscored = sequence.params
    if sequence.choices and unscored.num_prompt_logprobs is not None:
        unscored = replace(unscored, num_prompt_logprobs=None)
    own = (sequence.request_id, sequence.params.seed)
    for request_id, seed in (own, *sequence.choices):
        is_leader = request_id == sequence.request_id
        params = sequence.params if is_leader else unscored
        yield Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params if params.seed == seed else replace(params, seed=seed),
            arrival_s=sequence.arrival_s,
            salt=sequence.salt,
            leader_id=None if is_leader else sequence.request_id,
            output_ids=list(sequence.output_ids),
            work_s=sequence.work_s,
        )


def _is_out_of_memory(error: Exception) -> bool:
    """Python's, CUDA's, or the one of torch's CPU allocator, which is known by its words only."""
    if isinstance(error, MemoryError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)


def _only_largest(plan: StepPlan) -> tuple[StepPlan, StepResult]:
    """The request with most tokens in the step fails, for lack of memory. Of the others nothing has happened."""
    live = [segment for segment in plan.segments if segment.request.status is RequestStatus.RUNNING]
    victim = max(live, key=lambda segment: (len(segment.token_ids), segment.end))
    sentence = "The worker has too little memory for this request now. Send a shorter one, or try again later."
    return StepPlan((victim,)), StepResult(sampled={}, failed={victim.request.request_id: sentence})

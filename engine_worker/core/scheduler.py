"""Continuous batching: what each step computes, decided as data (`plan`) and accounted for afterwards (`commit`).

One rule (vLLM v1's): every request has tokens and `num_computed`, how many of them have KV in the cache; each step
moves `num_computed` towards `num_tokens`, and a request whose last token was computed gets a new one sampled. A request
with one token missing decodes; one with more missing prefills, in chunks that share steps with the decodes of others.
Hits, chunks, preemption and resume are values of the counter, so there is no phase to get out of step.

A plan, in this order, within `max_num_batched_tokens`:

1. decodes, one token each;
2. prefills under way and admissions, in the order of waiting_queue.py: a short prompt need not wait for the rest of a
   long one, nor for a chunk that would fill the step which completes it (core/step.py). Who waits is admitted while all
   of its tokens fit beside what the running ones have yet to store and one more block for each of them. Who shares with
   a prefill under way what it lacks is passed over until that is computed (core/holding.py).

When a decode or a prefill finds no free block, the last in that order is preempted: its blocks
are freed (and stay cached until handed out), it waits at its old place and is recomputed later, sampled tokens
included. Nobody is preempted for a request that comes after it: that one stalls instead and keeps its blocks. So the
first in the order always advances: alone it finds all blocks free, and `add` refused what could not fit alone.

Why plan and commit are apart. The caller runs the plan in between, and anything may be cancelled or added meanwhile; a
result is applied only to a request that is still running. Nothing in a plan depends on the step's result. An
asynchronous loop plans step N + 1 before it commits N where it would hold nothing but decodes (core/ahead.py).

Speculation is one more value of the counter: guesses count into num_tokens, and num_computed moves by those that were
right (core/drafts.py). Nobody waits or is preempted for a guess: it takes budget and blocks that are left over.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from typing import Any

from engine_worker.core.ahead import plan_behind
from engine_worker.core.drafts import DraftCounts, most_drafts, usable, verified
from engine_worker.core.events import KVEvent
from engine_worker.core.holding import Awaited, Leaders
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.limits import RequestTooLarge, SchedulerConfig, SchedulerStats, refuse_too_large
from engine_worker.core.step import Step
from engine_worker.core.types import (
    FinishReason,
    Request,
    RequestStatus,
    RequestUpdate,
    SampledToken,
    Segment,
    StepPlan,
    StepResult,
)
from engine_worker.core.waiting_queue import Key, WaitingQueue, key_of

__all__ = ["RequestTooLarge", "Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Drive it from one thread: `plan`, run the plan, `commit` that plan, again and again while `has_work()`.

    `add`, `cancel` and `reset_prefix_cache` may be called at any time, between plan and commit too. Call `take_events`
    after each step, or the events pile up.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self._kv = kv
        self._requests: dict[str, Request] = {}  # waiting and running
        self._keys: dict[str, Key] = {}
        self._leaders = Leaders()
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # sorted by key
        self._num_added = 0
        self._num_preemptions = 0
        self._drafts = DraftCounts()

    # -- requests come and go

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output, that one sequence can have here. The last one needs no KV slot."""
        return min(self.config.max_model_len, self._kv.num_blocks * self._kv.block_size + 1)

    def add(self, request: Request) -> None:
        """Queues a request, with what output it has. Raises RequestTooLarge; ValueError without a prompt or new id."""
        if not request.prompt_ids:
            raise ValueError(f"request {request.request_id} has an empty prompt: give at least one token")
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use: choose another one")
        refuse_too_large(request, self.config.max_model_len, self.max_request_tokens)
        assert request.status is RequestStatus.WAITING
        assert len(request.output_ids) < request.params.max_tokens
        self._requests[request.request_id] = request
        self._keys[request.request_id] = key_of(request, self._num_added)
        self._num_added += 1
        if request.leader_id is not None:
            self._leaders.add(request, self._requests.get(request.leader_id))
        self._enqueue(request)

    def cancel(self, request_id: str) -> bool:
        """Ends a request now and frees its blocks; a result on its way is dropped. False if there is no such one."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def has_work(self) -> bool:
        """Whether a plan would compute anything."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far will be a hit; running requests go on undisturbed."""
        self._kv.reset()

    # -- speculation

    def can_speculate(self, most: int) -> list[tuple[Request, int]]:
        """Decoding requests, each with how many tokens could be speculated for it: 1 to `most`."""
        decoding = (r for r in self._running if r.num_tokens - r.num_computed == 1)
        rooms = [(request, most_drafts(request, self.config.max_model_len, most)) for request in decoding]
        return [(request, room) for request, room in rooms if room > 0]

    def reserve(self, request: Request, num_drafts: int) -> int:
        """Finds slots for up to so many drafts, while a block is left for all that run. Returns for how many."""
        return self._kv.extend(request, num_drafts, len(self._running))

    def speculate(self, request: Request, draft_ids: tuple[int, ...]) -> None:
        """The next plan verifies `draft_ids` behind the output, as far as there is room."""
        assert request.status is RequestStatus.RUNNING
        assert not request.draft_ids
        assert request.num_tokens - request.num_computed == 1, "only a decoding request can speculate"
        draft_ids = usable(draft_ids, request, self.config.eos_token_ids)
        request.draft_ids = draft_ids[: self.reserve(request, len(draft_ids))]

    def plan(self, now: float) -> StepPlan:
        """Decides the next step; admits and preempts. `now` is only noted. Commit the plan before the next one."""
        step = Step(self.config.max_num_batched_tokens, self.config.joint_prefill_tokens)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running:
            (decodes if request.num_known_tokens - request.num_computed == 1 else prefills).append(request)
        spare = step.budget - len(decodes) - (1 if prefills or len(self._waiting) else 0)  # what drafts may use
        for request in decodes:
            request.draft_ids = request.draft_ids[: max(spare, 0)]
            spare -= len(request.draft_ids)
            if request.status is RequestStatus.RUNNING and step.budget and self._kv.has_slot(request):
                step.add(request, request.num_tokens)  # most decodes: no block to find
            else:
                assert not request.draft_ids, "drafts have their slots"
                self._continue(request, step)
        for request in prefills:
            self._admit(step, now, before=self._keys[request.request_id])
            self._continue(request, step)
        self._admit(step, now)
        assert step.segments or not self._requests, "work, but nothing to compute"
        return StepPlan(tuple(step.segments.values()), tuple(step.preempted))

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step behind `plan`, while that runs; None if it must wait. Commit `plan` first. See core/ahead.py."""
        may_admit = len(self._waiting) and len(self._running) < self.config.max_num_seqs
        return None if may_admit else plan_behind(plan, self._running, self._kv, self.config.max_model_len)

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Accounts for a step that ran: progress, new tokens, ends. One update for each token, end or failure."""
        updates: list[RequestUpdate] = []
        for segment in plan.segments:
            request = segment.request
            if request.status is not RequestStatus.RUNNING:
                continue  # cancelled meanwhile
            assert request.num_computed == segment.start, f"{request.request_id}: the plan is not the last one"
            error = result.failed.get(request.request_id)
            if error is not None:
                updates.append(self._update(request, None, FinishReason.ERROR, error))
                continue
            scores = result.prompt_logprobs.get(request.request_id, ())
            request.num_scored += len(scores)
            if segment.sample:
                updates += self._sampled(segment, result, scores)
                continue
            self._kv.commit(request, segment.end)
            self._place(request)
            if scores:
                updates.append(self._update(request, None, None, None, False, scores))
        return updates

    # -- what others read

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take_events(self) -> list[KVEvent]:
        """What became reusable and what was evicted since the last call, in true order."""
        return self._kv.take_events()

    def stats(self) -> SchedulerStats:
        """O(running)."""
        missing = [r.num_known_tokens - r.num_computed for r in self._running]
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            queued_prefill_tokens=self._waiting.num_uncached_tokens + sum(n for n in missing if n > 1),
            num_preemptions=self._num_preemptions,
            num_blocks=self._kv.num_blocks,
            num_free_blocks=self._kv.num_free_blocks,
            num_cached_blocks=self._kv.num_cached_blocks,
            prefix_cache_queries=self._kv.prefix_cache_queries,
            prefix_cache_hits=self._kv.prefix_cache_hits,
            num_copied_tokens=self._kv.num_copied_tokens,
            **self._drafts.as_stats(),
        )

    # -- inside

    def _enqueue(self, request: Request) -> None:
        if self._leaders.hold(request):
            num_cached = self._kv.most_cacheable(request.num_tokens)  # its leader will leave them
        else:
            num_cached = len(self._kv.lookup(request)) * self._kv.block_size
        self._waiting.add(request, self._keys[request.request_id], request.num_tokens - num_cached)

    def _place(self, request: Request) -> None:  # some of its prompt was computed, or has to be once more
        self._keys[request.request_id] = key_of(request, self._keys[request.request_id][-1])
        if request.status is RequestStatus.RUNNING and request.work_s:
            self._running.remove(request)
            insort(self._running, request, key=lambda r: self._keys[r.request_id])

    def _continue(self, request: Request, step: Step) -> None:
        """Gives a running request its share of the step: all it lacks, or what budget and free blocks allow."""
        if request.status is not RequestStatus.RUNNING or step.budget == 0:
            return  # preempted for one before it, or the step is full
        num_missing = request.num_tokens - request.num_computed
        if not step.takes(num_missing):
            return
        while (num_slots := self._kv.num_tokens_allocatable(request)) == 0:
            if not self._preempt_for(request, step):
                return  # it stalls, and those before it go on
        end = min(request.num_tokens, request.num_computed + min(step.budget, num_slots))
        fits = self._kv.allocate(request, end)
        assert fits, "it takes no more than there is"
        (step.add if num_missing == 1 else step.add_prefill)(request, end)

    def _preempt_for(self, request: Request, step: Step) -> bool:
        """Preempts the last running request in the order; False if that is `request` itself."""
        victim = self._running[-1]
        if victim is request:
            return False
        self._running.pop()
        step.drop(victim)
        self._kv.free(victim)
        victim.status = RequestStatus.WAITING
        victim.draft_ids = ()
        victim.num_preemptions += 1
        self._place(victim)
        self._num_preemptions += 1
        self._enqueue(victim)
        return True

    def _admit(self, step: Step, now: float, before: Key | None = None) -> None:
        """Lets in whom the step has room for, in order; with `before` those that come before that key."""
        if step.preempted or step.budget == 0 or not self._waiting.has_any(before):
            return
        admitted: list[Request] = []
        reserve = sum(map(self._kv.num_blocks_to_come, self._running))
        awaited = Awaited(self._kv, self._running, step)
        for request in self._waiting:
            if step.budget == 0 or len(self._running) + len(admitted) >= self.config.max_num_seqs:
                break
            if before is not None and self._keys[request.request_id] > before:
                break
            if awaited.num_held == self.config.max_num_seqs:
                break
            if self._leaders.hold(request) or awaited.hold(request):
                continue
            if self._kv.num_free_blocks <= reserve:
                break  # even the best hit leaves a block to allocate
            hit = self._kv.find(request, reserve)
            if hit is None or not step.takes(request.num_tokens - hit.num_tokens):
                break
            self._kv.admit(request, hit)
            end = min(request.num_tokens, request.num_computed + step.budget)
            fits = self._kv.allocate(request, end)
            assert fits, "all of its tokens fit, so these do"
            step.add_prefill(request, end)
            awaited.add(request)
            reserve += self._kv.num_blocks_to_come(request)
            admitted.append(request)
        for request in admitted:
            self._waiting.remove(request, self._keys[request.request_id])
            insort(self._running, request, key=lambda r: self._keys[r.request_id])
            request.status = RequestStatus.RUNNING
            if request.first_planned_s is None:
                request.first_planned_s = now

    def _sampled(self, segment: Segment, result: StepResult, scores: tuple[SampledToken, ...]) -> list[RequestUpdate]:
        """The request got a token, and another one behind each speculated token that was right."""
        request = segment.request
        tokens, reason, is_complete = verified(segment, result, self.config)
        self._drafts.count(segment.num_drafts, len(tokens) - 1)
        self._kv.commit(request, request.num_tokens - 1)  # what was computed for wrong guesses does not count
        updates = [self._update(request, token, None) for token in tokens[:-1]]
        for number, update in enumerate(reversed(updates)):  # a stop string may end the answer at any of them
            updates[-1 - number] = replace(update, num_accepted_tokens=update.num_accepted_tokens - number)
        updates.append(self._update(request, tokens[-1], reason, None, is_complete, scores))
        return updates

    def _update(
        self, request: Request, token: SampledToken | None, reason: FinishReason | None, *rest: Any
    ) -> RequestUpdate:
        """See RequestUpdate.of; a request with a reason is over."""
        if reason is not None:
            self._finish(request)
        return RequestUpdate.of(request, token, reason, *rest)

    def _finish(self, request: Request) -> None:
        key = self._keys.pop(request.request_id)
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._kv.free(request)
        else:
            self._waiting.remove(request, key)
        self._kv.forget(request)
        request.status = RequestStatus.FINISHED
        self._leaders.forget(request)
        request.draft_ids = ()
        del self._requests[request.request_id]

    def check_invariants(self) -> None:
        """Asserts that queues, requests and blocks agree. O(pool)."""
        self._waiting.check_invariants()
        waiting = list(self._waiting)
        assert len(waiting) + len(self._running) == len(self._requests) == len(self._keys)
        assert len(self._running) <= self.config.max_num_seqs
        keys = [self._keys[r.request_id] for r in self._running]
        assert keys == sorted(keys), "the running ones are out of order"
        self._leaders.check_invariants(self._requests)
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed < request.num_tokens, f"{request.request_id} has nothing left to compute"
        for request in waiting:
            assert request.status is RequestStatus.WAITING
            assert (request.num_computed, request.block_ids, request.draft_ids) == (0, [], ())
            assert request.copy_from is None
        self._kv.check_invariants(self._requests.values())

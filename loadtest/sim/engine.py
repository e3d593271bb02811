"""One replica's engine: the real scheduler, KV manager and block pool, with steps that take the time of the model.

A step is planned for real, lasts as long as gpus.py says, and is committed for real. What came meanwhile waits for the
next plan, as in the worker.

Runs of decode steps. Most steps decode the same sequences one token further, and nothing can change before one of them
finishes or fills its block, except by a request that comes. Such steps are taken at once: the plan is made once, and
what commit would do for a decode that neither ends nor fills a block, adding a token to the counters, is done for all
of them together. Everything else is committed through the scheduler. Exactly those steps are alike in which
- every running sequence decodes (none stalls, none prefills, none sees its first token) and nobody was preempted,
- nobody was admitted. Those who wait were refused for lack of blocks or seats; while no block is taken, freed or named
  the answer stays the same,
- no sequence ends, and none fills its block, before the last of them.
A request that comes during a run cuts it at the end of the step under way. `fast_forward=False` steps one by one;
tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_worker.core.events import KVEvent
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.limits import JOINT_PREFILL_TOKENS
from engine_worker.core.scheduler import Scheduler, SchedulerConfig
from engine_worker.core.types import RequestUpdate, SampledToken, Segment, StepPlan, StepResult
from loadtest.sim.clock import Clock
from loadtest.sim.gpus import TOKEN_BUDGET, Gpu
from loadtest.sim.prompts import SimRequest

MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 1 << 40  # the pool is the limit
TOKEN = SampledToken(0)
ONE = (0,)
ZEROS = [0] * 65_536


@dataclass(slots=True)
class _Run:
    """`num_steps` steps like `plan`, under way since `started`."""

    plan: StepPlan
    started: float
    num_steps: int
    num_tokens: int  # in each step
    num_decodes: int
    decode_context: int


class Engine:
    """`on_update` is told of first tokens and ends; `after_step` is called before the next plan."""

    def __init__(
        self,
        clock: Clock,
        gpu: Gpu,
        kv: KVCacheManager,
        on_update: Callable[[RequestUpdate], None],
        after_step: Callable[[], None] | None = None,
        token_budget: int = TOKEN_BUDGET,
        max_num_seqs: int = MAX_NUM_SEQS,
        fast_forward: bool = True,
        joint_prefill_tokens: int = JOINT_PREFILL_TOKENS,
    ) -> None:
        config = SchedulerConfig(max_num_seqs, token_budget, MAX_MODEL_LEN, frozenset(), joint_prefill_tokens)
        self.gpu = gpu
        self.kv = kv
        self.scheduler = Scheduler(config, kv)
        self.num_plans = 0
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.busy_s = 0.0
        self._clock = clock
        self._on_update = on_update
        self._after_step = after_step
        self._fast_forward = fast_forward
        self._run: _Run | None = None
        self._between = False  # a step has ended and the next one isn't planned yet
        self._version = 0  # of the run; an end scheduled for another one is void

    def submit(self, request: SimRequest) -> None:
        """Raises RequestTooLarge."""
        self.scheduler.add(request)
        if self._between:
            return
        if self._run is None:
            self._start()
        elif self._run.num_steps > 1:
            self._cut(self._run)

    def cancel(self, request_id: str) -> bool:
        """The client is gone. A step under way goes on as it was planned."""
        if self._run is not None and self._run.num_steps > 1 and not self._between:
            self._cut(self._run)
        return self.scheduler.cancel(request_id)

    def stop(self, request_ids: Iterable[str]) -> None:
        """The process dies with the requests it had: nothing of it happens any more. A shared pool gets its blocks."""
        self._version += 1
        self._run = None
        self._between = True
        for request_id in request_ids:
            self.scheduler.cancel(request_id)

    def take_events(self) -> list[KVEvent]:
        return self.scheduler.take_events()

    # Steps

    def _start(self) -> None:
        if not self.scheduler.has_work():
            self._run = None
            return
        num_waiting = self.scheduler.num_waiting
        plan = self.scheduler.plan(self._clock.now)
        chunks: list[tuple[int, int]] = []
        num_tokens = num_decodes = context = 0
        for segment in plan.segments:
            size = len(segment.token_ids)
            num_tokens += size
            if size == 1 and segment.request.output_ids:
                num_decodes += 1
                context += segment.start + 1
            else:
                chunks.append((size, segment.start))
        num_steps = 1
        if self._fast_forward and not chunks and not plan.preempted and self.scheduler.num_waiting == num_waiting:
            num_steps = self._num_alike(plan)
        self._run = _Run(plan, self._clock.now, num_steps, num_tokens, num_decodes, context)
        if num_steps > 1:
            seconds = self.gpu.decode_run_s(num_steps, num_decodes, context)
        else:
            seconds = self.gpu.step_seconds(chunks, num_decodes, context)
        self.num_plans += 1
        self._schedule(seconds)

    def _num_alike(self, plan: StepPlan) -> int:
        """How many steps like this one, a step of decodes only, come before something must be decided."""
        if len(plan.segments) != self.scheduler.num_running:
            return 1
        block_size, least = self.kv.block_size, len(ZEROS)
        for segment in plan.segments:
            request = segment.request
            to_end = request.params.max_tokens - len(request.output_ids)
            to_full = block_size - segment.start % block_size
            if to_end < least:
                least = to_end
            if to_full < least:
                least = to_full
        return least

    def _schedule(self, seconds: float) -> None:
        run = self._run
        assert run is not None
        self._version += 1
        self._clock.at(run.started + seconds, self._end, self._version)

    def _cut(self, run: _Run) -> None:
        """End the run with the step that is under way."""
        elapsed = self._clock.now - run.started
        num_steps = self.gpu.decode_steps_until(elapsed, run.num_decodes, run.decode_context)
        if num_steps < run.num_steps:
            run.num_steps = num_steps
            self._schedule(self.gpu.decode_run_s(num_steps, run.num_decodes, run.decode_context))

    def _end(self, version: int) -> None:
        run = self._run
        if version != self._version or run is None:
            return
        plan = _settled(run.plan, run.num_steps, self.kv.block_size)
        self.num_steps += run.num_steps
        self.num_computed_tokens += run.num_steps * run.num_tokens
        self.busy_s += self._clock.now - run.started
        self._between = True
        sampling = [segment.request for segment in plan.segments if segment.sample]
        starting = {request.request_id for request in sampling if not request.output_ids}
        result = StepResult({request.request_id: TOKEN for request in sampling})
        for update in self.scheduler.commit(plan, result):
            if update.finish_reason is not None or update.request_id in starting:
                self._on_update(update)
        if self._after_step is not None:
            self._after_step()
        self._between = False
        self._start()


def _settled(plan: StepPlan, num_steps: int, block_size: int) -> StepPlan:
    """Let `num_steps` steps like `plan` have happened, but for what the scheduler must see of the last: its plan.

    Of a decode that neither ends nor fills a block, commit would add a token and count it as computed, no more; so that
    is done here, as it is for all steps of a run before the last.
    """
    segments = []
    for segment in plan.segments:
        request = segment.request
        if len(segment.token_ids) > 1 or not request.output_ids:
            segments.append(segment)
            continue
        num_output, end = len(request.output_ids) + num_steps, segment.start + num_steps
        if num_output < request.params.max_tokens and end % block_size:
            request.output_ids.extend(ZEROS[:num_steps])
            request.num_computed = end
        else:
            request.output_ids.extend(ZEROS[: num_steps - 1])
            request.num_computed = end - 1
            segments.append(segment if num_steps == 1 else Segment(request, end - 1, ONE, segment.block_ids, True))
    return StepPlan(tuple(segments))

"""Planning a step before the last one's tokens are known, so that the device never waits for the host.

While step N runs, the host plans step N + 1 and queues it behind N. What N samples isn't known then, but where it will
lie is: one token further. So the plan holds PLACEHOLDER for it, the runner puts the sampled id in its place on the
device, and N is committed one step late.

Only steps in which every running request decodes are planned so. A plan that might admit, preempt or compute a prompt
is left to the scheduler's ordinary `plan`, behind a commit: such steps are long, and the host's share in them small.
Whoever needs to know its tokens to choose the next one (a grammar, penalties, bad words) can't run ahead either.

A request may turn out to have ended in step N (an end token, a cancel) when step N + 1 is on its way. What that one
computed for it is dropped at its commit, like any result of a request that no longer runs. The slot that it wrote is
behind all that the request is known to have computed, where no hit reaches, nor a copy of a part of its last block; a
new owner writes before it reads, and the device runs steps in order.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.types import Request, RequestStatus, SamplingParams, Segment, StepPlan

PLACEHOLDER = -1  # stands for the token that the step before samples for the same request


def runs_ahead(params: SamplingParams) -> bool:
    """Whether the next token can be chosen on the device, without the host knowing the ones before it."""
    return not (
        params.grammar
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.min_tokens
        or params.allowed_token_ids
        or params.bad_words
        or params.num_prompt_logprobs is not None
    )


def can_defer(plan: StepPlan) -> bool:
    """Whether the plan's results can be read late: no request in it needs the host to choose its token."""
    return all(runs_ahead(segment.request.params) and not segment.num_drafts for segment in plan.segments)


def plan_behind(plan: StepPlan, running: Iterable[Request], kv: KVCacheManager, max_model_len: int) -> StepPlan | None:
    """The step behind `plan`, which is under way; None if that takes more than going on with its requests.

    `running` are all running requests. Finds slots for the tokens that `plan` will sample, and changes nothing else.
    """
    live = [segment for segment in plan.segments if segment.request.status is RequestStatus.RUNNING]
    if len(live) != sum(1 for _ in running) or not can_defer(plan) or not all(segment.sample for segment in live):
        return None
    segments = []
    for segment in live:
        request = segment.request
        num_output = segment.end + 1 - len(request.prompt_ids)
        if num_output >= request.params.max_tokens or segment.end + 1 >= max_model_len:
            continue  # it ends with the token that is under way
        if not kv.allocate(request, segment.end + 1):
            return None  # someone must be preempted, which is not for a guess to do
        segments.append(Segment(request, segment.end, (PLACEHOLDER,), request.block_ids, sample=True))
    return StepPlan(tuple(segments)) if segments else None

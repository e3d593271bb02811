"""The scheduler's limits and what it reports, and the refusal of requests that could never be served."""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.core.types import Request

JOINT_PREFILL_TOKENS = 512


class RequestTooLarge(Exception):
    """The request could never be served, however idle the worker is. The message says the numbers and the mend."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    max_num_seqs           sequences running at once
    max_num_batched_tokens tokens a step computes at most, hence also sequences running at once: one is admitted only
                           while the step has a token left, so decodes always leave one to a prefill under way
    max_model_len          tokens of a sequence, prompt and output, at most
    joint_prefill_tokens   a step that completes a prompt takes others only if they are completed too and have so many
                           tokens together (see core/step.py); 0 is no bound: every step is filled
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    joint_prefill_tokens: int = JOINT_PREFILL_TOKENS

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_model_len", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.joint_prefill_tokens < 0:
            raise ValueError(f"joint_prefill_tokens must be at least 0 (no bound), not {self.joint_prefill_tokens}")


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Load and cache now, and counters since the start.

    queued_prefill_tokens uncached tokens of waiting and running requests not computed yet (expected, for waiting ones)
    num_free_blocks       blocks in no request's table, cached ones included
    num_cached_blocks     distinct blocks that a request could hit
    prefix_cache_queries, prefix_cache_hits
                          prompt tokens looked up and found at first admissions
    num_copied_tokens     of those found, the ones in parts of blocks, which were copied
    num_drafts, num_draft_tokens, num_accepted_tokens
                          speculations that were verified, their tokens, and those of them that became output
    """

    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    num_preemptions: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_copied_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def refuse_too_large(request: Request, max_model_len: int, max_request_tokens: int) -> None:
    """Raises RequestTooLarge for a prompt beyond the model's limit, or a sequence that the idle pool could not hold.

    A sequence that would outgrow `max_model_len` is served, and ends there.
    """
    num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
    if num_prompt + 1 > max_model_len:
        raise RequestTooLarge(
            f"The prompt has {num_prompt} tokens, and the limit is {max_model_len} for prompt and output together: "
            f"shorten the prompt to {max_model_len - 1} tokens or fewer."
        )
    num_total = min(num_prompt + max_tokens, max_model_len)
    if num_total > max_request_tokens:
        num_left = max_request_tokens - num_prompt
        mend = f"set max_tokens to {num_left} or less" if num_left > 0 else "shorten the prompt"
        raise RequestTooLarge(
            f"The prompt's {num_prompt} tokens and up to {num_total - num_prompt} output tokens make {num_total}, and "
            f"this worker's whole KV cache holds a sequence of at most {max_request_tokens} tokens: {mend}, or start "
            "the worker with more KV cache memory."
        )

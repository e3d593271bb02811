"""When a sequence is over: stop tokens first, then the limits on its length. Stop strings are the detokenizer's."""

from __future__ import annotations

from collections.abc import Set

from engine_worker.core.types import FinishReason, Request


def finish_reason(request: Request, max_model_len: int, eos_token_ids: Set[int]) -> FinishReason | None:
    """Why the token just appended to `output_ids` ends the sequence, or None if it goes on.

    An EOS token ends it unless `ignore_eos`; so does a stop token, unless it is an EOS token that is ignored. Neither
    does among the first `min_tokens` tokens.
    """
    params, last, num_output = request.params, request.output_ids[-1], len(request.output_ids)
    if num_output > params.min_tokens:
        if last in eos_token_ids:
            if not params.ignore_eos:
                return FinishReason.STOP
        elif last in params.stop_token_ids:
            return FinishReason.STOP
    if num_output >= params.max_tokens or request.num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None

"""Which requests take the likeliest token and want nothing else: most of a greedy crowd, step after step.

That is in their parameters alone, so it is looked up once a request and not once a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_worker.core.types import SamplingParams, Segment


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens so far change what is chosen next."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def needs_state(params: SamplingParams) -> bool:
    """Whether the next token may be another than the likeliest one."""
    edits = params.logit_bias or params.min_tokens or params.grammar or params.allowed_token_ids or params.bad_words
    return not params.is_greedy or has_penalties(params) or bool(edits)


class PlainRequests:
    """Remembers a request's parameters, once they were found plain, until `release`: never its id alone, which another
    request may have next."""

    def __init__(self) -> None:
        self._params: dict[str, SamplingParams] = {}

    def covers(self, segments: Sequence[Segment]) -> bool:
        """Whether each has one row, takes its likeliest token and wants nothing else."""
        for segment in segments:
            request = segment.request
            params = request.params
            if segment.num_drafts:
                return False
            if self._params.get(request.request_id) is not params:
                if needs_state(params) or params.num_logprobs is not None:
                    return False
                self._params[request.request_id] = params
        return True

    def release(self, request_id: str) -> None:
        """Idempotent."""
        self._params.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._params)

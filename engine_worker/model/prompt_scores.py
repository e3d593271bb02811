"""Log probabilities of a prompt's own tokens, for requests that ask for them.

The logits of position p say how likely the token at p + 1 was. A request's prompt is computed in chunks, so its scores
come in chunks too, those of each segment's `scored` positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine_worker.core.types import SampledToken, Segment
from engine_worker.model.logprobs import with_logprobs


def score_prompts(
    logits: Tensor, segments: Sequence[Segment]
) -> tuple[dict[str, tuple[SampledToken, ...]], dict[str, str]]:
    """The prompt token behind each scored position, by request id; and a sentence for each request that failed.

    logits: [sum of len(segment.scored), V] float32, segment after segment.
    """
    scores: dict[str, tuple[SampledToken, ...]] = {}
    failed: dict[str, str] = {}
    start = 0
    for segment in segments:
        request, positions = segment.request, segment.scored
        rows = logits[start : start + len(positions)]
        start += len(positions)
        tokens = list(request.prompt_ids[positions.start + 1 : positions.stop + 1])
        found = with_logprobs(rows, tokens, [request.params.num_prompt_logprobs or 0] * len(tokens))
        if any(token.logprob is None or math.isnan(token.logprob) for token in found):
            failed[request.request_id] = "The model's logits for this prompt are not finite (NaN or infinite)."
        else:
            own = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])  # [P, 1]
            ranks = ((rows > own).sum(dim=-1) + 1).tolist()
            scores[request.request_id] = tuple(
                replace(token, rank=rank) for token, rank in zip(found, ranks, strict=True)
            )
    assert start == len(logits)
    return scores, failed

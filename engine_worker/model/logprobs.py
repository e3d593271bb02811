"""Log probabilities of tokens under the raw model distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.core.types import SampledToken


def with_logprobs(logits: Tensor, chosen: Sequence[int], num_logprobs: Sequence[int]) -> list[SampledToken]:
    """The chosen tokens with logprobs under log-softmax of the raw logits [R, V], and each row's k likeliest tokens."""
    ids = torch.tensor(chosen, device=logits.device)[:, None]  # [R, 1]
    norm = logits.logsumexp(dim=-1, keepdim=True)  # [R, 1]
    own = (logits.gather(1, ids) - norm).flatten().tolist()
    k = min(max(num_logprobs), logits.shape[1])
    top, top_ids = logits.topk(k, dim=-1)  # [R, k], likeliest first
    top_values, top_tokens = (top - norm).tolist(), top_ids.tolist()
    return [
        SampledToken(chosen[row], own[row], tuple(zip(top_tokens[row][:count], top_values[row][:count], strict=True)))
        for row, count in enumerate(num_logprobs)
    ]

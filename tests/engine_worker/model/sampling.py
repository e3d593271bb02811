"""Helpers of the sampler's tests: requests as the scheduler would hand them over, and reference distributions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model.sampler import Sampler

_names = itertools.count()


def segment(
    prompt_ids: Sequence[int] = (1, 2, 3), output_ids: Sequence[int] = (), name: str | None = None, **params: Any
) -> Segment:
    """A decode segment of a request with these tokens and sampling parameters (temperature 1 unless named)."""
    request = Request(
        request_id=name or f"r{next(_names)}",
        prompt_ids=tuple(prompt_ids),
        params=SamplingParams(max_tokens=100, **params),
        arrival_s=0.0,
        output_ids=list(output_ids),
    )
    last = request.token_ids(request.num_tokens - 1, request.num_tokens)
    return Segment(request, request.num_tokens - 1, tuple(last), (BlockId(0),), sample=True)


def sample_ids(sampler: Sampler, logits: torch.Tensor, segments: Sequence[Segment]) -> list[int]:
    """Token ids in the segments' order; no row may fail."""
    tokens, failed = sampler.sample(logits, segments)
    assert failed == {}
    sampler.check_invariants()
    return [tokens[s.request.request_id].token_id for s in segments]


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[V] float64 probabilities by sorting and renormalising, for logits [V] without equal values."""
    probs = (logits.double() / params.temperature).softmax(-1)
    order = probs.argsort(descending=True)
    keep = torch.ones(len(probs), dtype=torch.bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    kept_probs = torch.where(keep, probs, 0) / probs[keep].sum()
    before = kept_probs[order].cumsum(-1) - kept_probs[order]
    keep[order[before >= params.top_p]] = False
    keep[order[0]] = True
    keep &= probs >= params.min_p * probs.max()
    return torch.where(keep, probs, 0) / probs[keep].sum()


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; classes expected fewer than 5 times are pooled."""
    expected = probs * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1

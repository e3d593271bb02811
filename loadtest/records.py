"""One request as it happened: raw moments and counts. Everything else is derived from these, later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Moments on one monotonic clock, in seconds. `first_token_at` is None when none came; `error` then says why.

    matched_tokens  cached tokens that the router expected, cached_tokens those that the replica found
    """

    conversation: int
    turn: int
    started_at: float
    first_token_at: float | None
    finished_at: float
    status: int
    replica: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    matched_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.started_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in a few numbers. `cached_share` counts prompt tokens, not requests."""

    num_requests: int
    num_errors: int
    ttft_median_s: float
    ttft_p95_s: float
    cached_share: float
    matched_share: float
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    requests_per_replica: dict[str, int]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the smallest value with at least `share` of the values at or below it."""
    assert 0 < share <= 1
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarize(records: Sequence[Record]) -> Summary:
    answered = [record for record in records if record.first_token_at is not None and not record.error]
    waits = [record.ttft_s for record in answered if record.ttft_s is not None]
    prompt_tokens = sum(record.prompt_tokens for record in answered)
    replicas = sorted({record.replica for record in answered})
    return Summary(
        num_requests=len(records),
        num_errors=len(records) - len(answered),
        ttft_median_s=percentile(waits, 0.5),
        ttft_p95_s=percentile(waits, 0.95),
        cached_share=sum(record.cached_tokens for record in answered) / prompt_tokens if prompt_tokens else math.nan,
        matched_share=sum(record.matched_tokens for record in answered) / prompt_tokens if prompt_tokens else math.nan,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(record.output_tokens for record in answered),
        duration_s=max((r.finished_at for r in records), default=0) - min((r.started_at for r in records), default=0),
        requests_per_replica={name: sum(record.replica == name for record in answered) for name in replicas},
    )

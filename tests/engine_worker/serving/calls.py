"""A prepared call for tests of what comes after preparation."""

from __future__ import annotations

from typing import Any

from engine_worker.core.types import SamplingParams
from engine_worker.serving.prepare import PreparedCall


def prepared_call(prompt: list[int] | None = None, n: int = 1, **params: Any) -> PreparedCall:
    """Streamed, of one prompt, with sampling parameters as given (max_tokens 9 unless given)."""
    return PreparedCall(
        model="m",
        prompts=(prompt or [1, 2],),
        params=(SamplingParams(**{"max_tokens": 9, **params}),),
        n=n,
        stops=(),
        include_stop=False,
        skip_special_tokens=True,
        salt="",
        num_logprobs=None,
        stream=True,
        include_usage=False,
    )

"""The prompt in the answer: echoed as text with its logprobs, and as vLLM's `prompt_logprobs`.

Nothing comes before a prompt's first token, so it has no log probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_worker.core.types import SampledToken
from engine_worker.serving.detokenizer import PlacedToken
from engine_worker.serving.token_text import TokenText


def echoed(
    prompt_ids: Sequence[int], scores: Sequence[SampledToken], tokens: TokenText, skip_special_tokens: bool
) -> tuple[str, tuple[PlacedToken, ...]]:
    """The prompt's text, and each of its tokens with where its text begins.

    `scores` are the tokens behind the first with their logprobs, or empty where none were asked for.
    """
    assert not scores or len(scores) == len(prompt_ids) - 1, "a prompt scored in part"
    stream = tokens.stream(skip_special_tokens)
    known = [SampledToken(prompt_ids[0]), *scores] if scores else [SampledToken(token_id) for token_id in prompt_ids]
    text = ""
    placed = []
    for token in known:
        placed.append(PlacedToken(token, len(text)))
        text += stream.push(token.token_id)
    return text + stream.flush(), tuple(placed)


def prompt_logprobs(scores: Sequence[SampledToken], num_top: int, tokens: TokenText) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token, its id and those of the likeliest to logprob, rank and text; null for the first."""
    return [None, *(_entries(token, num_top, tokens) for token in scores)]


def _entries(token: SampledToken, num_top: int, tokens: TokenText) -> dict[str, Any]:
    found = {token_id: (logprob, i + 1) for i, (token_id, logprob) in enumerate(token.top_logprobs[:num_top])}
    entries = {token.token_id: (token.logprob, token.rank), **found}
    return {
        str(token_id): {
            "logprob": None if logprob is None else max(logprob, -9999.0),
            "rank": rank,
            "decoded_token": tokens.string_of(token_id),
        }
        for token_id, (logprob, rank) in entries.items()
    }

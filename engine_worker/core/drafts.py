"""Speculated tokens: which of them may be tried, and what a step that tried some means for its request.

Before a plan, guesses are put behind a decoding request's output, and the step computes them with the token before
them. The result brings one token more than there were right guesses. Commit keeps these tokens and drops the guesses:
num_computed ends one behind num_tokens, as after any decode, and the slots behind it are written before they are read
again. So only tokens that stay get blocks named.

Why the output is what it would have been without. A draft is only a guess at what will be sampled. The token at each
position is sampled from the model's own distribution behind the true tokens before it, with the randomness that belongs
to that position (its seed and the number of output tokens), exactly as a step without drafts would do; a draft decides
merely whether the logits behind it are of use. So a right guess saves a step, a wrong one costs some arithmetic, and
neither shows in the output: greedy answers stay, and so do seeded ones, token by token; unseeded ones keep their
distribution.

Rejection sampling (Leviathan et al. 2023; Chen et al. 2023) keeps the distribution, too, and accepts a guess more often
where draft and model both draw at random: it keeps a token x with min(1, p(x) / q(x)), whereas here two independent
draws would have to coincide. A draft model can draw with the same noise, though (the Gumbel coupling: both take the
argmax of their logits plus the same noise). Then a guess is right with a chance of at least (1 - d) / (1 + d), where d
is the distance in variation, against 1 - d at best; and for a guess that is no draw at all, as one copied from the
prompt, both methods accept with chance p(x).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict, dataclass

from engine_worker.core.finish import finish_reason
from engine_worker.core.limits import SchedulerConfig
from engine_worker.core.types import FinishReason, Request, SampledToken, Segment, StepResult


@dataclass(slots=True)
class DraftCounts:
    """Speculations verified since the start, their tokens, and those of them that became output."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def as_stats(self) -> dict[str, int]:
        return asdict(self)

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted


def most_drafts(request: Request, max_model_len: int, most: int) -> int:
    """How many tokens it makes sense to speculate, at most `most`: what is sampled behind them is output, too."""
    num_left = min(request.params.max_tokens - len(request.output_ids), max_model_len - request.num_known_tokens)
    return min(num_left - 1, most)


def usable(draft_ids: tuple[int, ...], request: Request, eos_token_ids: Set[int]) -> tuple[int, ...]:
    """The drafts before the first one that could end the sequence: what follows an end is never output."""
    ends = {*eos_token_ids, *request.params.stop_token_ids}
    return draft_ids[: next((i for i, token_id in enumerate(draft_ids) if token_id in ends), len(draft_ids))]


def verified(
    segment: Segment, result: StepResult, config: SchedulerConfig
) -> tuple[tuple[SampledToken, ...], FinishReason | None, bool]:
    """Makes output of what was sampled, up to the sequence's end, and drops the request's drafts.

    Returns the new tokens, why they end the sequence, and whether it is its grammar that does.
    """
    request = segment.request
    tokens = (result.sampled[request.request_id], *result.following.get(request.request_id, ()))
    guessed = tuple(token.token_id for token in tokens[:-1])
    assert guessed == segment.draft_ids[: len(guessed)], f"{request.request_id}: a guess was taken unverified"
    request.draft_ids = ()
    reason: FinishReason | None = None
    num_taken = 0
    for token in tokens:
        request.output_ids.append(token.token_id)
        num_taken += 1
        reason = finish_reason(request, config.max_model_len, config.eos_token_ids)
        if reason is not None:
            break
    request.num_draft_tokens += segment.num_drafts
    request.num_accepted_tokens += num_taken - 1
    is_complete = (
        request.request_id in result.completed and num_taken == len(tokens) and reason is not FinishReason.STOP
    )
    return tokens[:num_taken], FinishReason.STOP if is_complete else reason, is_complete

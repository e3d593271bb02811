"""N-gram guesses: what is found, how far it goes, and that a growing text is followed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine_worker.core.types import Request, SamplingParams
from engine_worker.model.draft_ngram import NgramDrafter, last_match

pytestmark = pytest.mark.engine


def request_of(prompt_ids: list[int], output_ids: list[int]) -> Request:
    params = SamplingParams(max_tokens=100)
    return Request(
        request_id="a", prompt_ids=tuple(prompt_ids), params=params, arrival_s=0.0, output_ids=list(output_ids)
    )


def slow_match(ids: list[int], least: int, most: int) -> int | None:
    for length in range(min(most, len(ids) - 1), least - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[-length:]:
                return end
    return None


def test_finds_what_a_plain_search_finds() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        ids = [rng.randrange(4) for _ in range(rng.randint(0, 30))]
        least = rng.randint(1, 3)
        most = rng.randint(least, 5)
        assert last_match(np.array(ids, dtype=np.int64), least, most) == slow_match(ids, least, most), (
            ids,
            least,
            most,
        )


def test_guesses_what_followed_and_goes_on_with_the_guess() -> None:
    drafter = NgramDrafter(2, 4)
    request = request_of([1, 2, 3, 4, 5, 6, 9, 9], [2, 3])
    assert drafter.propose([(request, 3)]) == [(4, 5, 6)]
    loop = request_of([7, 8, 5], [7, 8, 5, 7, 8])
    drafter.release("a")
    assert drafter.propose([(loop, 7)]) == [(5, 7, 8, 5, 7, 8, 5)]


def test_follows_the_output_across_tokens_and_forgets_on_release() -> None:
    drafter = NgramDrafter(2, 4)
    request = request_of([1, 2, 3, 4], [])
    assert drafter.propose([(request, 4)]) == [()]
    for token_id in (1, 2):
        request.output_ids.append(token_id)
    assert drafter.propose([(request, 2)]) == [(3, 4)]
    request.output_ids += list(range(10, 300))
    assert drafter.propose([(request, 2)]) == [()]
    request.output_ids += [20, 21]
    assert drafter.propose([(request, 3)]) == [(22, 23, 24)]
    drafter.release("a")
    drafter.release("a")
    assert drafter.num_states == 0

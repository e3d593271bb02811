"""The bounds against what can be counted by hand, and against brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from loadtest.sim.bounds import belady, bounds, infinite, lru
from loadtest.sim.prompts import BlockName, PromptBook
from tests.loadtest.sim.traces import BLOCK, request


def named(book: PromptBook, *prompts: tuple[int, ...]) -> list[list[BlockName]]:
    return [book.names(prompt) for prompt in prompts]


def test_an_infinite_cache_remembers_whole_prefixes() -> None:
    prompts = named(PromptBook(), (0, 1, 2), (0, 1, 3), (9, 1, 2), (0, 1, 2))
    assert infinite(prompts) == [0, 2, 0, 3]


def test_lru_evicts_tails_first() -> None:
    prompts = named(PromptBook(), (1, 2, 3), (4,), (1, 2, 3))
    assert lru(prompts, 4) == [0, 0, 3]
    assert lru(prompts, 3) == [0, 0, 2], "the tail of the old prompt went, not its root"


def test_belady_keeps_what_is_needed_next() -> None:
    prompts = named(PromptBook(), (1,), (2,), (3,), (1,), (2,), (4,), (1,))
    assert lru(prompts, 2) == [0] * 7
    assert belady(prompts, 2) == [0, 0, 0, 1, 1, 0, 1]


def most_hits(prompts: list[list[BlockName]], num_blocks: int) -> int:
    """The most block hits of any caching at all: after each prompt keep any `num_blocks` of what was held or came."""
    best: dict[frozenset[BlockName], int] = {frozenset(): 0}
    for prompt in prompts:
        following: dict[frozenset[BlockName], int] = {}
        for held, hits in best.items():
            length = next((i for i, name in enumerate(prompt) if name not in held), len(prompt))
            there = held | set(prompt)
            for kept in itertools.combinations(sorted(there, key=lambda n: n.key), min(num_blocks, len(there))):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), hits + length)
        best = following
    return max(best.values())


@pytest.mark.parametrize("seed", range(15))
def test_belady_is_the_best_there_is(seed: int) -> None:
    rng, book = random.Random(seed), PromptBook()
    prompts = []
    for _ in range(7):
        prompts.append(book.names(tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 3)))))
    for num_blocks in (1, 2, 3):
        found = sum(belady(prompts, num_blocks))
        assert found == most_hits(prompts, num_blocks)
        assert sum(lru(prompts, num_blocks)) <= found <= sum(infinite(prompts))


def test_ratios_are_in_tokens_and_leave_one_to_compute() -> None:
    book = PromptBook()
    requests = [request(1, 2, tail=0), request(1, 2, tail=0)]
    found = bounds(requests, book, 100, BLOCK)
    assert found.infinite == found.lru == found.belady == pytest.approx(512 / 2048)

"""Hits that go on behind whole blocks: what is copied from where, for how long it is held, and what is kept for it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.core.block_pool import BlockPool, hash_block, root_hash
from engine_worker.core.events import BlocksStored
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.parts import Siblings, num_common
from engine_worker.core.types import BlockHash, BlockId, Request
from tests.engine_worker.core.fake_runner import Driver, make_driver, make_request, shape

ROOT = root_hash(b"root", "")
PARENT = BlockHash(b"parent")


def manager(num_blocks: int = 20, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, b"root", enable_partial_hits=True)


NUMBERS = count()


def start(kv: KVCacheManager, prompt: Iterable[int], end: int | None = None, **options: str) -> Request:
    """A request that is admitted, and whose first step (up to `end`) has run."""
    request = make_request(f"r{next(NUMBERS)}", prompt, 100, **options)  # type: ignore[arg-type]
    hit = kv.find(request, 0)
    assert hit is not None
    kv.admit(request, hit)
    end = request.num_tokens if end is None else end
    assert kv.allocate(request, end)
    kv.commit(request, end)
    return request


def finish(kv: KVCacheManager, *requests: Request) -> None:
    for request in requests:
        kv.free(request)
        kv.forget(request)


def cached(kv: KVCacheManager, prompt: Iterable[int], **options: str) -> tuple[int, BlockId | None]:
    """What a request with this prompt would find: tokens, and the block that some of them are copied from."""
    request = make_request("peek", prompt, **options)  # type: ignore[arg-type]
    hit = kv.find(request, 0)
    kv.forget(request)
    assert hit is not None
    return hit.num_tokens, hit.part


# -- what is found


def test_a_prompt_that_leaves_a_cached_one_within_a_block_copies_up_to_there() -> None:
    kv = manager()
    first = start(kv, range(12))
    finish(kv, first)
    assert cached(kv, [0, 1, 2, 3, 4, 5, 6, 77, 78]) == (7, BlockId(1))
    assert cached(kv, [0, 1, 77]) == (2, BlockId(0))
    assert cached(kv, [77, 1, 2]) == (0, None)


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_the_same_prompt_again_computes_one_token(num_tokens: int) -> None:
    kv = manager()
    finish(kv, start(kv, range(num_tokens)))
    assert cached(kv, range(num_tokens))[0] == num_tokens - 1


def test_the_last_block_of_an_answer_is_kept_for_the_next_turn() -> None:
    kv = manager()
    request = start(kv, [0, 1, 2, 3, 4])
    for token in (5, 6):
        request.output_ids.append(token)
    kv.commit(request, 6)  # the last token is never computed
    finish(kv, request)
    assert cached(kv, [*range(7), 50, 51]) == (6, BlockId(1))


def test_a_running_requests_block_is_found_as_far_as_it_has_come() -> None:
    kv = manager()
    running = start(kv, range(7), end=6)
    assert cached(kv, [*range(7), 50]) == (6, running.block_ids[1])
    kv.commit(running, 7)
    assert cached(kv, [*range(7), 50]) == (7, running.block_ids[1])
    running.output_ids += [7, 8, 9]
    assert kv.allocate(running, 9)
    kv.commit(running, 9)
    assert cached(kv, [*range(7), 50]) == (7, running.block_ids[1]), "it is full and has a name now"
    assert cached(kv, [*range(9), 50]) == (9, running.block_ids[2])


def test_whoever_has_most_in_common_is_copied() -> None:
    kv = manager()
    finish(kv, start(kv, [0, 1, 2, 3, 4, 50, 51, 52, 53]))
    finish(kv, start(kv, [0, 1, 2, 3, 4, 5, 60, 61]))
    running = start(kv, [0, 1, 2, 3, 4, 5, 6])
    assert cached(kv, [0, 1, 2, 3, 4, 50, 77, 78]) == (6, BlockId(1))
    assert cached(kv, [0, 1, 2, 3, 4, 5, 60, 78])[0] == 7
    assert cached(kv, [0, 1, 2, 3, 4, 5, 6, 78]) == (7, running.block_ids[1])


def test_salts_share_nothing() -> None:
    kv = manager()
    running = start(kv, range(6), salt="a")
    finish(kv, start(kv, range(7), salt="b"))
    assert cached(kv, range(7)) == (0, None)
    assert cached(kv, range(7), salt="c") == (0, None)
    assert cached(kv, range(7), salt="a") == (6, running.block_ids[1])
    assert cached(kv, range(7), salt="b")[0] == 6


def test_who_waits_for_a_copy_has_nothing_to_copy_yet() -> None:
    kv = manager()
    finish(kv, start(kv, range(6)))
    second = make_request("second", range(7))
    hit = kv.find(second, 0)
    assert hit is not None
    kv.admit(second, hit)
    assert (second.num_computed, second.copy_from, second.block_ids) == (6, BlockId(1), [0, 2])
    assert cached(kv, [*range(7), 8]) == (6, BlockId(1)), "not the block that the rows are about to be copied into"
    kv.check_invariants([second])
    kv.allocate(second, 7)
    kv.commit(second, 7)
    assert cached(kv, [*range(7), 8]) == (7, BlockId(2))


def test_prompt_logprobs_are_computed_from_the_start() -> None:
    kv = manager()
    finish(kv, start(kv, range(6)))
    request = make_request("a", range(6), num_prompt_logprobs=0)
    hit = kv.find(request, 0)
    assert hit is not None
    assert (hit.num_tokens, hit.part) == (0, None)


def test_without_prefix_caching_or_parts_whole_blocks_or_nothing_are_found() -> None:
    for options, expected in (({"enable_prefix_caching": False, "enable_partial_hits": True}, 0), ({}, 4)):
        kv = KVCacheManager(20, 4, b"root", **options)
        finish(kv, start(kv, range(7)))
        assert cached(kv, range(7)) == (expected, None)


def test_a_reset_forgets_parts_too() -> None:
    kv = manager()
    finish(kv, start(kv, range(6)))
    running = start(kv, range(50, 57))
    kv.reset()
    assert cached(kv, range(6)) == (0, None)
    assert cached(kv, range(50, 57)) == (0, None)
    kv.check_invariants([running])
    finish(kv, running)
    kv.check_invariants([])
    assert cached(kv, range(50, 57)) == (0, None)


# -- what is held and what is given away


def about_to_copy() -> tuple[KVCacheManager, Request]:
    """Six blocks, and a request that is admitted, whose copy out of another's block has not run yet."""
    kv = manager(num_blocks=6)
    finish(kv, start(kv, range(7)))
    request = make_request("a", [0, 1, 2, 3, 4, 5, 50])
    hit = kv.find(request, 0)
    assert hit is not None
    kv.admit(request, hit)
    return kv, request


def test_the_source_is_held_until_the_step_is_committed() -> None:
    kv, request = about_to_copy()
    assert kv.num_free_blocks == 3, "two blocks of its own, and the source"
    greedy = make_request("b", range(60, 76))
    assert kv.find(greedy, 0) is None, "the source is not to be had"
    kv.forget(greedy)
    kv.allocate(request, 7)
    kv.commit(request, 7)
    assert (request.copy_from, kv.num_free_blocks) == (None, 4)
    kv.check_invariants([request])


@pytest.mark.parametrize("end", ["preempted", "finished"])
def test_a_request_that_goes_before_its_copy_lets_go_of_the_source(end: str) -> None:
    kv, request = about_to_copy()
    kv.free(request)
    if end == "finished":
        kv.forget(request)
    assert (request.copy_from, kv.num_free_blocks) == (None, 6)
    kv.check_invariants([] if end == "finished" else [request])
    assert cached(kv, [0, 1, 2, 3, 4, 5, 60]) == (6, BlockId(1))


def test_no_source_is_held_where_its_block_is_needed() -> None:
    """Alone in a pool that it just fits into, a request must be admitted as if there were no parts."""
    kv = manager(num_blocks=2)
    finish(kv, start(kv, range(7)))
    assert cached(kv, [0, 1, 2, 3, 4, 5, 50]) == (4, None)
    kv = manager(num_blocks=3)
    finish(kv, start(kv, range(7)))
    assert cached(kv, [0, 1, 2, 3, 4, 5, 50]) == (6, BlockId(1))
    request = make_request("a", [0, 1, 2, 3, 4, 5, 50])
    hit = kv.find(request, 1)
    assert hit is not None
    assert hit.part is None, "one block is reserved"


def test_parts_are_evicted_before_the_blocks_that_they_follow() -> None:
    kv = manager(num_blocks=4)
    finish(kv, start(kv, range(10)))
    kv.check_invariants([])
    assert cached(kv, range(10)) == (9, BlockId(2))
    finish(kv, start(kv, range(60, 65)))
    kv.check_invariants([])
    assert cached(kv, range(10)) == (8, None)


def test_events_are_about_whole_blocks_only() -> None:
    kv = manager(num_blocks=4)
    for prompt in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], range(60, 76)):
        finish(kv, start(kv, prompt))
    stored = [event for event in kv.take_events() if isinstance(event, BlocksStored)]
    assert [event.token_ids for event in stored] == [(0, 1, 2, 3), tuple(range(60, 76))]
    assert kv.num_cached_blocks == 4


def test_a_part_that_a_fuller_block_begins_with_is_given_away_first() -> None:
    pool = BlockPool(4, with_parts=True)
    blocks, _ = pool.allocate(3)
    pool.keep_part(blocks[0], ROOT, (1, 2), is_first=True)
    pool.free([blocks[0]])
    pool.check_invariants([[blocks[1]], [blocks[2]]])
    assert pool.find_part(ROOT, (1, 2, 3)) == (blocks[0], 2)
    pool.keep_part(blocks[1], ROOT, (1, 2, 3), is_first=True)
    assert pool.eviction_order()[0] == (blocks[0], None)
    assert pool.find_part(ROOT, (1, 2, 3)) == (blocks[1], 3)
    pool.keep_part(blocks[2], ROOT, (1, 2), is_first=True)
    pool.free([blocks[2]])
    assert pool.eviction_order()[0] == (blocks[2], None), "it had nothing that the other hasn't"
    pool.free([blocks[1]])
    (again,), _ = pool.allocate(1)
    pool.register(again, hash_block(ROOT, (1, 2, 3, 4)), ROOT, (1, 2, 3, 4), is_first=True)
    pool.check_invariants([[again]])
    assert pool.find_part(ROOT, (1, 2, 3)) == (again, 3)
    assert [block for block, _ in pool.eviction_order()][:1] == [blocks[1]]


# -- the index


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), max_size=30), st.randoms())
def test_the_index_finds_what_a_walk_over_all_entries_finds(texts: list[tuple[int, ...]], rng: random.Random) -> None:
    siblings: Siblings[tuple[int, ...]] = Siblings()
    held: set[tuple[int, ...]] = set()
    for text in texts:
        covered = any(other[: len(text)] == text for other in held)
        assert siblings.covers(PARENT, text) == covered
        if not covered:
            begun = siblings.add(PARENT, text, text)
            assert begun == next((other for other in held if text[: len(other)] == other), None)
            held -= {begun}  # type: ignore[arg-type]
            held.add(text)
        if held and rng.random() < 0.3:
            gone = rng.choice(sorted(held))
            siblings.remove(PARENT, gone)
            held.remove(gone)
        siblings.check_invariants()
        assert {tokens for _, tokens, _ in siblings} == held
        query = tuple(rng.randrange(3) for _ in range(rng.randint(0, 5)))
        most = max((num_common(other, query) for other in held), default=0)
        found = siblings.closest(PARENT, query)
        assert (found[1] if found else 0) == most
        if found:
            assert num_common(found[0], query) == most


# -- with the scheduler


def turns(driver: Driver, *prompts: Sequence[int], max_tokens: int = 1) -> list[int | None]:
    """Serves one after the other; their cached tokens."""
    requests = [make_request(f"t{next(NUMBERS)}", prompt, max_tokens) for prompt in prompts]
    for request in requests:
        driver.add(request)
        driver.run()
    driver.check_ended()
    return [request.num_cached_tokens for request in requests]


def test_cached_tokens_are_counted_to_the_token() -> None:
    driver = make_driver(enable_partial_hits=True)
    assert turns(driver, range(10), [*range(6), 50, 51], range(10)) == [0, 6, 9]
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (28, 15)
    assert driver.runner.num_copied == 2 + 1


def test_choices_of_one_prompt_compute_one_token_of_it_each() -> None:
    driver = make_driver(enable_partial_hits=True)
    driver.add(make_request("a", range(7), 3), *(make_request(n, range(7), 3, leader_id="a") for n in "bcd"))
    plans = driver.run()
    driver.check_ended()
    assert shape(plans[1])[1:] == [(n, 6, 7, True) for n in "bcd"]


def test_a_copy_is_planned_again_after_a_step_that_did_not_run() -> None:
    """The loop commits only a part of such a plan; whoever isn't in it is planned once more, with the copy."""
    driver = make_driver(enable_partial_hits=True)
    turns(driver, range(7))
    driver.add(make_request("late", [0, 1, 2, 3, 4, 5, 50], 2))
    scheduler = driver.scheduler
    lost = scheduler.plan(1.0)
    scheduler.check_invariants()
    again = scheduler.plan(2.0)
    assert lost.segments[0].copy_from == again.segments[0].copy_from == BlockId(1)
    driver.first_starts["late"] = 6
    for update in scheduler.commit(again, driver.runner.execute(again)):
        driver._note(update)
    assert scheduler.plan(3.0).segments[0].copy_from is None


def conversations(seed: int, num_blocks: int, budget: int, enable_partial_hits: bool) -> Driver:
    """Users who share a beginning and come back with all that was said and a few words more."""
    rng = random.Random(seed)
    driver = make_driver(
        num_blocks, 4, max_num_batched_tokens=budget, enable_partial_hits=enable_partial_hits, max_num_seqs=4
    )
    driver.runner.vocab_size = 8
    histories = [[*range(6), *(rng.randrange(8) for _ in range(rng.randint(1, 6)))] for _ in range(5)]
    for number in range(40):
        user = rng.randrange(len(histories))
        request = make_request(f"r{number}", histories[user], rng.randint(1, 6), arrival_s=driver.now)
        driver.add(request)
        for _ in range(rng.randint(0, 6)):
            driver.step(cancel_meanwhile=[f"r{rng.randint(0, number)}"] if rng.random() < 0.05 else [])
        known = [*request.prompt_ids, *request.output_ids][: rng.randint(1, 40)]
        histories[user] = [*known, *(rng.randrange(8) for _ in range(rng.randint(1, 3)))]
    driver.run()
    driver.check_ended()
    return driver


@pytest.mark.parametrize("budget", [3, 16, 1000])
@pytest.mark.parametrize("num_blocks", [14, 30, 200])
def test_conversations_compute_less_and_say_the_same(num_blocks: int, budget: int) -> None:
    """Whether the pool is ample or evicts all the time. What is said is held against solo runs."""
    for seed in range(4):
        whole, parts = (conversations(seed, num_blocks, budget, parts) for parts in (False, True))
        assert parts.runner.num_copied > 0
        assert whole.runner.num_copied == 0
        if num_blocks == 200:
            assert parts.runner.num_computed < whole.runner.num_computed

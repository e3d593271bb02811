"""Hits, block tables and events, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from unittest import mock

import pytest

from engine_worker.core import block_pool
from engine_worker.core.chains import Hit
from engine_worker.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.types import BlockId, Request
from tests.engine_worker.core.fake_runner import make_request

TEN = range(100, 110)


def manager(num_blocks: int = 10, block_size: int = 4, **options: bool) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, b"root", **options)


def admit(kv: KVCacheManager, request: Request) -> int:
    """Admits with whatever is cached; returns the cached tokens."""
    hit = kv.find(request, 0)
    assert hit is not None
    kv.admit(request, hit)
    return request.num_computed


def compute(kv: KVCacheManager, request: Request, end: int | None = None) -> None:
    end = request.num_tokens if end is None else end
    assert kv.allocate(request, end)
    kv.commit(request, end)
    kv.check_invariants([request])


def finish(kv: KVCacheManager, request: Request) -> None:
    kv.free(request)
    kv.forget(request)


def serve(kv: KVCacheManager, request: Request) -> int:
    """Admits, computes and ends one request alone; returns its cached tokens."""
    num_cached = admit(kv, request)
    compute(kv, request)
    finish(kv, request)
    kv.check_invariants([])
    return num_cached


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_fully_cached_prompt_still_computes_its_last_token(num_tokens: int, expected: int) -> None:
    kv = manager()
    prompt = range(num_tokens)
    assert serve(kv, make_request("a", prompt)) == 0
    assert serve(kv, make_request("b", prompt)) == expected == kv.most_cacheable(num_tokens)


def peek(kv: KVCacheManager, prompt: Iterable[int]) -> list[BlockId]:
    """What a request with this prompt would hit."""
    request = make_request("peek", prompt)
    hit = kv.lookup(request)
    kv.forget(request)
    return hit


def test_a_block_is_no_hit_before_its_kv_was_computed() -> None:
    kv = manager()
    first = make_request("a", TEN)
    admit(kv, first)
    kv.allocate(first, 10)
    assert peek(kv, TEN) == []
    kv.commit(first, 7)
    assert peek(kv, TEN) == first.block_ids[:1]
    kv.commit(first, 8)
    assert peek(kv, TEN) == first.block_ids[:2]


def test_the_longest_common_prefix_of_whole_blocks_is_hit() -> None:
    kv = manager()
    serve(kv, make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert serve(kv, make_request("b", [1, 2, 3, 4, 5, 6, 7, 0, 9])) == 4
    assert serve(kv, make_request("c", [0, 2, 3, 4, 5, 6, 7, 8, 9])) == 0


def test_output_tokens_are_cached_for_the_next_turn() -> None:
    kv = manager()
    request = make_request("a", [1, 2, 3], max_tokens=9)
    admit(kv, request)
    compute(kv, request)
    for token in (4, 5, 6, 7, 8, 9):
        request.output_ids.append(token)
        compute(kv, request)
    finish(kv, request)
    assert serve(kv, make_request("b", [*range(1, 10), 77, 78])) == 8


def test_a_salt_and_another_model_separate_caches() -> None:
    kv = manager()
    serve(kv, make_request("a", TEN, salt="x"))
    assert serve(kv, make_request("b", TEN)) == 0
    assert serve(kv, make_request("c", TEN, salt="y")) == 0
    assert serve(kv, make_request("d", TEN, salt="x")) == 8


def test_a_resume_keeps_the_first_count_of_cached_tokens() -> None:
    kv = manager()
    request = make_request("a", TEN)
    admit(kv, request)
    compute(kv, request)
    kv.free(request)
    assert (request.num_computed, request.block_ids) == (0, [])
    assert admit(kv, request) == 8
    assert request.num_cached_tokens == 0
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (10, 0)


def test_hits_are_counted_in_tokens() -> None:
    kv = manager()
    serve(kv, make_request("a", TEN))
    serve(kv, make_request("b", TEN))
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (20, 8)


def test_a_failed_allocation_changes_nothing() -> None:
    kv = manager(num_blocks=2)
    request = make_request("a", TEN)
    assert kv.find(request, 0) is None, "it needs three blocks"
    kv.admit(request, Hit([], 0))
    assert not kv.allocate(request, 9)
    assert (kv.num_free_blocks, request.block_ids) == (2, [])
    assert kv.num_tokens_allocatable(request) == 8
    assert kv.allocate(request, 8)
    assert kv.allocate(request, 5)
    assert kv.num_free_blocks == 0


def test_missing_blocks_count_what_a_hit_takes_from_the_free_ones() -> None:
    kv = manager()
    holder = make_request("a", TEN)
    admit(kv, holder)
    compute(kv, holder)
    asker = make_request("b", TEN)
    assert kv.num_blocks_missing(asker, kv.lookup(asker)) == 1
    finish(kv, holder)
    assert kv.num_blocks_missing(asker, kv.lookup(asker)) == 3


def test_without_prefix_caching_there_are_no_hits_and_no_events() -> None:
    kv = manager(enable_prefix_caching=False)
    for request_id in "ab":
        assert serve(kv, make_request(request_id, TEN)) == 0
    kv.reset()
    assert (kv.take_events(), kv.num_cached_blocks, kv.most_cacheable(9)) == ([], 0, 0)


def test_events_can_be_off_while_hits_are_on() -> None:
    kv = manager(num_blocks=3, enable_kv_events=False)
    serve(kv, make_request("a", TEN))
    assert serve(kv, make_request("b", TEN)) == 8
    serve(kv, make_request("c", range(12)))
    kv.reset()
    assert kv.take_events() == []


def test_events_tell_what_happened_in_the_true_order() -> None:
    kv = manager(num_blocks=3)
    request = make_request("a", TEN, salt="s")
    admit(kv, request)
    compute(kv, request, 3)
    assert kv.take_events() == []
    compute(kv, request, 5)
    compute(kv, request)
    finish(kv, request)
    other = make_request("b", range(12))
    admit(kv, other)
    compute(kv, other)
    kv.reset()
    root_s, root = block_pool.root_hash(b"root", "s"), block_pool.root_hash(b"root", "")
    a0 = block_pool.hash_block(root_s, tuple(TEN[:4]))
    a1 = block_pool.hash_block(a0, tuple(TEN[4:8]))
    b0 = block_pool.hash_block(root, (0, 1, 2, 3))
    b1 = block_pool.hash_block(b0, (4, 5, 6, 7))
    b2 = block_pool.hash_block(b1, (8, 9, 10, 11))
    assert kv.take_events() == [
        BlocksStored((a0,), None, tuple(TEN[:4]), 4, "s"),
        BlocksStored((a1,), a0, tuple(TEN[4:8]), 4, "s"),
        BlocksRemoved((a1, a0)),
        BlocksStored((b0, b1, b2), None, tuple(range(12)), 4, ""),
        AllBlocksCleared(),
    ]
    assert kv.take_events() == []


def test_a_prefix_computed_twice_is_stored_once_and_removed_once() -> None:
    kv = manager(num_blocks=6)
    first, second = make_request("a", range(9)), make_request("b", [*range(8), 77, 78, 79, 80])
    for request in (first, second):
        admit(kv, request)
        kv.allocate(request, request.num_tokens)
    kv.commit(first, 9)
    kv.commit(second, 12)
    kv.check_invariants([first, second])
    stored = [len(event.block_hashes) for event in kv.take_events() if isinstance(event, BlocksStored)]
    assert stored == [2, 1]
    finish(kv, second)
    kv.check_invariants([first])
    third = make_request("c", range(200, 212))
    admit(kv, third)
    assert kv.allocate(third, 12)
    (removed,) = kv.take_events()
    assert isinstance(removed, BlocksRemoved)
    assert len(removed.block_hashes) == 1, "only the tail that the second had alone"
    assert peek(kv, range(9)) == first.block_ids[:2]


def test_a_forged_collision_is_neither_a_hit_nor_a_name_for_what_follows() -> None:
    """With one hash for everything, no request reads another's blocks, and children of a nameless block stay so."""
    with mock.patch.object(block_pool, "hash_block", return_value=b"same"):
        kv = manager()
        serve(kv, make_request("a", [1, 2, 3, 4, 5]))
        kv.take_events()
        assert serve(kv, make_request("b", [9, 9, 9, 9, 5, 6, 7, 8, 9])) == 0
        assert kv.take_events() == []
        assert serve(kv, make_request("c", [1, 2, 3, 4, 5])) == 4


def test_a_reset_disturbs_nobody_and_nothing_before_it_is_hit() -> None:
    kv = manager()
    running = make_request("a", TEN)
    admit(kv, running)
    compute(kv, running, 5)
    kv.reset()
    kv.check_invariants([running])
    compute(kv, running)
    assert peek(kv, TEN) == []
    kv.free(running)
    assert admit(kv, running) == 0
    compute(kv, running)
    assert len(peek(kv, TEN)) == 2, "recomputed after the reset, so reusable again"


def test_a_finished_request_leaves_no_hashes_behind() -> None:
    kv = manager()
    serve(kv, make_request("a", TEN))
    never_admitted = make_request("b", TEN)
    kv.lookup(never_admitted)
    kv.forget(never_admitted)
    kv.check_invariants([])


def test_a_table_that_plans_still_point_to_is_left_as_it_is() -> None:
    kv = manager()
    request = make_request("a", TEN)
    admit(kv, request)
    kv.allocate(request, 10)
    seen = request.block_ids
    kv.free(request)
    assert len(seen) == 3

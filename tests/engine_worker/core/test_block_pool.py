"""The block pool: references, names, and the exact order in which blocks are given away."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine_worker.core.block_pool import BlockPool, Registered, hash_block, root_hash
from engine_worker.core.types import BlockHash, BlockId

ROOT = root_hash(b"model", "")


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(n) for n in numbers]


def order(pool: BlockPool) -> list[int]:
    return [block_id for block_id, _ in pool.eviction_order()]


def cache(pool: BlockPool, table: list[BlockId], *tokens: int, skip: int = 0) -> list[BlockHash]:
    """Registers the table's blocks, one token each, as one chain; the first `skip` are registered already."""
    parent, names = ROOT, []
    for i, (block_id, token) in enumerate(zip(table, tokens, strict=True)):
        name = hash_block(parent, (token,))
        if i >= skip:
            pool.register(block_id, name, parent, (token,), is_first=i == 0)
        names.append(name)
        parent = name
    return names


def test_blocks_are_handed_out_in_order_and_only_once() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == (ids(0, 1, 2), [])
    assert (pool.num_free, order(pool)) == (1, [3])
    pool.check_invariants([ids(0, 1, 2)])


def test_asking_for_more_than_is_free_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 are free"):
        BlockPool(2).allocate(3)


def test_a_pool_without_blocks_is_refused_with_the_mend() -> None:
    with pytest.raises(ValueError, match="give the KV cache more memory"):
        BlockPool(0)


def test_a_block_freed_twice_is_a_bug() -> None:
    pool = BlockPool(2)
    table, _ = pool.allocate(1)
    pool.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)


def test_tails_are_evicted_before_roots_and_older_tables_before_newer() -> None:
    pool = BlockPool(6)
    old, _ = pool.allocate(3)
    new, _ = pool.allocate(3)
    old_names = cache(pool, old, 1, 2, 3)
    new_names = cache(pool, new, 7, 8, 9)
    pool.free(old)
    pool.free(new)
    assert order(pool) == [2, 1, 0, 5, 4, 3]
    evicted = [pool.allocate(1)[1] for _ in range(6)]
    assert evicted == [[name] for name in [*reversed(old_names), *reversed(new_names)]]


def test_empty_blocks_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(5)
    table, _ = pool.allocate(3)  # blocks 0 and 1 full, 2 the partial tail
    cache(pool, table[:2], 1, 2)
    pool.free(table)
    assert order(pool) == [2, 3, 4, 1, 0]
    assert pool.allocate(3)[1] == []


def test_a_hit_moves_a_prefix_behind_what_was_used_less_recently() -> None:
    pool = BlockPool(4)
    first, _ = pool.allocate(2)
    second, _ = pool.allocate(2)
    cache(pool, first, 1, 2)
    cache(pool, second, 5, 6)
    pool.free(first)
    pool.free(second)
    assert order(pool) == [1, 0, 3, 2]
    pool.take(ids(0))  # a hit on the root of the first prefix alone
    assert order(pool) == [1, 3, 2]
    pool.free(ids(0))
    assert order(pool) == [1, 3, 2, 0]
    pool.check_invariants([])


def test_a_shared_block_is_free_only_when_its_last_table_drops_it() -> None:
    pool = BlockPool(3)
    table, _ = pool.allocate(2)
    cache(pool, table, 1, 2)
    pool.take(ids(0))
    pool.free(table)
    assert (pool.is_free(BlockId(0)), pool.is_free(BlockId(1))) == (False, True)
    pool.check_invariants([ids(0)])
    pool.free(ids(0))
    assert order(pool) == [2, 1, 0]


def test_a_cached_free_block_is_found_until_it_is_handed_out() -> None:
    pool = BlockPool(1)
    table, _ = pool.allocate(1)
    (name,) = cache(pool, table, 1)
    pool.free(table)
    assert pool.find(name, ROOT, (1,)) == 0
    assert pool.allocate(1) == (ids(0), [name])
    assert pool.find(name, ROOT, (1,)) is None
    assert pool.num_cached == 0


def test_a_forged_hash_is_no_hit_and_cant_be_registered() -> None:
    pool = BlockPool(2)
    table, _ = pool.allocate(2)
    (name,) = cache(pool, table[:1], 1)
    other_root = root_hash(b"model", "tenant")
    assert pool.find(name, ROOT, (2,)) is None
    assert pool.find(name, other_root, (1,)) is None
    for parent, token in ((ROOT, 2), (other_root, 1)):
        assert pool.register(table[1], name, parent, (token,), is_first=True) is Registered.COLLISION
    pool.check_invariants([table])


def test_two_held_copies_of_a_prefix_outlive_each_other() -> None:
    """Neither end of one table takes a block or the prefix from the other."""
    for first_to_end in (0, 1):
        pool = BlockPool(4)
        tables = [pool.allocate(2)[0] for _ in range(2)]
        names = cache(pool, tables[0], 1, 2)
        assert pool.register(tables[1][0], names[0], ROOT, (1,), is_first=True) is Registered.DUPLICATE
        assert pool.register(tables[1][1], names[1], names[0], (2,), is_first=False) is Registered.DUPLICATE
        assert pool.num_cached == 2
        pool.free(tables[first_to_end])
        left = tables[1 - first_to_end]
        pool.check_invariants([left])
        assert [pool.find(names[0], ROOT, (1,)), pool.find(names[1], names[0], (2,))] == left
        assert pool.allocate(2) == (tables[first_to_end], []), "the copies carried nothing"
        pool.free(left)
        assert pool.num_cached == 2


def test_a_free_copy_gives_way_to_a_held_one() -> None:
    pool = BlockPool(2)
    old, _ = pool.allocate(1)
    new, _ = pool.allocate(1)
    (name,) = cache(pool, old, 1)
    pool.free(old)
    assert pool.register(new[0], name, ROOT, (1,), is_first=True) is Registered.DUPLICATE
    assert pool.eviction_order() == [(old[0], None)]
    assert pool.find(name, ROOT, (1,)) == new[0]
    pool.check_invariants([new])


def test_clearing_forgets_names_and_keeps_holders() -> None:
    pool = BlockPool(3)
    table, _ = pool.allocate(2)
    names = cache(pool, table, 1, 2)
    pool.clear_cache()
    assert pool.find(names[0], ROOT, (1,)) is None
    assert (pool.num_cached, pool.num_free) == (0, 1)
    pool.free(table)
    pool.check_invariants([])


def test_roots_separate_models_and_salts() -> None:
    roots = [root_hash(b"m", "ab"), root_hash(b"ma", "b"), root_hash(b"m", ""), root_hash(b"", "m"), root_hash(b"", "")]
    assert len(set(roots)) == len(roots)


def test_names_depend_on_every_token_and_on_the_whole_prefix() -> None:
    names = [hash_block(ROOT, (1, 2)), hash_block(ROOT, (2, 1)), hash_block(hash_block(ROOT, (1,)), (2,))]
    names += [hash_block(ROOT, (1, 2, 0)), hash_block(ROOT, (1 + 2**16, 2))]
    assert len(set(names)) == len(names)


def test_names_are_the_same_in_every_process() -> None:
    code = "from engine_worker.core.block_pool import *; print(hash_block(root_hash(b'm', 'salt'), (1, 70000)).hex())"
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True)
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.decode().strip() == hash_block(root_hash(b"m", "salt"), (1, 70000)).hex()

"""The fixed pool of KV blocks: who holds each block, which prefix it carries, and which one is given away next.

A block is in one of two places. *Held*: one or more block tables contain it, and `num_refs` counts them. *Free*: it is
in the free list, which is also the eviction order, from head (handed out next) to tail. A free block may still carry a
prefix; until it is handed out, a hit takes it back.

Order of the free list. Blocks that carry nothing come first, since giving them away loses nothing. Then come the
cached ones, least recently freed first. A table is freed from its last block to its first, so a prefix's tail is
evicted before its root, and a cached block's parent is always cached too.

Names of blocks. A full block whose KV was computed is registered under SHA-256(parent hash, token ids); the first
block's parent is a root made of the model's cache root and the request's salt. A hash is only a name: `find` compares
the token ids and the parent, so a forged collision is never a hit. The parent was compared in the same way one block
earlier, hence by induction the whole prefix was.

Duplicates. Two requests may compute one prefix at the same time. Both blocks stay where they are (a block never leaves
a table early) and share the hash. Once one of them is free while another copy exists it carries nothing of value, so
it drops its hash: a hash has either held copies only, or exactly one free copy.

Parts. With `with_parts` a block that a table leaves behind half full may keep its tokens, though it has no hash: as
long as it is free, and behind a parent that is cached, they can be copied (parts.py). In the eviction order it is a
cached block like others. A part that a fuller block begins with carries nothing of value and is forgotten.

Block tables, requests and events belong to `kv_manager`. The design of pool and list follows vLLM v1's block pool.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from enum import Enum

from engine_worker.core.parts import Siblings
from engine_worker.core.types import BlockHash, BlockId


def root_hash(cache_root: bytes, salt: str) -> BlockHash:
    """The parent of every first block: equal for equal model, weights, KV format (`cache_root`) and salt only."""
    prefix = b"warmgate kv root\0" + len(cache_root).to_bytes(8, "little")
    return BlockHash(hashlib.sha256(prefix + cache_root + salt.encode("utf-8", "surrogatepass")).digest())


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """SHA-256 over the parent hash and the ids as unsigned 32-bit little-endian; the same in every process."""
    return BlockHash(hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest())


class Registered(Enum):
    """What came of registering a block. NEW: its prefix became reusable. DUPLICATE: it was already, in another block.
    COLLISION: other tokens hold the same hash, so this block (and any child of it) must stay without one."""

    NEW = "new"
    DUPLICATE = "duplicate"
    COLLISION = "collision"


class _Block:
    """One block's book-keeping. `parent` and `token_ids` mean something only while `block_hash` is set, or for a part,
    which has none.

    `prev` and `next` link the free list; a held block has neither. `is_first` tells that `parent` is a root.
    """

    __slots__ = ("block_hash", "block_id", "is_first", "next", "num_refs", "parent", "prev", "token_ids")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.num_refs = 0
        self.block_hash: BlockHash | None = None
        self.parent: BlockHash | None = None
        self.is_first = False
        self.token_ids: tuple[int, ...] = ()
        self.prev: _Block | None = None
        self.next: _Block | None = None

    @property
    def is_part(self) -> bool:
        return self.block_hash is None and bool(self.token_ids)


class BlockPool:
    """`num_blocks` blocks with ids 0 to num_blocks - 1. Every operation costs O(blocks it is given).

    `with_parts` lets blocks be found by a part of their tokens, for the price of an index.
    """

    def __init__(self, num_blocks: int, with_parts: bool = False) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, not {num_blocks}: give the KV cache more memory")
        self._blocks = [_Block(BlockId(i)) for i in range(num_blocks)]
        self._copies: dict[BlockHash, list[_Block]] = {}
        self._siblings: Siblings[list[_Block]] | None = Siblings() if with_parts else None
        self._end = _Block(BlockId(-1))  # closes the ring: _end.next is the head, _end.prev the tail
        self._end.prev = self._end.next = self._end
        self.num_free = 0
        for block in self._blocks:
            self._link(block, at_head=False)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_cached(self) -> int:
        """Distinct prefixes' blocks that a request could hit, held and free ones alike."""
        return len(self._copies)

    def is_free(self, block_id: BlockId) -> bool:
        return self._blocks[block_id].num_refs == 0

    def num_held(self, block_ids: Sequence[BlockId]) -> int:
        """How many of them are in a block table."""
        blocks = self._blocks
        return sum([blocks[block_id].num_refs > 0 for block_id in block_ids])

    def find(self, block_hash: BlockHash, parent: BlockHash, token_ids: tuple[int, ...]) -> BlockId | None:
        """The block that carries exactly these tokens behind exactly this parent. Changes nothing."""
        found = self.find_all(parent, [block_hash], [token_ids])
        return found[0] if found else None

    def find_all(
        self, parent: BlockHash, hashes: Sequence[BlockHash], token_ids: Sequence[tuple[int, ...]]
    ) -> list[BlockId]:
        """The same for consecutive blocks behind `parent`, up to the first that isn't there."""
        found: list[BlockId] = []
        all_copies = self._copies
        for block_hash, tokens in zip(hashes, token_ids, strict=False):
            copies = all_copies.get(block_hash)
            if copies is None:
                break
            block = copies[0]  # copies of one hash carry the same tokens: `register` refuses others
            if block.token_ids != tokens or block.parent != parent:
                break
            found.append(block.block_id)
            parent = block_hash
        return found

    def find_part(self, parent: BlockHash, token_ids: tuple[int, ...]) -> tuple[BlockId, int] | None:
        """The block behind `parent` with most leading tokens in common, and how many; None without any."""
        found = None if self._siblings is None else self._siblings.closest(parent, token_ids)
        return None if found is None else (found[0][0].block_id, found[1])

    def take(self, block_ids: Iterable[BlockId]) -> None:
        """Adds one reference to each block (a hit); free ones leave the free list."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.num_refs == 0:
                self._unlink(block)
            block.num_refs += 1

    def allocate(self, num_blocks: int) -> tuple[list[BlockId], list[BlockHash]]:
        """Hands out blocks from the head with one reference each; returns them and the hashes evicted, in order.

        The caller checks `num_free` first; asking for more is a bug.
        """
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} are free"
        allocated: list[BlockId] = []
        evicted: list[BlockHash] = []
        for _ in range(num_blocks):
            block = self._end.next
            assert block is not None
            if block.block_hash is not None:
                evicted.append(block.block_hash)
                self._forget(block)
            elif block.token_ids:
                self._forget_part(block)
            self._unlink(block)
            block.num_refs = 1
            allocated.append(block.block_id)
        return allocated, evicted

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Drops one reference to each block of a table given first to last. Without references a block is free."""
        blocks, all_copies = self._blocks, self._copies
        for block_id in reversed(block_ids):
            block = blocks[block_id]
            num_refs = block.num_refs - 1
            assert num_refs >= 0, f"block {block_id} freed twice"
            block.num_refs = num_refs
            if num_refs == 0:
                if block.block_hash is not None and len(all_copies[block.block_hash]) > 1:
                    self._forget(block)  # another copy is still held
                self._link(block, at_head=block.block_hash is None and not block.token_ids)

    def register(
        self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash, token_ids: tuple[int, ...], is_first: bool
    ) -> Registered:
        """Names a held block whose KV is computed. Its parent is registered, or a root if the block `is_first`."""
        block = self._blocks[block_id]
        assert block.num_refs > 0, f"block {block_id} is free and can't be registered"
        assert block.block_hash is None, f"block {block_id} is registered already"
        copies = self._copies.get(block_hash)
        if copies is None:
            copies, outcome = self._copies.setdefault(block_hash, []), Registered.NEW
        elif copies[0].token_ids != token_ids or copies[0].parent != parent:
            return Registered.COLLISION
        else:
            outcome = Registered.DUPLICATE
        block.block_hash, block.parent, block.token_ids, block.is_first = block_hash, parent, token_ids, is_first
        copies.append(block)
        if outcome is Registered.NEW:
            self._add_sibling(block, copies)
        if len(copies) == 2 and copies[0].num_refs == 0:
            twin = copies[0]
            self._forget(twin)
            self._unlink(twin)
            self._link(twin, at_head=True)
        return outcome

    def keep_part(
        self, block_id: BlockId, parent: BlockHash, token_ids: tuple[int, ...], is_first: bool = False
    ) -> None:
        """Lets the first tokens of a held block be found once its table lets go of it; nobody may write it any more.

        Its parent is registered, or a root if the block `is_first`. Nothing happens where another block has as many.
        """
        block = self._blocks[block_id]
        assert block.num_refs > 0, f"block {block_id} is free and keeps nothing"
        assert block.block_hash is None, f"block {block_id} is no part"
        if self._siblings is not None and token_ids and not self._siblings.covers(parent, token_ids):
            block.parent, block.token_ids, block.is_first = parent, token_ids, is_first
            self._add_sibling(block, [block])

    def clear_cache(self) -> None:
        """Forgets every hash and every part. Held blocks stay held."""
        if self._siblings is not None:
            for _, _, copies in self._siblings:
                copies[0].block_hash, copies[0].parent, copies[0].token_ids = None, None, ()
            self._siblings.clear()
        for copies in self._copies.values():
            for block in copies:
                block.block_hash, block.parent, block.token_ids = None, None, ()
        self._copies.clear()

    def eviction_order(self) -> list[tuple[BlockId, BlockHash | None]]:
        """The free list from head to tail, for tests and debugging. O(free blocks)."""
        order: list[tuple[BlockId, BlockHash | None]] = []
        block = self._end.next
        while block is not None and block is not self._end:
            order.append((block.block_id, block.block_hash))
            block = block.next
        return order

    def _add_sibling(self, block: _Block, copies: list[_Block]) -> None:
        """Lets `copies`, which `block` is one of, be found by a part of its tokens."""
        if self._siblings is None:
            return
        assert block.parent is not None
        covered = self._siblings.add(block.parent, block.token_ids, copies)
        if covered is not None:
            part = covered[0]
            part.parent, part.token_ids = None, ()
            if part.num_refs == 0:
                self._unlink(part)
                self._link(part, at_head=True)

    def _forget(self, block: _Block) -> None:
        assert block.block_hash is not None
        copies = self._copies[block.block_hash]
        copies.remove(block)
        if not copies:
            del self._copies[block.block_hash]
            if self._siblings is not None:
                assert block.parent is not None
                self._siblings.remove(block.parent, block.token_ids)
        block.block_hash, block.parent, block.token_ids = None, None, ()

    def _forget_part(self, block: _Block) -> None:
        assert self._siblings is not None
        assert block.parent is not None
        self._siblings.remove(block.parent, block.token_ids)
        block.parent, block.token_ids = None, ()

    def _link(self, block: _Block, *, at_head: bool) -> None:
        after = self._end if at_head else self._end.prev
        assert after is not None
        before = after.next
        assert before is not None
        block.prev, block.next = after, before
        after.next = before.prev = block
        self.num_free += 1

    def _unlink(self, block: _Block) -> None:
        before, after = block.prev, block.next
        assert before is not None
        assert after is not None
        before.next, after.prev = after, before
        block.prev = block.next = None
        self.num_free -= 1

    def check_invariants(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Asserts that references, free list and hashes agree with `tables`, all block tables in use. O(pool)."""
        refs = [0] * len(self._blocks)
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block_id in table:
                refs[block_id] += 1
        for block in self._blocks:
            assert block.num_refs == refs[block.block_id], f"block {block.block_id}: {block.num_refs} references"
            assert (block.next is None) == (block.num_refs > 0), f"block {block.block_id} is both held and free"
        order = self.eviction_order()
        assert len(order) == self.num_free == refs.count(0), "the free list lost or gained blocks"
        assert len({block_id for block_id, _ in order}) == len(order), "the free list holds a block twice"
        cached = [bool(self._blocks[block_id].token_ids) for block_id, _ in order]
        assert cached == sorted(cached), "a cached block would be evicted before an empty one"
        place = {block_hash: i for i, (_, block_hash) in enumerate(order) if block_hash}
        self._check_hashes(place)
        self._check_parts(place, {block_id: i for i, (block_id, _) in enumerate(order)})

    def _check_hashes(self, place: dict[BlockHash, int]) -> None:
        assert sum(map(len, self._copies.values())) == sum(b.block_hash is not None for b in self._blocks)
        for block_hash, copies in self._copies.items():
            first = copies[0]
            for block in copies:
                assert (block.block_hash, block.parent) == (block_hash, first.parent), "a copy under another's name"
                assert block.token_ids == first.token_ids, "copies of one hash carry different tokens"
            assert len(copies) == 1 or all(b.num_refs > 0 for b in copies), "a free block has a twin"
            assert first.parent is not None
            assert first.is_first or first.parent in self._copies, "a cached block lost its parent"
            if first.parent in place:
                assert block_hash in place, "a free parent has a held child"
                assert place[block_hash] < place[first.parent], "a parent would be evicted before its child"

    def _check_parts(self, place: dict[BlockHash, int], place_of: dict[BlockId, int]) -> None:
        parts = [block for block in self._blocks if block.is_part]
        if self._siblings is None:
            assert not parts, "a part that nobody finds"
            return
        self._siblings.check_invariants()
        found = {(parent, tokens): copies[0] for parent, tokens, copies in self._siblings}
        named = [copies[0] for copies in self._copies.values()]
        assert len(found) == len(named) + len(parts), "siblings were lost, or are left of blocks that are gone"
        for block in named + parts:
            assert block.parent is not None
            assert found[block.parent, block.token_ids] is block, "another block is found by these tokens"
        for block in parts:
            assert block.is_first or block.parent in self._copies, "a part lost its parent"
            if block.parent in place:
                assert block.num_refs == 0, "a free parent has a held part"
                assert place_of[block.block_id] < place[block.parent], "a parent would be evicted before its part"

"""Prompts without tokens: what the core and the router need to know of one, computed once for each distinct prefix.

The engine names a block by SHA-256 over its parent's name and its token ids, the router by a 128-bit key. In a trace
a block is an id, so here a name is SHA-256 over the parent's name and that id, and the router's key is its first half.
Each distinct (parent, id) is hashed once for the whole run. The engine compares token ids on a hit; the stand-in for a
block's ids is a tuple with one number.

`SimRequest` has a range for a prompt: its length is what counts, and slices of it cost nothing. Output blocks get
names nobody else has: they take room in the cache and age in it as real ones do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from engine_worker.core.block_pool import BlockPool
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.types import BlockHash, Request
from policies.types import BlockKey

ROOT = BlockHash(hashlib.sha256(b"simulated").digest())
OUTPUT_ID = -1


@dataclass(frozen=True, slots=True, eq=False)
class BlockName:
    """One distinct prefix, and the same object wherever it occurs. `token_ids` stands in for its last block's."""

    block_hash: BlockHash
    key: BlockKey
    token_ids: tuple[int, ...]


class PromptBook:
    """Names of all prefixes met so far. The latest prompt of a session is kept: the next one mostly continues it."""

    def __init__(self) -> None:
        self._names: dict[tuple[BlockHash, int], BlockName] = {}
        self._latest: dict[str, tuple[tuple[int, ...], list[BlockName]]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def names(self, block_ids: tuple[int, ...], session: str | None = None) -> list[BlockName]:
        """One name for each block of the prompt."""
        if session is None:
            return self._walk(block_ids, [])
        ids, known = self._latest.get(session, ((), []))
        names = self._walk(block_ids, known[: _common(ids, block_ids)])
        self._latest[session] = block_ids, names
        return names

    def _walk(self, block_ids: tuple[int, ...], found: list[BlockName]) -> list[BlockName]:
        """Goes on behind the names in `found`."""
        names = self._names
        parent = found[-1].block_hash if found else ROOT
        for block_id in block_ids[len(found) :]:
            name = names.get((parent, block_id))
            if name is None:
                name = names[parent, block_id] = _name(parent, block_id)
            found.append(name)
            parent = name.block_hash
        return found


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many leading ids they share."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _name(parent: BlockHash, block_id: int) -> BlockName:
    digest = hashlib.sha256(parent + block_id.to_bytes(8, "little", signed=True)).digest()
    return BlockName(BlockHash(digest), key_of(digest), (block_id,))


def key_of(block_hash: bytes) -> BlockKey:
    """The router's name of the engine's block."""
    return BlockKey(int.from_bytes(block_hash[:16], "little"))


@dataclass(slots=True, kw_only=True, eq=False)
class SimRequest(Request):
    """A request whose tokens are only counted. `names`: of the prompt's full blocks, and then of those that the answer
    fills, where they are somebody's prompt later."""

    names: Sequence[BlockName]

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        return cast("tuple[int, ...]", range(start, end))


class SimKVCacheManager(KVCacheManager):
    """The real manager, with names from the book. Several may share one `pool` (the pooled limit)."""

    def __init__(
        self, num_blocks: int, block_size: int, pool: BlockPool | None = None, enable_kv_events: bool = False
    ) -> None:
        super().__init__(num_blocks, block_size, b"simulated", enable_kv_events=enable_kv_events)
        if pool is not None:
            self._pool = pool

    def known_names(self, request: Request) -> tuple[list[BlockHash], list[tuple[int, ...]]]:
        assert isinstance(request, SimRequest)
        names = request.names[: len(request.prompt_ids) // self.block_size]
        return [name.block_hash for name in names], [name.token_ids for name in names]

    def name_block(self, request: Request, index: int, parent: BlockHash) -> tuple[BlockHash, tuple[int, ...]]:
        """A block with output in it: a later prompt's, or nobody else's."""
        assert isinstance(request, SimRequest)
        if index < len(request.names):
            return request.names[index].block_hash, request.names[index].token_ids
        tail = f"{request.request_id}/{index}".encode()
        return BlockHash(hashlib.sha256(parent + tail).digest()), (OUTPUT_ID, index)

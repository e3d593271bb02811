"""What is found of a request in the prefix cache, and what its blocks are called there: data without rules.

The rules are kv_manager.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.core.types import BlockHash, BlockId

BlockTokens = tuple[int, ...]  # a block's token ids, in order


@dataclass(frozen=True, slots=True)
class Hit:
    """A request's longest cached prefix: whole blocks, and then the first tokens of `part`; `num_tokens` in all."""

    block_ids: list[BlockId]
    num_tokens: int
    part: BlockId | None = None


@dataclass(slots=True)
class Chain:
    """What a request's full blocks are called. Hashes are made once and kept while the request lives.

    `num_registered` leading blocks of the table have their hash in the pool. `caching` is off once the prefix of this
    table can't be named any more (a collision, or a reset of the cache), until the table is dropped.
    """

    root: BlockHash
    hashes: list[BlockHash]
    token_ids: list[BlockTokens]
    num_registered: int = 0
    caching: bool = True

    def parent(self, index: int) -> BlockHash:
        return self.hashes[index - 1] if index else self.root

    @property
    def tail(self) -> BlockHash:
        """What the table's first block without a name follows."""
        return self.parent(self.num_registered)

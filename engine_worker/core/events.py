"""What the prefix cache tells the world: blocks stored, removed, cleared. Taken after every step, sent by others."""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.core.types import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive full blocks became reusable. `token_ids` holds block_size ids for each hash, in order."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    salt: str


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared

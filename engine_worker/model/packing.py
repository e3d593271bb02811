"""From a step's plan to the flat tensors of one forward.

All tokens of a step lie in one row, request after request: ids [1, T], positions [1, T] and the cache slot of each
token. Requests that compute a single token (the decoding ones) come first, so that a backend finds their queries in one
slice; among them, long contexts whose blocks lie side by side come before all others, and short ones before longer.

Block tables persist between steps: a request owns a row of one int64 table, and a step only writes the blocks that are
new since the last one. Nothing here costs Python time in proportion to the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from engine_worker.core.types import BlockId, Segment
from engine_worker.model.transfer import to_device

SHORT_CONTEXT = 128  # tokens; up to here many requests are read faster together, gathered, than one by one in place


class BlockTables:
    """request id -> row of block ids. Rows grow, are rewritten after a preemption, and go back with `release`."""

    def __init__(self, num_rows: int, blocks_per_row: int, block_size: int) -> None:
        self.block_size = block_size
        self.table = np.zeros((num_rows, blocks_per_row), dtype=np.int64)
        self.tensor = torch.from_numpy(self.table)  # shares the memory
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.contiguous = np.ones(num_rows, dtype=bool)
        self._rows: dict[str, int] = {}
        self._known: dict[str, list[BlockId]] = {}
        self._lists: dict[str, Sequence[BlockId]] = {}  # what `cover` saw last: the list itself
        self._free = list(range(num_rows - 1, -1, -1))

    def update(self, request_id: str, block_ids: Sequence[BlockId]) -> int:
        """Record a request's blocks and return its row. Compares and copies at C speed; writes only what is new."""
        row = self._rows.get(request_id)
        if row is None:
            row = self._claim(request_id)
        known = self._known[request_id]
        if known == block_ids:
            return row
        if len(block_ids) > self.table.shape[1]:
            self._widen(len(block_ids))
        old, new = len(known), len(block_ids)
        grown = 0 < old < new and block_ids[:old] == known
        begin = old if grown else 0
        self.table[row, begin:new] = block_ids[begin:]
        joined = bool((np.diff(self.table[row, max(begin - 1, 0) : new]) == 1).all())
        self.contiguous[row] = joined and (not grown or bool(self.contiguous[row]))
        self.num_blocks[row] = new
        self._known[request_id] = list(block_ids)
        return row

    def cover(self, request_id: str, block_ids: Sequence[BlockId], end: int) -> int:
        """`update` with as many of the blocks as positions 0 .. end - 1 take.

        A list seen before only grows (Segment.block_ids): most steps find in it nothing new.
        """
        needed = -(-end // self.block_size)
        row = self._rows.get(request_id)
        if row is not None and self._lists.get(request_id) is block_ids and len(self._known[request_id]) == needed:
            return row
        row = self.update(request_id, list(block_ids[:needed]))
        self._lists[request_id] = block_ids
        return row

    def release(self, request_id: str) -> None:
        """Give a request's row back. Idempotent."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            del self._known[request_id]
            self._lists.pop(request_id, None)
            self._free.append(row)

    @property
    def num_used(self) -> int:
        return len(self._rows)

    def check_invariants(self) -> None:
        used = list(self._rows.values())
        assert sorted(used + self._free) == list(range(self.table.shape[0])), "a row is lost or owned twice"
        assert self._rows.keys() == self._known.keys()
        for request_id, row in self._rows.items():
            known = self._known[request_id]
            assert self.table[row, : len(known)].tolist() == known
            assert self.num_blocks[row] == len(known)
            assert self.contiguous[row] == all(b - a == 1 for a, b in pairwise(known))

    def _claim(self, request_id: str) -> int:
        if not self._free:
            self._grow_rows()
        row = self._free.pop()
        self._rows[request_id] = row
        self._known[request_id] = []
        self.num_blocks[row] = 0
        self.contiguous[row] = True
        return row

    def _grow_rows(self) -> None:
        old = self.table.shape[0]
        self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self.tensor = torch.from_numpy(self.table)
        self.num_blocks = np.concatenate([self.num_blocks, np.zeros_like(self.num_blocks)])
        self.contiguous = np.concatenate([self.contiguous, np.ones_like(self.contiguous)])
        self._free.extend(range(2 * old - 1, old - 1, -1))

    def _widen(self, needed: int) -> None:
        width = max(needed, 2 * self.table.shape[1])
        self.table = np.pad(self.table, ((0, 0), (0, width - self.table.shape[1])))
        self.tensor = torch.from_numpy(self.table)


@dataclass(frozen=True, slots=True)
class Span:
    """One request's tokens in the pack: tokens offset .. offset + num_tokens - 1 are its positions start .. end - 1."""

    offset: int
    num_tokens: int
    start: int
    row: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True)
class PackedBatch:
    """One step as tensors. `memo` keeps what a backend derives once a step (per mask), for all layers.

    input_ids, position_ids  [1, T]
    slots                    [T], where each token's key and value go
    spans                    in pack order; the first `num_decodes` have one token each
    last_index               for each segment, in the plan's order, the pack index of its last token
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    spans: tuple[Span, ...]
    num_decodes: int
    tables: BlockTables
    last_index: list[int]
    memo: dict[object, object] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[0]

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    def block_row(self, span: Span) -> torch.Tensor:
        """Block ids [ceil(end / block_size)] of the span's request, on the CPU."""
        return self.tables.tensor[span.row, : -(-span.end // self.block_size)]


def pack(segments: Sequence[Segment], tables: BlockTables, device: torch.device) -> PackedBatch:
    """Lay a step's segments out as one packed row. Every segment must have a token."""
    assert len(segments) > 0
    ranked = []
    for index, segment in enumerate(segments):
        num_tokens, end = len(segment.token_ids), segment.end
        assert num_tokens > 0, "a segment without tokens"
        row = tables.cover(segment.request.request_id, segment.block_ids, end)
        is_run = end > SHORT_CONTEXT and tables.contiguous[row]
        ranked.append((num_tokens > 1, not is_run, end, index, row))
    ranked.sort()
    spans: list[Span] = []
    ids: list[int] = []
    last_index = [0] * len(segments)
    for _, _, end, index, row in ranked:
        token_ids = segments[index].token_ids
        spans.append(Span(len(ids), len(token_ids), end - len(token_ids), row))
        ids += token_ids
        last_index[index] = len(ids) - 1
    num_decodes = sum(span.num_tokens == 1 for span in spans)
    positions, slots = _places(spans, tables, len(ids), num_decodes)
    return PackedBatch(
        input_ids=to_device(np.array([ids], dtype=np.int64), device),
        position_ids=to_device(positions[None], device),
        slots=to_device(slots, device),
        spans=tuple(spans),
        num_decodes=num_decodes,
        tables=tables,
        last_index=last_index,
    )


def _places(
    spans: Sequence[Span], tables: BlockTables, num_tokens: int, num_decodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Position and cache slot [T] of each token."""
    starts = np.array([span.start for span in spans], dtype=np.int64)
    rows = np.array([span.row for span in spans], dtype=np.int64)
    if num_decodes < len(spans):
        offsets = np.array([span.offset for span in spans], dtype=np.int64)
        counts = np.array([span.num_tokens for span in spans], dtype=np.int64)
        starts = np.repeat(starts - offsets, counts) + np.arange(num_tokens)
        rows = np.repeat(rows, counts)
    blocks, places = np.divmod(starts, tables.block_size)
    return starts, tables.table[rows, blocks] * tables.block_size + places


def fresh_blocks(segment: Segment, block_size: int) -> list[int]:
    """Blocks that this segment writes from their first slot on (or copies into): what they held before is dead."""
    first = -(-segment.start // block_size) if segment.copy_from is None else segment.start // block_size
    return [int(block) for block in segment.block_ids[first : -(-segment.end // block_size)]]


def copies_of(segments: Sequence[Segment], block_size: int) -> list[tuple[int, int, int]]:
    """(source block, target block, number of leading rows) of the copies that must precede the segments' step."""
    return [
        (int(s.copy_from), int(s.block_ids[s.start // block_size]), s.start % block_size)
        for s in segments
        if s.copy_from is not None
    ]

"""What the Triton kernels must know of a step, as tensors on the device, made once a step for all layers.

A request's queries are cut into tiles (see triton_kernels). Requests with few queries, whose rows fit one small tile
(decodes, and drafts to be verified), make *short* tiles, which come with splits of their keys; all others make *long*
ones with many rows. How a request is cut depends on its own query count alone, never on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine_worker.model.packing import PackedBatch
from engine_worker.model.transfer import to_device

SHORT_ROWS = 16  # the least that tensor cores multiply; more where one query's heads are more
LONG_ROWS = 64
_TABLE_STEP = 16  # tables are this many columns, or a multiple: kernels are compiled for strides that 16 divides


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one size: whose queries (sequence index) and the first of them, both [n] int32."""

    rows: int
    seq: torch.Tensor
    first: torch.Tensor

    def __len__(self) -> int:
        return self.seq.shape[0]


@dataclass(frozen=True, slots=True)
class Cut:
    """A step's tiles for one number of query heads a key head. `short_tokens` are the pack indices in short tiles."""

    short: Tiles
    long: Tiles
    short_tokens: torch.Tensor  # [*] int32


@dataclass(slots=True)
class StepMeta:
    """Per sequence of the pack (int32): its first query's place in the pack and its position, and its query count.

    table [S, W] int32 are block ids. `counts` are the query counts on the host; `cuts` remembers tiles by group size.
    """

    offset: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    table: torch.Tensor
    counts: np.ndarray
    cuts: dict[int, Cut] = field(default_factory=dict)

    def cut(self, group: int) -> Cut:
        """Tiles for `group` query heads a key head."""
        found = self.cuts.get(group)
        if found is None:
            found = self.cuts[group] = make_cut(self.counts, group, self.offset.device)
        return found


def make_meta(batch: PackedBatch) -> StepMeta:
    spans = batch.spans
    device = batch.slots.device
    numbers = np.array([[span.offset, span.start, span.num_tokens, span.row] for span in spans], dtype=np.int32)
    width = -(-max(span.end for span in spans) // batch.block_size)
    padded = -(-width // _TABLE_STEP) * _TABLE_STEP
    table = np.zeros((len(spans), padded), dtype=np.int32)
    table[:, :width] = batch.tables.table[numbers[:, 3], :width]
    fixed = to_device(np.ascontiguousarray(numbers[:, :3].T), device)
    return StepMeta(fixed[0], fixed[1], fixed[2], to_device(table, device), numbers[:, 2])


def make_cut(counts: np.ndarray, group: int, device: torch.device) -> Cut:
    one_query = 1 << (group - 1).bit_length()
    short_rows, long_rows = max(SHORT_ROWS, one_query), max(LONG_ROWS, one_query)
    is_short = counts * group <= short_rows
    ends = np.cumsum(counts)
    short = np.flatnonzero(is_short).astype(np.int32)
    tokens = [np.arange(ends[seq] - counts[seq], ends[seq], dtype=np.int32) for seq in short]
    queries = long_rows // group
    seqs = np.flatnonzero(~is_short).astype(np.int32)
    num_tiles = -(-counts[seqs] // queries)
    long_seq = np.repeat(seqs, num_tiles)
    first = [np.arange(n, dtype=np.int32) * queries for n in num_tiles]
    # Late tiles see most keys: started first, so that none of them runs alone at the end.
    long_seq, long_first = long_seq[::-1].copy(), (np.concatenate(first) if first else long_seq)[::-1].copy()
    parts = [short, np.zeros_like(short), np.concatenate(tokens) if tokens else short, long_seq, long_first]
    joint = to_device(np.concatenate(parts), device).split([len(part) for part in parts])
    return Cut(Tiles(short_rows, joint[0], joint[1]), Tiles(long_rows, joint[3], joint[4]), joint[2])

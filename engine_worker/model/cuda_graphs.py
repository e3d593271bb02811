"""Decode steps as recorded CUDA graphs: the launches of a whole forward as one.

A decode step of a small batch is a thousand short kernels. Launched one by one from Python they take the host longer
than the device; a recorded graph is launched as one. Its kernels read and write fixed places, so a step's tokens,
positions, slots and block tables are copied into static buffers first.

Graphs are recorded at load for a few batch sizes. A step takes the next larger one; rows in excess write to a block
that belongs to no request (the cache has one more than the scheduler knows of) and their logits are dropped. Steps that
compute anything but one token a request, and larger batches, run as they are.

All graphs share one memory pool: they never run at the same time, and the largest is recorded first. A row is computed
by the same kernels, with the same number of splits, as in an eager step of the graph's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine_worker.model.backend_triton_plan import StepMeta, make_meta
from engine_worker.model.packing import BlockTables, PackedBatch

Forward = Callable[[PackedBatch], Tensor]  # logits [size, V] of every token of the batch


class Recorded(Protocol):
    """A forward over static buffers that can be run again."""

    output: Tensor

    def replay(self) -> None: ...


Record = Callable[[Callable[[], Tensor]], Recorded]


def default_sizes(max_num_seqs: int, most: int = 256) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8th, from 64 on every 16th: padding stays below a fifth."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, most + 1, 16)]
    largest = min(max_num_seqs, most)
    return tuple(sorted({size for size in steps if size < largest} | {largest}))


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What graphs read: `size` rows of each."""

    input_ids: Tensor  # [1, size]
    position_ids: Tensor  # [1, size]
    slots: Tensor  # [size]
    start: Tensor  # [size] int32
    table: Tensor  # [size, blocks of a sequence] int32


class DecodeGraphs:
    """Use it from the thread and in the device's stream that run the model."""

    def __init__(
        self, sizes: Iterable[int], blocks_per_seq: int, null_block: int, block_size: int, device: torch.device
    ) -> None:
        """`null_block` takes what rows in excess write."""
        self.sizes = tuple(sorted(set(sizes)))
        assert self.sizes
        assert self.sizes[0] > 0
        largest = self.sizes[-1]
        width = -(-blocks_per_seq // 16) * 16
        self._null_block = null_block
        self._block_size = block_size
        self._graphs: dict[int, Recorded] = {}
        long = {"dtype": torch.int64, "device": device}
        self._buffers = _Buffers(
            torch.zeros(1, largest, **long),
            torch.zeros(1, largest, **long),
            torch.full((largest,), null_block * block_size, **long),
            torch.zeros(largest, dtype=torch.int32, device=device),
            torch.full((largest, width), null_block, dtype=torch.int32, device=device),
        )

    @torch.inference_mode()
    def record(self, forward: Forward, record: Record) -> None:
        """Record `forward` for every size, the largest first. Whatever `record` raises goes through."""
        for size in reversed(self.sizes):
            batch = self._batch(size)
            self._graphs[size] = record(lambda batch=batch: forward(batch))  # type: ignore[misc]

    def fits(self, batch: PackedBatch) -> bool:
        """Whether the batch is nothing but decodes, and not too many."""
        return batch.num_decodes == len(batch.spans) <= self.sizes[-1] and bool(self._graphs)

    def run(self, batch: PackedBatch, keep: Tensor) -> Tensor:
        """Logits [len(keep), V] in float32 of the pack positions in `keep` [R]."""
        num = len(batch.spans)
        size = next(size for size in self.sizes if size >= num)
        buffers, meta = self._buffers, make_meta(batch)
        buffers.input_ids[:, :num].copy_(batch.input_ids)
        buffers.position_ids[:, :num].copy_(batch.position_ids)
        buffers.slots[:num].copy_(batch.slots)
        buffers.start[:num].copy_(meta.start)
        width = min(meta.table.shape[1], buffers.table.shape[1])
        buffers.table[:num, :width].copy_(meta.table[:, :width])
        if num < size:
            buffers.slots[num:size].fill_(self._null_block * self._block_size)
            buffers.start[num:size].zero_()
            buffers.position_ids[:, num:size].zero_()
            buffers.input_ids[:, num:size].zero_()
            buffers.table[num:size, 0].fill_(self._null_block)
        graph = self._graphs[size]
        graph.replay()
        return graph.output.index_select(0, keep)  # a copy: the next step overwrites the graph's output

    def _batch(self, size: int) -> PackedBatch:
        buffers, device = self._buffers, self._buffers.slots.device
        meta = StepMeta(
            offset=torch.arange(size, dtype=torch.int32, device=device),
            start=buffers.start[:size],
            count=torch.ones(size, dtype=torch.int32, device=device),
            table=buffers.table[:size],
            counts=np.ones(size, dtype=np.int32),
        )
        return PackedBatch(
            input_ids=buffers.input_ids[:, :size],
            position_ids=buffers.position_ids[:, :size],
            slots=buffers.slots[:size],
            spans=(),
            num_decodes=size,
            tables=BlockTables(1, 1, self._block_size),
            last_index=list(range(size)),
            memo={StepMeta: meta},
        )


class CUDARecorder:
    """Records on CUDA, all graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> Recorded:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and lets libraries allocate their workspaces outside of the graph
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self._pool = graph.pool()
        return _CUDAGraph(graph, output)


@dataclass(frozen=True, slots=True)
class _CUDAGraph:
    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()

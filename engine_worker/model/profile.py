"""How much device memory a KV cache may take: what is left beside the largest step, which is run to find out.

    budget = total * utilization - what is taken now (weights, the driver, other processes) - the largest step's peak

The peak is counted twice where decode graphs will be recorded: their pool holds a step's activations, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model.attention import AttentionBackend
from engine_worker.model.families import num_layers
from engine_worker.model.kv_tensors import KVLayout, KVTensors
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.packing import BlockTables, pack
from engine_worker.model.sampler_draw import Draw, draw_ids, new_key

_SPARE = 256 << 20  # bytes for what no measurement sees: fragments, and libraries that allocate late


class DeviceMemory(Protocol):
    """A device's memory, in bytes. Tests bring their own."""

    def free_and_total(self) -> tuple[int, int]:
        """After everything cached was given back."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """By how much allocations grew, at most, while `run` ran."""
        ...


class CUDAMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)

    def peak_of(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def kv_budget(memory: DeviceMemory, utilization: float, run: Callable[[], None], *, with_graphs: bool) -> int:
    """Bytes that the KV cache may take; 0 where nothing is left. `run` is the largest step."""
    peak = memory.peak_of(run)
    free, total = memory.free_and_total()
    taken = total - free
    return max(0, int(total * utilization) - taken - peak * (2 if with_graphs else 1) - _SPARE)


@torch.inference_mode()
def largest_step(
    module: PreTrainedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    block_size: int,
    num_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> None:
    """The forward over `num_tokens` new tokens, with as many drawn from as sequences can be, and the draws."""
    lengths = [min(max_model_len, num_tokens - at) for at in range(0, num_tokens, max_model_len)]
    num_blocks = sum(-(-length // block_size) for length in lengths)
    kv = KVTensors(num_layers(module), num_blocks, block_size, module.device, layout)
    tables = BlockTables(len(lengths), num_blocks, block_size)
    free = iter(range(num_blocks))
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    segments = []
    for index, length in enumerate(lengths):
        request = Request(request_id=str(index), prompt_ids=(0,) * length, params=params, arrival_s=0.0)
        request.block_ids = [BlockId(next(free)) for _ in range(-(-length // block_size))]
        segments.append(Segment(request, 0, request.prompt_ids, request.block_ids, sample=True))
    batch = pack(segments, tables, module.device)
    rows = [row % batch.num_tokens for row in range(max_num_seqs)]
    logits = PackedModel(module, backend, kv).forward(batch, rows)
    assert logits is not None
    draws = [Draw(index=row, key=new_key(), position=0, params=params) for row in range(max_num_seqs)]
    draw_ids(logits, logits.amax(dim=-1), draws)

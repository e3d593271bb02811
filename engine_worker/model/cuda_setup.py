"""What loading does on a CUDA device beyond what it does anywhere: measure memory, record decode graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from engine_worker.config import EngineConfig
from engine_worker.model.attention import AttentionBackend
from engine_worker.model.cuda_graphs import CUDARecorder, DecodeGraphs, Record, default_sizes
from engine_worker.model.kv_tensors import KVLayout
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.profile import CUDAMemory, DeviceMemory, kv_budget, largest_step


def wants_graphs(config: EngineConfig, device: torch.device, backend: AttentionBackend) -> bool:
    """Only our own kernels find everything that a step changes in buffers that stay where they are."""
    return device.type == "cuda" and config.cuda_graphs == "on" and backend.name == "triton"


def profiled_budget(
    config: EngineConfig,
    module: PreTrainedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    max_model_len: int,
    device: torch.device,
    memory: DeviceMemory | None = None,
) -> int | None:
    """Bytes for KV blocks after a run of the largest step; None where the setting or the device decides otherwise."""
    if config.kv_cache_memory is not None or device.type != "cuda":
        return None

    def run() -> None:
        largest_step(
            module,
            backend,
            layout,
            config.block_size,
            config.max_num_batched_tokens,
            config.max_num_seqs,
            max_model_len,
        )

    with_graphs = wants_graphs(config, device, backend)
    return kv_budget(memory or CUDAMemory(device), config.gpu_memory_utilization, run, with_graphs=with_graphs)


def record_graphs(
    config: EngineConfig,
    model: PackedModel,
    num_blocks: int,
    max_model_len: int,
    progress: Callable[[str], None],
    record: Record | None = None,
) -> str:
    """Record the model's decode graphs, if it can be done. Returns a line for the log.

    The model's cache must have a block more than the `num_blocks` that are handed out.
    """
    assert model.kv.num_blocks > num_blocks
    unknown = getattr(model.backend, "unknown_masks", 0)
    if unknown:
        return f"no CUDA graphs: {unknown} of the model's attention masks run outside of the kernels"
    sizes = config.cuda_graph_sizes or default_sizes(config.max_num_seqs)
    progress(f"recording CUDA graphs for batches of {', '.join(map(str, sizes))}")
    blocks_per_seq = -(-max_model_len // config.block_size)
    graphs = DecodeGraphs(sizes, blocks_per_seq, num_blocks, config.block_size, model.device)
    try:
        graphs.record(model.forward_all, record or CUDARecorder(model.device))
    except RuntimeError as error:  # the model's code waits for the device, or memory ran out
        line = str(error).strip().splitlines()[0][:200]
        detail = f"no CUDA graphs, as this model can't be recorded ({line}): decoding will be slower"
        progress(detail)
        return detail
    model.graphs = graphs
    return f"CUDA graphs for {len(sizes)} batch sizes up to {sizes[-1]}"

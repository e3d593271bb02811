"""Refusing a --kv-cache-memory that can't hold one sequence before any weight is read.

How large a block is follows from the first keys and values that each layer gives, never from names in a config (see
kv_tensors.py). So the model is built once without memory, on torch's meta device, and run over two tokens: shapes come
out and nothing is computed. A family whose code looks at values on the way can't be run like that; then there is no
early answer, and loading checks again at its end as always.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from engine_worker.config import EngineConfig
from engine_worker.model.attention import NAME, AttentionCall, register
from engine_worker.model.kv_format import KVFormat, choose_format
from engine_worker.model.kv_tensors import KVLayout, KVTensors, LayerShape
from engine_worker.model.memory import num_kv_blocks
from engine_worker.model.packing import PackedBatch
from engine_worker.model.rope import freeze_rope


def check_kv_room(
    config: EngineConfig, hf_config: Any, dtype: torch.dtype, max_model_len: int, device: torch.device
) -> None:
    """Raise NotEnoughMemory if `config.kv_cache_memory` is set and too small, or more than is free.

    Does nothing where it is left out: a share of what is free is known when the weights are loaded.
    """
    if config.kv_cache_memory is None:
        return
    found = plan_layout(
        hf_config, dtype, max_model_len, choose_format(config.kv_cache_dtype, device), config.trust_remote_code
    )
    if found is not None:
        layout, served_len = found
        num_kv_blocks(config, layout.block_bytes(config.block_size), served_len, device)


def plan_layout(
    hf_config: Any, dtype: torch.dtype, max_model_len: int, form: KVFormat, trust_remote_code: bool = False
) -> tuple[KVLayout, int] | None:
    """The cache's layout and the length that can be served, from the configuration alone; None where that can't be."""
    from transformers import AutoModelForCausalLM

    from engine_worker.model.self_test import probe_layout

    register()
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                copy.deepcopy(hf_config),
                dtype=torch.bfloat16,  # shapes don't depend on it, and on meta experts know no other type
                attn_implementation=NAME,
                trust_remote_code=trust_remote_code,
            )
        module.eval().requires_grad_(False)
        served_len, _ = freeze_rope(module, max_model_len)
        layout = probe_layout(module, _Shapes())
    except Exception:  # whatever a family's code raises where there are no values; real mistakes come up again at load
        return None
    return KVLayout(layout.layers, dtype, form), served_len


class _Shapes:
    """A backend that lets the cache learn its shapes and answers with nothing."""

    name = "shapes"

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        kv.ensure(call.layer, LayerShape.of(call.key, call.value), call.key.dtype)
        return call.query.new_empty(call.query.shape[2], call.query.shape[1], call.value.shape[3])

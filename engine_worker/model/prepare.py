"""What is done to a loaded module so that it runs fast: quantized, laid out for the kernels, fused.

In float32 on a CPU with the kernel library, every linear layer is laid out anew (and, if asked, quantized) and decoder
layers that are recognised run in one call. Without the library, layers are packed for oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.families import num_layers
from engine_worker.model.fuse import fuse_layers
from engine_worker.model.linear import prepack
from engine_worker.model.memory import format_bytes
from engine_worker.model.native.kernels import PackedWeight
from engine_worker.model.native.library import Library
from engine_worker.model.native_linear import nativize


def prepare_module(
    module: PreTrainedModel,
    dtype: torch.dtype,
    library: Library | None,
    backend: AttentionBackend,
    kind: str,
    progress: Callable[[str], None],
) -> list[str]:
    """Rewrite the module in place. `kind` is what linear weights become: float32, int8 or int4. Returns details."""
    if library is None or dtype != torch.float32 or module.device.type != "cpu":
        packed = prepack(module)
        return (
            [f"{packed.num_packed} linear layers packed ({format_bytes(packed.packed_bytes)} more)"]
            if packed.num_packed
            else []
        )
    progress(f"laying out the weights in {kind}")
    before = count_bytes(module)
    nativize(module, library, kind)
    details = []
    if kind != "float32":
        after = count_bytes(module)
        details.append(f"{kind} weights: {format_bytes(after)} instead of {format_bytes(before)}")
    if isinstance(backend, NativeBackend):
        fused = fuse_layers(module, backend)
        details.append(f"{fused} of {num_layers(module)} layers fused")
    return details


def count_bytes(module: nn.Module) -> int:
    """Bytes of parameters, buffers and packed weights, each memory once."""
    tensors = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        packed = getattr(part, "packed", None)
        if isinstance(packed, PackedWeight):
            tensors += [tensor for tensor in (packed.data, packed.scales, packed.bias) if tensor is not None]
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(sizes.values())

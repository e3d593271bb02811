"""What is done to a loaded module so that it runs fast: quantized, laid out for the kernels, fused.

In float32 on a CPU with the kernel library, every linear layer is laid out anew (and, if asked, quantized) and decoder
layers that are recognised run in one call. Without the library, layers are packed for oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.families import num_layers
from engine_worker.model.fuse import fuse_layers
from engine_worker.model.fuse_model import fuse_model
from engine_worker.model.fuse_stack import fuse_stack
from engine_worker.model.huge_pages import use_huge_pages
from engine_worker.model.linear import prepack
from engine_worker.model.memory import format_bytes
from engine_worker.model.native.kernels import PackedWeight
from engine_worker.model.native.library import Library
from engine_worker.model.native_linear import nativize
from engine_worker.model.quantize import quantize_linears


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was done: lines for people, bytes of weights now, and how many quantization saved."""

    details: tuple[str, ...]
    weight_bytes: int
    saved_bytes: int


def prepare_module(
    module: PreTrainedModel,
    dtype: torch.dtype,
    library: Library | None,
    backend: AttentionBackend,
    quantization: str,
    progress: Callable[[str], None],
) -> Prepared:
    """Rewrite the module in place. `quantization` is what its linear weights become, "" for nothing."""
    before = count_bytes(module)
    details = _rewrite(module, dtype, library, backend, quantization, progress)
    after = count_bytes(module)
    if quantization:
        details.insert(0, f"{quantization} weights: {format_bytes(after)} instead of {format_bytes(before)}")
    return Prepared(tuple(details), after, max(0, before - after) if quantization else 0)


def _rewrite(
    module: PreTrainedModel,
    dtype: torch.dtype,
    library: Library | None,
    backend: AttentionBackend,
    quantization: str,
    progress: Callable[[str], None],
) -> list[str]:
    if library is None or dtype != torch.float32 or module.device.type != "cpu":
        if quantization:
            progress(f"quantizing the weights to {quantization}")
            quantize_linears(module, quantization)
        packed = prepack(module)
        return (
            [f"{packed.num_packed} linear layers packed ({format_bytes(packed.packed_bytes)} more)"]
            if packed.num_packed
            else []
        )
    kind = quantization or "float32"
    progress(f"laying out the weights in {kind}")
    nativize(module, library, kind)
    details = []
    if isinstance(backend, NativeBackend):
        layers, trial = fuse_layers(module, backend)
        is_stack = trial is not None and fuse_stack(module, layers, trial, backend)
        is_whole = trial is not None and is_stack and fuse_model(module, trial, backend)
        extent = (", into one call" if is_stack else "") + (" with embedding and head" if is_whole else "")
        details.append(f"{len(layers)} of {num_layers(module)} layers fused{extent}")
    if moved := use_huge_pages(_packed_tensors(module)):
        details.append(f"{format_bytes(moved)} of memory for weights on huge pages")
    return details


def count_bytes(module: nn.Module) -> int:
    """Bytes of parameters, buffers and packed weights, each memory once."""
    tensors = [*module.parameters(), *module.buffers(), *_packed_tensors(module)]
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(sizes.values())


def _packed_tensors(module: nn.Module) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for part in module.modules():
        packed = getattr(part, "packed", None)
        if isinstance(packed, PackedWeight):
            tensors += [tensor for tensor in (packed.data, packed.scales, packed.bias) if tensor is not None]
    return tensors

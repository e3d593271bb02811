"""All decoder layers in one call of the kernel library, where nothing lies between them.

Going through thirty layers takes a tenth of the time of a small step in Python alone: the weights that stream by leave
nothing of the interpreter in the processor's caches. So where every layer is fused (fuse.py) and the model does no more
than embed, run its layers one after the other and normalise, the model's `forward` is swapped for just that. Whether it
does no more is tried, as for each layer: the result and all keys and values must be those of the model's own code.

In the last layer only keys and values are needed of every token. The rest of it is computed for those positions alone
whose results will be read (`StepContext.needed`): in a prefill, where that is one, a layer less.

Only models whose layers all see the plain causal mask and the same rotation are taken. Others go on layer by layer.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine_worker.model.attention import StepContext, current_context
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.families import num_layers
from engine_worker.model.fuse import FusedLayer, Trial, close
from engine_worker.model.fused_parts import find_norm
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import CAUSAL, MaskTag
from engine_worker.model.native import kernels
from engine_worker.model.native.cache import cache_struct, is_known
from engine_worker.model.native.kernels import HeadNorm, address
from engine_worker.model.native.library import AttentionStruct, LayerStruct, Library
from engine_worker.model.packing import PackedBatch

_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_USED = {"input_ids", "position_ids", "attention_mask", "use_cache"}  # of forward; the mask is all ones in a step


class FusedStack:
    """A decoder without its head. `forward` takes what transformers gives and falls back to the model's own."""

    def __init__(self, base: nn.Module, norm: HeadNorm, layers: list[FusedLayer], backend: NativeBackend) -> None:
        self._models_own = weakref.WeakMethod(base.forward)  # which holds this object, as in FusedLayer
        self._embed, self._rotary = base.embed_tokens, base.rotary_emb
        self._norm, self._layers, self._backend = norm, layers, backend
        self._numbers = [layer.parts.layer for layer in layers]
        structs = [layer.struct for layer in layers]
        self._structs = (LayerStruct * len(layers))(*structs)  # copies, with caches of their own
        self._kv: weakref.ref[KVTensors] | None = None  # whose rows the structs name
        self._rotary_dim = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is not None and not args and context.backend.name == NativeBackend.name:
            out = self.run(kwargs, context)
            if out is not None:
                return BaseModelOutputWithPast(last_hidden_state=out)
        own = self._models_own()
        assert own is not None, "a model that is gone was called"
        return own(*args, **kwargs)

    def run(self, kwargs: dict[str, Any], context: StepContext) -> Tensor | None:
        """Normalised hidden states [1, T, H], or None where these arguments are not for the kernels.

        Only those of the positions that the context needs are the model's.
        """
        ids, positions, batch = kwargs.get("input_ids"), kwargs.get("position_ids"), context.batch
        if ids is None or positions is None or not self._bind(context.kv):
            return None
        if any(value is not None for name, value in kwargs.items() if name not in _USED):
            return None
        hidden = self._embed(ids).contiguous()
        cos, sin = (tensor.contiguous() for tensor in self._rotary(hidden, position_ids=positions))
        if hidden.dtype != torch.float32 or cos.shape[:2] != ids.shape:
            return None
        first = self._layers[0].parts
        ranges = self._backend.ranges(CAUSAL, batch)
        call = self._backend.describe(batch, ranges, first.num_heads, *context.kv.rows(first.layer))
        self._turn(cos.shape[2])
        context.calls.extend(self._numbers)
        is_finite = self._backend.library.layers(
            self._structs,
            len(self._layers),
            call,
            hidden.data_ptr(),
            address(cos),
            address(sin),
            batch.slots.data_ptr(),
            batch.num_tokens,
            address(context.needed),
            -1 if context.needed is None else len(context.needed),
            torch.get_num_threads(),
        )
        context.kv.written(self._numbers[-1], batch.slots, bool(is_finite))
        return kernels.rms_norm(self._backend.library, hidden, self._norm.weight, self._norm.eps)

    # -- its parts, for who runs them in a call of its own (fuse_model.py)

    @property
    def numbers(self) -> list[int]:
        """The layers' numbers, in the order they run in."""
        return self._numbers

    @property
    def structs(self) -> ctypes.Array[LayerStruct]:
        return self._structs

    @property
    def norm(self) -> HeadNorm:
        return self._norm

    @property
    def library(self) -> Library:
        return self._backend.library

    def prepare(self, batch: PackedBatch, kv: KVTensors, rotary_dim: int) -> AttentionStruct | None:
        """The kernels' view of a step over this cache, whose rotations are so wide. None if they don't know the cache.

        What it points to lives as long as the batch.
        """
        if not self._bind(kv):
            return None
        self._turn(rotary_dim)
        first = self._layers[0].parts
        ranges = self._backend.ranges(CAUSAL, batch)
        return self._backend.describe(batch, ranges, first.num_heads, *kv.rows(first.layer))

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [P, R] of these positions [P]."""
        like = torch.empty(1, len(positions), 1, dtype=torch.float32)
        cos, sin = self._rotary(like, position_ids=positions[None])
        return cos[0].float().contiguous(), sin[0].float().contiguous()

    def _turn(self, rotary_dim: int) -> None:
        """Let the layers that rotate rotate so many numbers of a head."""
        if self._rotary_dim != rotary_dim:
            self._rotary_dim = rotary_dim
            for struct, layer in zip(self._structs, self._layers, strict=True):
                struct.rotary = rotary_dim if layer.parts.rotates else 0

    def _bind(self, kv: KVTensors) -> bool:
        """Let the structs name this cache's rows. False if the kernels have no code for them."""
        if self._kv is not None and self._kv() is kv:
            return True
        for struct, layer in zip(self._structs, self._layers, strict=True):
            rows = kv.ensure(layer.parts.layer, layer.shape, torch.float32)
            if not is_known(*rows):
                return False
            struct.cache = cache_struct(*rows)
        self._kv = weakref.ref(kv)
        return True


@torch.inference_mode()
def fuse_stack(
    module: PreTrainedModel, layers: dict[nn.Module, FusedLayer], trial: Trial, backend: NativeBackend
) -> bool:
    """Swap the forward of the model around these layers, if it does nothing but run them. Returns whether it did."""
    base = module.base_model
    norm = find_norm(base.norm) if _has_parts(base, layers, num_layers(module)) and _are_alike(layers, trial) else None
    if norm is None or norm.weight.shape[0] != next(iter(layers.values())).parts.out.shape[0]:
        return False
    seen = trial.seen[base]
    stack = FusedStack(base, norm, list(layers.values()), backend)
    expected = seen.output.last_hidden_state
    for needed in (None, torch.arange(1, expected.shape[1], 4)):
        try:
            with trial.again(backend) as context:
                context.needed = needed
                out = stack.run(seen.kwargs, context)
        except TypeError:  # its rotation wants to know more
            return False
        rows = slice(None) if needed is None else needed
        if out is None or not close(out[:, rows], expected[:, rows]):
            return False
        if not all(trial.has_stored_alike(layer.parts.layer, context.kv) for layer in layers.values()):
            return False
    base.forward = stack.forward  # type: ignore[method-assign]
    return True


def _has_parts(base: nn.Module, layers: dict[nn.Module, FusedLayer], count: int) -> bool:
    if {name for name, _ in base.named_children()} != _PARTS or not isinstance(base.layers, nn.ModuleList):
        return False
    return len(layers) == count and list(layers) == list(base.layers)


def _are_alike(layers: dict[nn.Module, FusedLayer], trial: Trial) -> bool:
    """Whether one description of the step serves all layers: heads, mask and rotation are the same."""
    first = next(iter(layers.values()))
    rotation = trial.seen[next(iter(layers))].kwargs.get("position_embeddings")
    for layer, fused in layers.items():
        kwargs = trial.seen[layer].kwargs
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, MaskTag) or not mask.is_causal or kwargs.get("position_embeddings") is not rotation:
            return False
        if fused.shape != first.shape or fused.parts.num_heads != first.parts.num_heads:
            return False
    return True

"""Decoder layers that run as one call of the kernel library.

transformers' layers are recognised by their parts, never by their family: a pre-norm layer with rotary attention and a
gated SiLU MLP has the same parts in llama, mistral, qwen2, qwen3, smollm3 and many more. What else a layer does
(residual multipliers, other rotations, other activations) can't be seen in its parts. So every swap is tried first, on
what the real model hands to that very layer, against the layer's own code: output, keys and values must agree. What
differs keeps its own forward. The self-test at load then covers the whole.

Tried twice, at the first positions and at the last that the model has: some layers (ministral3's, inkling2's) scale
their queries by the position, from some thousandth one on.

Swaps are of instances' `forward`; parameters stay where they are. Outside a step with the native backend (in the
self-test's reference, for one) a fused layer runs its own code.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model.attention import StepContext, current_context, step_context
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.checkpoint_files import longest_context
from engine_worker.model.families import num_layers
from engine_worker.model.fused_parts import LayerParts, find_parts
from engine_worker.model.kv_tensors import KVTensors, LayerShape
from engine_worker.model.masks import MaskTag
from engine_worker.model.native.cache import cache_struct, is_known
from engine_worker.model.native.kernels import address
from engine_worker.model.native.library import LayerStruct
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.packing import BlockTables, PackedBatch, pack

TOLERANCE = 2e-4  # of the outputs' largest value; rounding stays near 1e-6
_NUM_TOKENS = 11  # of the trial
_BLOCK_SIZE = 4


class FusedLayer:
    """One decoder layer behind one call. `forward` takes what transformers gives and falls back to the layer's own."""

    def __init__(self, layer: nn.Module, parts: LayerParts, backend: NativeBackend) -> None:
        self.parts = parts
        # The layer holds this object by its forward: held in turn it would be a cycle, whose weights (all of a model's)
        # stay until the garbage collector looks through everything there is.
        self._layers_own = weakref.WeakMethod(layer.forward)
        self._backend = backend
        self.shape = LayerShape(parts.num_kv_heads, parts.head_dim, parts.head_dim)
        q_norm, k_norm = parts.q_norm, parts.k_norm
        self.struct = LayerStruct(
            qkv=parts.qkv.struct,
            out=parts.out.struct,
            gate_up=parts.gate_up.struct,
            down=parts.down.struct,
            input_norm=address(parts.input_norm.weight),
            post_norm=address(parts.post_norm.weight),
            q_norm=None if q_norm is None else address(q_norm.weight),
            k_norm=None if k_norm is None else address(k_norm.weight),
            hidden=parts.out.shape[0],
            inner=parts.down.shape[1],
            input_eps=parts.input_norm.eps,
            post_eps=parts.post_norm.eps,
            q_eps=0.0 if q_norm is None else q_norm.eps,
            k_eps=0.0 if k_norm is None else k_norm.eps,
            scaling=parts.scaling,
        )
        self._pointer = ctypes.pointer(self.struct)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None or context.backend.name != NativeBackend.name:
            return self._own(hidden_states, *args, **kwargs)
        out = self.run(hidden_states, kwargs, context)
        return self._own(hidden_states, *args, **kwargs) if out is None else out

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer does by itself."""
        forward = self._layers_own()
        assert forward is not None, "a layer that is gone was called"
        return forward(*args, **kwargs)

    def run(self, hidden: Tensor, kwargs: dict[str, Any], context: StepContext) -> Tensor | None:
        """The layer's output [1, T, H], or None where these arguments are not for the kernels."""
        mask, rotation = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
        if not isinstance(mask, MaskTag) or hidden.dtype != torch.float32:
            return None
        ranges = self._backend.ranges(mask, context.batch)
        if not ranges.is_exact:
            return None
        parts, kv, batch = self.parts, context.kv, context.batch
        cos = sin = None
        if parts.rotates:
            if not isinstance(rotation, tuple) or rotation[0].shape != (1, batch.num_tokens, rotation[0].shape[2]):
                return None
            cos, sin = rotation[0].contiguous(), rotation[1].contiguous()
        keys, values = kv.ensure(parts.layer, self.shape, torch.float32)
        if not is_known(keys, values):
            return None
        context.calls.append(parts.layer)
        out = hidden.clone(memory_format=torch.contiguous_format)
        call = batch.memo.get(("native call", id(ranges), self.shape, parts.num_heads))
        if call is None:
            call = self._backend.describe(batch, ranges, parts.num_heads, keys, values)
            batch.memo[("native call", id(ranges), self.shape, parts.num_heads)] = call
        struct = self.struct
        struct.cache = cache_struct(keys, values)
        struct.rotary = 0 if cos is None else cos.shape[-1]
        is_finite = self._backend.library.layer(
            self._pointer,
            call,
            out.data_ptr(),
            address(cos),
            address(sin),
            batch.slots.data_ptr(),
            batch.num_tokens,
            torch.get_num_threads(),
        )
        kv.written(parts.layer, batch.slots, bool(is_finite))
        return out


@dataclass(slots=True)
class Seen:
    """What the model handed to one of its parts, and what the part's own code answered."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One forward by the model's own code over a few random tokens: what went through its parts and into the cache."""

    seen: dict[nn.Module, Seen]
    batch: PackedBatch
    kv: KVTensors

    @contextmanager
    def again(self, backend: NativeBackend) -> Iterator[StepContext]:
        """The same step over an empty cache."""
        scratch = KVTensors(self.kv.num_layers, self.kv.num_blocks, self.kv.block_size, self.kv.device)
        with step_context(StepContext(backend, self.batch, scratch)) as context:
            yield context

    def has_stored_alike(self, layer: int, kv: KVTensors) -> bool:
        """Whether a layer's keys and values are those of the model's own code."""
        pairs = zip(kv.layer(layer), self.kv.layer(layer), strict=True)
        return all(ours.shape == theirs.shape and close(ours, theirs) for ours, theirs in pairs)


@torch.inference_mode()
def fuse_layers(module: PreTrainedModel, backend: NativeBackend) -> tuple[dict[nn.Module, FusedLayer], Trial | None]:
    """Swap the forward of every decoder layer that the kernels compute alike. Returns these and the trial."""
    found = {layer: parts for layer in module.modules() if (parts := find_parts(layer)) is not None}
    if not found:
        return {}, None
    trial = _try(module, [*found, module.base_model])
    longest = longest_context(module.config.get_text_config(decoder=True)) or 0
    far = _try(module, list(found), first_position=max(0, longest - _NUM_TOKENS))
    tried = {layer: _fuse(layer, parts, backend, (trial, far)) for layer, parts in found.items()}
    return {layer: fused for layer, fused in tried.items() if fused is not None}, trial


def _try(module: PreTrainedModel, watched: list[nn.Module], first_position: int = 0) -> Trial:
    """One forward. From another first position on, only what the model's code is told of positions is another."""
    seen = {part: Seen() for part in watched}

    def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
        seen[layer].args = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
        seen[layer].kwargs = dict(kwargs)

    def after(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[layer].output = output

    hooks = []
    for layer in watched:
        hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(layer.register_forward_hook(after, with_kwargs=True))
    generator = torch.Generator().manual_seed(99)
    vocab_size = module.get_input_embeddings().weight.shape[0]
    ids = tuple(torch.randint(0, vocab_size, (_NUM_TOKENS,), generator=generator).tolist())
    num_blocks = -(-_NUM_TOKENS // _BLOCK_SIZE)
    request = Request(request_id="trial", prompt_ids=ids, params=SamplingParams(max_tokens=1), arrival_s=0.0)
    request.block_ids = [BlockId(index) for index in reversed(range(num_blocks))]
    tables = BlockTables(1, num_blocks, _BLOCK_SIZE)
    batch = pack([Segment(request, 0, ids, request.block_ids, sample=True)], tables, module.device)
    batch.position_ids = batch.position_ids + first_position
    kv = KVTensors(num_layers(module), num_blocks, _BLOCK_SIZE, module.device)
    try:
        PackedModel(module, ReferenceBackend(), kv).forward(batch, [_NUM_TOKENS - 1])
    finally:
        for hook in hooks:
            hook.remove()
    return Trial(seen, batch, kv)


def _fuse(layer: nn.Module, parts: LayerParts, backend: NativeBackend, trials: tuple[Trial, ...]) -> FusedLayer | None:
    """Try the kernels on what the layer was given. Swaps its forward if output, keys and values are the same."""
    for variant in parts.variants():
        fused = FusedLayer(layer, variant, backend)
        if all(_is_alike(fused, trial.seen[layer], trial, backend) for trial in trials):
            layer.forward = fused.forward  # type: ignore[method-assign]
            return fused
    return None


def _is_alike(fused: FusedLayer, seen: Seen, trial: Trial, backend: NativeBackend) -> bool:
    if len(seen.args) != 1 or not isinstance(seen.output, Tensor):
        return False
    with trial.again(backend) as context:
        out = fused.run(seen.args[0], seen.kwargs, context)
    return out is not None and close(out, seen.output) and trial.has_stored_alike(fused.parts.layer, context.kv)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results of a trial are the same up to rounding."""
    return bool((ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max().clamp(min=1e-6))

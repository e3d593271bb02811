"""A whole step of the model in one call of the kernel library: embedding, layers, norm, head, likeliest tokens.

A step of decoding leaves nothing of the interpreter in the processor's caches: half a gigabyte of weights has streamed
by since the last one. So each operator that is called on its own costs tens of microseconds, whatever it does, and a
forward through transformers' classes a millisecond: as much as all else that is done in Python for a step. Where the
decoder runs in one call anyway (fuse_stack.py) and the model does no more than multiply its result by the head, all of
it is one call. Whether it does no more is tried, as for each layer: logits, keys and values must be those of the
model's own code.

Rotations are looked up in a table that the model's own module made, of all positions up to the longest context so far.
That is right if a position's rotation doesn't depend on the others in the pack, which is tried, too. And the head is
tried on results far larger than the trial's: a cap on logits can't be seen in small ones.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.fuse import Trial, close
from engine_worker.model.fuse_stack import FusedStack
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.native.kernels import PackedWeight, address
from engine_worker.model.native.library import HeadStruct, WeightStruct
from engine_worker.model.native_linear import NativeEmbedding, NativeLinear
from engine_worker.model.packed_model import WHOLE_MODELS, Likeliest
from engine_worker.model.packing import PackedBatch

_FIRST_POSITIONS = 256  # of the table of rotations, which doubles
_FAR_POSITION = 1 << 22  # behind the longest text that a model was trained on
_GROWTH = 1000.0  # of the results that the head is tried on


class FusedModel:
    """Holds parts of the model, never the model, by which it is found."""

    def __init__(self, stack: FusedStack, head: NativeLinear, embedding: nn.Module) -> None:
        self._stack, self._head, self._embedding = stack, head, embedding
        self.vocab_size = head.out_features
        self._rotations: tuple[Tensor, Tensor] | None = None  # cos and sin [P, R]
        tied = embedding.packed if isinstance(embedding, NativeEmbedding) else None
        self._struct = HeadStruct(
            head=head.packed.struct,
            tied=WeightStruct() if tied is None else tied.struct,
            embedding=address(cast(Tensor, embedding.weight)) if tied is None else None,
            norm=address(stack.norm.weight),
            vocab=embedding.weight.shape[0],
            hidden=head.in_features,
            eps=stack.norm.eps,
        )
        self._pointer = ctypes.pointer(self._struct)

    @property
    def layers(self) -> list[int]:
        """The numbers of its layers, in the order they run in."""
        return self._stack.numbers

    def run(self, batch: PackedBatch, kv: KVTensors, keep: list[int]) -> tuple[Tensor, Likeliest] | None:
        """Logits [len(keep), V] of these pack positions, at least one, and the likeliest tokens. None where the cache
        is not for the kernels."""
        cos = self._reach(max(span.end for span in batch.spans))
        call = self._stack.prepare(batch, kv, cos.shape[1])
        if call is None:
            return None
        rows = np.array(keep, dtype=np.int64)
        logits = torch.empty(len(keep), self.vocab_size, dtype=torch.float32)
        best, ids = np.empty(len(keep), dtype=np.float32), np.empty(len(keep), dtype=np.int64)
        is_finite = self._stack.library.model(
            self._pointer,
            self._stack.structs,
            len(self._stack.numbers),
            call,
            batch.input_ids.data_ptr(),
            batch.position_ids.data_ptr(),
            batch.slots.data_ptr(),
            batch.num_tokens,
            rows.ctypes.data,
            len(keep),
            logits.data_ptr(),
            best.ctypes.data,
            ids.ctypes.data,
            torch.get_num_threads(),
        )
        if is_finite < 0:
            raise IndexError("a token id outside the model's vocabulary")
        kv.written(self._stack.numbers[-1], batch.slots, bool(is_finite))
        return logits, (best, ids)

    def _reach(self, num_positions: int) -> Tensor:
        """Have rotations of so many positions. Returns the table of cosines [P, R]."""
        if self._rotations is None or len(self._rotations[0]) < num_positions:
            size = _FIRST_POSITIONS
            while size < num_positions:
                size *= 2
            cos, sin = self._rotations = self._stack.rotations(torch.arange(size))
            self._struct.cos, self._struct.sin, self._struct.rotary = address(cos), address(sin), cos.shape[1]
        return self._rotations[0]

    def rotates_alone(self) -> bool:
        """Whether a position's rotation is the same whatever others are asked for with it, one far behind included."""
        near = torch.tensor([0, 1, 17, _FIRST_POSITIONS - 1])
        together = self._stack.rotations(torch.cat([near, torch.tensor([_FAR_POSITION])]))
        for index, position in enumerate(near):
            alone = self._stack.rotations(position[None])
            if not all(torch.allclose(a[0], t[index], atol=1e-6) for a, t in zip(alone, together, strict=True)):
                return False
        return True


@torch.inference_mode()
def fuse_model(module: PreTrainedModel, trial: Trial, backend: NativeBackend) -> bool:
    """Make the model of a fused stack and its head, if it does nothing but run them. Returns whether it did."""
    stack = getattr(module.base_model.forward, "__self__", None)
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if not isinstance(stack, FusedStack) or not isinstance(head, NativeLinear) or not _can_embed(embedding):
        return False
    fused = FusedModel(stack, head, embedding)
    keep = list(range(trial.batch.num_tokens - 1, -1, -2))  # some rows, out of order
    if not fused.rotates_alone() or not _only_multiplies(module, head, trial, backend, keep):
        return False
    expected = _logits_of(module, trial, backend, keep)
    with trial.again(backend) as context:
        found = fused.run(trial.batch, context.kv, keep)
    if found is None or found[0].shape != expected.shape or not close(found[0], expected):
        return False
    if not all(trial.has_stored_alike(layer, context.kv) for layer in fused.layers):
        return False
    WHOLE_MODELS[module] = fused
    return True


def _logits_of(module: PreTrainedModel, trial: Trial, backend: NativeBackend, keep: list[int]) -> Tensor:
    """The model's own logits [len(keep), V] of these rows of the trial."""
    ids, positions = trial.batch.input_ids, trial.batch.position_ids
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with trial.again(backend):
        return cast(Tensor, module(**inputs, logits_to_keep=torch.tensor(keep)).logits[0])


def _only_multiplies(
    module: PreTrainedModel, head: NativeLinear, trial: Trial, backend: NativeBackend, keep: list[int]
) -> bool:
    """Whether logits are the head's answer to the decoder's result even where that is large."""
    seen: list[Tensor] = []

    def grow(base: nn.Module, args: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state * _GROWTH
        seen.append(output.last_hidden_state)

    hook = module.base_model.register_forward_hook(grow)
    try:
        logits = _logits_of(module, trial, backend, keep)
    finally:
        hook.remove()
    if len(seen) != 1:
        return False
    expected = head(seen[0][0, keep])
    return logits.shape == expected.shape and close(logits, expected)


def _can_embed(embedding: nn.Module) -> bool:
    if isinstance(embedding, NativeEmbedding):
        packed: PackedWeight = embedding.packed
        return packed.kind in ("float32", "int8")
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return False
    weight = embedding.weight
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()

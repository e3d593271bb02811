"""The model as a function of packed tokens and a paged cache: one forward, no transformers cache object.

The runner and the self-test both go through here, so what is tested at load is what serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from engine_worker.model.attention import AttentionBackend, StepContext, step_context
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.packing import PackedBatch
from engine_worker.model.transfer import to_device

if TYPE_CHECKING:
    from engine_worker.model.cuda_graphs import DecodeGraphs


Likeliest = tuple[np.ndarray, np.ndarray]  # [R] largest logits and [R] their token ids, as sampler_draw.likeliest


class WholeModel(Protocol):
    """A module's forward by other means: see fuse_model."""

    @property
    def layers(self) -> list[int]:
        """The numbers of its layers, in the order they run in."""
        ...

    def run(self, batch: PackedBatch, kv: KVTensors, keep: list[int]) -> tuple[torch.Tensor, Likeliest] | None:
        """Logits [len(keep), V] of these pack positions, at least one, and the likeliest tokens; None: not this way."""
        ...


# What computes a module over the native backend's caches. An entry must not hold its module.
WHOLE_MODELS: WeakKeyDictionary[torch.nn.Module, WholeModel] = WeakKeyDictionary()


class PackedModel:
    """A loaded module, an attention backend and a cache. `kv` may be replaced (probing, then serving)."""

    def __init__(self, module: PreTrainedModel, backend: AttentionBackend, kv: KVTensors) -> None:
        self.module = module
        self.backend = backend
        self.kv = kv
        self.device = kv.device
        self.graphs: DecodeGraphs | None = None  # decode steps that are recorded, on CUDA
        self.last_calls: list[int] = []  # layers of the latest forward, in the order they attended
        self.last_likeliest: Likeliest | None = None  # of the latest forward's logits, where they came with them
        self._whole = WHOLE_MODELS.get(module) if isinstance(backend, NativeBackend) else None

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, keep: list[int]) -> torch.Tensor | None:
        """Compute the batch, and logits [len(keep), V] in float32 of the pack positions in `keep`, in their order.

        With nothing to keep, the LM head is left out and None returned.
        """
        self.last_likeliest = None
        if keep and self.graphs is not None and self.graphs.fits(batch):
            return self.graphs.run(batch, to_device(keep, self.device))
        if keep and self._whole is not None:
            found = self._whole.run(batch, self.kv, keep)
            if found is not None:
                logits, self.last_likeliest = found
                self.last_calls = self._whole.layers
                return logits
        needed = None if len(keep) >= batch.num_tokens else torch.tensor(sorted(set(keep)), dtype=torch.int64)
        return self._run(batch, to_device(keep, self.device) if keep else None, needed)

    @torch.inference_mode()
    def forward_all(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [T, V] in float32 of every token, by nothing that a CUDA graph can't record."""
        logits = self._run(batch, 0)
        assert logits is not None
        return logits

    def _run(
        self, batch: PackedBatch, keep: torch.Tensor | int | None, needed: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """`keep` as transformers takes it (0 for all); None leaves out the LM head. `needed` as StepContext says."""
        context = StepContext(self.backend, batch, self.kv, needed)
        inputs = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            # All ones, not None: None makes transformers look for packed sequences itself and wrap the mask functions.
            "attention_mask": torch.ones_like(batch.input_ids),
            "use_cache": False,
        }
        logits = None
        with step_context(context):
            if keep is None:
                self.module.base_model(**inputs)
            else:
                logits = self.module(**inputs, logits_to_keep=keep).logits[0].float()
        self.last_calls = context.calls
        return logits

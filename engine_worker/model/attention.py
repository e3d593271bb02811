"""The seam between transformers' modelling code and our paged attention.

Models are loaded with `attn_implementation=NAME`. Each attention layer then calls `paged_attention` with queries, keys
and values after its own projections, norms and rotary embedding: q [1, Hq, T, Dk], k [1, Hkv, T, Dk], v [1, Hkv, T, Dv]
for the T packed tokens of the step. Which request a token belongs to, where its keys go and what it may see is not in
those arguments: it lies in the StepContext, which whoever runs the forward sets around the call (`step_context`). The
context travels in a ContextVar, so two engines in two threads of one process do not meet.

A backend writes the new keys and values into the cache and attends. Backends differ in speed, never in meaning: the
tests hold each against `reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from engine_worker.model.errors import ModelError
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import MaskTag, build_mask_tag
from engine_worker.model.packing import PackedBatch

NAME = "warmgate_paged"

# Keyword arguments that layers pass along and that mean nothing to us: positions are applied already, and the rest
# concerns caches and outputs that are switched off.
_IGNORED = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "is_causal",
    }
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention over the packed tokens.

    query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv]; Hq is a multiple of Hkv, query head h reads
    key head h // (Hq // Hkv). Scores are `scaling * q.k`, then `softcap * tanh(scores / softcap)` if set. `sinks` [Hq]
    are logits of an extra column that takes part in the softmax and has no value.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: MaskTag
    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Paged attention. Holds scratch memory at most: all state is in the cache and the batch."""

    name: str

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        """Write the call's keys and values into `kv` at `batch.slots`, then attend. Returns [T, Hq, Dv]."""
        ...


@dataclass(slots=True)
class StepContext:
    """What the attention of one forward needs to know. `calls` records the layers in the order they were called.

    `needed` are the pack positions [n] whose hidden states will be read, ascending; the others' may come out as
    anything. None: all will be.
    """

    backend: AttentionBackend
    batch: PackedBatch
    kv: KVTensors
    needed: torch.Tensor | None = None
    calls: list[int] = field(default_factory=list)


_CONTEXT: ContextVar[StepContext | None] = ContextVar("warmgate_step", default=None)


def current_context() -> StepContext | None:
    """The step that this thread's forward belongs to, None outside of one."""
    return _CONTEXT.get()


@contextmanager
def step_context(context: StepContext) -> Iterator[StepContext]:
    """Make `context` the one that this thread's forward attends in."""
    token = _CONTEXT.set(context)
    try:
        yield context
    finally:
        _CONTEXT.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskTag | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,  # already in the mask function, where every family has it
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function. Returns ([1, T, Hq, Dv], None); raises ModelError for what it can't honour."""
    context = _CONTEXT.get()
    assert context is not None, "paged attention was called outside a step"
    if not isinstance(attention_mask, MaskTag):
        raise ModelError(f"{type(module).__name__} hides its mask from the attention function.")
    _refuse_unknown(module, kwargs, dropout)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    context.calls.append(layer)
    call = AttentionCall(
        layer=layer,
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sinks=s_aux,
    )
    return context.backend.attend(call, context.batch, context.kv)[None], None


def _refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any], dropout: float) -> None:
    if kwargs.keys() - _IGNORED:
        unknown = sorted(name for name, value in kwargs.items() if name not in _IGNORED and value is not None)
        if unknown:
            raise ModelError(
                f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which paged attention "
                "does not implement."
            )
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} attends to later tokens, which a decoder with a KV cache can't.")
    assert dropout == 0.0, "the model is in training mode"


def register() -> None:
    """Make NAME known to transformers. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, build_mask_tag)

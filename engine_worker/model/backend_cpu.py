"""Paged attention for CPUs, out of torch's own kernels. Measured choices, each held against `reference` by tests:

- A request whose blocks lie side by side is read as a view of the cache: no copy. It beats every gather.
- Scattered decodes are gathered block by block into a scratch buffer that outlives the step (fresh pages cost more
  than the copy) and attended in one batched call. Those of like length share a call, so that padding stays small.
- A decode's query heads that share a key head become the rows of one small matrix product: keys are read once a group.
- A prefill chunk behind a past attends to past and self apart, merged by their log-sum-exps: no mask is materialised.
  First chunks need no past and no mask at all.
- Masks other than plain causal are evaluated once a step on true positions and shared by the layers that have them.
  What no query of a span may see is not even read, so a window costs its own width.

Soft-capped scores, and sinks with value heads narrower than key heads, go to the reference implementation: torch's
fused kernel knows neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_reference import attend_written
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import CAUSAL, MaskTag, additive
from engine_worker.model.packing import PackedBatch, Span

# Private in torch, pinned by tests: (q, k, v, dropout, is_causal, attn_mask=, scale=) -> (output, logsumexp).
_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

_MAX_GATHER_TOKENS = 1 << 16  # padded tokens that one gather may hold, which bounds the scratch buffers
_MAX_PADDING = 1.25  # padded over true tokens, at most, within one gather


@dataclass(frozen=True, slots=True)
class _View:
    """A decode whose visible keys are slots begin .. end - 1."""

    index: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Gather:
    """Decodes first .. last - 1, each over `num_blocks` gathered blocks; mask [n, 1, 1, num_blocks * block_size]."""

    first: int
    last: int
    blocks: torch.Tensor  # [n * num_blocks]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A span of several tokens that sees keys of positions kv_start .. end - 1.

    `blocks` are those to gather, or None where slots begin .. end are one run. `mask` [n, L] or None for plain causal.
    """

    span: Span
    kv_start: int
    begin: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    views: tuple[_View, ...]
    gathers: tuple[_Gather, ...]
    prefills: tuple[_Prefill, ...]


class CPUBackend:
    name = "cpu"

    def __init__(self) -> None:
        self._scratch: dict[str, torch.Tensor] = {}

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        kv.write(call.layer, batch.slots, call.key, call.value)
        fused = _FLASH is not None and call.key.shape[3] == call.value.shape[3]
        if call.softcap is not None or (call.sinks is not None and not fused):
            return attend_written(call, batch, kv)
        key = "causal" if call.mask.is_causal else call.mask
        plan = batch.memo.get(key)
        if plan is None:
            plan = batch.memo[key] = _make_plan(call.mask, batch, call.query.dtype)
        assert isinstance(plan, _Plan)
        return self._run(call, plan, kv, fused)

    def _run(self, call: AttentionCall, plan: _Plan, kv: KVTensors, fused: bool) -> torch.Tensor:
        keys, values = kv.layer(call.layer)
        num_kv_heads = keys.shape[1]
        num_tokens, num_heads = call.query.shape[2], call.query.shape[1]
        out = call.query.new_empty(num_tokens, num_kv_heads, num_heads // num_kv_heads, values.shape[2])
        query = call.query[0].transpose(0, 1).unflatten(1, (num_kv_heads, -1))  # [T, Hkv, G, Dk]
        sinks = None if call.sinks is None else call.sinks.float().view(num_kv_heads, -1)  # [Hkv, G]

        for view in plan.views:
            i, run = view.index, slice(view.begin, view.end)
            key, value = keys[run].transpose(0, 1)[None], values[run].transpose(0, 1)[None]
            result, lse = _attention(query[i : i + 1], key, value, call.scaling, None, False, fused)
            out[i] = _with_sinks(result, lse, sinks)[0]
        for gather in plan.gathers:
            n = gather.last - gather.first
            key = self._gather("key", keys, gather.blocks, kv.block_size).view(n, -1, *keys.shape[1:])
            value = self._gather("value", values, gather.blocks, kv.block_size).view(n, -1, *values.shape[1:])
            rows = query[gather.first : gather.last]
            result, lse = _attention(
                rows, key.transpose(1, 2), value.transpose(1, 2), call.scaling, gather.mask, False, fused
            )
            out[gather.first : gather.last] = _with_sinks(result, lse, sinks)
        for prefill in plan.prefills:
            span = prefill.span
            rows = slice(span.offset, span.offset + span.num_tokens)
            result, lse = self._prefill(call, prefill, query[rows], keys, values, kv.block_size, fused)
            result = _with_sinks(result, lse, None if sinks is None else sinks[:, :, None])
            out[rows] = result.permute(2, 0, 1, 3)
        return out.flatten(1, 2)

    def _prefill(
        self,
        call: AttentionCall,
        plan: _Prefill,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_size: int,
        fused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one chunk. query [n, Hkv, G, Dk]; returns ([Hkv, G, n, Dv], logsumexp [Hkv, G, n] or None)."""
        span, scale = plan.span, call.scaling
        query = query.permute(1, 2, 0, 3)  # [Hkv, G, n, Dk]
        group = query.shape[1]
        own = slice(span.offset, span.offset + span.num_tokens)
        if span.start == 0 and plan.mask is None:
            key, value = _shared(call.key[0, :, own], group), _shared(call.value[0, :, own], group)
            return _attention(query, key, value, scale, None, True, fused)

        length = span.end - plan.kv_start
        if plan.blocks is None:
            key, value = (tensor[plan.begin : plan.begin + length] for tensor in (keys, values))
        else:
            skip = plan.kv_start % block_size
            key = self._gather("key", keys, plan.blocks, block_size)[skip : skip + length]
            value = self._gather("value", values, plan.blocks, block_size)[skip : skip + length]
        key, value = _shared(key.transpose(0, 1), group), _shared(value.transpose(0, 1), group)
        if plan.mask is not None:
            return _attention(query, key, value, scale, plan.mask, False, fused)
        past = length - span.num_tokens
        if not fused:
            kv_pos = torch.arange(length)
            mask = additive(CAUSAL.allow(kv_pos[past:, None], kv_pos[None, :]), query.dtype)
            return _attention(query, key, value, scale, mask, False, fused)
        before, lse_before = _attention(query, key[:, :, :past], value[:, :, :past], scale, None, False, fused)
        within, lse_within = _attention(query, key[:, :, past:], value[:, :, past:], scale, None, True, fused)
        assert lse_before is not None
        assert lse_within is not None
        share = torch.sigmoid(lse_before - lse_within)[..., None].to(query.dtype)  # e^a / (e^a + e^b)
        return torch.lerp(within, before, share), torch.logaddexp(lse_before, lse_within)

    def _gather(self, name: str, tensor: torch.Tensor, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
        """Copy whole blocks [N] of `tensor` [num_slots, H, D] into scratch: [N * block_size, H, D]."""
        width = block_size * tensor.shape[1] * tensor.shape[2]
        needed = blocks.shape[0] * width
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < needed or scratch.dtype != tensor.dtype:
            scratch = self._scratch[name] = torch.empty(needed, dtype=tensor.dtype)
        rows = scratch[:needed].view(-1, width)
        torch.index_select(tensor.view(-1, width), 0, blocks, out=rows)
        return rows.view(-1, *tensor.shape[1:])


def _shared(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """[Hkv, L, D] -> [Hkv, group, L, D], every query head of a group seeing the same memory."""
    return tensor[:, None].expand(-1, group, -1, -1)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    is_causal: bool,
    fused: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(scale * q k^T + mask) v and, where fused, the scores' logsumexp [B, H, n]. `is_causal` needs n = L."""
    if fused:
        assert _FLASH is not None
        return _FLASH(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)
    return out, None


def _with_sinks(result: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Let a sink's logit join the softmax afterwards: scale by e^lse / (e^lse + e^sink)."""
    if sinks is None:
        return result
    assert lse is not None
    return result * torch.sigmoid(lse.float() - sinks)[..., None].to(result.dtype)


def _make_plan(mask: MaskTag, batch: PackedBatch, dtype: torch.dtype) -> _Plan:
    views, gathers = _plan_decodes(mask, batch, dtype)
    prefills = tuple(_plan_prefill(mask, batch, span, dtype) for span in batch.spans[batch.num_decodes :])
    return _Plan(views, gathers, prefills)


def _plan_decodes(
    mask: MaskTag, batch: PackedBatch, dtype: torch.dtype
) -> tuple[tuple[_View, ...], tuple[_Gather, ...]]:
    """Runs first, as views; then the scattered ones in gathers of like length."""
    spans, tables, block_size = batch.spans[: batch.num_decodes], batch.tables, batch.block_size
    if not spans:
        return (), ()
    ends = torch.tensor([span.end for span in spans])
    first, is_range = _visible_range(mask, ends)
    views = []
    for index, span in enumerate(spans):
        if not (tables.contiguous[span.row] and is_range[index]):
            break
        base = int(tables.table[span.row, 0]) * block_size
        views.append(_View(index, base + first[index], base + span.end))
    gathers = []
    begin = len(views)
    counts = [-(-span.end // block_size) - first[i] // block_size for i, span in enumerate(spans)]
    while begin < len(spans):
        end = begin + 1
        widest = total = counts[begin]
        while end < len(spans):
            wider = max(widest, counts[end])
            padded = wider * (end + 1 - begin)
            if padded > _MAX_PADDING * (total + counts[end]) or padded * block_size > _MAX_GATHER_TOKENS:
                break
            widest, total, end = wider, total + counts[end], end + 1
        gathers.append(_plan_gather(mask, batch, begin, end, widest, first, ends, dtype))
        begin = end
    return tuple(views), tuple(gathers)


def _visible_range(mask: MaskTag, ends: torch.Tensor) -> tuple[list[int], list[bool]]:
    """For each decode (context length ends[i]): the first key it may see, and whether it sees all from there on."""
    if mask.is_causal:
        return [0] * len(ends), [True] * len(ends)
    kv_pos = torch.arange(int(ends.max()))[None, :]
    allow = mask.allow(ends[:, None] - 1, kv_pos) & (kv_pos < ends[:, None])
    first = allow.to(torch.int8).argmax(dim=1)
    return first.tolist(), (allow.sum(dim=1) == ends - first).tolist()


def _plan_gather(
    mask: MaskTag,
    batch: PackedBatch,
    begin: int,
    end: int,
    num_blocks: int,
    first: list[int],
    ends: torch.Tensor,
    dtype: torch.dtype,
) -> _Gather:
    block_size = batch.block_size
    rows = np.array([span.row for span in batch.spans[begin:end]])
    lows = np.array(first[begin:end]) // block_size
    ends = ends[begin:end, None]
    columns = lows[:, None] + np.arange(num_blocks)
    last = (ends.numpy() - 1) // block_size
    blocks = batch.tables.table[
        rows[:, None], np.minimum(columns, last)
    ]  # padding repeats the request's own last block
    kv_pos = torch.from_numpy(lows * block_size)[:, None] + torch.arange(num_blocks * block_size)
    allow = mask.allow(ends - 1, kv_pos) & (kv_pos < ends)
    return _Gather(begin, end, torch.from_numpy(blocks.ravel()), additive(allow, dtype)[:, None, None, :])


def _plan_prefill(mask: MaskTag, batch: PackedBatch, span: Span, dtype: torch.dtype) -> _Prefill:
    block_size, tables = batch.block_size, batch.tables
    kv_start, tensor = 0, None
    if not mask.is_causal:
        kv_pos = torch.arange(span.end)
        allow = mask.allow(kv_pos[span.start :, None], kv_pos[None, :])
        if not torch.equal(allow, CAUSAL.allow(kv_pos[span.start :, None], kv_pos[None, :])):
            kv_start = int(allow.any(dim=0).to(torch.int8).argmax())
            tensor = additive(allow[:, kv_start:], dtype)
    if tables.contiguous[span.row]:
        begin = int(tables.table[span.row, 0]) * block_size + kv_start
        return _Prefill(span, kv_start, begin, None, tensor)
    return _Prefill(span, kv_start, 0, batch.block_row(span)[kv_start // block_size :], tensor)

"""Paged attention for CPUs, out of torch's own kernels. Measured choices, each held against `reference` by tests:

- A request whose blocks lie side by side is read as a view of the cache: no copy. It beats a gather, except for many
  short contexts, where one batched call beats many small ones.
- Scattered decodes are gathered block by block into a scratch buffer that outlives the step (fresh pages cost more
  than the copy) and attended in one batched call. Those of like length share a call, so that padding stays small.
- A decode's query heads that share a key head become the rows of one small matrix product: keys are read once a group.
- A prefill chunk behind a past attends to past and self apart, merged by their log-sum-exps: no mask is materialised.
  First chunks need no past and no mask at all.

A quantized cache is widened as it is read, run by run or gather by gather. A first chunk, too, then reads what was
stored, as every later step will.

Soft-capped scores, and sinks with value heads narrower than key heads, go to the reference implementation: torch's
fused kernel knows neither.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_cpu_plan import Plan, Prefill, View, make_plan
from engine_worker.model.backend_reference import attend_written
from engine_worker.model.kv_format import Rows
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import CAUSAL, additive
from engine_worker.model.packing import PackedBatch

# Private in torch, pinned by tests: (q, k, v, dropout, is_causal, attn_mask=, scale=) -> (output, logsumexp).
_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


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
            plan = batch.memo[key] = make_plan(call.mask, batch, call.query.dtype)
        assert isinstance(plan, Plan)
        return self._run(call, plan, kv, fused)

    def _run(self, call: AttentionCall, plan: Plan, kv: KVTensors, fused: bool) -> torch.Tensor:
        keys, values = kv.rows(call.layer)
        num_kv_heads = keys.data.shape[1]
        num_tokens, num_heads = call.query.shape[2], call.query.shape[1]
        out = call.query.new_empty(num_tokens, num_kv_heads, num_heads // num_kv_heads, values.dim)
        query = call.query[0].transpose(0, 1).unflatten(1, (num_kv_heads, -1))  # [T, Hkv, G, Dk]
        sinks = None if call.sinks is None else call.sinks.float().view(num_kv_heads, -1)  # [Hkv, G]

        if plan.views:
            self._run_views(plan.views, query, keys, values, call.scaling, sinks, fused, out)
        for gather in plan.gathers:
            n = gather.last - gather.first
            key = self._gather("key", keys, gather.blocks, kv.block_size, query.dtype).unflatten(0, (n, -1))
            value = self._gather("value", values, gather.blocks, kv.block_size, query.dtype).unflatten(0, (n, -1))
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

    def _run_views(
        self,
        views: tuple[View, ...],
        query: torch.Tensor,
        keys: Rows,
        values: Rows,
        scale: float,
        sinks: torch.Tensor | None,
        fused: bool,
        out: torch.Tensor,
    ) -> None:
        """Decodes over runs of the cache. This loop is the hot Python of a step, hence as_strided instead of slices."""
        if keys.scales is not None or values.scales is not None:
            for index, view in enumerate(views):
                key, value = (_run_of(rows, view.begin, view.end, query.dtype) for rows in (keys, values))
                key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
                result, lse = _attention(query[index : index + 1], key, value, scale, None, False, fused)
                out[index : index + 1] = _with_sinks(result, lse, sinks)
            return
        heads, key_dim, value_dim = keys.data.shape[1], keys.dim, values.dim
        key_row, value_row = heads * key_dim, heads * value_dim
        key_strides, value_strides = (0, key_dim, key_row, 1), (0, value_dim, value_row, 1)
        rows = query[: len(views)].split(1)
        results = []
        for row, view in zip(rows, views, strict=True):
            length = view.end - view.begin
            key = keys.data.as_strided((1, heads, length, key_dim), key_strides, view.begin * key_row)
            value = values.data.as_strided((1, heads, length, value_dim), value_strides, view.begin * value_row)
            result, lse = _attention(row, key, value, scale, None, False, fused)
            results.append(_with_sinks(result, lse, sinks))
        torch.cat(results, out=out[: len(views)])

    def _prefill(
        self,
        call: AttentionCall,
        plan: Prefill,
        query: torch.Tensor,
        keys: Rows,
        values: Rows,
        block_size: int,
        fused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one chunk. query [n, Hkv, G, Dk]; returns ([Hkv, G, n, Dv], logsumexp [Hkv, G, n] or None)."""
        span, scale = plan.span, call.scaling
        query = query.permute(1, 2, 0, 3)  # [Hkv, G, n, Dk]
        group = query.shape[1]
        own = slice(span.offset, span.offset + span.num_tokens)
        is_dense = keys.scales is None and values.scales is None
        if is_dense and span.start == 0 and plan.mask is None:
            key, value = _shared(call.key[0, :, own], group), _shared(call.value[0, :, own], group)
            return _attention(query, key, value, scale, None, True, fused)

        length = span.end - plan.kv_start
        if plan.blocks is None:
            key, value = (_run_of(rows, plan.begin, plan.begin + length, query.dtype) for rows in (keys, values))
        else:
            skip = plan.kv_start % block_size
            key = self._gather("key", keys, plan.blocks, block_size, query.dtype)[skip : skip + length]
            value = self._gather("value", values, plan.blocks, block_size, query.dtype)[skip : skip + length]
        key, value = _shared(key.transpose(0, 1), group), _shared(value.transpose(0, 1), group)
        if plan.mask is not None:
            return _attention(query, key, value, scale, plan.mask, False, fused)
        past = length - span.num_tokens
        if past == 0:
            return _attention(query, key, value, scale, None, True, fused)
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

    def _gather(self, name: str, rows: Rows, blocks: torch.Tensor, block_size: int, dtype: torch.dtype) -> torch.Tensor:
        """Copy whole blocks [N] into scratch, or widen them: [N * block_size, H, D]."""
        if rows.scales is not None:
            return rows.read((blocks[:, None] * block_size + torch.arange(block_size)).flatten(), dtype)
        tensor = rows.data
        width = block_size * tensor.shape[1] * tensor.shape[2]
        needed = blocks.shape[0] * width
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < needed or scratch.dtype != tensor.dtype:
            scratch = self._scratch[name] = torch.empty(needed, dtype=tensor.dtype)
        copy = scratch[:needed].view(-1, width)
        torch.index_select(tensor.view(-1, width), 0, blocks, out=copy)
        return copy.view(-1, *tensor.shape[1:])


def _run_of(rows: Rows, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Slots begin .. end - 1, in place where they are dense: [end - begin, H, D]."""
    return rows.data[begin:end] if rows.scales is None else rows.read(slice(begin, end), dtype)


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

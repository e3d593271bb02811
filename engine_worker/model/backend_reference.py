"""The definition of paged attention, written to be read: each request alone, float32, an explicit mask.

Every other backend is tested against this one. It runs anywhere torch does and is slow everywhere.
"""

from __future__ import annotations

import torch

from engine_worker.model.attention import AttentionCall
from engine_worker.model.kv_format import Rows
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.packing import PackedBatch, Span


class ReferenceBackend:
    name = "reference"

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        kv.write(call.layer, batch.slots, call.key, call.value)
        return attend_written(call, batch, kv)


def attend_written(call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
    """Attention [T, Hq, Dv] over keys and values that are in the cache already."""
    keys, values = kv.rows(call.layer)
    outputs = [_attend_span(call, batch, span, keys, values) for span in batch.spans]
    return torch.cat(outputs).to(call.query.dtype)


def _attend_span(call: AttentionCall, batch: PackedBatch, span: Span, keys: Rows, values: Rows) -> torch.Tensor:
    query = call.query[0, :, span.offset : span.offset + span.num_tokens].float()  # [Hq, n, Dk]
    kv_pos = torch.arange(span.end, device=query.device)  # [L]
    q_pos = kv_pos[span.start :]  # [n]
    blocks = batch.block_row(span).to(query.device)
    slots = blocks[kv_pos // batch.block_size] * batch.block_size + kv_pos % batch.block_size
    group = query.shape[0] // keys.data.shape[1]
    key = keys.read(slots, torch.float32).transpose(0, 1).repeat_interleave(group, 0)  # [Hq, L, Dk]
    value = values.read(slots, torch.float32).transpose(0, 1).repeat_interleave(group, 0)  # [Hq, L, Dv]

    scores = query @ key.transpose(1, 2) * call.scaling  # [Hq, n, L]
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~call.mask.allow(q_pos[:, None], kv_pos[None, :]), float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float()[:, None, None].expand(-1, span.num_tokens, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights @ value).transpose(0, 1)  # [n, Hq, Dv]

"""Paged attention by the C++ kernels: keys and values are read in place, through the block tables, never copied.

A quantized cache is read as it is stored, in int8, fp4 or a mix of both: a row's scale joins its score or its weight.

Masks come as functions (masks.py). What a query may see under every one that is known today is a range that ends at its
own position, so the kernels take the first visible position of each query. A mask with holes, a type other than
float32 or a cache in fp8 goes to the torch backend, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.kv_format import Rows
from engine_worker.model.kv_tensors import KVTensors, LayerShape
from engine_worker.model.masks import MaskTag
from engine_worker.model.native.cache import cache_struct, is_known
from engine_worker.model.native.kernels import address
from engine_worker.model.native.library import AttentionStruct, Library
from engine_worker.model.packing import PackedBatch

_MAX_MASK_ELEMENTS = 1 << 22  # positions of a mask evaluated at once


@dataclass(frozen=True, slots=True)
class Ranges:
    """First visible position of each token [T], None for plain causal. `is_exact` False: the mask has holes."""

    first: torch.Tensor | None
    is_exact: bool


class NativeBackend:
    """The kernels behind the backend interface. The torch backend stands behind it for what they can't do."""

    name = "native"

    def __init__(self, library: Library) -> None:
        self.library = library
        self._other = CPUBackend()

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        ranges = self.ranges(call.mask, batch)
        is_float32 = call.query.dtype == call.key.dtype == torch.float32
        keys, values = kv.ensure(call.layer, LayerShape.of(call.key, call.value), call.key.dtype)
        if not ranges.is_exact or not is_float32 or not is_known(keys, values):
            return self._other.attend(call, batch, kv)
        kv.write(call.layer, batch.slots, call.key, call.value)
        query = call.query[0].transpose(0, 1).contiguous()  # [T, Hq, Dk]
        out = query.new_empty(*query.shape[:2], values.dim)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        struct = self.describe(batch, ranges, query.shape[1], keys, values)
        struct.query, struct.query_pitch, struct.out = query.data_ptr(), query.shape[1] * query.shape[2], out.data_ptr()
        struct.sinks, struct.scale, struct.softcap = address(sinks), call.scaling, call.softcap or 0.0
        self.library.attend(struct, torch.get_num_threads())
        return out

    def describe(self, batch: PackedBatch, ranges: Ranges, num_heads: int, keys: Rows, values: Rows) -> AttentionStruct:
        """The kernels' view of a step: everything but query, out, sinks and scores' scale."""
        spans = batch.memo.get("native spans")
        if spans is None:
            rows = [(span.offset, span.num_tokens, span.start, span.row) for span in batch.spans]
            spans = batch.memo["native spans"] = np.array(rows, dtype=np.int64)
        tables = batch.tables.tensor
        return AttentionStruct(
            cache=cache_struct(keys, values),
            first=address(ranges.first),
            table=tables.data_ptr(),
            spans=cast(np.ndarray, spans).ctypes.data,
            num_spans=len(batch.spans),
            table_pitch=tables.shape[1],
            block_size=batch.block_size,
            q_heads=num_heads,
            kv_heads=keys.data.shape[1],
            key_dim=keys.dim,
            value_dim=values.dim,
        )

    def ranges(self, mask: MaskTag, batch: PackedBatch) -> Ranges:
        """What each token may see, evaluated once a step and mask."""
        if mask.is_causal:
            return _CAUSAL
        key = ("native ranges", mask)
        found = batch.memo.get(key)
        if found is None:
            found = batch.memo[key] = _evaluate(mask, batch)
        return cast(Ranges, found)


_CAUSAL = Ranges(None, True)


def _evaluate(mask: MaskTag, batch: PackedBatch) -> Ranges:
    first = torch.empty(batch.num_tokens, dtype=torch.int64)
    decodes, chunks = batch.spans[: batch.num_decodes], batch.spans[batch.num_decodes :]
    groups = [([span.start for span in decodes], 0)] if decodes else []
    groups += [(list(range(span.start, span.end)), span.offset) for span in chunks]
    for positions, offset in groups:
        queries = torch.tensor(positions)
        kv_pos = torch.arange(int(queries.max()) + 1)
        step = max(1, _MAX_MASK_ELEMENTS // len(kv_pos))
        for begin in range(0, len(positions), step):
            q_pos = queries[begin : begin + step, None]
            allow = mask.allow(q_pos, kv_pos[None, :]) & (kv_pos <= q_pos)
            low = allow.to(torch.int8).argmax(dim=1)
            if not torch.equal(allow.sum(dim=1), q_pos[:, 0] + 1 - low):
                return Ranges(None, False)
            first[offset + begin : offset + begin + len(low)] = low
    return Ranges(first, True)

"""Paged attention by our own Triton kernels: the default on CUDA.

Any block size, number of heads and head size; any format of the cache; causal, sliding and chunked masks; soft cap and
sinks. A layer with another mask goes to the reference implementation, which is slow and makes the host wait for the
device; loading warns of it by name (`unknown_mask_names`).

The kernels run on a CPU too, in Triton's interpreter (TRITON_INTERPRET=1 set before triton is imported): far too slow
to serve, and how the tests hold them against the reference without a GPU.
"""

from __future__ import annotations

import torch
import triton

from engine_worker.model import triton_kernels as kernels
from engine_worker.model.attention import AttentionCall
from engine_worker.model.backend_reference import attend_written
from engine_worker.model.backend_triton_plan import StepMeta, Tiles, make_meta
from engine_worker.model.kv_format import Rows
from engine_worker.model.kv_tensors import KVTensors, LayerShape
from engine_worker.model.mask_kinds import MaskClassifier, MaskKind
from engine_worker.model.packing import PackedBatch

MAX_SPLITS = 32
_WAVES = 2  # programs of a decode per multiprocessor, at least, if splitting can bring them
_FORMATS = {"dense": kernels.DENSE, "int8": kernels.INT8, "fp8": kernels.FP8, "fp4": kernels.FP4}
_NOTHING = 1e9  # stands for a soft cap that isn't there


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, which works on CPU tensors."""
    return not isinstance(kernels.attend_kernel, triton.runtime.JITFunction)


class TritonBackend:
    name = "triton"

    def __init__(self, max_model_len: int, num_cores: int) -> None:
        """`num_cores` are the device's multiprocessors: how far decodes are split follows from it."""
        self._classifier = MaskClassifier(max_model_len)
        self._num_cores = num_cores

    @property
    def unknown_masks(self) -> int:
        """Different masks met so far that the kernels don't know."""
        return self._classifier.num_unknown

    @property
    def unknown_mask_names(self) -> tuple[str, ...]:
        """What the model's code calls them."""
        return self._classifier.unknown_names

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        kind = self._classifier.kind_in_step(call.mask, call.query.device, batch.memo)
        if kind is None:
            kv.write(call.layer, batch.slots, call.key, call.value)
            return attend_written(call, batch, kv)
        self._write(call, batch.slots, kv)
        meta = batch.memo.get(StepMeta)
        if meta is None:
            meta = batch.memo[StepMeta] = make_meta(batch)
        assert isinstance(meta, StepMeta)
        return self._attend(call, meta, kind, kv)

    def num_splits(self, num_tiles: int, num_kv_heads: int) -> int:
        """Programs that share a short tile's keys, so that the device is full."""
        wanted = -(-_WAVES * self._num_cores // max(1, num_tiles * num_kv_heads))
        return 1 << (min(wanted, MAX_SPLITS).bit_length() - 1)

    def _write(self, call: AttentionCall, slots: torch.Tensor, kv: KVTensors) -> None:
        """Leftovers behind a request's end are never loaded, so unlike other backends this need not look for NaN."""
        key, value = _rows_contiguous(call.key), _rows_contiguous(call.value)
        num_heads, num_tokens, key_dim = key.shape[1:]
        value_dim = value.shape[3]
        shape = LayerShape(num_heads, key_dim, value_dim)
        keys, values = kv.ensure(call.layer, shape, key.dtype)
        if "fp4" in (keys.format.name, values.format.name):  # its search for scales is no kernel yet
            keys.write(slots, key[0].transpose(0, 1))
            values.write(slots, value[0].transpose(0, 1))
            return
        kernels.write_kernel[(num_tokens,)](
            key,
            value,
            *_pointers(keys, values),
            slots,
            key.stride(1),
            key.stride(2),
            value.stride(1),
            value.stride(2),
            NUM_HEADS=num_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            HEADS_PADDED=triton.next_power_of_2(num_heads),
            DIM_PADDED=triton.next_power_of_2(max(key_dim, value_dim)),
            KEY_FORMAT=_FORMATS[keys.format.name],
            VALUE_FORMAT=_FORMATS[values.format.name],
        )

    def _attend(self, call: AttentionCall, meta: StepMeta, kind: MaskKind, kv: KVTensors) -> torch.Tensor:
        cache = kv.rows(call.layer)
        values = cache[1]
        num_heads, num_tokens = call.query.shape[1], call.query.shape[2]
        num_kv_heads, value_dim = values.data.shape[1], values.dim
        cut = meta.cut(num_heads // num_kv_heads)
        out = call.query.new_empty(num_tokens, num_heads, value_dim)
        if len(cut.long):
            self._launch(call, meta, kind, cut.long, 1, cache, kv.block_size, out, (out, out, out))
        if not len(cut.short):
            return out
        splits = self.num_splits(len(cut.short), num_kv_heads)
        partial = (out, out, out)
        if splits > 1:
            shape = (num_tokens, num_heads, splits)
            partial = tuple(  # type: ignore[assignment]
                torch.empty(size, dtype=torch.float32, device=out.device)
                for size in ((*shape, value_dim), shape, shape)
            )
        self._launch(call, meta, kind, cut.short, splits, cache, kv.block_size, out, partial)
        if splits > 1:
            kernels.merge_kernel[(cut.short_tokens.shape[0], num_heads)](
                out,
                *partial,
                cut.short_tokens,
                NUM_HEADS=num_heads,
                VALUE_DIM=value_dim,
                VALUE_PADDED=triton.next_power_of_2(value_dim),
                NUM_SPLITS=splits,
                SPLITS_PADDED=triton.next_power_of_2(splits),
            )
        return out

    def _launch(
        self,
        call: AttentionCall,
        meta: StepMeta,
        kind: MaskKind,
        tiles: Tiles,
        splits: int,
        cache: tuple[Rows, Rows],
        block_size: int,
        out: torch.Tensor,
        partial: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        query = _rows_contiguous(call.query)
        keys, values = cache
        num_kv_heads, key_dim, value_dim = keys.data.shape[1], keys.dim, values.dim
        key_padded = max(16, triton.next_power_of_2(key_dim))
        value_padded = max(16, triton.next_power_of_2(value_dim))
        row_bytes = max(key_padded, value_padded) * query.element_size()
        wide = row_bytes > 256
        kernels.attend_kernel[(len(tiles), num_kv_heads, splits)](
            out,
            *partial,
            query,
            *_pointers(keys, values),
            out if call.sinks is None else call.sinks,
            tiles.seq,
            tiles.first,
            meta.offset,
            meta.start,
            meta.count,
            meta.table,
            meta.table.stride(0),
            query.stride(1),
            query.stride(2),
            float(call.scaling),
            float(_NOTHING if call.softcap is None else call.softcap),
            kind.width,
            BLOCK_SIZE=block_size,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=query.shape[1] // num_kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_PADDED=key_padded,
            VALUE_PADDED=value_padded,
            BLOCK_M=tiles.rows,
            BLOCK_N=64 if not wide else 32 if row_bytes <= 1024 else 16,
            NUM_SPLITS=splits,
            MASK=kind.kind,
            HAS_SOFTCAP=call.softcap is not None,
            HAS_SINKS=call.sinks is not None,
            KEY_FORMAT=_FORMATS[keys.format.name],
            VALUE_FORMAT=_FORMATS[values.format.name],
            # float32 products as float32: the default would round them to TF32's ten bits.
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            # Triton's interpreter multiplies bfloat16 as if it were integers.
            UPCAST=is_interpreted() and query.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=3 if tiles.rows == 16 else 2,
        )


def _pointers(keys: Rows, values: Rows) -> tuple[torch.Tensor, ...]:
    """Numbers of both and scales of both, as the kernels take them."""
    data = [rows.data.view(torch.float8_e4m3fn) if rows.format.name == "fp8" else rows.data for rows in (keys, values)]
    return (*data, *(rows.data if rows.scales is None else rows.scales for rows in (keys, values)))


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] with D contiguous, which the kernels rely on; projections leave it so."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()

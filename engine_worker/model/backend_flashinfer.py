"""Paged attention by FlashInfer's kernels, where that package is installed: CUDA only, chosen by name.

FlashInfer works in two parts. `plan` looks at the lengths of a step's requests on the host and decides how the work is
cut; `run` attends, as often as there are layers of the same kind. Decodes come first in a pack, so a step is two runs a
layer at most: decodes in one, all others (chunks of prompts, drafts to be verified) in the other. Layers are of the
same kind if their mask, scale, soft cap, heads and type are: most models have one kind, those with windows two.

A wrapper keeps one plan, and a page-locked buffer from which the plan's numbers are copied to the device. With steps
queued behind each other, that copy may not have happened yet when the next step is planned. So wrappers are used in
turn, and one is planned anew only when its last copy is done.

The cache is read as it lies: slots of a block are neighbours, which is FlashInfer's layout NHD. It can't read scales of
single tokens, so a narrow cache is refused; as are sinks, masks other than causal and sliding, values of another size
than keys, head sizes and types that its kernels don't come in. Its kernels fill with zeros what they load behind a
request's end, so leftovers there do no harm.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_worker.model.attention import AttentionCall
from engine_worker.model.errors import ModelError
from engine_worker.model.kv_tensors import KVTensors, LayerShape
from engine_worker.model.mask_kinds import CHUNKED, SLIDING, MaskClassifier
from engine_worker.model.packing import PackedBatch
from engine_worker.model.transfer import to_device

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 256 << 20  # partial results of split requests; all wrappers share it, as their runs never overlap
_TURNS = 2  # steps in flight, with asynchronous scheduling
_TENSOR_CORE_GROUP = 3  # query heads a key head from which on tensor cores read a decode's keys faster
_INSTEAD = "use --attention-backend triton"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a plan depends on besides the step. `window_left` keys before the query's own are seen, -1: all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window_left: int
    softcap: float
    scaling: float


@dataclass(frozen=True, slots=True)
class Pages:
    """Some requests of a step as FlashInfer wants them, all int32.

    qo_indptr [n + 1] where each one's queries begin; indptr [n + 1] where its pages begin in `indices`; last_page_len
    [n] tokens on its last page, 1 .. block size. These lie on the host, which plans with them; `indices` on the device.
    """

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@dataclass(slots=True)
class _Planned:
    decode: Any = None  # wrappers, None where the step has no such requests
    prefill: Any = None


@dataclass(slots=True)
class _Step:
    """What all layers of a step share."""

    turn: int
    decodes: Pages | None
    prefills: Pages | None
    planned: dict[LayerKind, _Planned] = field(default_factory=dict)
    num_taken: dict[tuple[object, ...], int] = field(default_factory=lambda: defaultdict(int))


@dataclass(slots=True)
class _Slot:
    wrapper: Any
    copied: torch.cuda.Event | None = None


class FlashInferBackend:
    name = "flashinfer"

    def __init__(self, max_model_len: int, device: torch.device, library: Any) -> None:
        """`library` is the module flashinfer, or what takes its place in tests."""
        self._classifier = MaskClassifier(max_model_len)
        self._library = library
        self._device = device
        self._workspace: Tensor | None = None  # taken at first use, so that its memory is the profile run's to find
        self._slots: dict[tuple[object, ...], list[_Slot]] = defaultdict(list)
        self._turn = 0

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> Tensor:
        kind = self.kind_of(call, batch)
        keys, values = kv.ensure(call.layer, LayerShape.of(call.key, call.value), call.key.dtype)
        if not (keys.format.is_dense and values.format.is_dense):
            raise narrow_cache(kv.format.name)
        keys.write(batch.slots, call.key[0].transpose(0, 1))
        values.write(batch.slots, call.value[0].transpose(0, 1))
        planned = self._plan(kind, batch)
        query = call.query[0].transpose(0, 1).contiguous()  # [T, Hq, D]
        cache = tuple(rows.data.unflatten(0, (-1, kv.block_size)) for rows in (keys, values))
        parts = []
        if planned.decode is not None:
            parts.append(planned.decode.run(query[: batch.num_decodes], cache))
        if planned.prefill is not None:
            parts.append(planned.prefill.run(query[batch.num_decodes :], cache))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def kind_of(self, call: AttentionCall, batch: PackedBatch) -> LayerKind:
        """The call's kind. Raises ModelError for what FlashInfer can't compute."""
        dim, value_dim = call.key.shape[3], call.value.shape[3]
        if call.query.dtype not in DTYPES:
            name = str(call.query.dtype).removeprefix("torch.")
            raise ModelError(
                f"FlashInfer computes in 16-bit types, not in {name}: set --dtype bfloat16, or {_INSTEAD}."
            )
        if value_dim != dim:
            raise ModelError(f"This model's keys have {dim} numbers and its values {value_dim}: {_INSTEAD}.")
        if dim not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            raise ModelError(f"FlashInfer knows heads of {known} numbers, this model's have {dim}: {_INSTEAD}.")
        if call.sinks is not None:
            raise ModelError(f"This model's attention has sinks, which FlashInfer's kernels don't: {_INSTEAD}.")
        mask = self._classifier.kind_in_step(call.mask, call.query.device, batch.memo)
        if mask is None or mask.kind == CHUNKED:
            raise ModelError(f"This model has attention masks beyond causal and sliding windows: {_INSTEAD}.")
        return LayerKind(
            num_heads=call.query.shape[1],
            num_kv_heads=call.key.shape[1],
            head_dim=dim,
            dtype=call.query.dtype,
            window_left=mask.width - 1 if mask.kind == SLIDING else -1,
            softcap=call.softcap or 0.0,
            scaling=call.scaling,
        )

    def _plan(self, kind: LayerKind, batch: PackedBatch) -> _Planned:
        step = batch.memo.get(_Step)
        if step is None:
            self._turn = (self._turn + 1) % _TURNS
            decodes, prefills = pages_of(batch, self._device)
            step = batch.memo[_Step] = _Step(self._turn, decodes, prefills)
        assert isinstance(step, _Step)
        planned = step.planned.get(kind)
        if planned is None:
            planned = step.planned[kind] = _Planned()
            if step.decodes is not None:
                planned.decode = self._plan_decodes(kind, step, step.decodes, batch.block_size)
            if step.prefills is not None:
                planned.prefill = self._plan_prefills(kind, step, step.prefills, batch.block_size)
        return planned

    def _plan_decodes(self, kind: LayerKind, step: _Step, pages: Pages, block_size: int) -> Any:
        slot = self._take("decode", kind, step)
        slot.wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            block_size,
            **_options(kind),
        )
        return self._planned(slot)

    def _plan_prefills(self, kind: LayerKind, step: _Step, pages: Pages, block_size: int) -> Any:
        slot = self._take("prefill", kind, step)
        slot.wrapper.plan(
            pages.qo_indptr,
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            block_size,
            causal=True,
            **_options(kind),
        )
        return self._planned(slot)

    def _take(self, phase: str, kind: LayerKind, step: _Step) -> _Slot:
        """A wrapper that no other kind of this step has, whose last plan has reached the device."""
        shape = (phase, step.turn, kind.num_heads, kind.num_kv_heads, kind.head_dim, kind.dtype)
        slots, index = self._slots[shape], step.num_taken[shape]
        step.num_taken[shape] += 1
        if index == len(slots):
            slots.append(_Slot(self._wrapper(phase, kind)))
        if slots[index].copied is not None:
            slots[index].copied.synchronize()
        return slots[index]

    def _wrapper(self, phase: str, kind: LayerKind) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        if phase == "prefill":
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        use_tensor_cores = kind.num_heads // kind.num_kv_heads >= _TENSOR_CORE_GROUP
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=use_tensor_cores
        )

    def _planned(self, slot: _Slot) -> Any:
        if self._device.type == "cuda":
            slot.copied = slot.copied or torch.cuda.Event()
            slot.copied.record(torch.cuda.current_stream(self._device))
        return slot.wrapper


def pages_of(batch: PackedBatch, device: torch.device) -> tuple[Pages | None, Pages | None]:
    """(the decodes' pages, all others'), None where the step has none of them."""
    counts = np.array([span.num_tokens for span in batch.spans], dtype=np.int32)
    ends = np.array([span.end for span in batch.spans], dtype=np.int32)
    rows = np.array([span.row for span in batch.spans], dtype=np.int64)
    num_pages = -(-ends // batch.block_size)
    width = int(num_pages.max())
    table = batch.tables.table[rows, :width].astype(np.int32)
    is_used = np.arange(width) < num_pages[:, None]
    last_page_len = ends - (num_pages - 1) * batch.block_size

    def part(which: slice) -> Pages | None:
        if not len(counts[which]):
            return None
        return Pages(
            qo_indptr=_running(counts[which]),
            indptr=_running(num_pages[which]),
            indices=to_device(table[which][is_used[which]], device),
            last_page_len=torch.from_numpy(last_page_len[which]),
        )

    return part(slice(0, batch.num_decodes)), part(slice(batch.num_decodes, None))


def narrow_cache(name: str) -> ModelError:
    """Why a cache in that format can't be had."""
    return ModelError(f"FlashInfer can't read a KV cache in {name}: set --kv-cache-dtype auto, or {_INSTEAD}.")


def _running(counts: np.ndarray) -> Tensor:
    """[0, c0, c0 + c1, ...] in int32."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def _options(kind: LayerKind) -> dict[str, Any]:
    return {
        "window_left": kind.window_left,
        "logits_soft_cap": kind.softcap,
        "sm_scale": kind.scaling,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.dtype,
    }

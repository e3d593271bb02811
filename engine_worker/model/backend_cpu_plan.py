"""What the CPU backend will do in a step, decided once for each mask and carried out in every layer that has it.

Masks other than plain causal are evaluated here, on true positions. What no query of a span may see is not even read,
so a sliding window costs its own width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine_worker.model.masks import CAUSAL, MaskTag, additive
from engine_worker.model.packing import SHORT_CONTEXT, PackedBatch, Span

_MAX_GATHER_TOKENS = 1 << 16  # padded tokens that one gather may hold, which bounds the scratch buffers
_MANY_DECODES = 4  # from here on short contexts are gathered together
_MAX_PADDING = 1.25  # padded over true tokens, at most, within one gather


@dataclass(frozen=True, slots=True)
class View:
    """A decode whose visible keys are slots begin .. end - 1. Views come first in the pack, in its order."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Decodes first .. last - 1, each over `num_blocks` gathered blocks; mask [n, 1, 1, num_blocks * block_size]."""

    first: int
    last: int
    blocks: torch.Tensor  # [n * num_blocks]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prefill:
    """A span of several tokens that sees keys of positions kv_start .. end - 1.

    `blocks` are those to gather, or None where slots begin .. end are one run. `mask` [n, L] or None for plain causal.
    """

    span: Span
    kv_start: int
    begin: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    views: tuple[View, ...]
    gathers: tuple[Gather, ...]
    prefills: tuple[Prefill, ...]


def make_plan(mask: MaskTag, batch: PackedBatch, dtype: torch.dtype) -> Plan:
    views, gathers = _plan_decodes(mask, batch, dtype)
    prefills = tuple(_plan_prefill(mask, batch, span, dtype) for span in batch.spans[batch.num_decodes :])
    return Plan(views, gathers, prefills)


def _plan_decodes(mask: MaskTag, batch: PackedBatch, dtype: torch.dtype) -> tuple[tuple[View, ...], tuple[Gather, ...]]:
    """Runs first, as views; then the scattered ones in gathers of like length."""
    spans, tables, block_size = batch.spans[: batch.num_decodes], batch.tables, batch.block_size
    if not spans:
        return (), ()
    ends = torch.tensor([span.end for span in spans])
    first, is_range = _visible_range(mask, ends)
    shortest = SHORT_CONTEXT if len(spans) >= _MANY_DECODES else 0
    views = []
    for index, span in enumerate(spans):
        if not (tables.contiguous[span.row] and is_range[index] and span.end > shortest):
            break
        base = int(tables.table[span.row, 0]) * block_size
        views.append(View(base + first[index], base + span.end))
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
) -> Gather:
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
    return Gather(begin, end, torch.from_numpy(blocks.ravel()), additive(allow, dtype)[:, None, None, :])


def _plan_prefill(mask: MaskTag, batch: PackedBatch, span: Span, dtype: torch.dtype) -> Prefill:
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
        return Prefill(span, kv_start, begin, None, tensor)
    return Prefill(span, kv_start, 0, batch.block_row(span)[kv_start // block_size :], tensor)

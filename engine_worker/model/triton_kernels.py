"""Triton kernels of paged attention: keys and values into their slots, attention over blocks, merging of splits.

One attention kernel serves prefill, decode and everything between. Its unit of work is a tile of query rows: some
consecutive queries of one request times the query heads that share a key head (so that a key is read once a group, and
a decode's product has rows enough for the tensor cores). A tile walks over the keys its rows may see, `BLOCK_N`
positions at a time, each position found through the block table, so a block may have any size. Softmax is online
(Milakov and Gimelshein 2018; Dao et al. 2022), in base 2 and float32.

A decode has one tile a key head, too few for a large GPU at small batches. So the keys of a tile may be split over
`NUM_SPLITS` programs, each of which leaves its unnormalised output and its maximum and sum; `merge_kernel` joins them
(flash decoding, Dao et al. 2023). How many splits there are depends on the batch alone, never on lengths, so that a
captured graph and an eager step compute the same thing.

Keys and values behind a request's end are never loaded, so whatever other requests left in a block can do no harm, NaN
included. Offsets into the cache are 64-bit: a large cache has more than 2^31 elements.

Rows of the cache may be narrow (kv_format.py). Scales of a whole row (int8, fp8) fold into the scores and the weights,
K's behind the product and V's before it; fp4's scales, one for 16 numbers, multiply the numbers as they are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

# MASK says what a query sees of the keys up to its own (mask_kinds): 0 all, 1 the last `width`, 2 its own chunk

# FORMAT is how a row is stored
DENSE, INT8, FP8, FP4 = 0, 1, 2, 3

_LOG2_E = tl.constexpr(1.4426950408889634)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a float32 leaves no room for a fraction
_ROUND_E4M3 = tl.constexpr(24576.0)  # 1.5 * 2^14: leaves no room for less than 2^-9


@triton.jit
def write_kernel(
    key,  # [Hkv, T, Dk] by strides
    value,  # [Hkv, T, Dv] by strides
    key_cache,  # [num_slots, Hkv, Dk]
    value_cache,  # [num_slots, Hkv, Dv]
    key_scales,  # [num_slots, Hkv] bfloat16, or anything where rows are dense
    value_scales,
    slots,  # [T] int64
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
):
    """One program a token: its row of every head."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    source = key + token * key_token_stride
    _store_row(
        source, key_head_stride, key_cache, key_scales, slot, NUM_HEADS, KEY_DIM, HEADS_PADDED, DIM_PADDED, KEY_FORMAT
    )
    source = value + token * value_token_stride
    _store_row(
        source,
        value_head_stride,
        value_cache,
        value_scales,
        slot,
        NUM_HEADS,
        VALUE_DIM,
        HEADS_PADDED,
        DIM_PADDED,
        VALUE_FORMAT,
    )


@triton.jit
def _store_row(
    source,
    head_stride,
    cache,
    scales,
    slot,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """All heads of one token; int8 and fp8 as RowFormat.quantize makes them."""
    heads = tl.arange(0, HEADS_PADDED)
    dims = tl.arange(0, DIM_PADDED)[None, :]
    is_part = (heads < NUM_HEADS)[:, None] & (dims < DIM)
    row = tl.load(source + heads[:, None] * head_stride + dims, mask=is_part, other=0.0)
    target = cache + (slot * NUM_HEADS + heads[:, None]) * DIM + dims
    if FORMAT == 0:
        tl.store(target, row, mask=is_part)
    else:
        row = row.to(tl.float32)
        peak = tl.max(tl.where(row == row, tl.abs(row), float("inf")), 1)  # NaN counts as infinite
        scale = tl.maximum(peak / (127.0 if FORMAT == 1 else 448.0), _SMALLEST_SCALE)
        bits = scale.to(tl.int32, bitcast=True)
        scale = (((bits + 0xFFFF) >> 16) << 16).to(tl.float32, bitcast=True)  # rounded up to a bfloat16
        is_finite = peak < float("inf")
        numbers = tl.where(is_finite[:, None], row / scale[:, None], 0.0)
        if FORMAT == 1:
            tl.store(target, ((numbers + _ROUND) - _ROUND).to(tl.int8), mask=is_part)
        else:
            tl.store(target, _to_e4m3(numbers).to(cache.dtype.element_ty), mask=is_part)
        stored = tl.where(is_finite, scale, float("nan")).to(tl.bfloat16)
        tl.store(scales + slot * NUM_HEADS + heads, stored, mask=heads < NUM_HEADS)


@triton.jit
def _to_e4m3(x):
    """Numbers of at most 448 rounded to what e4m3 has, in float32. (Triton's interpreter rounds wrongly on its own.)"""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # to nearest, ties to even, 3 bits of fraction
    small = (x + _ROUND_E4M3) - _ROUND_E4M3  # below 2^-6 they lie 2^-9 apart
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def _load_rows(cache, scales, row, dims, is_part, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Numbers `dims` of the stored rows `row` (slot times heads plus head), in the shape that the two broadcast to."""
    if FORMAT == 3:
        groups: tl.constexpr = (DIM + 15) // 16
        byte = tl.load(cache + row * (groups * 8) + dims // 16 * 8 + dims % 8, mask=is_part, other=0).to(tl.int32)
        code = (byte >> (dims % 16 // 8 * 4)) & 15
        size = code & 7
        large = (2 + (size & 1)) << (size >> 1)  # in quarters, from 2 on: 1, 1.5, 2, 3, 4, 6
        number = tl.where(size < 2, size * 2, large).to(tl.float32) * 0.25
        number = tl.where(code >= 8, -number, number)
        scale = tl.load(scales + row * groups + dims // 16, mask=is_part, other=0)
        return number * (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.load(cache + row * DIM + dims, mask=is_part, other=0.0)


@triton.jit
def attend_kernel(
    out,  # [T, Hq, Dv]; with splits, not written
    partial,  # [T, Hq, NUM_SPLITS, Dv] float32, unnormalised; without splits, not written
    partial_max,  # [T, Hq, NUM_SPLITS] float32, base 2
    partial_sum,  # [T, Hq, NUM_SPLITS] float32
    query,  # [Hq, T, Dk] by strides
    key_cache,  # [num_slots, Hkv, width]
    value_cache,
    key_scales,  # [num_slots, Hkv, scales of a row], or anything where rows are dense
    value_scales,
    sinks,  # [Hq], or anything without HAS_SINKS
    tile_seq,  # [tiles] int32: whose queries
    tile_first,  # [tiles] int32: the first of them, counted from the sequence's first in this step
    seq_offset,  # [S] int32: pack index of a sequence's first query
    seq_start,  # [S] int32: its position
    seq_count,  # [S] int32: number of queries
    table,  # [S, *] int32 block ids
    table_stride,
    query_head_stride,
    query_token_stride,
    scaling,
    softcap,
    width,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (tile, key head, split). BLOCK_M rows hold BLOCK_M // GROUP queries of GROUP heads each."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tl.load(tile_seq + tile)
    first = tl.load(tile_first + tile)
    start = tl.load(seq_start + seq)
    count = tl.load(seq_count + seq)
    offset = tl.load(seq_offset + seq)

    queries: tl.constexpr = BLOCK_M // GROUP
    rows = tl.arange(0, BLOCK_M)
    index = first + rows // GROUP  # of the query, in its sequence's part of the step
    is_row = (rows < queries * GROUP) & (index < count)
    q_pos = start + index
    token = (offset + index).to(tl.int64)
    q_head = head * GROUP + rows % GROUP
    key_dims = tl.arange(0, KEY_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    q = tl.load(
        query + token[:, None] * query_token_stride + q_head[:, None] * query_head_stride + key_dims[None, :],
        mask=is_row[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )

    if UPCAST:
        q = q.to(tl.float32)

    # Keys low .. high - 1 are all that any row of the tile may see.
    high = start + tl.minimum(first + queries, count)
    low = 0
    if MASK == 1:
        low = tl.maximum(start + first - width + 1, 0)
    elif MASK == 2:
        low = (start + first) // width * width
    low = low // BLOCK_N * BLOCK_N
    if NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(high - low, BLOCK_N), NUM_SPLITS) * BLOCK_N
        low = low + split * share
        high = tl.minimum(high, low + share)

    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + q_head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        row_max = tl.where(split == 0, sink, float("-inf"))
        row_sum = tl.where(split == 0, 1.0, row_sum)
    acc = tl.zeros((BLOCK_M, VALUE_PADDED), tl.float32)

    for begin in range(low, high, BLOCK_N):
        kv_pos = begin + tl.arange(0, BLOCK_N)
        is_key = kv_pos < high
        block = tl.load(table + seq.to(tl.int64) * table_stride + kv_pos // BLOCK_SIZE, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + kv_pos % BLOCK_SIZE
        row = slot * NUM_KV_HEADS + head
        is_part = is_key[None, :] & (key_dims < KEY_DIM)[:, None]
        k = _load_rows(key_cache, key_scales, row[None, :], key_dims[:, None], is_part, KEY_DIM, KEY_FORMAT)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scaling  # k [KEY_PADDED, BLOCK_N]
        if KEY_FORMAT == 1 or KEY_FORMAT == 2:
            scores *= tl.load(key_scales + row, mask=is_key, other=0.0).to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
        allow = is_key[None, :] & (kv_pos[None, :] <= q_pos[:, None])
        if MASK == 1:
            allow &= kv_pos[None, :] > q_pos[:, None] - width
        elif MASK == 2:
            allow &= kv_pos[None, :] // width == q_pos[:, None] // width
        scores = tl.where(allow, scores * _LOG2_E, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(row_max - base)
        row_sum = row_sum * fade + tl.sum(weights, 1)
        is_part = is_key[:, None] & (value_dims < VALUE_DIM)[None, :]
        v = _load_rows(
            value_cache, value_scales, row[:, None], value_dims[None, :], is_part, VALUE_DIM, VALUE_FORMAT
        )  # [BLOCK_N, VALUE_PADDED]
        if VALUE_FORMAT == 1 or VALUE_FORMAT == 2:
            weights *= tl.load(value_scales + row, mask=is_key, other=0.0).to(tl.float32)[None, :]
        acc = acc * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        row_max = new_max

    is_out = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    place = token * (NUM_KV_HEADS * GROUP) + q_head
    if NUM_SPLITS > 1:
        place = place * NUM_SPLITS + split
        tl.store(partial + place[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=is_out)
        tl.store(partial_max + place, row_max, mask=is_row)
        tl.store(partial_sum + place, row_sum, mask=is_row)
    else:
        acc = acc / tl.where(is_row, row_sum, 1.0)[:, None]
        tl.store(out + place[:, None] * VALUE_DIM + value_dims[None, :], acc.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def merge_kernel(
    out,  # [T, Hq, Dv]
    partial,  # [T, Hq, NUM_SPLITS, Dv]
    partial_max,
    partial_sum,
    tokens,  # [*] int32: pack indices whose partial results are to be merged
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """Program (token, head): the splits' outputs, weighted by what each of them saw."""
    token = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    place = token * NUM_HEADS + tl.program_id(1)
    splits = tl.arange(0, SPLITS_PADDED)
    dims = tl.arange(0, VALUE_PADDED)
    is_split = splits < NUM_SPLITS
    maxima = tl.load(partial_max + place * NUM_SPLITS + splits, mask=is_split, other=float("-inf"))
    sums = tl.load(partial_sum + place * NUM_SPLITS + splits, mask=is_split, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, 0))  # every row sees its own key, so the maximum is finite
    outputs = tl.load(
        partial + (place * NUM_SPLITS + splits)[:, None] * VALUE_DIM + dims[None, :],
        mask=is_split[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(outputs * weights[:, None], 0) / tl.sum(sums * weights, 0)
    tl.store(out + place * VALUE_DIM + dims, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)

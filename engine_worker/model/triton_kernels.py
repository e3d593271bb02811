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

Where a cache row is narrow (int8, fp8), scales fold into the scores and the weights: K's after the product, V's before.
"""

from __future__ import annotations

import triton
import triton.language as tl

# MASK says what a query sees of the keys up to its own (mask_kinds): 0 all, 1 the last `width`, 2 its own chunk

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kernel(
    key,  # [Hkv, T, Dk] by strides
    value,  # [Hkv, T, Dv] by strides
    key_cache,  # [num_slots, Hkv, Dk]
    value_cache,  # [num_slots, Hkv, Dv]
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
):
    """One program a token: its row of every head."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    is_key = (heads < NUM_HEADS) & (dims < KEY_DIM)
    row = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=is_key)
    tl.store(key_cache + slot * (NUM_HEADS * KEY_DIM) + heads * KEY_DIM + dims, row, mask=is_key)
    is_value = (heads < NUM_HEADS) & (dims < VALUE_DIM)
    row = tl.load(value + token * value_token_stride + heads * value_head_stride + dims, mask=is_value)
    tl.store(value_cache + slot * (NUM_HEADS * VALUE_DIM) + heads * VALUE_DIM + dims, row, mask=is_value)


@triton.jit
def attend_kernel(
    out,  # [T, Hq, Dv]; with splits, not written
    partial,  # [T, Hq, NUM_SPLITS, Dv] float32, unnormalised; without splits, not written
    partial_max,  # [T, Hq, NUM_SPLITS] float32, base 2
    partial_sum,  # [T, Hq, NUM_SPLITS] float32
    query,  # [Hq, T, Dk] by strides
    key_cache,  # [num_slots, Hkv, Dk]
    value_cache,  # [num_slots, Hkv, Dv]
    key_scales,  # [num_blocks or num_slots, Hkv] float32, or anything without QUANTIZED
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
    QUANTIZED: tl.constexpr,
    SCALE_PER_SLOT: tl.constexpr,
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
        k = tl.load(
            key_cache + (slot[None, :] * NUM_KV_HEADS + head) * KEY_DIM + key_dims[:, None],
            mask=is_key[None, :] & (key_dims < KEY_DIM)[:, None],
            other=0.0,
        )  # [KEY_PADDED, BLOCK_N]
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scaling
        if QUANTIZED:
            scale_at = slot if SCALE_PER_SLOT else block.to(tl.int64)
            scale_at = scale_at * NUM_KV_HEADS + head
            scores *= tl.load(key_scales + scale_at, mask=is_key, other=0.0)[None, :]
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
        v = tl.load(
            value_cache + (slot[:, None] * NUM_KV_HEADS + head) * VALUE_DIM + value_dims[None, :],
            mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )  # [BLOCK_N, VALUE_PADDED]
        if QUANTIZED:
            weights *= tl.load(value_scales + scale_at, mask=is_key, other=0.0)[None, :]
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

// Softmax attention over a paged cache: keys and values [num_slots, heads, dim], read through block tables and as they
// are stored (rows.h): a row's scale is folded into its score, or into its weight.
//
// A query at position p sees the keys of positions first .. p, where `first` comes from the layer's mask: 0 when causal,
// p - window + 1 in a window, the chunk's begin in a chunk. Softmax runs online over chunks of keys, so scratch memory
// does not depend on the context.
//
// Here is what both ways of it share: attention_decode.h takes dot products straight from the cache for few query rows,
// attention_prefill.h transposes each chunk of keys once for many.
#pragma once
#include <algorithm>
#include "matmul.h"
#include "rows.h"

constexpr int KEYS = 128;  // keys of a chunk

// As native/kernels.py fills it; one request's tokens in the pack.
struct Span { int64_t offset, num_tokens, start, row; };

struct Attention {
  const float* query;           // [T, q_heads, key_dim], token pitch query_pitch
  Cache cache;                  // the layer's
  const float* sinks;           // [q_heads] or null
  float* out;                   // [T, q_heads, value_dim]
  const int64_t* first;         // [T] or null for causal
  const int64_t* table;         // [rows, table_pitch] block ids
  const Span* spans;
  int64_t num_spans, query_pitch, table_pitch, block_size, q_heads, kv_heads, key_dim, value_dim;
  float scale, softcap;         // softcap 0: none
};

// What one thread does at a time: tokens lo .. hi - 1 (pack positions) of a span, for key heads head_lo .. head_hi - 1.
// A decoding one begins at key `begin`; `so_far` is what its softmax is by then, or null (attention_shared.h).
struct Task { const Span* span; int64_t head_lo, head_hi, lo, hi, begin; const float* so_far; };

// A layer's keys or values as bytes, some of which will be wanted.
struct Stream {
  const char *data, *scales;
  int64_t row_bytes, scale_bytes;
  // Into the first-level cache (3) or the second (2). Inlined: GCC drops calls of a function that only asks.
  template <int LEVEL = 3>
  MEMBER void ask(int64_t row) const {
    for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(data + row * row_bytes + i, 0, LEVEL);
    if (scale_bytes) __builtin_prefetch(scales + row * scale_bytes, 0, LEVEL);
  }
};
INLINE Stream keys_of(const Attention& c) {
  const int64_t kind = c.cache.key_kind;
  return {(const char*)c.cache.keys, (const char*)c.cache.key_scales, row_bytes(kind, c.key_dim), scale_bytes(kind, c.key_dim)};
}
INLINE Stream values_of(const Attention& c) {
  const int64_t kind = c.cache.value_kind;
  return {(const char*)c.cache.values, (const char*)c.cache.value_scales, row_bytes(kind, c.value_dim),
          scale_bytes(kind, c.value_dim)};
}

INLINE float capped(float score, float cap) { return cap * std::tanh(score / cap); }

// For keys begin .. end - 1 of a request, which row of the cache the first key head's is; the other heads' follow it.
INLINE void find_rows(const Attention& c, int64_t row, int64_t begin, int64_t end, int64_t* rows) {
  const int64_t* block = c.table + row * c.table_pitch + begin / c.block_size;
  for (int64_t p = begin, place = begin % c.block_size; p < end; block++, place = 0)
    for (; place < c.block_size && p < end; place++, p++) *rows++ = (*block * c.block_size + place) * c.kv_heads;
}

// Turn a row of scores [n], with room up to a multiple of W, into weights, and tell by how much earlier results shrink.
INLINE void soften(float* scores, int64_t n, float* peak, float* total, float* shrink, const Attention& c) {
  if (c.softcap > 0)
    for (int64_t j = 0; j < n; j++)
      if (scores[j] != -INFINITY) scores[j] = capped(scores[j], c.softcap);
  int64_t padded = (n + W - 1) / W * W;
  for (int64_t j = n; j < padded; j++) scores[j] = -INFINITY;
  V best = set1(*peak);
  for (int64_t j = 0; j < padded; j += W) best = vmax(best, load(scores + j));
  float now = top(best);
  if (now == -INFINITY) {  // nothing visible yet
    for (int64_t j = 0; j < padded; j++) scores[j] = 0;
    *shrink = 1;
    return;
  }
  *shrink = *peak == now ? 1 : *peak == -INFINITY ? 0 : std::exp(*peak - now);
  V sums = set1(0), m = set1(now);
  for (int64_t j = 0; j < padded; j += W) {
    V x = load(scores + j) - m, w = unless_less(vexp(x), x, -86.0f);  // e^-87 is not 0: hidden keys must weigh nothing
    store(scores + j, w);
    sums = sums + w;
  }
  *total = *total * *shrink + sum(sums);
  *peak = now;
}

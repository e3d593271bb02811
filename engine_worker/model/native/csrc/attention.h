// Softmax attention over a paged cache: keys and values [num_slots, heads, dim], read through block tables and as they
// are stored (rows.h): a row's scale is folded into its score, or into its weight.
//
// A query at position p sees the keys of positions first .. p, where `first` comes from the layer's mask: 0 when causal,
// p - window + 1 in a window, the chunk's begin in a chunk. Softmax runs online over chunks of keys, so scratch memory
// does not depend on the context.
//
// Few query rows (decoding: the heads that share a key head) take dot products straight from the cache. Many (prefill)
// are worth transposing each chunk of keys once, after which both products are the register tiles of matmul.h.
#pragma once
#include <algorithm>
#include "matmul.h"
#include "rows.h"

constexpr int KEYS = 128;       // keys of a chunk
constexpr int KEYS_AHEAD = 8;   // keys asked for before their turn
constexpr int TOKENS = 64;      // query tokens of a prefill task
constexpr int MAX_GROUP = 8;    // query rows that share one read of the keys

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

INLINE float capped(float score, float cap) { return cap * std::tanh(score / cap); }

// Slots of keys begin .. end - 1 of a row.
INLINE void find_slots(const Attention& c, int64_t row, int64_t begin, int64_t end, int64_t* slots) {
  const int64_t* blocks = c.table + row * c.table_pitch;
  for (int64_t p = begin; p < end; p++) slots[p - begin] = blocks[p / c.block_size] * c.block_size + p % c.block_size;
}

// Turn G rows of scores [G][KEYS] into weights, and tell by how much earlier results shrink.
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
  *shrink = *peak == -INFINITY ? 0 : std::exp(*peak - now);
  V sums = set1(0), m = set1(now);
  for (int64_t j = 0; j < padded; j += W) {
    V x = load(scores + j) - m, w = vexp(x);
    float lanes[W], from[W];
    store(lanes, w);
    if (top(set1(0) - x) > 86.0f) {  // e^-87 is not 0: hidden keys must weigh nothing at all
      store(from, x);
      for (int i = 0; i < W; i++) lanes[i] = from[i] < -86.0f ? 0.0f : lanes[i];
      w = load(lanes);
    }
    store(scores + j, w);
    sums = sums + w;
  }
  *total = *total * *shrink + sum(sums);
  *peak = now;
}

template <int G, int KEY, int VALUE>
static void decode_rows(const Attention& c, const Span& span, int64_t kv_head, int64_t head) {
  float scores[G * KEYS], peak[G], total[G], shrink[G];
  float* acc = scratch(2, G * (size_t)(c.value_dim + W));
  const int64_t dk = c.key_dim, dv = c.value_dim, pitch = dv + W;
  const float* q = c.query + span.offset * c.query_pitch + head * dk;
  std::fill(acc, acc + G * pitch, 0.0f);
  for (int g = 0; g < G; g++) peak[g] = -INFINITY, total[g] = 0;
  int64_t end = span.start + 1, begin = c.first ? c.first[span.offset] : 0, slots[KEYS];
  auto key_at = [&](int64_t slot) { return Row<KEY>(c.cache.keys, c.cache.key_scales, slot * c.kv_heads + kv_head, dk); };
  auto value_at = [&](int64_t slot) {
    return Row<VALUE>(c.cache.values, c.cache.value_scales, slot * c.kv_heads + kv_head, dv);
  };
  for (int64_t from = begin; from < end; from += KEYS) {
    int64_t n = std::min<int64_t>(KEYS, end - from);
    find_slots(c, span.row, from, from + n, slots);
    for (int64_t j = 0; j < n; j++) {
      const Row<KEY> key = key_at(slots[j]);
      if (j + KEYS_AHEAD < n) key_at(slots[j + KEYS_AHEAD]).fetch(dk);
      value_at(slots[j]).fetch(dv);  // wanted after the chunk's scores
      V dots[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) dots[g] = set1(0);
      int64_t i = 0;
      for (; i + W <= dk; i += W) {
        V k = key.load(i);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) dots[g] = fma(load(q + g * dk + i), k, dots[g]);
      }
      for (int g = 0; g < G; g++) {
        float dot = sum(dots[g]);
        for (int64_t t = i; t < dk; t++) dot += q[g * dk + t] * key.one(t);
        scores[g * KEYS + j] = dot * (key.scale * c.scale);
      }
    }
    for (int g = 0; g < G; g++) {
      soften(scores + g * KEYS, n, peak + g, total + g, shrink + g, c);
      if (shrink[g] != 1)
        for (int64_t i = 0; i < dv; i++) acc[g * pitch + i] *= shrink[g];
    }
    if (VALUE == ROW_I8)
      for (int64_t j = 0; j < n; j++) {
        float s = value_at(slots[j]).scale;
        for (int g = 0; g < G; g++) scores[g * KEYS + j] *= s;
      }
    int64_t i = 0;
    for (; i + W <= dv; i += W) {
      V sums[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) sums[g] = load(acc + g * pitch + i);
      for (int64_t j = 0; j < n; j++) {
        V v = value_at(slots[j]).load(i);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) sums[g] = fma(set1(scores[g * KEYS + j]), v, sums[g]);
      }
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) store(acc + g * pitch + i, sums[g]);
    }
    for (; i < dv; i++)
      for (int64_t j = 0; j < n; j++)
        for (int g = 0; g < G; g++)
          acc[g * pitch + i] += scores[g * KEYS + j] * value_at(slots[j]).one(i);
  }
  for (int g = 0; g < G; g++) {
    if (c.sinks) total[g] += std::exp(c.sinks[head + g] - peak[g]);
    float* out = c.out + (span.offset * c.q_heads + head + g) * dv;
    for (int64_t i = 0; i < dv; i++) out[i] = acc[g * pitch + i] / total[g];
  }
}

template <int G, int KEY, int VALUE>
INLINE void pick_decode(int64_t rows, const Attention& c, const Span& span, int64_t kv_head, int64_t head) {
  if constexpr (G == 1)
    decode_rows<1, KEY, VALUE>(c, span, kv_head, head);
  else if (rows == G)
    decode_rows<G, KEY, VALUE>(c, span, kv_head, head);
  else
    pick_decode<G - 1, KEY, VALUE>(rows, c, span, kv_head, head);
}

template <int KEY, int VALUE>
static void decode(const Attention& c, const Span& span, int64_t kv_head) {
  int64_t group = c.q_heads / c.kv_heads;
  for (int64_t done = 0; done < group; done += MAX_GROUP)
    pick_decode<MAX_GROUP, KEY, VALUE>(std::min<int64_t>(MAX_GROUP, group - done), c, span, kv_head, kv_head * group + done);
}

// out [R][32] (pitch) of a [R rows] times w [k, 32]; a is [k][R].
template <int R>
static void small_product(const float* a, const float* w, int64_t k, float* out, int64_t pitch, bool accumulate) {
  Tile<R> tile;
  tile.clear();
  multiply<R>(tile, a, 1, R, w, PANEL, k);
  for (int r = 0; r < R; r++) {
    float* to = out + r * pitch;
    store(to, accumulate ? load(to) + tile.acc[r][0] : tile.acc[r][0]);
    store(to + W, accumulate ? load(to + W) + tile.acc[r][1] : tile.acc[r][1]);
  }
}

typedef void (*Product)(const float*, const float*, int64_t, float*, int64_t, bool);
template <int R>
INLINE Product pick_product(int rows) {
  if constexpr (R == 1)
    return small_product<1>;
  else
    return rows == R ? small_product<R> : pick_product<R - 1>(rows);
}

// Query rows of tokens lo .. hi - 1 (pack positions) of a span, for one key head. Row = (token, head of the group).
template <int KEY, int VALUE>
static void prefill(const Attention& c, const Span& span, int64_t kv_head, int64_t lo, int64_t hi) {
  const int64_t group = c.q_heads / c.kv_heads, rows = (hi - lo) * group, dk = c.key_dim, dv = c.value_dim;
  const int64_t wide = (dv + PANEL - 1) / PANEL * PANEL, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
  float* q = scratch(2, rows * dk);               // [tile][dk][rows of the tile]
  float* acc = scratch(3, rows * wide);           // [rows][wide]
  float* keys = scratch(4, KEYS * dk);            // [panel of 32 keys][dk][32]
  float* values = scratch(5, KEYS * wide);        // [panel of 32 columns][KEYS][32]
  float* state = scratch(6, rows * 2);            // peak and total of each row
  float* scores = scratch(7, MAX_ROWS * KEYS * 2);
  float* weights = scores + MAX_ROWS * KEYS;      // [KEYS][rows of the tile]
  float* line = scratch(8, std::max(dk, dv));     // a widened row
  auto token_of = [&](int64_t row) { return lo + row / group; };
  auto position_of = [&](int64_t row) { return span.start + token_of(row) - span.offset; };
  auto first_of = [&](int64_t row) { return c.first ? c.first[token_of(row)] : (int64_t)0; };
  std::fill(acc, acc + rows * wide, 0.0f);
  int64_t begin = first_of(0);
  for (int64_t row = 0; row < rows; row++) {
    state[row * 2] = -INFINITY, state[row * 2 + 1] = 0;
    begin = std::min(begin, first_of(row));
  }
  for (int64_t t = 0; t < tiles; t++) {
    int64_t r0 = rows * t / tiles, n = rows * (t + 1) / tiles - r0;
    for (int64_t r = 0; r < n; r++) {
      const float* from = c.query + token_of(r0 + r) * c.query_pitch + (kv_head * group + (r0 + r) % group) * dk;
      for (int64_t i = 0; i < dk; i++) q[r0 * dk + i * n + r] = from[i] * c.scale;
    }
  }
  int64_t end = position_of(rows - 1) + 1, slots[KEYS];
  for (int64_t from = begin; from < end; from += KEYS) {
    int64_t n = std::min<int64_t>(KEYS, end - from), panels = (n + PANEL - 1) / PANEL;
    find_slots(c, span.row, from, from + n, slots);
    if (n % PANEL) std::fill(keys + (panels - 1) * dk * PANEL, keys + panels * dk * PANEL, 0.0f);
    for (int64_t j = 0; j < n; j++) {
      const int64_t index = slots[j] * c.kv_heads + kv_head;
      const float* key = widen_row<KEY>(Row<KEY>(c.cache.keys, c.cache.key_scales, index, dk), dk, line);
      float* to = keys + (j / PANEL) * dk * PANEL + j % PANEL;
      for (int64_t i = 0; i < dk; i++) to[i * PANEL] = key[i];
      const float* value = widen_row<VALUE>(Row<VALUE>(c.cache.values, c.cache.value_scales, index, dv), dv, line);
      for (int64_t i = 0; i < wide; i++) values[(i / PANEL) * KEYS * PANEL + j * PANEL + i % PANEL] = i < dv ? value[i] : 0;
    }
    for (int64_t t = 0; t < tiles; t++) {
      int64_t r0 = rows * t / tiles, height = rows * (t + 1) / tiles - r0;
      int64_t last = position_of(r0 + height - 1), usable = std::min<int64_t>(n, last + 1 - from);
      if (usable <= 0) continue;
      Product product = pick_product<MAX_ROWS>((int)height);
      for (int64_t p = 0; p * PANEL < usable; p++)
        product(q + r0 * dk, keys + p * dk * PANEL, dk, scores + p * PANEL, KEYS, false);
      for (int64_t r = 0; r < height; r++) {
        int64_t row = r0 + r, seen = std::min<int64_t>(usable, position_of(row) + 1 - from);
        int64_t hidden = std::min<int64_t>(std::max<int64_t>(0, first_of(row) - from), usable);
        float* mine = scores + r * KEYS;
        for (int64_t j = 0; j < hidden; j++) mine[j] = -INFINITY;
        for (int64_t j = std::max<int64_t>(0, seen); j < usable; j++) mine[j] = -INFINITY;
        float shrink;
        soften(mine, usable, state + row * 2, state + row * 2 + 1, &shrink, c);
        if (shrink != 1) {
          V s = set1(shrink);
          for (int64_t i = 0; i < wide; i += W) store(acc + row * wide + i, load(acc + row * wide + i) * s);
        }
        for (int64_t j = 0; j < usable; j++) weights[j * height + r] = mine[j];
      }
      for (int64_t p = 0; p * PANEL < wide; p++)
        product(weights, values + p * KEYS * PANEL, usable, acc + r0 * wide + p * PANEL, wide, true);
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    int64_t head = kv_head * group + row % group;
    float total = state[row * 2 + 1];
    if (c.sinks) total += std::exp(c.sinks[head] - state[row * 2]);
    float* out = c.out + (token_of(row) * c.q_heads + head) * dv;
    for (int64_t i = 0; i < dv; i++) out[i] = acc[row * wide + i] / total;
  }
}

template <int KEY, int VALUE>
static void attend_as(const Attention& c, int threads) {
  struct Task { const Span* span; int64_t head, lo, hi; };
  static thread_local std::vector<Task> list;
  list.clear();
  for (int64_t s = 0; s < c.num_spans; s++) {
    const Span& span = c.spans[s];
    for (int64_t head = 0; head < c.kv_heads; head++)
      for (int64_t lo = 0; lo < span.num_tokens; lo += TOKENS)
        list.push_back({&span, head, span.offset + lo, span.offset + std::min<int64_t>(lo + TOKENS, span.num_tokens)});
  }
  const std::vector<Task>& tasks = list;  // the caller's list, also inside the threads
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (size_t i = 0; i < tasks.size(); i++) {
    const Task& task = tasks[i];
    if (task.span->num_tokens == 1)
      decode<KEY, VALUE>(c, *task.span, task.head);
    else
      prefill<KEY, VALUE>(c, *task.span, task.head, task.lo, task.hi);
  }
}

// The pairs of formats that model/kv_format.py knows; native/kernels.py lets no other come here.
static void attend(const Attention& c, int threads) {
  if (c.cache.key_kind == ROW_F32)
    attend_as<ROW_F32, ROW_F32>(c, threads);
  else if (c.cache.key_kind == ROW_FP4)
    attend_as<ROW_FP4, ROW_FP4>(c, threads);
  else if (c.cache.value_kind == ROW_FP4)
    attend_as<ROW_I8, ROW_FP4>(c, threads);
  else
    attend_as<ROW_I8, ROW_I8>(c, threads);
}

// Attention of many query tokens (prefill): each chunk of keys is transposed once, after which both products are the
// register tiles of matmul.h.
#pragma once
#include "attention.h"

constexpr int TOKENS = 64;     // query tokens of a task
constexpr int KEYS_AHEAD = 8;  // keys asked for before their turn

// out [R][32] (pitch) of a [R rows] times w [k, 32]; a[i * next + r * stride].
template <int R, bool ACCUMULATE>
static void small_product(const float* a, const float* w, int64_t k, float* out, int64_t pitch) {
  constexpr int64_t STRIDE = ACCUMULATE ? KEYS : 1, NEXT = ACCUMULATE ? 1 : R;
  Tile<R> tile;
  tile.clear();
  multiply<R>(tile, a, STRIDE, NEXT, w, PANEL, k);
  for (int r = 0; r < R; r++) {
    float* to = out + r * pitch;
    store(to, ACCUMULATE ? load(to) + tile.acc[r][0] : tile.acc[r][0]);
    store(to + W, ACCUMULATE ? load(to + W) + tile.acc[r][1] : tile.acc[r][1]);
  }
}

// Scores: a is queries [key_dim][R]. Sums (ACCUMULATE): a is weights [R][KEYS].
typedef void (*Product)(const float*, const float*, int64_t, float*, int64_t);
template <int R, bool ACCUMULATE>
INLINE Product pick_product(int rows) {
  if constexpr (R > 1)
    if (rows < R) return pick_product<R - 1, ACCUMULATE>(rows);
  return small_product<R, ACCUMULATE>;
}

// A chunk of keys as [panel of 32 keys][dk][32], with zeros behind the last, and of values as [panel of 32 columns][KEYS][32].
template <int KEY, int VALUE>
static void lay_out(const Attention& c, const int64_t* rows, int64_t n, int64_t kv_head, float* keys, float* values) {
  const int64_t dk = c.key_dim, dv = c.value_dim, panels = (n + PANEL - 1) / PANEL;
  const int64_t pitch = std::max(dk, dv) + W;
  float* lines = scratch(8, 4 * pitch);  // widened rows
  const Stream key_stream = keys_of(c), value_stream = values_of(c);
  if (n % PANEL) std::fill(keys + (panels - 1) * dk * PANEL, keys + panels * dk * PANEL, 0.0f);
  for (int64_t j = 0; j < n; j += 4) {
    const int64_t count = std::min<int64_t>(4, n - j);
    const float* key[4];
    for (int64_t k = 0; k < count; k++) {
      if (j + k + KEYS_AHEAD < n) key_stream.ask(rows[j + k + KEYS_AHEAD] + kv_head);
      value_stream.ask(rows[j + k] + kv_head);  // wanted after the keys
      const Row<KEY> row(c.cache.keys, c.cache.key_scales, rows[j + k] + kv_head, dk);
      key[k] = widen_row<KEY>(row, dk, lines + k * pitch);
    }
    float* to = keys + (j / PANEL) * dk * PANEL + j % PANEL;
    int64_t i = 0;
    for (; count == 4 && i + W <= dk; i += W)
      store_columns(load(key[0] + i), load(key[1] + i), load(key[2] + i), load(key[3] + i), to + i * PANEL, PANEL);
    for (; i < dk; i++)
      for (int64_t k = 0; k < count; k++) to[i * PANEL + k] = key[k][i];
  }
  for (int64_t j = 0; j < n; j++) {
    const Row<VALUE> row(c.cache.values, c.cache.value_scales, rows[j] + kv_head, dv);
    const float* value = widen_row<VALUE>(row, dv, lines);
    float* to = values + j * PANEL;
    int64_t i = 0;
    for (; i + PANEL <= dv; i += PANEL, to += KEYS * PANEL) store(to, load(value + i)), store(to + W, load(value + i + W));
    for (int64_t t = 0; i < dv && t < PANEL; t++) to[t] = i + t < dv ? value[i + t] : 0;
  }
}

// Key head `head_lo` of a task. A row is a (token, query head of the group).
template <int KEY, int VALUE>
static void prefill(const Attention& c, const Task& task) {
  const Span& span = *task.span;
  const int64_t kv_head = task.head_lo, lo = task.lo, group = c.q_heads / c.kv_heads;
  const int64_t rows = (task.hi - lo) * group, dk = c.key_dim, dv = c.value_dim;
  const int64_t wide = (dv + PANEL - 1) / PANEL * PANEL, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
  float* q = scratch(2, rows * dk);               // [tile][dk][rows of the tile]
  float* acc = scratch(3, rows * wide);           // [rows][wide]
  float* keys = scratch(4, KEYS * dk);
  float* values = scratch(5, KEYS * wide);
  float* state = scratch(6, rows * 2);            // peak and total of each row
  float* scores = scratch(7, MAX_ROWS * KEYS);
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
  int64_t end = position_of(rows - 1) + 1, places[KEYS];
  for (int64_t from = begin; from < end; from += KEYS) {
    int64_t n = std::min<int64_t>(KEYS, end - from);
    find_rows(c, span.row, from, from + n, places);
    lay_out<KEY, VALUE>(c, places, n, kv_head, keys, values);
    for (int64_t t = 0; t < tiles; t++) {
      int64_t r0 = rows * t / tiles, height = rows * (t + 1) / tiles - r0;
      int64_t last = position_of(r0 + height - 1), usable = std::min<int64_t>(n, last + 1 - from);
      if (usable <= 0) continue;
      Product score = pick_product<MAX_ROWS, false>((int)height), add = pick_product<MAX_ROWS, true>((int)height);
      for (int64_t p = 0; p * PANEL < usable; p++)
        score(q + r0 * dk, keys + p * dk * PANEL, dk, scores + p * PANEL, KEYS);
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
      }
      for (int64_t p = 0; p * PANEL < wide; p++)
        add(scores, values + p * KEYS * PANEL, usable, acc + r0 * wide + p * PANEL, wide);
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

// Attention of many query tokens (prefill): each chunk of keys is transposed once, after which both products are the
// register tiles of blocks.h. A task's tokens share that work, and a tile's rows are few enough that little is computed
// of keys that they don't see.
//
// Scores are taken in powers of 2 rather than of e: queries are scaled by log2(e) too, and a weight is 2^(score - peak).
#pragma once
#include "attention.h"

constexpr int TOKENS = 128;    // query tokens of a task
constexpr int KEYS_AHEAD = 8;  // keys asked for before their turn
constexpr float LOG2_E = 1.44269504088896341f;

// out [R, SLICE] (row pitch `pitch`) = a [k, R] times w [k, PANEL], of which SLICE columns, or += with ADD. Scores: a is
// queries [key_dim][R]. Sums (ADD): a is weights [R][KEYS].
template <int R, bool ADD>
static void small_product(const float* a, const float* w, int64_t k, float* out, int64_t pitch) {
  constexpr int64_t STRIDE = ADD ? KEYS : 1, NEXT = ADD ? 1 : R;
  RegisterTile<R> tile;
  tile.clear();
  for (int64_t i = 0; i < k; i++) tile.step(a + i * NEXT, w + i * PANEL, STRIDE);
  tile.put(out, ADD, pitch);
}

typedef void (*Product)(const float*, const float*, int64_t, float*, int64_t);
template <int R, bool ADD>
INLINE Product pick_product(int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return pick_product<R - 1, ADD>(rows);
  return small_product<R, ADD>;
}

// Turn a row of scores [n], with room up to a multiple of W, into weights. `totals` [W] are sums of them lane by lane.
// Returns by how much earlier results shrink.
INLINE float weigh_scores(float* scores, int64_t n, float* peak, float* totals) {
  const int64_t padded = (n + W - 1) / W * W;
  for (int64_t j = n; j < padded; j++) scores[j] = -INFINITY;
  V best = set1(*peak);
  for (int64_t j = 0; j < padded; j += W) best = vmax(best, load(scores + j));
  const float now = top(best);
  if (now == -INFINITY) {  // nothing visible yet
    for (int64_t j = 0; j < padded; j++) scores[j] = 0;
    return 1;
  }
  const float shrink = *peak == now ? 1 : *peak == -INFINITY ? 0 : std::exp2(*peak - now);
  V sums = load(totals) * set1(shrink), m = set1(now);
  for (int64_t j = 0; j < padded; j += W) {
    V x = load(scores + j) - m, w = unless_less(vexp2(x), x, -125.0f);  // hidden keys must weigh nothing
    store(scores + j, w);
    sums = sums + w;
  }
  store(totals, sums);
  *peak = now;
  return shrink;
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

// out [dim][n] = rows [n] of dim numbers each, by `scale`. row(r) points to one.
template <class F>
INLINE void lay_out_queries(F row, int64_t n, int64_t dim, float scale, float* out) {
  const V s = set1(scale);
  int64_t i = 0;
  for (; n >= 4 && i + W <= dim; i += W)
    for (int64_t r = 0; r < n; r += 4) {
      const int64_t first = std::min(r, n - 4);
      store_columns(load(row(first) + i) * s, load(row(first + 1) + i) * s, load(row(first + 2) + i) * s,
                    load(row(first + 3) + i) * s, out + i * n + first, n);
    }
  for (; i < dim; i++)
    for (int64_t r = 0; r < n; r++) out[i * n + r] = row(r)[i] * scale;
}

// Key head `head_lo` of a task. A row is a (token, query head of the group).
template <int KEY, int VALUE>
static void prefill(const Attention& c, const Task& task) {
  const Span& span = *task.span;
  const int64_t kv_head = task.head_lo, lo = task.lo, group = c.q_heads / c.kv_heads;
  const int64_t rows = (task.hi - lo) * group, dk = c.key_dim, dv = c.value_dim;
  const int64_t wide = (dv + PANEL - 1) / PANEL * PANEL;
  const Tiles tiles(rows, TILE_ROWS);
  float* q = scratch(2, rows * dk);               // [tile][dk][rows of the tile]
  float* acc = scratch(3, rows * wide);           // [rows][wide]
  float* keys = scratch(4, KEYS * dk);
  float* values = scratch(5, KEYS * wide);
  float* peaks = scratch(6, rows);
  float* scores = scratch(7, TILE_ROWS * KEYS);
  float* totals = scratch(9, rows * W);
  auto token_of = [&](int64_t row) { return lo + row / group; };
  auto position_of = [&](int64_t row) { return span.start + token_of(row) - span.offset; };
  auto first_of = [&](int64_t row) { return c.first ? c.first[token_of(row)] : (int64_t)0; };
  std::fill(acc, acc + rows * wide, 0.0f);
  std::fill(totals, totals + rows * W, 0.0f);
  std::fill(peaks, peaks + rows, -INFINITY);
  int64_t begin = first_of(0);
  for (int64_t row = 0; row < rows; row++) begin = std::min(begin, first_of(row));
  for (int64_t t = 0; t < tiles.count; t++) {
    const int64_t r0 = tiles.first(t);
    auto row = [&](int64_t r) {
      return c.query + token_of(r0 + r) * c.query_pitch + (kv_head * group + (r0 + r) % group) * dk;
    };
    lay_out_queries(row, tiles.height(t), dk, c.scale * LOG2_E, q + r0 * dk);
  }
  int64_t end = position_of(rows - 1) + 1, places[KEYS];
  for (int64_t from = begin; from < end; from += KEYS) {
    int64_t n = std::min<int64_t>(KEYS, end - from);
    find_rows(c, span.row, from, from + n, places);
    lay_out<KEY, VALUE>(c, places, n, kv_head, keys, values);
    for (int64_t t = 0; t < tiles.count; t++) {
      const int64_t r0 = tiles.first(t), height = tiles.height(t);
      const int64_t usable = std::min<int64_t>(n, position_of(r0 + height - 1) + 1 - from);
      if (usable <= 0) continue;
      const Product score = pick_product<TILE_ROWS, false>(height), add = pick_product<TILE_ROWS, true>(height);
      for (int64_t j = 0; j < usable; j += SLICE)
        score(q + r0 * dk, keys + j / PANEL * dk * PANEL + j % PANEL, dk, scores + j, KEYS);
      for (int64_t r = 0; r < height; r++) {
        const int64_t row = r0 + r, seen = std::max<int64_t>(0, std::min(usable, position_of(row) + 1 - from));
        const int64_t hidden = std::min<int64_t>(std::max<int64_t>(0, first_of(row) - from), usable);
        float* mine = scores + r * KEYS;
        if (c.softcap > 0)
          for (int64_t j = hidden; j < seen; j++) mine[j] = capped(mine[j] / LOG2_E, c.softcap) * LOG2_E;
        for (int64_t j = 0; j < hidden; j++) mine[j] = -INFINITY;
        for (int64_t j = seen; j < usable; j++) mine[j] = -INFINITY;
        const float shrink = weigh_scores(mine, usable, peaks + row, totals + row * W);
        if (shrink != 1) {
          V s = set1(shrink);
          for (int64_t i = 0; i < wide; i += W) store(acc + row * wide + i, load(acc + row * wide + i) * s);
        }
      }
      for (int64_t i = 0; i < wide; i += SLICE)
        add(scores, values + i / PANEL * KEYS * PANEL + i % PANEL, usable, acc + r0 * wide + i, wide);
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    const int64_t head = kv_head * group + row % group;
    float total = sum(load(totals + row * W));
    if (c.sinks) total += std::exp2(c.sinks[head] * LOG2_E - peaks[row]);
    const float* from = acc + row * wide;
    float* out = c.out + (token_of(row) * c.q_heads + head) * dv;
    int64_t i = 0;
    for (const V all = set1(total); i + W <= dv; i += W) store(out + i, load(from + i) / all);
    for (; i < dv; i++) out[i] = from[i] / total;
  }
}

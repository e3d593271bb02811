// Attention of a single query token (decoding): bound by memory, so everything here serves one stream of it.
//
// Keys and values pass in pieces that the first-level cache holds. Their heads lie side by side in memory, so all key
// heads of a task are done on a piece before the next one. While a piece is worked on, the one behind it is asked for row
// by row: the next keys, behind the chunk's last keys its values, behind those the next chunk's keys or the next
// request's. Walking head after head over the whole context instead reads at half the speed, and so does asking for them
// into the first-level cache (blocks.h says why): it is the second one that they come to.
#pragma once
#include "attention.h"

constexpr int MAX_GROUP = 8;               // query rows that share one read of the keys
constexpr int MAX_PIECE = 32;              // keys of a piece
constexpr int64_t PIECE_BYTES = 12 << 10;  // of a piece: two of them, and what is worked with, fit in 32 KiB

// Rows that are wanted when the present piece is done.
struct Wanted {
  const Stream* stream;
  const int64_t* rows;
  int64_t count;
  MEMBER void ask(int64_t j, int64_t kv_head) const { stream->ask<2>(rows[j] + kv_head); }
};

// What one call works on: rows of a key head, for queries q [G][dim] with scores [G][KEYS] and sums [G][pitch].
struct Piece {
  const int64_t* rows;
  int64_t n, kv_head, dim;
  const float* q;
  float *scores, *sums;
  int64_t pitch;
};

// Scores of rows j .. j + 3, without the columns that fill no register. Each read of a query serves TOGETHER rows.
template <int G, int KEY>
INLINE void score_four(const Cache& cache, const Piece& p, int64_t j) {
  constexpr int FIT = SUMS / G, TOGETHER = FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  auto at = [&](int k) { return Row<KEY>(cache.keys, cache.key_scales, p.rows[j + k] + p.kv_head, p.dim); };
  const Row<KEY> keys[4] = {at(0), at(1), at(2), at(3)};
  V dots[4][G];
#pragma GCC unroll 4
  for (int first = 0; first < 4; first += TOGETHER) {
    V part[TOGETHER][G];
#pragma GCC unroll 4
    for (int k = 0; k < TOGETHER; k++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) part[k][g] = set1(0);
    for (int64_t i = 0; i + W <= p.dim; i += W) {
      V q[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) q[g] = load(p.q + g * p.dim + i);
#pragma GCC unroll 4
      for (int k = 0; k < TOGETHER; k++) {
        V key = keys[first + k].load(i);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) part[k][g] = fma(q[g], key, part[k][g]);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < TOGETHER; k++)
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) dots[first + k][g] = part[k][g];
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; g++) {
    sum4(dots[0][g], dots[1][g], dots[2][g], dots[3][g], p.scores + g * KEYS + j);
    if (KEY == ROW_I8)
      for (int k = 0; k < 4; k++) p.scores[g * KEYS + j + k] *= keys[k].scale;
  }
}

// scores = q k
template <int G, int KEY>
static void score(const Cache& cache, const Piece& p, const Wanted& wanted) {
  int64_t j = 0;
  for (; j + 4 <= p.n; j += 4) {
    for (int64_t k = j; k < std::min(j + 4, wanted.count); k++) wanted.ask(k, p.kv_head);
    score_four<G, KEY>(cache, p, j);
  }
  for (int64_t k = j; k < wanted.count; k++) wanted.ask(k, p.kv_head);
  // What is left: whole rows behind the last four, and the last columns of those before.
  for (int64_t row = p.dim % W ? 0 : j; row < p.n; row++) {
    const Row<KEY> key(cache.keys, cache.key_scales, p.rows[row] + p.kv_head, p.dim);
    for (int g = 0; g < G; g++) {
      float dot = 0;
      for (int64_t i = row < j ? p.dim / W * W : 0; i < p.dim; i++) dot += p.q[g * p.dim + i] * key.one(i);
      p.scores[g * KEYS + row] = dot * key.scale + (row < j ? p.scores[g * KEYS + row] : 0);
    }
  }
}

// sums += scores (weights by now) times the rows' columns i .. i + LINES * W - 1. Asks where `wanted` is given.
template <int G, int LINES, int VALUE>
INLINE void weigh_columns(const Cache& cache, const Piece& p, int64_t i, const Wanted* wanted) {
  V sums[G][LINES];
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int l = 0; l < LINES; l++) sums[g][l] = load(p.sums + g * p.pitch + i + l * W);
  for (int64_t j = 0; j < p.n; j++) {
    if (wanted && j < wanted->count) wanted->ask(j, p.kv_head);
    const Row<VALUE> value(cache.values, cache.value_scales, p.rows[j] + p.kv_head, p.dim);
    V w[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; g++) w[g] = set1(p.scores[g * KEYS + j]);
#pragma GCC unroll 4
    for (int l = 0; l < LINES; l++) {
      V v = value.load(i + l * W);
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) sums[g][l] = fma(w[g], v, sums[g][l]);
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int l = 0; l < LINES; l++) store(p.sums + g * p.pitch + i + l * W, sums[g][l]);
}

// sums += scores v
template <int G, int VALUE>
static void weigh(const Cache& cache, const Piece& p, const Wanted& wanted) {
  constexpr int FIT = SUMS / G, LINES = FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  auto at = [&](int64_t j) { return Row<VALUE>(cache.values, cache.value_scales, p.rows[j] + p.kv_head, p.dim); };
  if (VALUE == ROW_I8)
    for (int64_t j = 0; j < p.n; j++)
      for (int g = 0; g < G; g++) p.scores[g * KEYS + j] *= at(j).scale;
  int64_t i = 0;
  for (; i + LINES * W <= p.dim; i += LINES * W) weigh_columns<G, LINES, VALUE>(cache, p, i, i ? nullptr : &wanted);
  for (; i + W <= p.dim; i += W) weigh_columns<G, 1, VALUE>(cache, p, i, i ? nullptr : &wanted);
  for (int64_t j = p.dim < W ? 0 : p.n; j < wanted.count; j++) wanted.ask(j, p.kv_head);
  for (; i < p.dim; i++)
    for (int64_t j = 0; j < p.n; j++)
      for (int g = 0; g < G; g++) p.sums[g * p.pitch + i] += p.scores[g * KEYS + j] * at(j).one(i);
}

typedef void (*PieceFunction)(const Cache&, const Piece&, const Wanted&);
template <int G, int KEY, int VALUE>
INLINE PieceFunction pick_piece(int64_t group, bool is_score) {
  if constexpr (G > 1)
    if (group < G) return pick_piece<G - 1, KEY, VALUE>(group, is_score);
  return is_score ? score<G, KEY> : weigh<G, VALUE>;
}

// Key heads head_lo .. head_hi - 1 of a span of one token, and the query heads that share them. `next` is what this
// thread does then.
template <int KEY, int VALUE>
static void decode(const Attention& c, const Task& task, const Task* next) {
  const int64_t group = c.q_heads / c.kv_heads, dk = c.key_dim, dv = c.value_dim, pitch = dv + W;
  const int64_t kv_heads = task.head_hi - task.head_lo, heads = kv_heads * group, first_head = task.head_lo * group;
  const Stream keys = keys_of(c), values = values_of(c);
  const int64_t fit = PIECE_BYTES / (kv_heads * std::max(keys.row_bytes, values.row_bytes));
  const int64_t size = std::min<int64_t>(std::max<int64_t>(fit, 4), MAX_PIECE) / 4 * 4;
  float *scores = scratch(2, heads * KEYS), *sums = scratch(3, heads * pitch), *state = scratch(4, heads * 2);
  float* q = scratch(5, heads * dk);
  const float* query = c.query + task.span->offset * c.query_pitch + first_head * dk;
  for (int64_t i = 0; i < heads * dk; i++) q[i] = query[i] * c.scale;
  if (task.so_far)
    for (int64_t h = 0; h < heads; h++) {
      const float* before = task.so_far + (first_head + h) * (dv + 2);
      std::copy(before, before + dv, sums + h * pitch);
      state[2 * h] = before[dv], state[2 * h + 1] = before[dv + 1];
    }
  else {
    std::fill(sums, sums + heads * pitch, 0.0f);
    for (int64_t h = 0; h < heads; h++) state[2 * h] = -INFINITY, state[2 * h + 1] = 0;
  }
  int64_t end = task.span->start + 1, rows[KEYS + MAX_PIECE];

  // Scores or sums of n rows for all heads, group by group; only the first of those that share a key head asks for more.
  auto pass = [&](bool is_score, int64_t from, int64_t n, const Wanted& wanted) {
    for (int64_t kv = 0; kv < kv_heads; kv++)
      for (int64_t g = 0; g < group; g += MAX_GROUP) {
        const int64_t h = kv * group + g;
        const Piece piece{rows + from, n, task.head_lo + kv, is_score ? dk : dv, q + h * dk, scores + h * KEYS + from,
                          sums + h * pitch, pitch};
        pick_piece<MAX_GROUP, KEY, VALUE>(std::min<int64_t>(MAX_GROUP, group - g), is_score)(c.cache, piece,
                                                                                            g ? Wanted{} : wanted);
      }
  };
  for (int64_t from = task.begin; from < end; from += KEYS) {
    int64_t n = std::min<int64_t>(KEYS, end - from), more = std::min(size, end - from - n);
    find_rows(c, task.span->row, from, from + n + more, rows);
    if (!more && next) {
      more = std::min(size, next->span->start + 1 - next->begin);
      find_rows(c, next->span->row, next->begin, next->begin + more, rows + n);
    }
    for (int64_t p = 0; p < n; p += size) {
      int64_t m = std::min(size, n - p), left = std::min(size, n - p - m);
      pass(true, p, m, left ? Wanted{&keys, rows + p + m, left} : Wanted{&values, rows, std::min(size, n)});
    }
    for (int64_t h = 0; h < heads; h++) {
      float shrink;
      soften(scores + h * KEYS, n, state + 2 * h, state + 2 * h + 1, &shrink, c);
      if (shrink != 1)
        for (int64_t i = 0; i < dv; i++) sums[h * pitch + i] *= shrink;
    }
    for (int64_t p = 0; p < n; p += size) {
      int64_t m = std::min(size, n - p), left = std::min(size, n - p - m);
      pass(false, p, m, left ? Wanted{&values, rows + p + m, left} : Wanted{&keys, rows + n, more});
    }
  }
  for (int64_t h = 0; h < heads; h++) {
    float total = state[2 * h + 1];
    if (c.sinks) total += std::exp(c.sinks[first_head + h] - state[2 * h]);
    float* out = c.out + (task.span->offset * c.q_heads + first_head + h) * dv;
    for (int64_t i = 0; i < dv; i++) out[i] = sums[h * pitch + i] / total;
  }
}

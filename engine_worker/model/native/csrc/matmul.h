// y = x w^T for a weight that was laid out once: float32, 8-bit with a scale a row, or 4-bit with scale and minimum a group.
//
// The weight [N, K] is cut into panels of 32 output columns, each stored as K rows of 32. A register tile of up to
// MAX_ROWS rows of x by one panel runs over all of K; the panel comes from memory once and from the second-level cache
// for further row tiles. So one copy serves every number of rows, and a single row runs at the speed of memory.
//
// With many rows the conversion of narrow weights to float32 would be repeated for every row tile: from WIDE_ROWS on a
// panel is converted once into scratch. The products are the same float32 ones either way.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <vector>
#include "vec.h"

constexpr int PANEL = 32;      // columns of a panel; the layout's, known to native/kernels.py
constexpr int WIDE_ROWS = 24;
constexpr int FEW_ROWS = 4;    // of a tile: up to here scales are applied to sums of products
constexpr int STREAMS = MAX_ROWS >= 12 ? 6 : 2;  // panels that a single row is multiplied by at once
constexpr int64_t SUM_LENGTH = 256;
constexpr int64_t CHUNK_FLOATS = 1 << 17;  // of x, while the panels pass

constexpr int64_t MAX_PANEL_AHEAD = 1 << 17;  // floats: half a megabyte

enum Kind : int32_t { F32 = 0, I8 = 1, I4 = 2 };

// As native/kernels.py fills it. bias may be null. scales: float [N padded] for I8; half [panels, K / group, 2, PANEL] for
// I4, of each group first the scales and then the minima.
struct Weight {
  const void* data;
  const void* scales;
  const float* bias;
  int64_t rows, cols;  // N, K
  int32_t kind, group;
};


// Scratch that each thread keeps between calls.
INLINE float* scratch(int which, size_t floats) {
  static thread_local std::vector<float> buffers[10];
  std::vector<float>& buffer = buffers[which];
  if (buffer.size() < floats + W) buffer.resize(floats + W);
  uintptr_t address = (uintptr_t)buffer.data();
  return (float*)((address + 63) & ~(uintptr_t)63);
}

template <int R>
struct Tile {
  V acc[R][2];
  MEMBER void clear() {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = set1(0);
  }
  MEMBER void step(const float* a, int64_t stride, V w0, V w1) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      V x = set1(a[r * stride]);
      acc[r][0] = fma(x, w0, acc[r][0]);
      acc[r][1] = fma(x, w1, acc[r][1]);
    }
  }
  MEMBER void add(const Tile& other) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][0] + other.acc[r][0], acc[r][1] = acc[r][1] + other.acc[r][1];
  }
  MEMBER void add_scaled(const Tile& other, V s0, V s1) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r][0] = fma(other.acc[r][0], s0, acc[r][0]), acc[r][1] = fma(other.acc[r][1], s1, acc[r][1]);
  }
};

// Part of a panel that is wanted next, asked for while this one is worked on: `lines` (0 to 2) cache lines a step over K.
struct Ahead {
  const char* at = nullptr;
  int lines = 0;
  MEMBER Ahead from(int64_t k) const { return {at + k * lines * 64, lines}; }
  MEMBER void step() {
    if (lines > 0) __builtin_prefetch(at, 0, 2), at += 64;
    if (lines > 1) __builtin_prefetch(at, 0, 2), at += 64;
  }
};

// acc += a [K, rows] times w [K, PANEL] (row stride `pitch`). a[k * next + r * stride].
template <int R>
INLINE void multiply(Tile<R>& tile, const float* a, int64_t stride, int64_t next, const float* w, int64_t pitch,
                     int64_t k, Ahead ahead = {}) {
  int64_t i = 0;
  if (R <= 2) {  // too few accumulators to hide the latency of a multiply-add: a second set for odd steps
    Tile<R> odd;
    odd.clear();
    for (; i + 2 <= k; i += 2) {
      __builtin_prefetch(w + (i + 24) * pitch), __builtin_prefetch(w + (i + 24) * pitch + W);
      __builtin_prefetch(w + (i + 25) * pitch), __builtin_prefetch(w + (i + 25) * pitch + W);
      tile.step(a + i * next, stride, load(w + i * pitch), load(w + i * pitch + W));
      odd.step(a + (i + 1) * next, stride, load(w + (i + 1) * pitch), load(w + (i + 1) * pitch + W));
    }
    tile.add(odd);
  }
  for (; i < k; i++) {
    __builtin_prefetch(w + (i + 24) * pitch), __builtin_prefetch(w + (i + 24) * pitch + W);
    ahead.step();
    tile.step(a + i * next, stride, load(w + i * pitch), load(w + i * pitch + W));
  }
}

template <int R>
INLINE void multiply_i8(Tile<R>& tile, const float* a, int64_t stride, int64_t next, const int8_t* w, int64_t k) {
  int64_t i = 0;
  if (R <= 2) {
    Tile<R> odd;
    odd.clear();
    for (; i + 2 <= k; i += 2) {
      const int8_t* p = w + i * PANEL;
      __builtin_prefetch(p + 1024);
      tile.step(a + i * next, stride, load_i8(p), load_i8(p + W));
      odd.step(a + (i + 1) * next, stride, load_i8(p + PANEL), load_i8(p + PANEL + W));
    }
    tile.add(odd);
  }
  for (; i < k; i++) {
    __builtin_prefetch(w + i * PANEL + 1024);
    tile.step(a + i * next, stride, load_i8(w + i * PANEL), load_i8(w + i * PANEL + W));
  }
}

INLINE int64_t groups_of(const Weight& w) { return (w.cols + w.group - 1) / w.group; }
INLINE const uint16_t* group_scales(const Weight& w, int64_t panel) {
  return (const uint16_t*)w.scales + panel * groups_of(w) * 2 * PANEL;
}

// Rows 2 j and 2 j + 1 of the panel share bytes [PANEL]: the even one in the low halves. `group` is even.
//
// A weight is scale * q + minimum. With few rows the products are those of q alone, and a group adds scale * (their sum)
// + minimum * (the sum of its x), which is in `sums` [K / group, R]. With more, weights are widened as they are used.
template <int R>
INLINE void multiply_i4(Tile<R>& tile, const float* a, const float* sums, int64_t next, const uint8_t* w,
                        const uint16_t* scales, int64_t k, int64_t group) {
  constexpr bool SPLITS = R <= (MAX_ROWS >= 12 ? 2 : 1);  // as in multiply; registers allow
  for (int64_t g = 0; g < k; g += group, scales += 2 * PANEL, sums += R) {
    V s0 = load_half(scales), s1 = load_half(scales + W);
    V m0 = load_half(scales + PANEL), m1 = load_half(scales + PANEL + W);
    Tile<R> part, odd;
    part.clear();
    odd.clear();
    int64_t end = g + group < k ? g + group : k;
    for (int64_t i = g; i < end; i += 2) {
      V low0, high0, low1, high1;
      const uint8_t* p = w + (i / 2) * PANEL;
      __builtin_prefetch(p + 1024);
      load_i4(p, low0, high0);
      load_i4(p + W, low1, high1);
      if (R <= FEW_ROWS) {
        part.step(a + i * next, 1, low0, low1);
        (SPLITS ? odd : part).step(a + (i + 1) * next, 1, high0, high1);
      } else {
        tile.step(a + i * next, 1, fma(low0, s0, m0), fma(low1, s1, m1));
        tile.step(a + (i + 1) * next, 1, fma(high0, s0, m0), fma(high1, s1, m1));
      }
    }
    if (R <= FEW_ROWS) {
      if (SPLITS) part.add(odd);
      tile.add_scaled(part, s0, s1);
      tile.step(sums, 1, m0, m1);
    }
  }
}

// The sums of x over each group, [tile][K / group][rows of the tile], for x [m, K] cut into `tiles` as matmul does.
static float* sum_groups(const Weight& w, const float* x, int64_t m, int64_t tiles) {
  const int64_t groups = groups_of(w);
  float* sums = scratch(9, (size_t)m * groups);
  for (int64_t t = 0; t < tiles; t++) {
    int64_t first = m * t / tiles, rows = m * (t + 1) / tiles - first;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t g = 0; g < groups; g++) {
        const float* from = x + (first + r) * w.cols + g * w.group;
        int64_t n = std::min<int64_t>(w.group, w.cols - g * w.group), i = 0;
        V total = set1(0);
        for (; i + W <= n; i += W) total = total + load(from + i);
        float rest = 0;
        for (; i < n; i++) rest += from[i];
        sums[first * groups + g * rows + r] = sum(total) + rest;
      }
  }
  return sums;
}

// The float32 values of one panel, without its rows' 8-bit scales (they are applied to the result).
INLINE void widen_panel(const Weight& w, int64_t panel, float* out) {
  if (w.kind == I8) {
    const int8_t* p = (const int8_t*)w.data + panel * w.cols * PANEL;
    for (int64_t i = 0; i < w.cols * PANEL; i += W) store(out + i, load_i8(p + i));
    return;
  }
  const uint8_t* p = (const uint8_t*)w.data + panel * (w.cols / 2) * PANEL;
  const uint16_t* scales = group_scales(w, panel);
  for (int64_t g = 0; g < w.cols; g += w.group, scales += 2 * PANEL) {
    int64_t end = std::min<int64_t>(g + w.group, w.cols);
    for (int half = 0; half < PANEL; half += W) {
      V low, high, factor = load_half(scales + half), least = load_half(scales + PANEL + half);
      for (int64_t k = g; k < end; k += 2) {
        load_i4(p + (k / 2) * PANEL + half, low, high);
        store(out + k * PANEL + half, fma(low, factor, least));
        store(out + (k + 1) * PANEL + half, fma(high, factor, least));
      }
    }
  }
}

// Scale, bias and store the 32 columns of one row of y.
INLINE void finish(const Weight& w, int64_t panel, V low, V high, float* y, bool accumulate) {
  const int64_t first = panel * PANEL, width = w.rows - first;
  const float* scales = (const float*)w.scales + first;
  if (w.kind == I8) low = low * load(scales), high = high * load(scales + W);
  if (width >= PANEL) {
    float* out = y + first;
    if (w.bias) low = low + load(w.bias + first), high = high + load(w.bias + first + W);
    if (accumulate) low = low + load(out), high = high + load(out + W);
    store(out, low), store(out + W, high);
    return;
  }
  float line[PANEL];
  store(line, low), store(line + W, high);
  for (int64_t j = 0; j < width; j++) {
    float value = line[j] + (w.bias ? w.bias[first + j] : 0.0f);
    y[first + j] = accumulate ? y[first + j] + value : value;
  }
}

template <int R>
static void run_tile(const Weight& w, int64_t panel, const float* wide, const float* a, const float* sums, int64_t next,
                     float* y, int64_t pitch, bool accumulate, Ahead ahead) {
  Tile<R> tile;
  tile.clear();
  const float* plain = wide ? wide : w.kind == F32 ? (const float*)w.data + panel * w.cols * PANEL : nullptr;
  if (plain || w.kind == I8) {
    const int8_t* bytes = (const int8_t*)w.data + panel * w.cols * PANEL;
    for (int64_t k = 0; k < w.cols; k += SUM_LENGTH) {  // sums of sums: errors grow with the length of a chain
      int64_t n = std::min<int64_t>(SUM_LENGTH, w.cols - k);
      Tile<R> part;
      part.clear();
      if (plain)
        multiply<R>(part, a + k * next, 1, next, plain + k * PANEL, PANEL, n, ahead.from(k));
      else
        multiply_i8<R>(part, a + k * next, 1, next, bytes + k * PANEL, n);
      tile.add(part);
    }
  } else
    multiply_i4<R>(tile, a, sums, next, (const uint8_t*)w.data + panel * (w.cols / 2) * PANEL, group_scales(w, panel),
                   w.cols, w.group);
  for (int r = 0; r < R; r++) finish(w, panel, tile.acc[r][0], tile.acc[r][1], y + r * pitch, accumulate);
}

INLINE V load_weight(const float* p) { return load(p); }
INLINE V load_weight(const int8_t* p) { return load_i8(p); }

// One row of x by STREAMS panels at once: a core needs several streams of memory to use all of its bandwidth.
template <class T>
INLINE void run_row(const Weight& w, int64_t panel, const float* x, float* y, bool accumulate) {
  const T* data = (const T*)w.data + panel * w.cols * PANEL;
  V total[STREAMS][2];
  for (int p = 0; p < STREAMS; p++) total[p][0] = total[p][1] = set1(0);
  for (int64_t k = 0; k < w.cols; k += SUM_LENGTH) {
    int64_t end = std::min<int64_t>(w.cols, k + SUM_LENGTH);
    V acc[STREAMS][2];
    for (int p = 0; p < STREAMS; p++) acc[p][0] = acc[p][1] = set1(0);
    for (int64_t i = k; i < end; i++) {
      V a = set1(x[i]);
#pragma GCC unroll 8
      for (int p = 0; p < STREAMS; p++) {
        const T* at = data + p * w.cols * PANEL + i * PANEL;
        acc[p][0] = fma(a, load_weight(at), acc[p][0]);
        acc[p][1] = fma(a, load_weight(at + W), acc[p][1]);
      }
    }
    for (int p = 0; p < STREAMS; p++) {
      total[p][0] = total[p][0] + acc[p][0];
      total[p][1] = total[p][1] + acc[p][1];
    }
  }
  for (int p = 0; p < STREAMS; p++) finish(w, panel + p, total[p][0], total[p][1], y, accumulate);
}

typedef void (*TileFunction)(const Weight&, int64_t, const float*, const float*, const float*, int64_t, float*, int64_t,
                             bool, Ahead);

template <int R>
INLINE TileFunction pick_tile(int rows) {
  if constexpr (R == 1)
    return run_tile<1>;
  else
    return rows == R ? run_tile<R> : pick_tile<R - 1>(rows);
}

// What tile t of `tiles` asks for of the panel after this one. Without it a panel's way from memory and the arithmetic on
// it add up, since the processor's own prefetching does not look past the panel's end while tiles repeat it: 12 rows took
// the time of one row plus that of the products. A panel that would push the present one out of the second-level cache
// is not asked for.
INLINE Ahead next_panel(const Weight& w, int64_t panel, int64_t t, int64_t tiles) {
  constexpr int LINES = PANEL * sizeof(float) / 64;  // of one step over K: two
  if (w.kind != F32 || w.cols * PANEL > MAX_PANEL_AHEAD || (panel + 1) * PANEL >= w.rows || t >= LINES) return {};
  const char* next = (const char*)((const float*)w.data + (panel + 1) * w.cols * PANEL);
  if (tiles == 1) return {next, LINES};
  return {next + t * w.cols * 64, 1};
}

// y [m, N] (row pitch `pitch`) = x [m, K] w^T + bias, or += with `accumulate`.
//
// Rows come in chunks whose share of x stays in the second-level cache while all panels pass by.
static void matmul(const Weight& w, const float* x, int64_t m, float* y, int64_t pitch, bool accumulate, int threads) {
  const int64_t k = w.cols, panels = (w.rows + PANEL - 1) / PANEL;
  int64_t chunk = std::max<int64_t>(CHUNK_FLOATS / k / MAX_ROWS, 1) * MAX_ROWS, chunks = (m + chunk - 1) / chunk;
  for (int64_t part = 0; part < chunks; part++) {
    const int64_t begin = m * part / chunks, size = m * (part + 1) / chunks - begin;
    const int64_t tiles = (size + MAX_ROWS - 1) / MAX_ROWS;
    const float* from = x + begin * k;
    float* packed = size == 1 ? nullptr : scratch(0, (size_t)size * k);  // [tile][K][rows of the tile]
    for (int64_t t = 0; packed && t < tiles; t++) {
      int64_t first = size * t / tiles, rows = size * (t + 1) / tiles - first;
      float* out = packed + first * k;
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < k; i++) out[i * rows + r] = from[(first + r) * k + i];
    }
    const bool widen = w.kind != F32 && size >= WIDE_ROWS;
    const float* sums = w.kind == I4 && size / tiles <= FEW_ROWS && !widen ? sum_groups(w, from, size, tiles) : nullptr;
    const int64_t together = size == 1 && w.kind != I4 ? panels / STREAMS * STREAMS : 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < together; panel += STREAMS) {
      if (w.kind == F32)
        run_row<float>(w, panel, from, y + begin * pitch, accumulate);
      else
        run_row<int8_t>(w, panel, from, y + begin * pitch, accumulate);
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = together; panel < panels; panel++) {
      float* wide = widen ? scratch(1, (size_t)k * PANEL) : nullptr;
      if (wide) widen_panel(w, panel, wide);
      for (int64_t t = 0; t < tiles; t++) {
        int64_t first = size * t / tiles, rows = size * (t + 1) / tiles - first;
        pick_tile<MAX_ROWS>((int)rows)(w, panel, wide, packed ? packed + first * k : from,
                                       sums ? sums + first * groups_of(w) : nullptr, rows, y + (begin + first) * pitch, pitch, accumulate, next_panel(w, panel, t, tiles));
      }
    }
  }
}

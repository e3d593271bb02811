// Few rows of x by a weight of 8 or 4 bits, whose numbers become floats in registers, as they are used.
//
// A register tile of up to MAX_ROWS rows by one panel runs over all of K. With many rows that conversion would be
// repeated for every tile, and blocks.h is faster. The same tile, on floats, is what attention.h multiplies with.
#pragma once
#include "pack.h"
#include "weight.h"

constexpr int FEW_ROWS = 4;  // of a tile: up to here scales are applied to sums of products

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

// acc += a [K, rows] times w [K, PANEL] (row stride `pitch`). a[k * next + r * stride].
template <int R>
INLINE void multiply(Tile<R>& tile, const float* a, int64_t stride, int64_t next, const float* w, int64_t pitch,
                     int64_t k) {
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

// Rows 2 j and 2 j + 1 of the panel share bytes [PANEL]: the even one in the low halves. `group` is even.
//
// A weight is scale * q + minimum. With few rows the products are those of q alone, and a group adds scale * (their sum)
// + minimum * (the sum of its x), which is in `sums` [K / group, R]. With more, weights are widened as they are used.
template <int R>
INLINE void multiply_i4(Tile<R>& tile, const float* a, const float* sums, int64_t next, const uint8_t* w,
                        const uint16_t* scales, int64_t k, int64_t group) {
  constexpr bool SPLITS = R <= (MAX_ROWS >= 12 ? 2 : 1);  // as in multiply; registers allow
  V s0, s1, m0, m1;
  auto load_scales = [&] {  // late where sums are scaled: until then the registers hold the sums
    s0 = load_half(scales), s1 = load_half(scales + W);
    m0 = load_half(scales + PANEL), m1 = load_half(scales + PANEL + W);
  };
  for (int64_t g = 0; g < k; g += group, scales += 2 * PANEL, sums += R) {
    if (R > FEW_ROWS) load_scales();
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
      load_scales();
      tile.add_scaled(part, s0, s1);
      tile.step(sums, 1, m0, m1);
    }
  }
}

// The sums of x over each group, [tile][K / group][rows of the tile].
static float* sum_groups(const Weight& w, const float* x, const Tiles& tiles) {
  const int64_t groups = groups_of(w);
  float* sums = scratch(9, (size_t)tiles.rows * groups);
  for (int64_t t = 0; t < tiles.count; t++) {
    const int64_t first = tiles.first(t), height = tiles.height(t);
    for (int64_t r = 0; r < height; r++)
      for (int64_t g = 0; g < groups; g++) {
        const float* from = x + (first + r) * w.cols + g * w.group;
        int64_t n = std::min<int64_t>(w.group, w.cols - g * w.group), i = 0;
        V total = set1(0);
        for (; i + W <= n; i += W) total = total + load(from + i);
        float rest = 0;
        for (; i < n; i++) rest += from[i];
        sums[first * groups + g * height + r] = sum(total) + rest;
      }
  }
  return sums;
}

template <int R>
static void run_tile(const Weight& w, int64_t panel, const float* a, const float* sums, int64_t next, float* y,
                     int64_t pitch, bool accumulate) {
  Tile<R> tile;
  tile.clear();
  if (w.kind == I8) {
    const int8_t* bytes = (const int8_t*)w.data + panel * w.cols * PANEL;
    const int64_t length = block_length(w);
    for (int64_t k = 0; k < w.cols; k += length) {
      Tile<R> part;
      part.clear();
      multiply_i8<R>(part, a + k * next, 1, next, bytes + k * PANEL, std::min(length, w.cols - k));
      tile.add(part);
    }
  } else
    multiply_i4<R>(tile, a, sums, next, (const uint8_t*)w.data + panel * (w.cols / 2) * PANEL, group_scales(w, panel),
                   w.cols, w.group);
  for (int r = 0; r < R; r++) finish(w, panel, tile.acc[r][0], tile.acc[r][1], y + r * pitch, accumulate);
}

typedef void (*TileFunction)(const Weight&, int64_t, const float*, const float*, int64_t, float*, int64_t,
                             bool);
template <int R>
INLINE TileFunction pick_tile(int64_t rows) {
  if constexpr (R == 1)
    return run_tile<1>;
  else
    return rows == R ? run_tile<R> : pick_tile<R - 1>(rows);
}

// As multiply_blocks does, for a narrow weight.
static void multiply_narrow(const Weight& w, int64_t from, const float* x, int64_t m, float* y, int64_t pitch,
                            bool accumulate, int threads) {
  const int64_t k = w.cols, panels = (w.rows + PANEL - 1) / PANEL;
  const Tiles tiles(m, MAX_ROWS);
  float* packed = scratch(0, (size_t)m * k);
  pack(x, tiles, k, k, packed);
  const float* sums = w.kind == I4 && tiles.height(0) <= FEW_ROWS ? sum_groups(w, x, tiles) : nullptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = from; panel < panels; panel++)
    for (int64_t t = 0; t < tiles.count; t++) {
      const int64_t first = tiles.first(t), height = tiles.height(t);
      pick_tile<MAX_ROWS>(height)(w, panel, packed + first * k, sums ? sums + first * groups_of(w) : nullptr, height,
                                  y + first * pitch, pitch, accumulate);
    }
}

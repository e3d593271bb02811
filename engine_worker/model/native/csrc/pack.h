// Rows of x in the order in which register tiles read them.
#pragma once
#include <algorithm>
#include "vec.h"

// Rows of x cut into tiles as equal as can be.
struct Tiles {
  int64_t rows, count;
  Tiles(int64_t m, int64_t most) : rows(m), count((m + most - 1) / most) {}
  MEMBER int64_t first(int64_t t) const { return rows * t / count; }
  MEMBER int64_t height(int64_t t) const { return first(t + 1) - first(t); }
};

// out [k, rows] = x [rows, k] (row pitch `pitch`) transposed.
INLINE void turn(const float* x, int64_t pitch, int64_t rows, int64_t k, float* out) {
  int64_t i = 0;
  for (; rows >= 4 && i + 4 <= k; i += 4) {
    for (int64_t r = 0; r + 4 <= rows; r += 4) turn4(x + r * pitch + i, pitch, out + i * rows + r, rows);
    if (rows % 4) turn4(x + (rows - 4) * pitch + i, pitch, out + i * rows + rows - 4, rows);
  }
  for (; i < k; i++)
    for (int64_t r = 0; r < rows; r++) out[i * rows + r] = x[r * pitch + i];
}

// x [m, K] as [block][tile][K of the block][rows of the tile].
static void pack(const float* x, const Tiles& tiles, int64_t k, int64_t length, float* out) {
  for (int64_t t = 0; t < tiles.count; t++)
    for (int64_t b = 0; b < k; b += length) {
      const int64_t n = std::min(length, k - b), first = tiles.first(t);
      turn(x + first * k + b, k, tiles.height(t), n, out + b * tiles.rows + first * n);
    }
}

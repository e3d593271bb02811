// A weight as it was laid out once: float32, 8-bit with a scale a row, or 4-bit with scale and minimum a group.
//
// The weight [N, K] is cut into panels of 32 output columns, each stored as K rows of 32, so that a product reads memory
// in one stream. Sums over K are taken in blocks and the blocks' sums added: errors grow with the length of a chain, and
// a block of a panel stays in the first-level cache while rows of x pass by. How K is cut depends on K alone.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <vector>
#include "vec.h"

constexpr int PANEL = 32;       // columns of a panel; the layout's, known to native/kernels.py
constexpr int64_t BLOCK = 192;  // of K, about: 24 KB of a panel in float32

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
  static thread_local std::vector<float> buffers[11];
  std::vector<float>& buffer = buffers[which];
  if (buffer.size() < floats + W) buffer.resize(floats + W);
  uintptr_t address = (uintptr_t)buffer.data();
  return (float*)((address + 63) & ~(uintptr_t)63);
}

INLINE int64_t groups_of(const Weight& w) { return (w.cols + w.group - 1) / w.group; }
INLINE const uint16_t* group_scales(const Weight& w, int64_t panel) {
  return (const uint16_t*)w.scales + panel * groups_of(w) * 2 * PANEL;
}

// The weight's columns from a panel's first up to `rows`, as a weight of its own.
INLINE Weight part_of(const Weight& w, int64_t panel, int64_t rows) {
  Weight part = w;
  const int64_t lines = panel * w.cols * PANEL;  // numbers before it
  part.data = (const char*)w.data + (w.kind == F32 ? lines * 4 : w.kind == I8 ? lines : lines / 2);
  if (w.kind == I8) part.scales = (const float*)w.scales + panel * PANEL;
  if (w.kind == I4) part.scales = group_scales(w, panel);
  if (w.bias) part.bias = w.bias + panel * PANEL;
  part.rows = rows - panel * PANEL;
  return part;
}

// How much of K is summed at once: equal parts, of whole groups in 4 bits.
INLINE int64_t block_length(const Weight& w) {
  const int64_t step = w.kind == I4 ? w.group : 4, blocks = (w.cols + BLOCK - 1) / BLOCK;
  return std::max<int64_t>(1, ((w.cols + blocks - 1) / std::max<int64_t>(1, blocks) + step - 1) / step) * step;
}

// The float32 values of rows from .. from + n - 1 of a panel, without its columns' 8-bit scales (they are applied to the
// result). `from` begins a group.
INLINE void widen_block(const Weight& w, int64_t panel, int64_t from, int64_t n, float* out) {
  if (w.kind == I8) {
    const int8_t* p = (const int8_t*)w.data + (panel * w.cols + from) * PANEL;
    for (int64_t i = 0; i < n * PANEL; i += W) store(out + i, load_i8(p + i));
    return;
  }
  const uint8_t* p = (const uint8_t*)w.data + (panel * w.cols + from) / 2 * PANEL;
  const uint16_t* scales = group_scales(w, panel) + from / w.group * 2 * PANEL;
  for (int64_t g = 0; g < n; g += w.group, scales += 2 * PANEL) {
    int64_t end = std::min<int64_t>(g + w.group, n);
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

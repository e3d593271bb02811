// What lies between the matrix products of a decoder layer, each in one pass over memory.
#pragma once
#include "vec.h"

// out [rows, n] = x / sqrt(mean(x^2) + eps) * weight; with `delta`, x += delta comes first and is kept.
static void rms_norm(float* x, const float* delta, const float* weight, float eps, float* out, int64_t rows, int64_t n,
                     int64_t x_pitch, int64_t out_pitch) {
  for (int64_t row = 0; row < rows; row++) {
    float* line = x + row * x_pitch;
    const float* more = delta ? delta + row * n : nullptr;
    V squares = set1(0);
    float rest = 0;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      V value = load(line + i);
      if (more) value = value + load(more + i), store(line + i, value);
      squares = fma(value, value, squares);
    }
    for (; i < n; i++) {
      if (more) line[i] += more[i];
      rest += line[i] * line[i];
    }
    float factor = 1.0f / std::sqrt((sum(squares) + rest) / (float)n + eps);
    float* to = out + row * out_pitch;
    V f = set1(factor);
    for (i = 0; i + W <= n; i += W) store(to + i, load(line + i) * f * load(weight + i));
    for (; i < n; i++) to[i] = line[i] * factor * weight[i];
  }
}

// gate = silu(gate) * up, for rows of [gate | up], each n wide; the result is written to out [rows, n].
static void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t n) {
  for (int64_t row = 0; row < rows; row++) {
    const float *gate = gate_up + row * 2 * n, *up = gate + n;
    float* to = out + row * n;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      V g = load(gate + i);
      store(to + i, g / (set1(1) + vexp(set1(0) - g)) * load(up + i));
    }
    for (; i < n; i++) to[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  }
}

// Rotate the first `rotary` of head_dim numbers in place: halves (a, b) -> (a cos - b sin, b cos + a sin).
INLINE void rotate(float* head, const float* cos, const float* sin, int64_t rotary) {
  int64_t half = rotary / 2, i = 0;
  for (; i + W <= half; i += W) {
    V a = load(head + i), b = load(head + half + i);
    store(head + i, a * load(cos + i) - b * load(sin + i));
    store(head + half + i, b * load(cos + half + i) + a * load(sin + half + i));
  }
  for (; i < half; i++) {
    float a = head[i], b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

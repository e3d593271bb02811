// Rows of the KV cache as model/kv_format.py stores them: float32, 8-bit integers with a scale a row, or 4-bit e2m1
// with a scale for 16 neighbours. What is written here is bit for bit what its `quantize` gives.
#pragma once
#include <algorithm>
#include "vec.h"

enum RowKind : int64_t { ROW_F32 = 0, ROW_I8 = 1, ROW_FP4 = 2 };

// A layer's cache, as native/kernels.py fills it. Scales are null for float32.
struct Cache {
  void *keys, *values, *key_scales, *value_scales;
  int64_t key_kind, value_kind;
};

constexpr int64_t FP4_GROUP = 16;
constexpr float FP4_NUMBERS[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

INLINE float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
INLINE uint32_t to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

// Scales of fp4 by their codes: the upper half of a float16. Subnormal ones are never written; 0 is what zeroed blocks hold.
struct Fp4Scales {
  float of[256];
  Fp4Scales() {
    for (int code = 0; code < 256; code++)
      of[code] = code < 8 ? 0.0f : code < 248 ? from_bits(((uint32_t)code << 20) + (112u << 23)) : NAN;
  }
};
static const Fp4Scales FP4_SCALES;

// Row `index` (slot * heads + head). Its numbers are load(i) * scale and one(i) * scale; load takes 16 of them.
template <int KIND> struct Row;

template <> struct Row<ROW_F32> {
  const float* p;
  static constexpr float scale = 1;
  MEMBER Row(const void* data, const void*, int64_t index, int64_t dim) : p((const float*)data + index * dim) {}
  MEMBER V load(int64_t i) const { return ::load(p + i); }
  MEMBER float one(int64_t i) const { return p[i]; }
};

template <> struct Row<ROW_I8> {
  const int8_t* p;
  float scale;
  MEMBER Row(const void* data, const void* scales, int64_t index, int64_t dim)
      : p((const int8_t*)data + index * dim), scale(from_bits((uint32_t)((const uint16_t*)scales)[index] << 16)) {}
  MEMBER V load(int64_t i) const { return load_i8(p + i); }
  MEMBER float one(int64_t i) const { return p[i]; }
};

template <> struct Row<ROW_FP4> {
  const uint8_t *p, *scales;
  static constexpr float scale = 1;
  MEMBER Row(const void* data, const void* s, int64_t index, int64_t dim) {
    int64_t groups = (dim + FP4_GROUP - 1) / FP4_GROUP;
    p = (const uint8_t*)data + index * groups * 8, scales = (const uint8_t*)s + index * groups;
  }
  MEMBER V load(int64_t i) const { return load_e2m1(p + i / 2) * set1(FP4_SCALES.of[scales[i / FP4_GROUP]]); }
  MEMBER float one(int64_t i) const {
    int64_t j = i % FP4_GROUP, byte = p[i / FP4_GROUP * 8 + j % 8], code = j < 8 ? byte & 15 : byte >> 4;
    float number = FP4_NUMBERS[code & 7] * FP4_SCALES.of[scales[i / FP4_GROUP]];
    return code & 8 ? -number : number;
  }
};

// Bytes of a row of numbers, and of its scales.
INLINE int64_t row_bytes(int64_t kind, int64_t dim) {
  return kind == ROW_F32 ? dim * 4 : kind == ROW_I8 ? dim : (dim + FP4_GROUP - 1) / FP4_GROUP * 8;
}
INLINE int64_t scale_bytes(int64_t kind, int64_t dim) {
  return kind == ROW_F32 ? 0 : kind == ROW_I8 ? 2 : (dim + FP4_GROUP - 1) / FP4_GROUP;
}

// A row as float32, in place where it is that already; otherwise in `line` [dim].
template <int KIND>
INLINE const float* widen_row(const Row<KIND>& row, int64_t dim, float* line) {
  if constexpr (KIND == ROW_F32) return row.p;
  V s = set1(row.scale);
  int64_t i = 0;
  for (; i + W <= dim; i += W) store(line + i, row.load(i) * s);
  for (; i < dim; i++) line[i] = row.one(i) * row.scale;
  return line;
}

// Whether n numbers are all finite: 0 * x is 0 for every finite x and NaN otherwise.
INLINE bool all_finite(const float* x, int64_t n) {
  V poison = set1(0);
  float rest = 0;
  int64_t i = 0;
  for (; i + W <= n; i += W) poison = fma(set1(0), load(x + i), poison);
  for (; i < n; i++) rest += 0.0f * x[i];
  return sum(poison) + rest == 0;
}

// The largest size of n numbers, NaN if one of them is not finite.
INLINE float peak_of(const float* x, int64_t n) {
  V high = set1(0), low = set1(0);
  float peak = 0;
  int64_t i = 0;
  for (; i + W <= n; i += W) high = vmax(high, load(x + i)), low = vmin(low, load(x + i));
  for (; i < n; i++) peak = std::max(peak, std::fabs(x[i]));
  return all_finite(x, n) ? std::max(peak, std::max(top(high), top(set1(0) - low))) : NAN;
}

static void store_i8(const float* x, int64_t dim, int8_t* to, uint16_t* scale) {
  float peak = peak_of(x, dim);
  if (std::isnan(peak)) {
    std::memset(to, 0, dim);
    *scale = 0x7fc0;
    return;
  }
  uint32_t bits = to_bits(std::max(peak / 127.0f, 0x1p-100f)) + 0xffff;
  *scale = bits >> 16;
  float s = from_bits(bits >> 16 << 16), lanes[W];
  int64_t i = 0;
  for (; i + W <= dim; i += W) {
    store(lanes, nearest(load(x + i) / set1(s)));
    for (int j = 0; j < W; j++) to[i + j] = (int8_t)(int)lanes[j];
  }
  for (; i < dim; i++) to[i] = (int8_t)(int)std::nearbyint(x[i] / s);
}

// Codes of 16 numbers on the scale nearest to `wanted`. Gives the scale's code and adds up the squared error.
INLINE int round_fp4(const float* x, float wanted, int32_t* numbers, float* error) {
  int code = (int)((to_bits(wanted) + (1u << 19)) >> 20) - (112 << 3);
  code = std::min(std::max(code, 8), 247);
  float s = FP4_SCALES.of[code], total = 0, values[FP4_GROUP];
  for (int i = 0; i < FP4_GROUP; i++) {
    float size = std::fabs(x[i] / s);
    numbers[i] = (size > 0.25f) + (size > 0.75f) + (size > 1.25f) + (size > 1.75f) + (size > 2.5f) + (size > 3.5f) +
                 (size > 5.0f);
    // 0, 1 / 2, 1, 3 / 2 and 2 go up by halves, 3 and 4 by ones, 6 by two
    int32_t n = numbers[i];
    values[i] = 0.5f * (n + std::max(n - 4, 0) + 2 * std::max(n - 6, 0)) * s;
  }
  for (int i = 0; i < FP4_GROUP; i++) {
    float off = std::fabs(x[i]) - values[i];
    total += off * off;
  }
  *error = total;
  return code;
}

static void store_fp4(const float* x, int64_t dim, uint8_t* to, uint8_t* scales) {
  for (int64_t from = 0; from < dim; from += FP4_GROUP, to += 8, scales++) {
    float group[FP4_GROUP] = {}, peak = peak_of(x + from, std::min(FP4_GROUP, dim - from)), error_six, error_four;
    if (std::isnan(peak)) {
      std::memset(to, 0, 8);
      *scales = 255;
      continue;
    }
    std::memcpy(group, x + from, std::min(FP4_GROUP, dim - from) * sizeof(float));
    int32_t six[FP4_GROUP], four[FP4_GROUP];
    int scale_six = round_fp4(group, peak / 6, six, &error_six), scale_four = round_fp4(group, peak / 4, four, &error_four);
    const int32_t* numbers = error_four < error_six ? four : six;
    *scales = error_four < error_six ? scale_four : scale_six;
    auto signed_code = [&](int i) { return (uint8_t)(numbers[i] | (group[i] < 0) << 3); };
    for (int i = 0; i < 8; i++) to[i] = signed_code(i) | signed_code(i + 8) << 4;
  }
}

// Write one row into a layer's keys (or values).
INLINE void store_row(const float* x, int64_t dim, int64_t kind, void* data, void* scales, int64_t index) {
  int64_t groups = (dim + FP4_GROUP - 1) / FP4_GROUP;
  if (kind == ROW_F32)
    std::memcpy((float*)data + index * dim, x, dim * sizeof(float));
  else if (kind == ROW_I8)
    store_i8(x, dim, (int8_t*)data + index * dim, (uint16_t*)scales + index);
  else
    store_fp4(x, dim, (uint8_t*)data + index * groups * 8, (uint8_t*)scales + index * groups);
}

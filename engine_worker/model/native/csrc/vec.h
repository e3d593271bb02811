// Sixteen floats as one value (V): a register with AVX-512, two with AVX2, an array elsewhere. And one register (H) of
// LANES floats, for the product that must know how many registers there are.
//
// Everything above is written on this type alone, so the same source gives one library an instruction set. Which of
// them is loaded is decided at run time, by what the processor says.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))

constexpr int W = 16;

#if defined(__AVX512F__)

constexpr int MAX_ROWS = 12;  // rows of a register tile: 12 x 2 accumulators and 2 weights of 32 registers
constexpr int SUMS = 24;      // values that registers hold besides what is added to them
struct V { __m512 v; };
typedef V H;
constexpr int LANES = 16, TILE_ROWS = 12;  // a tile of the product: TILE_ROWS x 2 registers of sums
INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
INLINE V set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE H load_register(const float* p) { return load(p); }
INLINE H fill(float x) { return set1(x); }
INLINE V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE V vmax(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE V vmin(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE V nearest(V a) { return {_mm512_roundscale_ps(a.v, 8)}; }
INLINE V scale2(V a, V n) { return {_mm512_scalef_ps(a.v, n.v)}; }
INLINE float sum(V a) { return _mm512_reduce_add_ps(a.v); }
INLINE float top(V a) { return _mm512_reduce_max_ps(a.v); }
// 0 where x < limit, and w elsewhere, also where x is no number.
INLINE V unless_less(V w, V x, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), w.v)};
}
// Rows 0 .. 3 of four numbers as columns, four at a time: lane l of t[i] has the numbers 4 l + i of a, b, c and d.
INLINE void turn(V a, V b, V c, V d, __m512* t) {
  __m512d ab0 = _mm512_castps_pd(_mm512_unpacklo_ps(a.v, b.v)), ab2 = _mm512_castps_pd(_mm512_unpackhi_ps(a.v, b.v));
  __m512d cd0 = _mm512_castps_pd(_mm512_unpacklo_ps(c.v, d.v)), cd2 = _mm512_castps_pd(_mm512_unpackhi_ps(c.v, d.v));
  t[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab0, cd0)), t[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab0, cd0));
  t[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)), t[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2));
}
// The sums of four values, side by side.
INLINE void sum4(V a, V b, V c, V d, float* out) {
  __m512 t[4];
  turn(a, b, c, d, t);
  __m512 all = _mm512_add_ps(_mm512_add_ps(t[0], t[1]), _mm512_add_ps(t[2], t[3]));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
// out[i * pitch ..] = the numbers i of a, b, c and d.
INLINE void store_columns(V a, V b, V c, V d, float* out, int64_t pitch) {
  __m512 t[4];
  turn(a, b, c, d, t);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm_storeu_ps(out + i * pitch, _mm512_castps512_ps128(t[i]));
    _mm_storeu_ps(out + (4 + i) * pitch, _mm512_extractf32x4_ps(t[i], 1));
    _mm_storeu_ps(out + (8 + i) * pitch, _mm512_extractf32x4_ps(t[i], 2));
    _mm_storeu_ps(out + (12 + i) * pitch, _mm512_extractf32x4_ps(t[i], 3));
  }
}
INLINE V load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
// Sixteen numbers in half precision, of finite size.
INLINE V load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
// 16 bytes, two 4-bit numbers each, as 0 .. 15: `low` those in the low halves.
INLINE void load_i4(const uint8_t* p, V& low, V& high) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  low = {_mm512_permutexvar_ps(both, table)};  // only the low four bits choose
  high = {_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table)};
}
// 8 bytes as 16 numbers e2m1: the low halves first.
INLINE V load_e2m1(const uint8_t* p) {
  const __m512 table = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  __m128i both = _mm_loadl_epi64((const __m128i*)p);
  return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(both, _mm_srli_epi16(both, 4))), table)};
}

#elif defined(__AVX2__)

constexpr int MAX_ROWS = 3;  // 3 x 4 accumulators of 16 registers
constexpr int SUMS = 6;
struct V { __m256 a, b; };
struct H { __m256 v; };
constexpr int LANES = 8, TILE_ROWS = 6;
INLINE H load_register(const float* p) { return {_mm256_loadu_ps(p)}; }
INLINE void store(float* p, H x) { _mm256_storeu_ps(p, x.v); }
INLINE H fill(float x) { return {_mm256_set1_ps(x)}; }
INLINE H operator+(H x, H y) { return {_mm256_add_ps(x.v, y.v)}; }
INLINE H fma(H x, H y, H z) { return {_mm256_fmadd_ps(x.v, y.v, z.v)}; }
INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, V x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE V set1(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
INLINE V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE V vmin(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE V nearest(V x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE __m256 power2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE V scale2(V x, V n) { return {_mm256_mul_ps(x.a, power2(n.a)), _mm256_mul_ps(x.b, power2(n.b))}; }
INLINE __m128 halves(__m256 x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
INLINE float sum(V x) {
  __m128 s = halves(_mm256_add_ps(x.a, x.b));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float top(V x) {
  __m256 m = _mm256_max_ps(x.a, x.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
INLINE __m256 unless_less(__m256 w, __m256 x, __m256 limit) { return _mm256_and_ps(w, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ)); }
INLINE V unless_less(V w, V x, float limit) {
  __m256 least = _mm256_set1_ps(limit);
  return {unless_less(w.a, x.a, least), unless_less(w.b, x.b, least)};
}
INLINE void turn(__m256 a, __m256 b, __m256 c, __m256 d, __m256* t) {
  __m256d ab0 = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), ab2 = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
  __m256d cd0 = _mm256_castps_pd(_mm256_unpacklo_ps(c, d)), cd2 = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
  t[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab0, cd0)), t[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab0, cd0));
  t[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2)), t[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2));
}
INLINE void sum4(V a, V b, V c, V d, float* out) {
  __m256 t[4];
  turn(_mm256_add_ps(a.a, a.b), _mm256_add_ps(b.a, b.b), _mm256_add_ps(c.a, c.b), _mm256_add_ps(d.a, d.b), t);
  _mm_storeu_ps(out, halves(_mm256_add_ps(_mm256_add_ps(t[0], t[1]), _mm256_add_ps(t[2], t[3]))));
}
INLINE void store_columns(__m256 a, __m256 b, __m256 c, __m256 d, float* out, int64_t pitch) {
  __m256 t[4];
  turn(a, b, c, d, t);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm_storeu_ps(out + i * pitch, _mm256_castps256_ps128(t[i]));
    _mm_storeu_ps(out + (4 + i) * pitch, _mm256_extractf128_ps(t[i], 1));
  }
}
INLINE void store_columns(V a, V b, V c, V d, float* out, int64_t pitch) {
  store_columns(a.a, b.a, c.a, d.a, out, pitch), store_columns(a.b, b.b, c.b, d.b, out + 8 * pitch, pitch);
}
INLINE __m256 widen(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
INLINE V load_i8(const int8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {widen(x), widen(_mm_srli_si128(x, 8))};
}
// By integers and a product, so that no processor without F16C is left out: a half's bits, moved into a float's places,
// are its value by 2^-112.
INLINE __m256 widen_half(const uint16_t* p) {
  __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  __m256i size = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)), 13);
  __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
  return _mm256_or_ps(_mm256_mul_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p112f)), _mm256_castsi256_ps(sign));
}
INLINE V load_half(const uint16_t* p) { return {widen_half(p), widen_half(p + 8)}; }
INLINE void load_i4(const uint8_t* p, V& low, V& high) {
  __m128i both = _mm_loadu_si128((const __m128i*)p), mask = _mm_set1_epi8(15);
  __m128i l = _mm_and_si128(both, mask), h = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
  low = {widen(l), widen(_mm_srli_si128(l, 8))};
  high = {widen(h), widen(_mm_srli_si128(h, 8))};
}
INLINE V load_e2m1(const uint8_t* p) {
  const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  __m128i both = _mm_loadl_epi64((const __m128i*)p);
  __m128i codes = _mm_and_si128(_mm_unpacklo_epi64(both, _mm_srli_epi16(both, 4)), _mm_set1_epi8(15));
  __m128i x = _mm_shuffle_epi8(doubled, codes);
  __m256 half = _mm256_set1_ps(0.5f);
  return {_mm256_mul_ps(widen(x), half), _mm256_mul_ps(widen(_mm_srli_si128(x, 8)), half)};
}

#else

constexpr int MAX_ROWS = 4;
constexpr int SUMS = 8;
struct V { float x[W]; };
typedef V H;
constexpr int LANES = 16, TILE_ROWS = 4;
#define EACH(expression) V r; for (int i = 0; i < W; i++) r.x[i] = (expression); return r
INLINE V load(const float* p) { V r; std::memcpy(r.x, p, sizeof r.x); return r; }
INLINE void store(float* p, V a) { std::memcpy(p, a.x, sizeof a.x); }
INLINE V set1(float x) { EACH(x); }
INLINE H load_register(const float* p) { return load(p); }
INLINE H fill(float x) { return set1(x); }
INLINE V operator+(V a, V b) { EACH(a.x[i] + b.x[i]); }
INLINE V operator-(V a, V b) { EACH(a.x[i] - b.x[i]); }
INLINE V operator*(V a, V b) { EACH(a.x[i] * b.x[i]); }
INLINE V operator/(V a, V b) { EACH(a.x[i] / b.x[i]); }
INLINE V fma(V a, V b, V c) { EACH(a.x[i] * b.x[i] + c.x[i]); }
INLINE V vmax(V a, V b) { EACH(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
INLINE V vmin(V a, V b) { EACH(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
INLINE V nearest(V a) { EACH(std::nearbyint(a.x[i])); }
INLINE V scale2(V a, V n) { EACH(std::ldexp(a.x[i], (int)n.x[i])); }
INLINE float sum(V a) { float s = 0; for (int i = 0; i < W; i++) s += a.x[i]; return s; }
INLINE float top(V a) { float m = a.x[0]; for (int i = 1; i < W; i++) m = m > a.x[i] ? m : a.x[i]; return m; }
INLINE V unless_less(V w, V x, float limit) { EACH(x.x[i] < limit ? 0.0f : w.x[i]); }
INLINE void sum4(V a, V b, V c, V d, float* out) { out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d); }
INLINE void store_columns(V a, V b, V c, V d, float* out, int64_t pitch) {
  for (int i = 0; i < W; i++, out += pitch) out[0] = a.x[i], out[1] = b.x[i], out[2] = c.x[i], out[3] = d.x[i];
}
INLINE V load_i8(const int8_t* p) { EACH((float)p[i]); }
INLINE float widen_half(uint32_t bits) {
  uint32_t size = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  float x;
  std::memcpy(&x, &size, 4), x *= 0x1p112f;
  std::memcpy(&size, &x, 4), size |= sign;
  std::memcpy(&x, &size, 4);
  return x;
}
INLINE V load_half(const uint16_t* p) { EACH(widen_half(p[i])); }
INLINE void load_i4(const uint8_t* p, V& low, V& high) {
  for (int i = 0; i < W; i++) low.x[i] = (float)(p[i] & 15), high.x[i] = (float)(p[i] >> 4);
}
INLINE V load_e2m1(const uint8_t* p) {
  const float table[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  EACH(table[i < 8 ? p[i] & 15 : p[i - 8] >> 4]);
}

#endif

// to [4, 4] = from [4, 4] transposed; pitches of both.
INLINE void turn4(const float* from, int64_t pitch, float* to, int64_t to_pitch) {
#if defined(__AVX2__)
  __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + pitch);
  __m128 c = _mm_loadu_ps(from + 2 * pitch), d = _mm_loadu_ps(from + 3 * pitch);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a), _mm_storeu_ps(to + to_pitch, b);
  _mm_storeu_ps(to + 2 * to_pitch, c), _mm_storeu_ps(to + 3 * to_pitch, d);
#else
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) to[i * to_pitch + j] = from[j * pitch + i];
#endif
}

// e^x within about one unit in the last place; below -87 it is 0 for all that a softmax cares. Range reduction to
// |r| <= ln(2) / 2 and the Taylor polynomial of degree 7 (its error there is below 2^-24).
INLINE V vexp(V x) {
  x = vmin(vmax(x, set1(-87.0f)), set1(88.0f));
  V n = nearest(x * set1(1.44269504088896341f));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return scale2(p, n);
}

// 2^x within about one unit in the last place, for x of 125 at most either way. The polynomial of degree 5 for 2^r,
// |r| <= 1 / 2, has the least largest error (1e-7), with 2^0 = 1 exactly.
INLINE V vexp2(V x) {
  V n = nearest(x), r = x - n;
  V p = set1(0.001326472731307149f);
  p = fma(p, r, set1(0.009671512991189957f));
  p = fma(p, r, set1(0.05550733581185341f));
  p = fma(p, r, set1(0.24022242426872253f));
  p = fma(p, r, set1(0.6931470036506653f));
  p = fma(p, r, set1(1.0f));
  return scale2(p, n);
}

// y = x w^T for a weight in panels (weight.h): one copy serves every number of rows, and which way is taken follows from
// that number. One row runs at the speed of memory (here), few by a narrow weight mostly so (narrow.h), and all others
// come nearer to that of arithmetic the more they are (blocks.h).
//
// The products are the same float32 ones every way, and in float32 they are summed in the same order.
#pragma once
#include "blocks.h"
#include "narrow.h"

// From so many rows on a narrow weight is widened once for all tiles. A high tile of AVX-512 does it in passing.
constexpr int WIDE_ROWS_I8 = MAX_ROWS >= 12 ? 24 : 4, WIDE_ROWS_I4 = MAX_ROWS >= 12 ? 24 : 9;
constexpr int STREAMS = MAX_ROWS >= 12 ? 6 : 2;  // panels that a stream's rows are multiplied by at once
constexpr int STREAM_ROWS = MAX_ROWS >= 12 ? 2 : 1;

INLINE V load_weight(const float* p) { return load(p); }
INLINE V load_weight(const int8_t* p) { return load_i8(p); }

// x [R, K] by STREAMS panels at once: a core needs several streams of memory to use all of its bandwidth.
template <class T, int R>
INLINE void run_streams(const Weight& w, int64_t panel, const float* x, float* y, int64_t pitch, bool accumulate) {
  const T* data = (const T*)w.data + panel * w.cols * PANEL;
  const int64_t length = block_length(w);
  V total[STREAMS][R][2];
  for (int64_t k = 0; k < w.cols; k += length) {
    const int64_t end = std::min<int64_t>(w.cols, k + length);
    V acc[STREAMS][R][2];
    for (int p = 0; p < STREAMS; p++)
      for (int r = 0; r < R; r++) acc[p][r][0] = acc[p][r][1] = set1(0);
    for (int64_t i = k; i < end; i++) {
#pragma GCC unroll 8
      for (int p = 0; p < STREAMS; p++) {
        const T* at = data + (p * w.cols + i) * PANEL;
        V w0 = load_weight(at), w1 = load_weight(at + W);
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) {
          V a = set1(x[r * w.cols + i]);
          acc[p][r][0] = fma(a, w0, acc[p][r][0]);
          acc[p][r][1] = fma(a, w1, acc[p][r][1]);
        }
      }
    }
    for (int p = 0; p < STREAMS; p++)
      for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) total[p][r][h] = k ? total[p][r][h] + acc[p][r][h] : acc[p][r][h];
  }
  for (int p = 0; p < STREAMS; p++)
    for (int r = 0; r < R; r++) finish(w, panel + p, total[p][r][0], total[p][r][1], y + r * pitch, accumulate);
}

// As many panels as fill STREAMS, of y [m, N]. Returns how many; none if there are too many rows.
static int64_t multiply_streams(const Weight& w, const float* x, int64_t m, float* y, int64_t pitch, bool accumulate,
                                int threads) {
  if (w.kind == I4 || m > (w.kind == F32 ? STREAM_ROWS : 1)) return 0;
  const int64_t panels = (w.rows + PANEL - 1) / PANEL / STREAMS * STREAMS;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; panel += STREAMS) {
    if (w.kind == I8)
      run_streams<int8_t, 1>(w, panel, x, y, pitch, accumulate);
    else if (m == 1)
      run_streams<float, 1>(w, panel, x, y, pitch, accumulate);
    else
      run_streams<float, STREAM_ROWS>(w, panel, x, y, pitch, accumulate);
  }
  return panels;
}

// y [m, N] (row pitch `pitch`) = x [m, K] w^T + bias, or += with `accumulate`.
static void matmul(const Weight& w, const float* x, int64_t m, float* y, int64_t pitch, bool accumulate, int threads) {
  if (m == 0) return;
  const int64_t from = multiply_streams(w, x, m, y, pitch, accumulate, threads);
  if (w.kind == F32 || m >= (w.kind == I8 ? WIDE_ROWS_I8 : WIDE_ROWS_I4))
    multiply_blocks(w, from, x, m, y, pitch, accumulate, threads);
  else
    multiply_narrow(w, from, x, m, y, pitch, accumulate, threads);
}

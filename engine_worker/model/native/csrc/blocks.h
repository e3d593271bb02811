// Many rows of x by a float32 weight, or by a narrow one that is widened on the way: arithmetic at the processor's rate,
// and memory's way hidden behind it.
//
// A register tile of up to TILE_ROWS rows by two registers of columns runs over one block of K. All tiles of rows pass
// one block of a panel before the next block's turn: the block stays in the first-level cache, the packed rows of x in
// the second, and the sums between blocks in a small scratch. Meanwhile the next block, which lies behind this one in
// memory, is asked for: without that, its way from memory and the arithmetic would add up. So it is with narrow weights,
// whose blocks become float32 in a scratch of that size.
//
// It is asked for into the second-level cache: the first one waits for so few lines at a time (two dozen, each for a
// tenth of a microsecond) that memory comes at half its speed, and one of 32 KB does not hold two blocks. With many
// rows there is time even so. With few the processor's own prefetching suffices, and asking only delays it.
//
// A row's result does not depend on how many rows go with it: every sum is taken in the same order.
#pragma once
#include "pack.h"
#include "weight.h"

constexpr int SLICE = 2 * LANES;  // columns of a register tile: a panel, or half of one
constexpr int UNROLL = 2;
constexpr int ASKS_FROM = MAX_ROWS >= 12 ? 6 : 1;  // rows of x from which on the next block is asked for
constexpr int ASKS_NEAR_FROM = MAX_ROWS >= 12 ? 28 : 1 << 30;  // and those from which on into the first-level cache
constexpr int64_t CHUNK_FLOATS = 1 << 17;  // of x, while the panels pass: half a megabyte

// What is wanted next, asked for while this is worked on: so many cache lines in UNROLL steps over K, into the
// first-level cache (`near`) or the second (`far`).
struct Ahead {
  const char *at, *end;
  int near, far;
};

template <int R>
struct RegisterTile {
  H acc[R][2];
  MEMBER void clear() {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = fill(0);
  }
  MEMBER void step(const float* a, const float* w, int64_t stride = 1) {
    H w0 = load_register(w), w1 = load_register(w + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      H x = fill(a[r * stride]);
      acc[r][0] = fma(x, w0, acc[r][0]);
      acc[r][1] = fma(x, w1, acc[r][1]);
    }
  }
  // to [R, ..], row pitch `pitch`
  MEMBER void put(float* to, bool add, int64_t pitch = PANEL) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++, to += pitch) {
      if (add) acc[r][0] = load_register(to) + acc[r][0], acc[r][1] = load_register(to + LANES) + acc[r][1];
      store(to, acc[r][0]), store(to + LANES, acc[r][1]);
    }
  }
};

// sums [R, PANEL] (of which SLICE columns) = or += a [k, R] transposed, times w [k, PANEL].
template <int R>
static void multiply_block(const float* a, const float* w, int64_t k, float* sums, bool add, Ahead& ahead) {
  RegisterTile<R> tile;
  tile.clear();
  const char* wanted = ahead.at;
  const bool asks = wanted < ahead.end;
  const int near = asks ? ahead.near : 0, far = asks ? ahead.far : 0;
  int64_t i = 0;
  for (; i + UNROLL <= k; i += UNROLL, a += UNROLL * R, w += UNROLL * PANEL) {
    for (int j = 0; j < far; j++) __builtin_prefetch(wanted, 0, 2), wanted += 64;
    for (int j = 0; j < near; j++) __builtin_prefetch(wanted, 0, 3), wanted += 64;
#pragma GCC unroll 8
    for (int u = 0; u < UNROLL; u++) tile.step(a + u * R, w + u * PANEL);
  }
  for (; i < k; i++, a += R, w += PANEL) tile.step(a, w);
  ahead.at = wanted;
  tile.put(sums, add);
}

typedef void (*BlockFunction)(const float*, const float*, int64_t, float*, bool, Ahead&);
template <int R>
INLINE BlockFunction pick_block(int64_t rows) {
  if constexpr (R == 1)
    return multiply_block<1>;
  else
    return rows == R ? multiply_block<R> : pick_block<R - 1>(rows);
}

// One panel's columns of y [rows of the tiles, N] from packed x.
static void run_panel(const Weight& w, int64_t panel, const float* packed, const Tiles& tiles, float* y, int64_t pitch,
                      bool accumulate) {
  const int64_t k = w.cols, length = block_length(w), runs = tiles.count * (PANEL / SLICE);
  const int64_t line = w.kind == F32 ? PANEL * sizeof(float) : w.kind == I8 ? PANEL : PANEL / 2;  // bytes of 32 columns
  float* sums = scratch(1, (size_t)tiles.rows * PANEL);
  float* wide = w.kind == F32 ? nullptr : scratch(10, (size_t)length * PANEL);
  for (int64_t b = 0; b < k; b += length) {
    const int64_t n = std::min(length, k - b);
    const float* block = (const float*)w.data + (panel * k + b) * PANEL;
    const char* next = (const char*)w.data + (panel * k + b + n) * line;
    const int lines = tiles.rows < ASKS_FROM ? 0 : (int)((UNROLL * line + runs * 64 - 1) / (runs * 64));
    const bool is_near = tiles.rows >= ASKS_NEAR_FROM;
    Ahead ahead = {next, next + n * line, is_near ? lines : 0, is_near ? 0 : lines};
    if (wide) widen_block(w, panel, b, n, wide), block = wide;
    for (int64_t column = 0; column < PANEL; column += SLICE)
      for (int64_t t = 0; t < tiles.count; t++) {
        const int64_t first = tiles.first(t), height = tiles.height(t);
        pick_block<TILE_ROWS>(height)(packed + b * tiles.rows + first * n, block + column, n,
                                      sums + first * PANEL + column, b > 0, ahead);
        if (b + n < k || column + SLICE < PANEL) continue;
        for (int64_t r = first; r < first + height; r++)
          finish(w, panel, load(sums + r * PANEL), load(sums + r * PANEL + W), y + r * pitch, accumulate);
      }
  }
}

// Panels from .. of y [m, N] (row pitch `pitch`) = x [m, K] w^T + bias, or += with `accumulate`.
//
// Rows come in chunks whose share of x stays in the second-level cache while all panels pass by.
static void multiply_blocks(const Weight& w, int64_t from, const float* x, int64_t m, float* y, int64_t pitch,
                            bool accumulate, int threads) {
  const int64_t k = w.cols, panels = (w.rows + PANEL - 1) / PANEL;
  const int64_t chunk = std::max<int64_t>(CHUNK_FLOATS / k / TILE_ROWS, 1) * TILE_ROWS, chunks = (m + chunk - 1) / chunk;
  for (int64_t part = 0; part < chunks; part++) {
    const int64_t begin = m * part / chunks;
    const Tiles tiles(m * (part + 1) / chunks - begin, TILE_ROWS);
    float* packed = scratch(0, (size_t)tiles.rows * k);
    pack(x + begin * k, tiles, k, block_length(w), packed);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = from; panel < panels; panel++)
      run_panel(w, panel, packed, tiles, y + begin * pitch, pitch, accumulate);
  }
}

// What lies around a model's layers, for a step that goes through the whole model in one call: embedding, rotation, the
// last norm, the head, and which token each row of logits makes likeliest.
#pragma once
#include "glue.h"
#include "matmul.h"

// As model/fuse_model.py fills it. The embedding is dense [V, hidden], or null: then it is rows of `tied`, in float32 or
// 8 bits. cos, sin [positions, rotary]: what each position is rotated by.
struct Head {
  Weight head, tied;
  const float *embedding, *norm, *cos, *sin;
  int64_t vocab, hidden, rotary;
  float eps;
};

INLINE void embed(const Head& m, int64_t id, float* out) {
  if (m.embedding) {
    std::memcpy(out, m.embedding + id * m.hidden, m.hidden * sizeof(float));
    return;
  }
  const int64_t panel = id / PANEL * m.hidden * PANEL, column = id % PANEL;
  if (m.tied.kind == F32) {
    const float* at = (const float*)m.tied.data + panel + column;
    for (int64_t k = 0; k < m.hidden; k++) out[k] = at[k * PANEL];
  } else {
    const int8_t* at = (const int8_t*)m.tied.data + panel + column;
    const float scale = ((const float*)m.tied.scales)[id];
    for (int64_t k = 0; k < m.hidden; k++) out[k] = at[k * PANEL] * scale;
  }
}

// The first of a row's largest numbers, or the first that is no number if there is one.
INLINE void find_likeliest(const float* row, int64_t n, float* best, int64_t* id) {
  constexpr int64_t PART = 1024;
  V zeros = set1(0);
  float most = -INFINITY;
  int64_t from = 0;  // the first part that has it
  const int64_t whole = n - n % W;
  for (int64_t begin = 0; begin < whole; begin += PART) {
    const int64_t end = std::min(whole, begin + PART);
    V peak = load(row + begin);
    for (int64_t i = begin; i < end; i += W) {
      V x = load(row + i);
      peak = vmax(peak, x), zeros = fma(x, set1(0), zeros);  // a NaN or an infinity stays in `zeros`
    }
    const float part = top(peak);
    if (part > most) most = part, from = begin;
  }
  int64_t next = whole;  // the first that is still to be looked at
  if (whole > 0 && sum(zeros) == 0) {
    while (row[from] != most) from++;
  } else {
    from = 0, most = row[0], next = 1;
  }
  for (int64_t i = next; i < n && most == most; i++)
    if (!(row[i] <= most)) most = row[i], from = i;
  *best = most, *id = from;
}

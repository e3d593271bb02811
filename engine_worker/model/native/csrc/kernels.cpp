// The library's functions, with C linkage: plain pointers and sizes, so that no header of torch or Python is needed to
// build it and no version of theirs can break it. native/kernels.py is the other side of every signature here.
#include "layer.h"
#include "model.h"

extern "C" {

int64_t wg_abi() { return 6; }

void wg_rms_norm(float* x, const float* delta, const float* weight, float eps, float* out, int64_t rows, int64_t n) {
  rms_norm(x, delta, weight, eps, out, rows, n, n, n);
}

void wg_silu_mul(const float* gate_up, float* out, int64_t rows, int64_t n) { silu_mul(gate_up, out, rows, n); }

void wg_matmul(const Weight* w, const float* x, int64_t m, float* y, int64_t accumulate, int64_t threads) {
  matmul(*w, x, m, y, w->rows, accumulate != 0, (int)threads);
}

void wg_attend(const Attention* call, int64_t threads) { attend(*call, (int)threads); }

int64_t wg_shared_tokens(const Attention* call, int64_t* tokens) { return shared_tokens(*call, tokens); }

// qkv [T, (q_heads + 2 kv_heads) dim]: norm and rotate queries in place and keys on their way into the cache; write the
// values there too. cos, sin [T, rotary]. Returns whether all that went into the cache is finite.
int64_t wg_rope_write(float* qkv, const float* cos, const float* sin, int64_t rotary, const float* q_norm,
                      const float* k_norm, float q_eps, float k_eps, const int64_t* slots, const Cache* cache, int64_t tokens,
                      int64_t q_heads, int64_t kv_heads, int64_t dim) {
  const int64_t pitch = (q_heads + 2 * kv_heads) * dim;
  const Tokens step = {tokens, slots, cos, sin};
  turn_queries(qkv, pitch, tokens, nullptr, q_heads, dim, q_norm, q_eps, step, rotary);
  return write_keys(qkv + q_heads * dim, pitch, kv_heads, dim, k_norm, k_eps, step, rotary, *cache);
}

// A whole layer on hidden [T, hidden], in place. Returns whether the keys and values it wrote are finite.
int64_t wg_layer(const Layer* layer, const Attention* call, float* hidden, const float* cos, const float* sin,
                 const int64_t* slots, int64_t tokens, int64_t threads) {
  return run_layer(*layer, *call, hidden, {tokens, slots, cos, sin}, {nullptr, -1}, (int)threads);
}

// Layers one after the other; of the last one's results only rows `needed` are right, all if `num_needed` is below 0.
// Returns whether the last one's keys and values are finite.
int64_t wg_layers(const Layer* layers, int64_t count, const Attention* call, float* hidden, const float* cos,
                  const float* sin, const int64_t* slots, int64_t tokens, const int64_t* needed, int64_t num_needed,
                  int64_t threads) {
  int64_t sound = 1;
  for (int64_t i = 0; i < count; i++)
    sound = run_layer(layers[i], *call, hidden, {tokens, slots, cos, sin}, {needed, i + 1 < count ? -1 : num_needed},
                      (int)threads);
  return sound;
}

// The likeliest of each row of logits [rows, n], and its logit.
void wg_find_likeliest(const float* logits, int64_t rows, int64_t n, float* best, int64_t* likeliest, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1 && rows > 1)
  for (int64_t r = 0; r < rows; r++) find_likeliest(logits + r * n, n, best + r, likeliest + r);
}

// A step of a whole model, from token ids [T] to logits [num_keep, V] of the pack positions `keep`, and the likeliest
// token of each with its logit. Returns whether the last layer's keys and values are finite; -1, and nothing is done, for
// an id outside the vocabulary.
int64_t wg_model(const Head* model, const Layer* layers, int64_t count, const Attention* call, const int64_t* ids,
                 const int64_t* positions, const int64_t* slots, int64_t tokens, const int64_t* keep, int64_t num_keep,
                 float* logits, float* best, int64_t* likeliest, int64_t threads) {
  const Head& m = *model;
  for (int64_t t = 0; t < tokens; t++)
    if (ids[t] < 0 || ids[t] >= m.vocab) return -1;
  static thread_local std::vector<float> buffer;
  const size_t needed = tokens * (m.hidden + 2 * m.rotary) + num_keep * m.hidden;
  if (buffer.size() < needed) buffer.resize(needed);
  float *hidden = buffer.data(), *cos = hidden + tokens * m.hidden, *sin = cos + tokens * m.rotary;
  float* kept = sin + tokens * m.rotary;
  for (int64_t t = 0; t < tokens; t++) {
    embed(m, ids[t], hidden + t * m.hidden);
    std::memcpy(cos + t * m.rotary, m.cos + positions[t] * m.rotary, m.rotary * sizeof(float));
    std::memcpy(sin + t * m.rotary, m.sin + positions[t] * m.rotary, m.rotary * sizeof(float));
  }
  static thread_local std::vector<int64_t> rows;  // `keep` in order, each once
  rows.assign(keep, keep + num_keep);
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  const int64_t num_rows = (int64_t)rows.size() < tokens ? (int64_t)rows.size() : -1;
  const int64_t sound = wg_layers(layers, count, call, hidden, cos, sin, slots, tokens, num_rows < 0 ? nullptr : rows.data(),
                                  num_rows, threads);
  for (int64_t r = 0; r < num_keep; r++)
    rms_norm(hidden + keep[r] * m.hidden, nullptr, m.norm, m.eps, kept + r * m.hidden, 1, m.hidden, m.hidden, m.hidden);
  matmul(m.head, kept, num_keep, logits, m.head.rows, false, (int)threads);
  wg_find_likeliest(logits, num_keep, m.head.rows, best, likeliest, threads);
  return sound;
}
}

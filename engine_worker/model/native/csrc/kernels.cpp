// The library's functions, with C linkage: plain pointers and sizes, so that no header of torch or Python is needed to
// build it and no version of theirs can break it. native/kernels.py is the other side of every signature here.
#include "attention_tasks.h"
#include "glue.h"

// One decoder layer, as native/kernels.py fills it: pre-norm, rotary attention, gated MLP.
struct Layer {
  Weight qkv, out, gate_up, down;
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
  Cache cache;
  int64_t hidden, inner, rotary;
  float input_eps, post_eps, q_eps, k_eps;
  float scaling;                // of attention scores
};

extern "C" {

int64_t wg_abi() { return 4; }

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
  int64_t pitch = (q_heads + 2 * kv_heads) * dim;
  bool sound = true;
  for (int64_t t = 0; t < tokens; t++) {
    float* line = qkv + t * pitch;
    if (q_norm) rms_norm(line, nullptr, q_norm, q_eps, line, q_heads, dim, dim, dim);
    if (k_norm) rms_norm(line + q_heads * dim, nullptr, k_norm, k_eps, line + q_heads * dim, kv_heads, dim, dim, dim);
    for (int64_t h = 0; rotary && h < q_heads + kv_heads; h++)
      rotate(line + h * dim, cos + t * rotary, sin + t * rotary, rotary);
    const float *key = line + q_heads * dim, *value = key + kv_heads * dim;
    for (int64_t h = 0; h < kv_heads; h++) {
      int64_t index = slots[t] * kv_heads + h;
      store_row(key + h * dim, dim, cache->key_kind, cache->keys, cache->key_scales, index);
      store_row(value + h * dim, dim, cache->value_kind, cache->values, cache->value_scales, index);
    }
    sound = all_finite(key, 2 * kv_heads * dim) && sound;
  }
  return sound;
}

// A whole layer on hidden [T, hidden], in place. `call` brings spans, tables and heads; what is the layer's own is set
// here. Returns whether the keys and values it wrote are finite.
int64_t wg_layer(const Layer* layer, const Attention* call, float* hidden, const float* cos, const float* sin,
                 const int64_t* slots, int64_t tokens, int64_t threads) {
  const Layer& l = *layer;
  Attention c = *call;
  int64_t dim = c.key_dim, width = (c.q_heads + 2 * c.kv_heads) * dim;
  static thread_local std::vector<float> buffer;
  size_t needed = (size_t)tokens * (l.hidden + width + c.q_heads * dim + 3 * l.inner);
  if (buffer.size() < needed) buffer.resize(needed);
  float *norm = buffer.data(), *qkv = norm + tokens * l.hidden, *mixed = qkv + tokens * width;
  float *gate_up = mixed + tokens * c.q_heads * dim, *inner = gate_up + tokens * 2 * l.inner;

  rms_norm(hidden, nullptr, l.input_norm, l.input_eps, norm, tokens, l.hidden, l.hidden, l.hidden);
  matmul(l.qkv, norm, tokens, qkv, width, false, (int)threads);
  int64_t sound = wg_rope_write(qkv, cos, sin, l.rotary, l.q_norm, l.k_norm, l.q_eps, l.k_eps, slots, &l.cache,
                                tokens, c.q_heads, c.kv_heads, dim);
  c.query = qkv, c.query_pitch = width, c.out = mixed, c.cache = l.cache, c.scale = l.scaling;
  attend(c, (int)threads);
  matmul(l.out, mixed, tokens, hidden, l.hidden, true, (int)threads);
  rms_norm(hidden, nullptr, l.post_norm, l.post_eps, norm, tokens, l.hidden, l.hidden, l.hidden);
  matmul(l.gate_up, norm, tokens, gate_up, 2 * l.inner, false, (int)threads);
  silu_mul(gate_up, inner, tokens, l.inner);
  matmul(l.down, inner, tokens, hidden, l.hidden, true, (int)threads);
  return sound;
}
// Layers one after the other. Returns whether the last one's keys and values are finite.
int64_t wg_layers(const Layer* layers, int64_t count, const Attention* call, float* hidden, const float* cos,
                  const float* sin, const int64_t* slots, int64_t tokens, int64_t threads) {
  int64_t sound = 1;
  for (int64_t i = 0; i < count; i++) sound = wg_layer(layers + i, call, hidden, cos, sin, slots, tokens, threads);
  return sound;
}
}

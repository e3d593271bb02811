// Decoder layers: pre-norm, rotary attention, gated MLP, each in one call, or all of a model one after the other.
//
// Of the last layer's results only some are read: the rows that tokens are sampled from. Its keys and values are needed
// of every token, all else in it of those rows alone.
#pragma once
#include "attention_tasks.h"
#include "glue.h"

// As native/kernels.py fills it.
struct Layer {
  Weight qkv, out, gate_up, down;
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
  Cache cache;
  int64_t hidden, inner, rotary;
  float input_eps, post_eps, q_eps, k_eps;
  float scaling;                // of attention scores
};

// A step's tokens: where their keys and values go, and by what their heads are turned. cos, sin [T, rotary].
struct Tokens {
  int64_t count;
  const int64_t* slots;
  const float *cos, *sin;
};

// Rows of hidden [T, hidden] that are read afterwards, in ascending order. A count below 0: all.
struct Needed { const int64_t* rows; int64_t count; };

// What lies between a layer's products, for so many tokens.
struct LayerRoom {
  float *norm, *qkv, *mixed, *gate_up, *inner;
  LayerRoom(const Layer& l, const Attention& c, int64_t tokens) {
    static thread_local std::vector<float> buffer;
    const int64_t width = (c.q_heads + 2 * c.kv_heads) * c.key_dim, mix = c.q_heads * c.key_dim;
    const size_t floats = (size_t)tokens * (l.hidden + width + mix + 3 * l.inner);
    if (buffer.size() < floats) buffer.resize(floats);
    norm = buffer.data(), qkv = norm + tokens * l.hidden, mixed = qkv + tokens * width;
    gate_up = mixed + tokens * mix, inner = gate_up + tokens * 2 * l.inner;
  }
};

// Norm (where there is one) and rotate heads [count, dim] of one token in place.
INLINE void turn_heads(float* heads, int64_t count, int64_t dim, const float* norm, float eps, const float* cos,
                       const float* sin, int64_t rotary) {
  if (norm) rms_norm(heads, nullptr, norm, eps, heads, count, dim, dim, dim);
  for (int64_t h = 0; rotary && h < count; h++) rotate(heads + h * dim, cos, sin, rotary);
}

// Norm and rotate queries [count, heads * dim] (row pitch `pitch`) in place. Row i is token rows[i], or i.
static void turn_queries(float* queries, int64_t pitch, int64_t count, const int64_t* rows, int64_t heads, int64_t dim,
                         const float* norm, float eps, const Tokens& tokens, int64_t rotary) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = (rows ? rows[i] : i) * rotary;
    turn_heads(queries + i * pitch, heads, dim, norm, eps, tokens.cos + t, tokens.sin + t, rotary);
  }
}

// Norm and rotate keys [T, heads * dim] (row pitch `pitch`, behind each the values) on their way into the cache, and
// write the values there too. Returns whether all that went into the cache is finite.
static bool write_keys(float* keys, int64_t pitch, int64_t heads, int64_t dim, const float* norm, float eps,
                       const Tokens& tokens, int64_t rotary, const Cache& cache) {
  bool sound = true;
  for (int64_t t = 0; t < tokens.count; t++) {
    float *key = keys + t * pitch, *value = key + heads * dim;
    turn_heads(key, heads, dim, norm, eps, tokens.cos + t * rotary, tokens.sin + t * rotary, rotary);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t index = tokens.slots[t] * heads + h;
      store_row(key + h * dim, dim, cache.key_kind, cache.keys, cache.key_scales, index);
      store_row(value + h * dim, dim, cache.value_kind, cache.values, cache.value_scales, index);
    }
    sound = all_finite(key, 2 * heads * dim) && sound;
  }
  return sound;
}

// From the queries on: hidden [rows, hidden] += attention, then += MLP. `call` describes these rows.
static void attend_and_think(const Layer& l, const Attention& call, float* hidden, int64_t rows, const LayerRoom& room,
                             int threads) {
  attend(call, threads);
  matmul(l.out, room.mixed, rows, hidden, l.hidden, true, threads);
  rms_norm(hidden, nullptr, l.post_norm, l.post_eps, room.norm, rows, l.hidden, l.hidden, l.hidden);
  matmul(l.gate_up, room.norm, rows, room.gate_up, 2 * l.inner, false, threads);
  silu_mul(room.gate_up, room.inner, rows, l.inner);
  matmul(l.down, room.inner, rows, hidden, l.hidden, true, threads);
}

// The call's spans, cut down to the needed rows, which lie side by side in the queries.
static std::vector<Span> spans_of(const Attention& call, const Needed& needed) {
  std::vector<Span> found;
  int64_t i = 0;
  for (const Span* span = call.spans; span < call.spans + call.num_spans; span++)
    for (const int64_t end = span->offset + span->num_tokens; i < needed.count && needed.rows[i] < end;) {
      const int64_t begin = i, first = needed.rows[i];
      while (++i < needed.count && needed.rows[i] < end && needed.rows[i] == first + i - begin) {}
      found.push_back({begin, i - begin, span->start + first - span->offset, span->row});
    }
  return found;
}

// A layer on hidden [T, hidden], in place. Other rows than those needed are left as they are. `call` brings spans, tables
// and heads; what is the layer's own is set here. Returns whether the keys and values it wrote are finite.
static bool run_layer(const Layer& l, const Attention& call, float* hidden, const Tokens& tokens, const Needed& needed,
                      int threads) {
  const LayerRoom room(l, call, tokens.count);
  const int64_t dim = call.key_dim, queries = call.q_heads * dim, width = queries + 2 * call.kv_heads * dim;
  const int64_t panel = needed.count < 0 ? 0 : queries / PANEL;  // from here on all tokens are multiplied
  rms_norm(hidden, nullptr, l.input_norm, l.input_eps, room.norm, tokens.count, l.hidden, l.hidden, l.hidden);
  matmul(part_of(l.qkv, panel, l.qkv.rows), room.norm, tokens.count, room.qkv + panel * PANEL, width, false, threads);
  const bool sound = write_keys(room.qkv + queries, width, call.kv_heads, dim, l.k_norm, l.k_eps, tokens, l.rotary, l.cache);
  Attention c = call;
  c.query = room.qkv, c.query_pitch = width, c.out = room.mixed, c.cache = l.cache, c.scale = l.scaling;
  if (needed.count < 0) {
    turn_queries(room.qkv, width, tokens.count, nullptr, call.q_heads, dim, l.q_norm, l.q_eps, tokens, l.rotary);
    attend_and_think(l, c, hidden, tokens.count, room, threads);
    return sound;
  }
  static thread_local std::vector<float> kept;
  kept.resize(needed.count * l.hidden);
  const size_t line = l.hidden * sizeof(float);
  for (int64_t i = 0; i < needed.count; i++) {
    std::memcpy(kept.data() + i * l.hidden, hidden + needed.rows[i] * l.hidden, line);
    if (needed.rows[i] != i) std::memcpy(room.norm + i * l.hidden, room.norm + needed.rows[i] * l.hidden, line);
  }
  matmul(part_of(l.qkv, 0, queries), room.norm, needed.count, room.qkv, width, false, threads);
  turn_queries(room.qkv, width, needed.count, needed.rows, call.q_heads, dim, l.q_norm, l.q_eps, tokens, l.rotary);
  const std::vector<Span> spans = spans_of(call, needed);
  c.spans = spans.data(), c.num_spans = spans.size();
  attend_and_think(l, c, kept.data(), needed.count, room, threads);
  for (int64_t i = 0; i < needed.count; i++)
    std::memcpy(hidden + needed.rows[i] * l.hidden, kept.data() + i * l.hidden, line);
  return sound;
}

// Decoding requests whose block tables begin alike: the blocks that they share are attended to once for all of them.
//
// Alone, a decoding request reads its whole context for the few query heads of a key head. Requests behind one prefix
// read the same memory again and again, and take dot products where a matrix product would do. So their queries become
// the rows of one: each chunk of shared keys is turned once, as in prefill, and the register tiles of blocks.h do the
// rest. What comes out, a running softmax (peak, total and weighted sums) of every row, is what each request then goes on
// from over the blocks of its own. Merging partial softmaxes this way is exact; Hydragen and ChunkAttention split
// attention like that, and FlashInfer calls it cascade attention.
//
// Who shares what: tables are sorted, so that those with a common beginning are neighbours. Among all cuts into groups of
// neighbours the one that saves most time is taken, by a rough model of it (`saved`). Only whole blocks behind which
// every member has a token left are shared, and only from position 0 on: a request that sees less (a window that has
// moved on) is left out.
#pragma once
#include "attention_prefill.h"

// Members order[first .. first + count - 1] share `tokens` tokens.
struct Group { int64_t first, count, tokens; };

// `results` [order][q_heads][value_dim + 2]: sums, peak and total of each row over what its group shares.
struct Sharing {
  std::vector<const Span*> order;
  std::vector<Group> groups;
  std::vector<float> results;
};

constexpr int64_t MOST_MEMBERS = 64;  // of a group: bounds both the search and the scratch memory

// Time saved by a group, counted in tokens of one member's context. Turning keys and values once for all costs as much as
// PAYS_FROM members alone, whatever their number of heads, and setting sums down and taking them up as much as KEEP tokens
// of each. Measured with AVX-512 and AVX2, heads of 64 and 128 numbers, 1 to 8 query heads a key head, every format: 4
// members with 800 tokens about break even, 8 save a quarter to two fifths, 16 two fifths to a half of it.
constexpr float PAYS_FROM = 3.5f, KEEP = 25;
INLINE float saved(int64_t members, int64_t tokens) { return tokens * (members - PAYS_FROM) - KEEP * members; }

// How many leading blocks two requests share, of `most`.
INLINE int64_t common_blocks(const int64_t* a, const int64_t* b, int64_t most) {
  int64_t n = 0;
  while (n < most && a[n] == b[n]) n++;
  return n;
}

static void find_groups(const Attention& c, Sharing& found) {
  auto& order = found.order;
  order.clear(), found.groups.clear();
  auto row_of = [&](const Span* span) { return c.table + span->row * c.table_pitch; };
  auto whole = [&](const Span* span) { return span->start / c.block_size; };  // blocks, with a token left behind them
  for (int64_t s = 0; s < c.num_spans; s++)
    if (c.spans[s].num_tokens == 1 && whole(c.spans + s) && !(c.first && c.first[c.spans[s].offset]))
      order.push_back(c.spans + s);
  if (order.size() < 2) return;
  std::sort(order.begin(), order.end(), [&](const Span* a, const Span* b) {
    return std::lexicographical_compare(row_of(a), row_of(a) + whole(a), row_of(b), row_of(b) + whole(b));
  });
  const int64_t count = order.size();
  static thread_local std::vector<int64_t> shared, cut;  // blocks with the one before; begin of the last group of a prefix
  static thread_local std::vector<float> best;           // time that the first so many save
  shared.assign(count, 0), cut.assign(count + 1, 0), best.assign(count + 1, 0);
  for (int64_t i = 1; i < count; i++)
    shared[i] = common_blocks(row_of(order[i - 1]), row_of(order[i]), std::min(whole(order[i - 1]), whole(order[i])));
  for (int64_t end = 1; end <= count; end++) {
    best[end] = best[end - 1], cut[end] = end - 1;
    int64_t blocks = INT64_MAX;
    for (int64_t i = end - 2; i >= std::max<int64_t>(0, end - MOST_MEMBERS); i--) {
      blocks = std::min(blocks, shared[i + 1]);
      if (!blocks) break;
      const float time = best[i] + saved(end - i, blocks * c.block_size);
      if (time > best[end]) best[end] = time, cut[end] = i;
    }
  }
  for (int64_t end = count; end > 0; end = cut[end]) {
    const int64_t first = cut[end], members = end - first;
    if (members < 2) continue;
    const int64_t blocks = *std::min_element(shared.begin() + first + 1, shared.begin() + end);
    found.groups.push_back({first, members, blocks * c.block_size});
  }
}

// The members' queries, scaled, as [head][tile][key_dim][rows of the tile].
static void pack_queries(const Attention& c, const Sharing& sharing, const Group& group, int64_t head_lo, int64_t num,
                         float* out) {
  const int64_t heads = c.q_heads / c.kv_heads, dk = c.key_dim;
  const Tiles tiles(group.count * heads, TILE_ROWS);
  float* lines = scratch(7, tiles.rows * dk);
  for (int64_t h = 0; h < num; h++, out += tiles.rows * dk) {
    for (int64_t m = 0; m < group.count; m++) {
      const Span& span = *sharing.order[group.first + m];
      const float* from = c.query + span.offset * c.query_pitch + (head_lo + h) * heads * dk;
      for (int64_t i = 0; i < heads * dk; i++) lines[m * heads * dk + i] = from[i] * c.scale;
    }
    for (int64_t t = 0; t < tiles.count; t++)
      turn(lines + tiles.first(t) * dk, dk, tiles.height(t), dk, out + tiles.first(t) * dk);
  }
}

// Key heads head_lo .. head_hi - 1 over what a group shares. A row is a (member, query head of the group of heads).
template <int KEY, int VALUE>
static void attend_shared(const Attention& c, Sharing& sharing, const Group& group, int64_t head_lo, int64_t head_hi) {
  const int64_t heads = c.q_heads / c.kv_heads, rows = group.count * heads, dk = c.key_dim, dv = c.value_dim;
  const int64_t wide = (dv + PANEL - 1) / PANEL * PANEL, num = head_hi - head_lo;
  const Tiles tiles(rows, TILE_ROWS);
  float *queries = scratch(2, num * rows * dk), *sums = scratch(3, num * rows * wide);
  float *keys = scratch(4, KEYS * dk), *values = scratch(5, KEYS * wide);
  float *states = scratch(6, num * rows * 2), *scores = scratch(9, TILE_ROWS * KEYS);
  const Stream key_stream = keys_of(c), value_stream = values_of(c);
  std::fill(sums, sums + num * rows * wide, 0.0f);
  for (int64_t i = 0; i < num * rows; i++) states[2 * i] = -INFINITY, states[2 * i + 1] = 0;
  pack_queries(c, sharing, group, head_lo, num, queries);
  int64_t places[2 * KEYS];
  for (int64_t from = 0; from < group.tokens; from += KEYS) {
    const int64_t n = std::min<int64_t>(KEYS, group.tokens - from);
    const int64_t more = std::min<int64_t>(KEYS, group.tokens - from - n);  // of the next chunk
    find_rows(c, sharing.order[group.first]->row, from, from + n + more, places);
    for (int64_t h = 0; h < num; h++) {
      lay_out<KEY, VALUE>(c, places, n, head_lo + h, keys, values);
      for (int64_t t = 0; t < tiles.count; t++) {
        const int64_t r0 = tiles.first(t), height = tiles.height(t);
        const int64_t at = h * rows + r0;
        float *q = queries + at * dk, *acc = sums + at * wide, *state = states + at * 2;
        const Product score = pick_product<TILE_ROWS, false>(height), add = pick_product<TILE_ROWS, true>(height);
        for (int64_t j = 0; j < n; j += SLICE)
          score(q, keys + j / PANEL * dk * PANEL + j % PANEL, dk, scores + j, KEYS);
        for (int64_t r = 0; r < height; r++) {
          for (int64_t j = n + more * (r0 + r) / rows; j < n + more * (r0 + r + 1) / rows; j++)  // spread: bursts stall
            key_stream.ask<2>(places[j] + head_lo + h), value_stream.ask<2>(places[j] + head_lo + h);
          float shrink;
          soften(scores + r * KEYS, n, state + 2 * r, state + 2 * r + 1, &shrink, c);
          if (shrink == 1) continue;
          for (int64_t i = 0; i < wide; i++) acc[r * wide + i] *= shrink;
        }
        for (int64_t i = 0; i < wide; i += SLICE)
          add(scores, values + i / PANEL * KEYS * PANEL + i % PANEL, n, acc + i, wide);
      }
    }
  }
  for (int64_t h = 0; h < num; h++)
    for (int64_t row = 0; row < rows; row++) {
      const int64_t head = (head_lo + h) * heads + row % heads, at = h * rows + row;
      float* to = sharing.results.data() + ((group.first + row / heads) * c.q_heads + head) * (dv + 2);
      std::copy(sums + at * wide, sums + at * wide + dv, to);
      to[dv] = states[2 * at], to[dv + 1] = states[2 * at + 1];
    }
}

template <int KEY, int VALUE>
static void attend_groups(const Attention& c, Sharing& sharing, int threads) {
  const int64_t step = threads > 1 ? 1 : c.kv_heads, parts = c.kv_heads / step, count = sharing.groups.size() * parts;
  sharing.results.resize(sharing.groups.empty() ? 0 : sharing.order.size() * c.q_heads * (c.value_dim + 2));
  Sharing& found = sharing;  // the caller's, also inside the threads
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; i++)
    attend_shared<KEY, VALUE>(c, found, found.groups[i / parts], i % parts * step, (i % parts + 1) * step);
}

// Let the members' tasks begin behind what is done.
static void go_on_from(const Sharing& sharing, const Attention& c, std::vector<Task>& tasks) {
  if (sharing.groups.empty()) return;
  static thread_local std::vector<const Group*> group_of;
  static thread_local std::vector<const float*> result_of;
  group_of.assign(c.num_spans, nullptr), result_of.resize(c.num_spans);
  for (const Group& group : sharing.groups)
    for (int64_t i = group.first; i < group.first + group.count; i++) {
      const int64_t span = sharing.order[i] - c.spans;
      group_of[span] = &group, result_of[span] = sharing.results.data() + i * c.q_heads * (c.value_dim + 2);
    }
  for (Task& task : tasks)
    if (const Group* group = group_of[task.span - c.spans])
      task.begin = group->tokens, task.so_far = result_of[task.span - c.spans];
}

// For each span how many leading tokens its group does for it, 0 for none. For tests. Returns the number of groups.
static int64_t shared_tokens(const Attention& c, int64_t* tokens) {
  Sharing found;
  find_groups(c, found);
  std::fill(tokens, tokens + c.num_spans, 0);
  for (const Group& group : found.groups)
    for (int64_t i = group.first; i < group.first + group.count; i++) tokens[found.order[i] - c.spans] = group.tokens;
  return found.groups.size();
}

// A step's attention cut into tasks: by request when there are enough of them for all threads, otherwise also by head.
// What decoding requests share goes first, by group and, with several threads, by head.
#pragma once
#include "attention_decode.h"
#include "attention_shared.h"

constexpr int TASKS_A_THREAD = 4;  // with fewer requests than that, heads are tasks of their own

template <int KEY, int VALUE>
static void attend_as(const Attention& c, int threads) {
  static thread_local std::vector<Task> list;
  static thread_local Sharing shared;
  list.clear();
  const int64_t heads = threads > 1 && c.num_spans < TASKS_A_THREAD * threads ? 1 : c.kv_heads;  // of a decoding task
  for (int64_t s = 0; s < c.num_spans; s++) {
    const Span& span = c.spans[s];
    const int64_t step = span.num_tokens == 1 ? heads : 1;
    for (int64_t head = 0; head < c.kv_heads; head += step)
      for (int64_t lo = 0; lo < span.num_tokens; lo += TOKENS)
        list.push_back({&span, head, std::min(head + step, c.kv_heads), span.offset + lo,
                        span.offset + std::min<int64_t>(lo + TOKENS, span.num_tokens),
                        c.first ? c.first[span.offset] : 0, nullptr});
  }
  find_groups(c, shared);
  attend_groups<KEY, VALUE>(c, shared, threads);
  go_on_from(shared, c, list);
  const std::vector<Task>& tasks = list;  // the caller's list, also inside the threads
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (size_t i = 0; i < tasks.size(); i++) {
    const Task* next = threads == 1 && i + 1 < tasks.size() ? &tasks[i + 1] : nullptr;
    if (tasks[i].span->num_tokens == 1)
      decode<KEY, VALUE>(c, tasks[i], next);
    else
      prefill<KEY, VALUE>(c, tasks[i]);
  }
}

// The pairs of formats that model/kv_format.py knows; native/kernels.py lets no other come here.
static void attend(const Attention& c, int threads) {
  if (c.cache.key_kind == ROW_F32)
    attend_as<ROW_F32, ROW_F32>(c, threads);
  else if (c.cache.key_kind == ROW_FP4)
    attend_as<ROW_FP4, ROW_FP4>(c, threads);
  else if (c.cache.value_kind == ROW_FP4)
    attend_as<ROW_I8, ROW_FP4>(c, threads);
  else
    attend_as<ROW_I8, ROW_I8>(c, threads);
}

#pragma once
// Loops of the CPU references over a pool's threads. The caller's split alone fixes what a task computes, so results are the same
// for any number of threads. Tasks must not start parallel loops of their own: they hand serial(exec) to what they call.
#include <algorithm>
#include <functional>

#include "kernels/base/exec.h"
#include "kernels/base/thread_pool.h"

namespace speedrun::kernels {

// The same numerics on the calling thread alone.
inline HostExec serial(const HostExec& exec) { return HostExec{.pool = nullptr, .round_bf16 = exec.round_bf16}; }

// body(index) for index = 0 … count−1, each once, in any order.
template <class Body>
void parallel(const HostExec& exec, int64_t count, const Body& body) {
  if (exec.pool == nullptr || count == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
  } else {
    exec.pool->run(count, std::cref(body));
  }
}

// body(begin, end) for the ranges [0, grain), [grain, 2·grain), … of [0, n).
template <class Body>
void parallel_ranges(const HostExec& exec, int64_t n, int64_t grain, const Body& body) {
  parallel(exec, (n + grain - 1) / grain, [&](int64_t i) { body(i * grain, std::min(n, (i + 1) * grain)); });
}

// Values on their way to an activation buffer, rounded where they lie.
template <class T>
void round_stored(T* values, int64_t count, const HostExec& exec) {
  if (!exec.round_bf16) return;
  for (int64_t i = 0; i < count; ++i) values[i] = exec.store(values[i]);
}

// The same for `rows` rows of `columns`, on all threads.
template <class T>
void round_rows(T* values, int64_t rows, int64_t columns, const HostExec& exec) {
  constexpr int64_t kRowsAtOnce = 16;
  if (!exec.round_bf16) return;
  parallel_ranges(exec, rows, kRowsAtOnce,
                  [&](int64_t begin, int64_t end) { round_stored(values + begin * columns, (end - begin) * columns, exec); });
}

}  // namespace speedrun::kernels

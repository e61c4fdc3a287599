#pragma once
// Sums over the rows of a matrix (bias and gain gradients) in a fixed order: the rows are cut into parts by N alone, each part is
// summed top to bottom, and the parts are added in ascending order. Both devices use the same cut, so one scratch size serves both.
#include "kernels/base/host_parallel.h"

namespace speedrun::kernels {

// At most 64 parts of at least 64 rows: enough blocks for a GPU next to the split over columns, small enough for a head's V
// columns.
constexpr int64_t column_sum_parts(int64_t N) { return N <= 64 ? 1 : N >= 64 * 64 ? 64 : (N + 63) / 64; }

// First row of a part; part == parts gives N.
constexpr int64_t part_begin(int64_t part, int64_t parts, int64_t N) {
  const int64_t rows = (N + parts - 1) / parts;
  return part * rows < N ? part * rows : N;
}

// sum (C) += partial (parts, C), added in ascending order of parts.
template <class A>
void add_parts(A* sum, const A* partial, int64_t parts, int64_t C, const HostExec& exec) {
  constexpr int64_t kColumns = 1024;
  parallel_ranges(exec, C, kColumns, [&](int64_t begin, int64_t end) {
    for (int64_t part = 0; part < parts; ++part) {
      const A* __restrict row = partial + part * C;
      for (int64_t c = begin; c < end; ++c) sum[c] += row[c];
    }
  });
}

// sum (C) += Σ_rows inp (N, C); scratch holds column_sum_parts(N)·C elements.
template <class T>
void column_sum(Acc<T>* sum, const T* inp, Acc<T>* scratch, int64_t N, int64_t C, const HostExec& exec) {
  const int64_t parts = column_sum_parts(N);
  parallel(exec, parts, [&](int64_t part) {
    Acc<T>* __restrict partial = scratch + part * C;
    for (int64_t c = 0; c < C; ++c) partial[c] = 0;
    for (int64_t n = part_begin(part, parts, N); n < part_begin(part + 1, parts, N); ++n) {
      const T* __restrict row = inp + n * C;
      for (int64_t c = 0; c < C; ++c) partial[c] += row[c];
    }
  });
  add_parts(sum, scratch, parts, C, exec);
}

}  // namespace speedrun::kernels

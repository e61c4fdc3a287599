#pragma once
// Tiles of (queries × keys) scores for the CPU references of attention.
#include <cmath>
#include <limits>

#include "kernels/base/fast_math.h"
#include "kernels/gemm/gemm_ref.h"

namespace speedrun::kernels {

// Tokens begin … end − 1.
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// scores (keys) of one row <- e^(score − lse) on the keys first … last − 1 that it sees, 0 elsewhere.
template <class T>
struct Exponentiate {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(T* row, int64_t first, int64_t last, int64_t keys, T lse) {
    using S = Simd<T, W>;
    for (int64_t j = 0; j < first; ++j) row[j] = 0;
    for (int64_t j = first; j < last; j += S::kLanes) {
      store_lanes<S>(row + j, vector_exp<S>(load_lanes<S>(row + j, last - j) - lse), last - j);
    }
    for (int64_t j = last; j < keys; ++j) row[j] = 0;
  }
};

// log Σ e^x over count > 0 numbers.
template <class T>
struct LogSumExp {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(T* result, const T* x, int64_t count) {
    using S = Simd<T, W>;
    constexpr T kLowest = -std::numeric_limits<T>::infinity();
    typename S::Vec largest = S::fill(kLowest), sum{};
    for (int64_t j = 0; j < count; j += S::kLanes) largest = S::max(largest, load_lanes<S>(x + j, count - j, kLowest));
    const T top = S::largest(largest);
    for (int64_t j = 0; j < count; j += S::kLanes) sum += vector_exp<S>(load_lanes<S>(x + j, count - j, kLowest) - top);
    *result = top + std::log(S::sum(sum));
  }
};

// scores (rows, columns) = scale · r · cᵀ of one head; r and c (·, D) with their row strides.
template <class T>
void make_scores(T* scores, const T* r, int64_t stride_r, Span rows, const T* c, int64_t stride_c, Span columns, int D,
                 double scale, const HostExec& exec) {
  gemm_ref(GemmRef<T>{.c = scores,
                      .a = r + rows.begin * stride_r,
                      .b = c + columns.begin * stride_c,
                      .M = rows.size(),
                      .N = columns.size(),
                      .K = D,
                      .lda = stride_r,
                      .ldb = stride_c,
                      .ldc = columns.size(),
                      .transpose_b = true,
                      .alpha = static_cast<T>(scale)},
           exec);
}

}  // namespace speedrun::kernels

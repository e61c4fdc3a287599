#pragma once
// Matrix products of the CPU references: row-major C (M, N) = alpha · op(A) · op(B) + beta · C, in an order that vectorises and
// that does not depend on the number of threads. T = float or double.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct GemmRef {
  T* c;        // (M, N), row stride ldc
  const T* a;  // transpose_a ? (K, M) : (M, K), row stride lda
  const T* b;  // transpose_b ? (N, K) : (K, N), row stride ldb
  int64_t M, N, K;
  int64_t lda, ldb, ldc;
  bool transpose_a = false, transpose_b = false;
  T alpha = 1, beta = 0;  // beta 0: C is written, never read
};

template <class T>
void gemm_ref(const GemmRef<T>& args, const HostExec& exec);

}  // namespace speedrun::kernels

#pragma once
// FP8 matrix products of the CPU references: c (M, N) = scale_a · scale_b · A (M, K) · B (N, K)ᵀ + beta · c on the numbers that the
// codes stand for; products and sums in T (float or double). E4M3 both, or one of them E5M2.
#include "kernels/base/exec.h"
#include "kernels/fp8/fp8_types.h"

namespace speedrun::kernels {

template <class T, class A, class B = e4m3>
struct Fp8ProductRef {
  T* c;        // (M, N)
  const A* a;  // (M, K)
  const B* b;  // (N, K)
  float scale_a, scale_b;
  int64_t M, N, K;
  T beta = 0;  // 0: c is written, never read
};

template <class T, class A, class B>
void fp8_product_ref(const Fp8ProductRef<T, A, B>& args, const HostExec& exec);

}  // namespace speedrun::kernels

#pragma once
// The products of projection_fp8.h in the CPU references.
#include "kernels/gemm/projection_fp8.h"

namespace speedrun::kernels {

// out (N, O) = a (N, K) · bᵀ (O, K) · scales, an activation or its gradient, stored once. E4M3 both, or A E5M2.
template <class T, class A>
void fp8_activation_ref(T* out, const A* a, const Fp8Scale& scale_a, const e4m3* b, const Fp8Scale& scale_b, int64_t N, int64_t K,
                        int64_t O, const HostExec& exec);

// dweight (M, K) += a (M, N) · bᵀ (K, N) · scales, a sum over tokens. One of them E4M3, the other E5M2.
template <class T, class A, class B>
void fp8_weight_grad_ref(T* dweight, const A* a, const Fp8Scale& scale_a, const B* b, const Fp8Scale& scale_b, int64_t M, int64_t K,
                         int64_t N, const HostExec& exec);

// A layer without bias; products in FP8 as `fp8` has them.
template <class T>
void projection_ref(T* out, const T* inp, const T* weight, const ProjectionFp8& fp8, int64_t N, int K, int O, const HostExec& exec);
// dinp may be null.
template <class T>
void projection_grad_ref(T* dinp, Acc<T>* dweight, const T* dout, const T* inp, const T* weight, const ProjectionFp8& fp8,
                         int64_t N, int K, int O, const HostExec& exec);

}  // namespace speedrun::kernels

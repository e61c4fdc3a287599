#pragma once
// The matrix product of a layer and its gradients as the CPU references of linear, qkv, mlp and head use them. weight rows are
// output features.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

// out (N, O) = inp (N, K) · weightᵀ (O, K) + bias (O) or null + residual (N, O) or null; stored once. residual may alias out.
template <class T>
void affine_ref(T* out, const T* inp, const T* weight, const T* bias, const T* residual, int64_t N, int64_t K, int64_t O,
                const HostExec& exec);

// dinp (N, K) = dout (N, O) · weight (O, K); stored once.
template <class T>
void affine_input_grad_ref(T* dinp, const T* dout, const T* weight, int64_t N, int64_t K, int64_t O, const HostExec& exec);

// dweight (O, K) += doutᵀ · inp
template <class T>
void affine_weight_grad_ref(Acc<T>* dweight, const T* dout, const T* inp, int64_t N, int64_t K, int64_t O, const HostExec& exec);

}  // namespace speedrun::kernels

#pragma once
// Projection to queries, keys and values, with optional per-head RMS norm of q and k and rotary positions:
//   (q, k, v) = inp · weightᵀ + bias;   q, k <- rms_norm over the D of each head (no gain);   q, k <- rotate
// Rotary, pairs (i, i + D/2) with angle θ = pos·ω_i, pos = t mod row_tokens:  y_i = x_i cos θ + x_{i+D/2} sin θ;
//   y_{i+D/2} = −x_i sin θ + x_{i+D/2} cos θ  (Optimization Track, section 2; ω_i = 0 leaves a pair alone).
// The buffer keeps only the final q and k: backward recovers the normalised values by rotating back, so nothing else but rstd is
// saved. Norm and rotary in Acc<T>, one rounding at the store (and one before, at the product's store, on CUDA's first form).
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct QkvForward {
  T* qkv;                    // (N, 3C): q heads, k heads, v heads, each (H, D)
  Acc<T>* qk_rstd;           // (N, 2H) saved for backward; null without qk_norm
  const T* inp;              // (N, C)
  const T* weight;           // (3C, C)
  const T* bias;             // (3C) or null
  const Acc<T>* rotary_cos;  // (row_tokens, D/2) or null: no rotary
  const Acc<T>* rotary_sin;  // (row_tokens, D/2)
  int64_t N;
  int64_t row_tokens;
  int C, H;    // D = C / H
  double eps;  // of the q, k norm
};

template <class T>
struct QkvBackward {
  T* dinp;                // (N, C) =
  Acc<T>* dweight;        // (3C, C) +=
  Acc<T>* dbias;          // (3C) += or null
  T* dqkv;                // (N, 3C) in: gradient of the final q, k, v; out: gradient of the projection's output
  const T* qkv;           // (N, 3C) as forward left it
  const Acc<T>* qk_rstd;  // (N, 2H) or null
  const T* inp;           // (N, C)
  const T* weight;        // (3C, C)
  const Acc<T>* rotary_cos;
  const Acc<T>* rotary_sin;
  Acc<T>* scratch;  // bias_grad_scratch(N, 3C) elements (linear.h's rule) if dbias
  int64_t N;
  int64_t row_tokens;
  int C, H;
};

template <class T>
void qkv_forward(const QkvForward<T>& args, const HostExec& exec);
template <class T>
void qkv_backward(const QkvBackward<T>& args, const HostExec& exec);
void qkv_forward(const QkvForward<bf16>& args, const CudaExec& exec);
void qkv_backward(const QkvBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

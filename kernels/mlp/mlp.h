#pragma once
// The MLP with its residual: pre = inp · up_weightᵀ + up_bias; post = act(pre); out = post · down_weightᵀ + down_bias + residual.
//   gelu   tanh form: 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))); keeps pre and post
//   relu2  max(x, 0)²; keeps post alone: its derivative is 2·√post
// Cost: forward 4·N·C·F FLOPs, backward 8·N·C·F. The place where FP8 copies and fused activations will live.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

enum class Activation : int { gelu, relu2 };

template <class T>
struct MlpForward {
  T* out;                // (N, C)
  T* post;               // (N, F)
  T* pre;                // (N, F), or null for relu2
  const T* inp;          // (N, C)
  const T* residual;     // (N, C); may alias out
  const T* up_weight;    // (F, C)
  const T* up_bias;      // (F) or null
  const T* down_weight;  // (C, F)
  const T* down_bias;    // (C) or null
  int64_t N;
  int C, F;
  Activation activation;
};

template <class T>
struct MlpBackward {
  T* dinp;               // (N, C) =
  Acc<T>* dup_weight;    // (F, C) +=
  Acc<T>* dup_bias;      // (F) += or null
  Acc<T>* ddown_weight;  // (C, F) +=
  Acc<T>* ddown_bias;    // (C) += or null
  T* dhidden;            // (N, F) scratch: gradient of post, then of pre
  const T* dout;         // (N, C)
  const T* inp;          // (N, C)
  const T* pre;          // (N, F) or null for relu2
  const T* post;         // (N, F)
  const T* up_weight;    // (F, C)
  const T* down_weight;  // (C, F)
  Acc<T>* scratch;       // bias_grad_scratch(N, max(F, C)) elements (linear.h's rule) if there are biases
  int64_t N;
  int C, F;
  Activation activation;
};

template <class T>
void mlp_forward(const MlpForward<T>& args, const HostExec& exec);
template <class T>
void mlp_backward(const MlpBackward<T>& args, const HostExec& exec);
void mlp_forward(const MlpForward<bf16>& args, const CudaExec& exec);
void mlp_backward(const MlpBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// Output projection, optional soft-cap and cross-entropy in one op; with gradients it is forward and backward at once, because the
// loss's gradient follows from the logits it has just made. Works through the tokens in chunks, so that (chunk, V) logits are all
// that exists.
//   logit = inp · weightᵀ + bias (rounded to T);   z = cap(logit);   loss[t] = logsumexp(z) − z[target]
//   none: z = logit    rational: z = c·x/√(x² + c²)    sigmoid: z = 23·σ((x + 5)/7.5)  (Main Track)
//   dlogit = grad_scale · (softmax(z) − onehot) · dz/dlogit
// The softmax runs over all V columns, padding included. Cap, softmax and loss in Acc<T>. V·N exceeds 2³¹: 64-bit indices.
// Cost: 2·N·C·V FLOPs forward, 4·N·C·V more with gradients; about 4·N·V elements of traffic.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

enum class Softcap : int { none, rational, sigmoid };

template <class T>
struct HeadLoss {
  Acc<T>* loss;              // (N) = cross-entropy of each token, nats
  T* dinp;                   // (N, C) = ; null: loss only (evaluation)
  Acc<T>* dweight;           // (V, C) += ; null if dinp is null
  Acc<T>* dbias;             // (V) += or null
  const T* inp;              // (N, C)
  const T* weight;           // (V, C)
  const T* bias;             // (V) or null
  const int32_t* targets;    // (N), 0 <= target < V
  const Acc<T>* grad_scale;  // one element on the device: d(objective)/d(loss[t])
  T* logits;                 // (chunk, V) scratch
  Acc<T>* scratch;           // bias_grad_scratch(chunk, V) elements (linear.h's rule) if dbias
  int64_t N;
  int64_t chunk;  // tokens at once; the last chunk may be shorter
  int C, V;       // multiples of 8 on CUDA
  Softcap softcap;
  double softcap_value;  // c of `rational`
};

template <class T>
struct HeadLogits {  // for sampling and tests: capped logits of a few tokens
  T* logits;         // (N, V)
  const T* inp;      // (N, C)
  const T* weight;   // (V, C)
  const T* bias;     // (V) or null
  int64_t N;
  int C, V;
  Softcap softcap;
  double softcap_value;
};

template <class T>
void head_loss(const HeadLoss<T>& args, const HostExec& exec);
template <class T>
void head_logits(const HeadLogits<T>& args, const HostExec& exec);
void head_loss(const HeadLoss<bf16>& args, const CudaExec& exec);
void head_logits(const HeadLogits<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

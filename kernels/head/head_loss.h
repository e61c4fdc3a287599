#pragma once
// Output projection, optional soft-cap and cross-entropy in one op; with gradients it is forward and backward at once, because the
// loss's gradient follows from the logits it has just made. Works through the tokens in chunks, so that (chunk, V) logits are all
// that exists; where chunks are cut changes nothing.
//   logit = inp · weightᵀ + bias (rounded to T);   z = cap(logit);   loss[t] = logsumexp(z) − z[target]
//   none: z = logit    rational: z = c·x/√(x² + c²)    sigmoid: z = 23·σ((x + 5)/7.5)  (Main Track)
//   dlogit = grad_scale · (softmax(z) − onehot) · dz/dlogit
// With several terms (Main Track: multi-token prediction and prefix), i = t's place in its row of n:
//   loss[t] = Σ_{k < terms, i + k < n} w_k·(lse − z[targets[t+k]]) + [π >= 0]·w_p·(lse − z[π]),   π = prefix[targets[t]]
//   dlogit_c = grad_scale · dz_c/dlogit_c · (S·softmax_c − Σ_{k: i + k < n, targets[t+k] = c} w_k − [π = c]·w_p)
//   S = Σ_k w_k (all k: at row ends, where late targets drop out of the loss, the softmax part keeps the full sum) + [π >= 0]·w_p
// The softmax runs over all V columns, padding included. Cap, softmax and loss in Acc<T>. V·N exceeds 2³¹: 64-bit indices.
// FP8 (record #89): forward product, dX and dW from E4M3 inputs and weights and an E5M2 gradient in both layouts (a product that
// sums over tokens wants them contiguous):
//   logit = T(inp8 · weight8ᵀ · inp_scale · weight_scale)             fast accumulation
//   grad8 = e5m2(dlogit / grad_scale8),  grad_scale8 = grad_bound/448 · grad_scale: the stored bits do not depend on grad_scale
//   dinp = grad8 · weight8_tᵀ,  dweight += grad8_t · inp8_tᵀ          accurate accumulation
// Cost: 2·N·C·V FLOPs forward, 4·N·C·V more with gradients; about 4·N·V elements of traffic.
#include "kernels/base/exec.h"
#include "kernels/fp8/fp8.h"

namespace speedrun::kernels {

inline constexpr int kMaxLossTerms = 3;

// Weights of the loss's terms in this step, on the device.
template <class T>
struct LossWeights {
  Acc<T> next[kMaxLossTerms] = {1};  // w_k
  Acc<T> prefix = 0;                 // w_p
};

// Null weight8: BF16. All of it is scratch but the weights, which fp8_weights makes once per step, and the scales. Without bias
// only. On CUDA: sm_90, C, V and the tokens of every chunk, the last one too, multiples of 16 (N and chunk are). A last chunk of
// fewer tokens is stored as densely as the others: (tokens, V) and (V, tokens). Without gradients only weight8, inp8 and the scales
// of the two are used.
struct HeadFp8 {
  const e4m3* weight8 = nullptr;           // (V, C)
  const e4m3* weight8_t = nullptr;         // (C, V)
  const Fp8Scale* weight_scale = nullptr;  // what weight8 was made with
  e4m3* inp8 = nullptr;                    // (chunk, C)
  e4m3* inp8_t = nullptr;                  // (C, chunk)
  Fp8Scale* inp_scale = nullptr;           // fixed: given by the caller
  e5m2* grad8 = nullptr;                   // (chunk, V)
  e5m2* grad8_t = nullptr;                 // (V, chunk)
  float* row_shift = nullptr;              // (chunk), 16-byte aligned, on CUDA: what the gradient's pass needs of each row's sum
  Fp8Scale* grad_scale8 = nullptr;         // its scale is written by the op
  double grad_bound = 0.75;                // |dlogit/grad_scale| that is stored as 448
  bool count = false;                      // count saturated and flushed values of inputs and gradients in their scales
};

enum class Softcap : int { none, rational, sigmoid };

template <class T>
struct HeadLoss {
  Acc<T>* loss;                                  // (N) = cross-entropy of each token, nats; with several terms their weighted sum
  T* dinp;                                       // (N, C) = ; null: loss only (evaluation)
  Acc<T>* dweight;                               // (V, C) += ; null if dinp is null
  Acc<T>* dbias;                                 // (V) += or null
  const T* inp;                                  // (N, C)
  const T* weight;                               // (V, C); not read with FP8
  const T* bias;                                 // (V) or null
  const int32_t* targets;                        // (N), 0 <= target < V
  const LossWeights<T>* loss_weights = nullptr;  // on the device; null: one term of weight 1, no prefix
  int loss_terms = 1;                            // <= kMaxLossTerms; those below are read with loss_weights only
  const int32_t* prefix = nullptr;               // (V) prefix token of each token, -1: none; or null: no prefix term
  int64_t row_tokens = 0;                        // n; N % row_tokens == 0
  const Acc<T>* grad_scale;                      // one element on the device: d(objective)/d(loss[t])
  T* logits;                                     // (chunk, V) scratch
  Acc<T>* scratch;                               // bias_grad_scratch(chunk, V) elements (linear.h's rule) if dbias
  int64_t N;
  int64_t chunk;  // tokens at once; the last chunk may be shorter
  int C, V;       // multiples of 8 on CUDA
  Softcap softcap;
  double softcap_value;  // c of `rational`
  HeadFp8 fp8 = {};
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

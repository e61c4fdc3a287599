#pragma once
// Projection to queries, keys and values in three planes, for the Main Track (modded-nanogpt record #89):
//   (q, k, v) = inp · weightᵀ;   q, k <- rms_norm over the D of each head (no gain);   q, k <- rotate;   k <- shift;   v <- v + …
// Rotary on the first half of a head, adjacent pairs, θ = pos · frequencies[i], i < D/4; the second half does not rotate:
//   y[2i] = cos θ · x[2i] + sin θ · x[2i+1];   y[2i+1] = cos θ · x[2i+1] − sin θ · x[2i]
//   pos = p = t mod row_tokens; with paired heads 2p for even heads, 2p + 1 for odd ones (by the head's own index). θ in Acc<T>.
//
// Key shift: for every t that is not the first of its row, k[t][D/2:] <- the unshifted k[t−1][D/2:], also across documents.
// Values: v_h[t] += value_gate[t, h / gate_heads] · value_embed_h[t];   v[t] += value_add[t].
//
// Planes (N, C) make paired heads a view: head h of token t is head h mod H/2 of position 2t + [h >= H/2] of a stream of 2N tokens
// with row stride C/2, which attention takes as it is.
//
// Backward recovers normalised q and k from the final ones (rotating and shifting back), so only rstd and the keys' last upper
// halves are saved. Norm, rotary and sums in Acc<T>, one rounding at the store (and one before, at the product's store). Each of
// the three products can be in FP8.
#include "kernels/base/exec.h"
#include "kernels/gemm/projection_fp8.h"

namespace speedrun::kernels {

template <class T>
struct SplitQkvForward {
  T *q, *k, *v;     // (N, C) each
  Acc<T>* qk_rstd;  // (N, 2H) saved for backward: q heads, k heads
  T* key_tail;      // (N / row_tokens, H, D/2) saved for backward: the last token's unshifted upper half; null without shift
  T* raw;           // (N, 3C) scratch
  const T* inp;     // (N, C)
  const T* weight;  // (3C, C)
  const Acc<T>* frequencies;  // (D/4)
  const T* value_embed;       // (N, C) or null
  const T* value_gate;        // gate j of token t is value_gate[t·value_gate_stride + j]; null iff value_embed is
  const T* value_add;         // (N, C) or null
  int64_t value_gate_stride;
  int gate_heads;  // neighbouring heads that share a gate: ceil(H / gate_heads) gates
  bool paired;
  bool key_shift;
  int64_t N;
  int64_t row_tokens;  // N % row_tokens == 0
  int C, H;            // D = C / H, a multiple of 4; on CUDA 64 or 128, and H <= 32
  double eps;          // of the q, k norm
  ProjectionFp8 fp8 = {};
};

template <class T>
struct SplitQkvBackward {
  T* dinp;          // (N, C) =
  Acc<T>* dweight;  // (3C, C) +=
  T* dvalue_embed;  // (N, C) = or += ; null without value_embed. value_add's gradient is dv itself
  bool accumulate_dvalue_embed;
  T* dvalue_gate;         // dvalue_gate[t·value_gate_stride + j] =
  T* raw;                 // (N, 3C) scratch: the gradient of the product
  const T *dq, *dk, *dv;  // (N, C) gradients of the final q, k, v
  const T *q, *k;         // (N, C) as forward left them
  const Acc<T>* qk_rstd;
  const T* key_tail;
  const T* inp;
  const T* weight;
  const Acc<T>* frequencies;
  const T* value_embed;
  const T* value_gate;
  int64_t value_gate_stride;
  int gate_heads;
  bool paired;
  bool key_shift;
  int64_t N;
  int64_t row_tokens;
  int C, H;
  ProjectionFp8 fp8 = {};  // dout: (N, 3C), the gradient of the product
};

template <class T>
void split_qkv_forward(const SplitQkvForward<T>& args, const HostExec& exec);
template <class T>
void split_qkv_backward(const SplitQkvBackward<T>& args, const HostExec& exec);
void split_qkv_forward(const SplitQkvForward<bf16>& args, const CudaExec& exec);
void split_qkv_backward(const SplitQkvBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

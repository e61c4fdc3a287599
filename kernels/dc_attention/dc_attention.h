#pragma once
// Lightweight dynamically composable attention (modded-nanogpt record #89; DCMHA, Xiao et al. 2024): a short-range attention whose
// weights are mixed over heads, added to the attention output.
//   p_h(t,s) = softmax over max(doc_start[t], t − window) <= s <= t of scale · q_h(t)·k_h(s)
//   u_h(t)   = w1_h(t) / √(mean_h w1_h(t)² + 1e−6)
//   A(t,s)   = Σ_h u_h(t) · p_h(t,s)                     out_h(t) = y_h(t) + w2_h(t) · Σ_s A(t,s) · v_h(s)
// Accumulation and softmax in Acc<T>. Deterministic: sums in a fixed order, no float atomics. window + 1 <= 256 keys; D = 64 or
// 128, H <= 16 on CUDA. Cost: (2·D·H for the scores + 2·D·H for the values) FLOPs per attended pair forward, about 2.5 times that
// backward.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct DcAttentionForward {
  T* out;              // (N, H, D); not y
  Acc<T>* lse;         // (H, N) saved for backward, natural log
  const T* y;          // (N, H, D)
  const T *q, *k, *v;  // (N, H, D)
  const T *w1, *w2;    // of token t, head h: w1[t·stride + h], w2[t·stride + h]
  int64_t stride;
  const int32_t* doc_start;  // (N)
  int64_t N;
  int H, D;
  int64_t window;  // a query sees itself and `window` keys before it
  double scale;
};

template <class T>
struct DcAttentionBackward {
  T *dq, *dk, *dv;  // (N, H, D) +=
  T *dw1, *dw2;     // with `stride`, =
  const T* dout;    // (N, H, D); the gradient of y is dout itself
  const T *q, *k, *v;
  const T *w1, *w2;
  int64_t stride;
  const Acc<T>* lse;         // (H, N)
  const int32_t* doc_start;  // (N)
  void* scratch;             // dc_attention_scratch(N, H, window) bytes, 256-byte aligned; unused on the CPU
  int64_t N;
  int H, D;
  int64_t window;
  double scale;
};

size_t dc_attention_scratch(int64_t N, int H, int64_t window);  // bytes

template <class T>
void dc_attention_forward(const DcAttentionForward<T>& args, const HostExec& exec);
template <class T>
void dc_attention_backward(const DcAttentionBackward<T>& args, const HostExec& exec);
void dc_attention_forward(const DcAttentionForward<bf16>& args, const CudaExec& exec);
void dc_attention_backward(const DcAttentionBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// Causal softmax attention within documents with a sliding window. The N tokens of a micro-batch are one stream; token t sees the
// keys
//   max(doc_start[t], t − window) … t      (window <= 0: no limit),   score = scale · q·k
// Rows of a batch are documents like any other (doc_start never points before the row), so one kernel serves plain rows and
// documents. doc_start is non-decreasing, doc_start[t] <= t; any N > 0; D = 64 or 128 on CUDA. q, k, v are slices of one buffer:
// element (t, h, d) at t·stride + h·D + d. Accumulation, softmax and lse in Acc<T>. Deterministic: dq, dk, dv are summed in a fixed
// order. Cost: 4·D FLOPs per attended pair and head forward, 10·D backward (14·D in the two-pass form).
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct AttentionForward {
  T* out;       // (N, H·D), packed
  Acc<T>* lse;  // (H, N) log Σ exp(score), natural log; saved for backward
  const T* q;   // (N, H, D) with row stride `stride`
  const T* k;
  const T* v;
  const int32_t* doc_start;  // (N) absolute index in the stream
  int64_t N;
  int64_t stride;  // elements between tokens of q, k, v; stride % 8 == 0
  int H, D;
  int64_t window;
  double scale;
};

template <class T>
struct AttentionBackward {
  T* dq;  // (N, H, D) with row stride `stride`, =
  T* dk;
  T* dv;
  const T* dout;      // (N, H·D)
  const T* out;       // (N, H·D)
  const Acc<T>* lse;  // (H, N)
  const T* q;
  const T* k;
  const T* v;
  const int32_t* doc_start;  // (N)
  Acc<T>* delta;             // (H, N) scratch: Σ_d dout·out
  int64_t N;
  int64_t stride;
  int H, D;
  int64_t window;
  double scale;
};

template <class T>
void attention_forward(const AttentionForward<T>& args, const HostExec& exec);
template <class T>
void attention_backward(const AttentionBackward<T>& args, const HostExec& exec);
void attention_forward(const AttentionForward<bf16>& args, const CudaExec& exec);
void attention_backward(const AttentionBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// Smear (modded-nanogpt): a token's embedding takes in a gated part of the token before it in its row, before the first norm.
//   out[t] = inp[t] + λ · σ(Σ_{c < G} gate_weight[c] · inp[t][c]) · inp[t−1]     out = inp at the first token of a row
// The previous token may belong to another document. Sums in Acc<T>, one rounding at the store. C % 8 == 0 on CUDA, G <= 32.
// Cost: forward reads and writes N·C elements (the second row comes from the cache), backward reads 2·N·C and writes N·C.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct SmearForward {
  T* out;                // (N, C); not inp
  const T* inp;          // (N, C)
  const T* gate_weight;  // (G)
  const T* lambda;       // one element on the device
  int64_t N;
  int64_t row_tokens;  // N % row_tokens == 0
  int C, G;
};

template <class T>
struct SmearBackward {
  T* dinp;               // (N, C) = ; neither dout nor inp
  Acc<T>* dgate_weight;  // (G) +=
  Acc<T>* dlambda;       // one element, +=
  const T* dout;         // (N, C)
  const T* inp;          // (N, C)
  const T* gate_weight;  // (G)
  const T* lambda;
  Acc<T>* scratch;  // smear_scratch(N) elements: partial sums, added in a fixed order
  int64_t N;
  int64_t row_tokens;
  int C, G;
};

int64_t smear_scratch(int64_t N);  // elements of Acc<T>

template <class T>
void smear_forward(const SmearForward<T>& args, const HostExec& exec);
template <class T>
void smear_backward(const SmearBackward<T>& args, const HostExec& exec);
void smear_forward(const SmearForward<bf16>& args, const CudaExec& exec);
void smear_backward(const SmearBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

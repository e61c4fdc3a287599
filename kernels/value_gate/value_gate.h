#pragma once
// Gates of a layer's value embedding (modded-nanogpt record #89):
//   gate[t,h] = 2·σ(Σ_{c<P} w[h][c]·inp[t][c] + Σ_{c<P} w[h][P+c]·embed[t][c]).
// Sums in Acc<T>. Cost: a few channels of N rows. P <= 16, H <= 32 and C % 8 == 0 on CUDA.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct ValueGateForward {
  T* gate;          // (N, H)
  const T* inp;     // (N, C) the layer's normed attention input
  const T* embed;   // (N, C) the tokens' value embeddings
  const T* weight;  // (H, 2P)
  int64_t N;
  int C, H, P;
};

template <class T>
struct ValueGateBackward {
  T* dinp;          // (N, C): channels < P +=
  T* dembed;        // (N, C): channels < P +=
  Acc<T>* dweight;  // (H, 2P) +=
  const T* dgate;   // (N, H)
  const T* gate;    // (N, H) as forward left it
  const T* inp;     // (N, C)
  const T* embed;   // (N, C)
  const T* weight;  // (H, 2P)
  Acc<T>* scratch;  // value_gate_scratch(N, H, P) elements: partial sums, added in a fixed order
  int64_t N;
  int C, H, P;
};

int64_t value_gate_scratch(int64_t N, int H, int P);  // elements of Acc<T>

template <class T>
void value_gate_forward(const ValueGateForward<T>& args, const HostExec& exec);
template <class T>
void value_gate_backward(const ValueGateBackward<T>& args, const HostExec& exec);
void value_gate_forward(const ValueGateForward<bf16>& args, const CudaExec& exec);
void value_gate_backward(const ValueGateBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

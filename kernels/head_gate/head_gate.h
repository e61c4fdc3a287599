#pragma once
// What happens to attention's output head by head before the output projection (modded-nanogpt record #89):
//   XSA   y <- y − tanh(α) · (y·v / max(‖v‖², 1e−8)) · v      α per token and head, v the token's own final value
//   gate  y <- gate · y                                        per token and head, no squashing
// Either may be absent (not both). Sums in Acc<T>, one rounding at the store. D % 8 == 0 and D <= 256 on CUDA.
// Cost: forward reads 2·N·C (N·C without XSA) and writes N·C elements.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct HeadGateForward {
  T* out;          // (N, H, D); not y
  const T* y;      // (N, H, D)
  const T* v;      // (N, H, D); null without alpha
  const T* alpha;  // α of token t, head h is alpha[t·stride + h]; or null
  const T* gate;   // gate[t·stride + h], or null
  int64_t stride;  // of alpha and gate
  int64_t N;
  int H, D;
};

template <class T>
struct HeadGateBackward {
  T* dy;          // (N, H, D) = ; may be dout
  T* dv;          // (N, H, D) = ; null without alpha
  T* dalpha;      // dalpha[t·stride + h] = ; null without alpha
  T* dgate;       // dgate[t·stride + h] = ; null without gate
  const T* dout;  // (N, H, D)
  const T* y;     // (N, H, D) as given to forward
  const T* v;
  const T* alpha;
  const T* gate;
  int64_t stride;
  int64_t N;
  int H, D;
};

template <class T>
void head_gate_forward(const HeadGateForward<T>& args, const HostExec& exec);
template <class T>
void head_gate_backward(const HeadGateBackward<T>& args, const HostExec& exec);
void head_gate_forward(const HeadGateForward<bf16>& args, const CudaExec& exec);
void head_gate_backward(const HeadGateBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

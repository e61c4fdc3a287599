#pragma once
// A small net from the residual stream to a few coefficients per token (modded-nanogpt record #89: MUDD and its gates):
//   h = GELU(inp · w1ᵀ) (exact, erf);   out = (h · w2ᵀ + bias) · scale
// Without w1 and w2 (both null) the coefficients are bias · scale, the same for every token. Sums in Acc<T>, roundings at the
// stores of inp · w1ᵀ, of h as the second product reads it, and of out. CUDA: G % 8 == 0, C % 8 == 0, G <= 128, 1 <= O <= 64. Cost:
// 2·N·(C·G + G·O) FLOPs forward, reads N·C elements.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

template <class T>
struct GateNetForward {
  T* out;          // (N, O)
  T* hidden;       // (N, G) inp · w1ᵀ, before GELU, saved for backward
  const T* inp;    // (N, C)
  const T* w1;     // (G, C) or null
  const T* w2;     // (O, G) or null
  const T* bias;   // (O)
  const T* scale;  // one element on the device, or null: constant_scale
  double constant_scale;
  int64_t N;
  int C, G, O;
};

template <class T>
struct GateNetBackward {
  T* dinp;  // (N, C) += (summed before the one rounding), or = if not `accumulate`; untouched without w1
  bool accumulate;
  Acc<T>* dw1;      // (G, C) +=
  Acc<T>* dw2;      // (O, G) +=
  Acc<T>* dbias;    // (O) +=
  Acc<T>* dscale;   // one element, += ; null without scale
  T* dhidden;       // (N, G) scratch
  const T* dout;    // (N, O)
  const T* hidden;  // (N, G)
  const T* inp;     // (N, C)
  const T* w1;
  const T* w2;
  const T* bias;
  const T* scale;
  double constant_scale;
  Acc<T>* scratch;  // gate_net_scratch(N, G, O) elements: partial sums, added in a fixed order
  int64_t N;
  int C, G, O;
};

int64_t gate_net_scratch(int64_t N, int G, int O);  // elements of Acc<T>

template <class T>
void gate_net_forward(const GateNetForward<T>& args, const HostExec& exec);
template <class T>
void gate_net_backward(const GateNetBackward<T>& args, const HostExec& exec);
void gate_net_forward(const GateNetForward<bf16>& args, const CudaExec& exec);
void gate_net_backward(const GateNetBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

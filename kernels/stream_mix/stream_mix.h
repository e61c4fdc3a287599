#pragma once
// A weighted sum of residual-stream tensors, token by token (modded-nanogpt record #89: λ's, x0 and bigram injections, gated skip,
// MUDD):
//   out[t] = Σ_i f_i · (gate_i[t] + gate_add_i) · src_i[t]     f_i = scalar_i, or σ(scalar_i); a null scalar is 1; a null gate is 0
//                                                              (then gate_add is the whole factor)
// Products and the sum in Acc<T>, one rounding at the store. C % 8 == 0 and 16-byte aligned rows on CUDA.
// Cost: forward reads terms·N·C and writes N·C elements; backward reads N·C (dout), every src whose gate or scalar has a gradient,
// and reads/writes the dsrc's. A term of factor 1 (no scalar, no gate, gate_add = 1) whose dsrc is dout costs nothing.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

inline constexpr int kMaxMixTerms = 6;

template <class T>
struct MixTerm {
  const T* src = nullptr;     // (N, C)
  const T* scalar = nullptr;  // one element on the device, or null
  bool sigmoid = false;       // the factor is σ(scalar)
  const T* gate = nullptr;    // gate of token t is gate[t·gate_stride], or null
  int64_t gate_stride = 0;
  double gate_add = 0;
};

template <class T>
struct MixTermGrad {
  T* dsrc = nullptr;          // (N, C), or null: not wanted. One term's dsrc may be dout itself
  bool accumulate = false;    // dsrc += (summed before the one rounding); else dsrc =
  Acc<T>* dscalar = nullptr;  // += , or null; terms may share one
  T* dgate = nullptr;         // dgate[t·gate_stride] = , or null
};

template <class T>
struct StreamMixForward {
  T* out;  // (N, C); may be one term's src
  MixTerm<T> terms[kMaxMixTerms];
  int num_terms;
  int64_t N;
  int C;
};

template <class T>
struct StreamMixBackward {
  MixTerm<T> terms[kMaxMixTerms];
  MixTermGrad<T> grads[kMaxMixTerms];
  int num_terms;
  const T* dout;    // (N, C)
  Acc<T>* scratch;  // stream_mix_scratch(N) elements: partial sums of the dscalars, added in a fixed order
  int64_t N;
  int C;
};

int64_t stream_mix_scratch(int64_t N);  // elements of Acc<T>

template <class T>
void stream_mix_forward(const StreamMixForward<T>& args, const HostExec& exec);
template <class T>
void stream_mix_backward(const StreamMixBackward<T>& args, const HostExec& exec);
void stream_mix_forward(const StreamMixForward<bf16>& args, const CudaExec& exec);
void stream_mix_backward(const StreamMixBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

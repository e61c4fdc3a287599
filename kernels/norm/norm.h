#pragma once
// Normalisation over the C channels of each of N rows.
//   rms    out = inp · rstd · gain                    rstd = 1/√(mean(inp²) + eps)
//   layer  out = (inp − mean) · rstd · gain + shift   rstd = 1/√(var(inp) + eps)
// Statistics in Acc<T>; one rounding at the store. gain and shift may be null (1 and 0). C % 8 == 0 and 16-byte aligned rows on
// CUDA. Cost: forward reads N·C and writes N·C elements; backward reads 2·N·C (3 with dinp_add) and writes N·C.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

enum class Norm : int { rms, layer };

template <class T>
struct NormForward {
  T* out;          // (N, C); may alias inp only if no backward follows
  Acc<T>* mean;    // (N) saved for backward; null for rms
  Acc<T>* rstd;    // (N) saved for backward
  const T* inp;    // (N, C)
  const T* gain;   // (C) or null
  const T* shift;  // (C) or null
  int64_t N;
  int C;
  double eps;
  Norm kind;
};

template <class T>
struct NormBackward {
  T* dinp;             // (N, C) = norm's gradient + dinp_add, summed before the one rounding
  const T* dinp_add;   // (N, C) or null; may alias dinp (the residual stream's gradient)
  Acc<T>* dgain;       // (C) += ; null if gain is null
  Acc<T>* dshift;      // (C) += ; null if shift is null
  const T* dout;       // (N, C)
  const T* inp;        // (N, C)
  const Acc<T>* mean;  // (N) or null
  const Acc<T>* rstd;  // (N)
  const T* gain;       // (C) or null
  Acc<T>* scratch;     // norm_backward_scratch(N, C) elements: partial column sums, added in a fixed order
  int64_t N;
  int C;
  Norm kind;
};

int64_t norm_backward_scratch(int64_t N, int C);  // elements of Acc<T>

template <class T>
void norm_forward(const NormForward<T>& args, const HostExec& exec);
template <class T>
void norm_backward(const NormBackward<T>& args, const HostExec& exec);
void norm_forward(const NormForward<bf16>& args, const CudaExec& exec);
void norm_backward(const NormBackward<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// Column sums on CUDA: bias gradients. The cut into parts is column_sum.h's; scratch holds column_sum_parts(N)·C floats.
#include "kernels/base/exec.h"

namespace speedrun::kernels {

// sum (C) += Σ_rows inp (N, C). C % 8 == 0, inp 16-byte aligned.
void column_sum(float* sum, const bf16* inp, float* scratch, int64_t N, int64_t C, const CudaExec& exec);

}  // namespace speedrun::kernels

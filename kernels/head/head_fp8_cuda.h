#pragma once
// The parts of head_loss that differ in FP8, each for the `count` tokens from `begin` on. Internal to the head.
#include "kernels/gemm/projection_cuda.h"
#include "kernels/head/head_loss.h"

namespace speedrun::kernels {

struct LossTerms;  // head_row.cuh

void check_head_fp8(const HeadLoss<bf16>& args, const CudaExec& exec);  // throws Error on what FP8 does not do

// inp8, inp8_t with gradients, logits.
void head_fp8_logits(const HeadLoss<bf16>& args, int64_t begin, ProjectionSize size, const CudaExec& exec);

// Of row_shift and of the gradient's codes: 448/grad_bound.
inline float gradient_units(const HeadFp8& fp8) { return static_cast<float>(kE4m3Max / fp8.grad_bound); }

// grad8, grad8_t and grad_scale8 from the logits and row_shift (head_fp8_gradient.cu).
void head_fp8_codes(const HeadLoss<bf16>& args, const LossTerms& terms, int64_t begin, int64_t count, const CudaExec& exec);

// dinp and dweight.
void head_fp8_gradients(const HeadLoss<bf16>& args, int64_t begin, ProjectionSize size, const CudaExec& exec);

}  // namespace speedrun::kernels

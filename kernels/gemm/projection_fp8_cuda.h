#pragma once
// The products of projection_fp8.h through cuBLASLt.
#include "kernels/gemm/projection_cuda.h"
#include "kernels/gemm/projection_fp8.h"

namespace speedrun::kernels {

// out (N, O) = a (N, K) · bᵀ (O, K)
inline void fp8_product(bf16* out, const GemmOperand& a, const GemmOperand& b, ProjectionSize size, Accumulation accumulation,
                        const CudaExec& exec) {
  gemm({.d = out, .a = a, .b = b, .M = size.N, .N = size.O, .K = size.K, .transpose_b = true, .accumulation = accumulation}, exec);
}

// dweight (O, K) += a (O, N) · bᵀ (K, N), in FP32
inline void fp8_weight_grad(float* dweight, const GemmOperand& a, const GemmOperand& b, ProjectionSize size, const CudaExec& exec) {
  gemm({.d = dweight,
        .a = a,
        .b = b,
        .c = dweight,
        .M = size.O,
        .N = size.K,
        .K = size.N,
        .transpose_b = true,
        .float_out = true,
        .beta = 1.0f},
       exec);
}

// A layer without bias and residual; products in FP8 as `fp8` has them.
inline void project(const char* op, bf16* out, const bf16* inp, const bf16* weight, const ProjectionFp8& fp8, ProjectionSize size,
                    const CudaExec& exec) {
  if (fp8.weight8 == nullptr) return project(out, inp, weight, nullptr, nullptr, size, exec);
  require_forward_operands(op, fp8);
  fp8_copies(forward_inp(fp8), inp, size.N, size.K, exec);
  fp8_product(out, {fp8.inp.codes, &fp8.inp.scale->scale}, {fp8.weight8, &fp8.weight_scale->scale}, size, Accumulation::fast, exec);
}

// dinp may be null.
inline void project_backward(const char* op, bf16* dinp, float* dweight, const bf16* dout, const bf16* inp, const bf16* weight,
                             const ProjectionFp8& fp8, ProjectionSize size, const CudaExec& exec) {
  require_backward_operands(op, fp8);
  fp8_copies(fp8.dout, dout, size.N, size.O, exec);
  if (fp8.inp.codes_t != nullptr) {
    fp8_copies(backward_inp(fp8), inp, size.N, size.K, exec);
    fp8_weight_grad(dweight, {fp8.dout.codes_t, &fp8.dout.scale->scale}, {fp8.inp.codes_t, &fp8.inp.scale->scale}, size, exec);
  } else {
    project_weight_grad(dweight, dout, inp, size, exec);
  }
  if (dinp == nullptr) return;
  if (fp8.weight8_t != nullptr) {
    fp8_product(dinp, {fp8.dout.codes, &fp8.dout.scale->scale}, {fp8.weight8_t, &fp8.weight_scale->scale},
                {.N = size.N, .K = size.O, .O = size.K}, Accumulation::accurate, exec);
  } else {
    project_input_grad(dinp, dout, weight, nullptr, size, exec);
  }
}

}  // namespace speedrun::kernels

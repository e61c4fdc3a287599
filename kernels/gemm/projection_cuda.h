#pragma once
// The three products every layer with a weight makes. inp (N, K), weight (O, K), out (N, O); N tokens, any N > 0; K and O multiples
// of 8.
#include "kernels/gemm/gemm_cuda.h"

namespace speedrun::kernels {

struct ProjectionSize {
  int64_t N = 0;
  int K = 0, O = 0;
};

// out (N, O) = inp · weightᵀ + bias + residual; bias and residual may be null, residual may alias out.
inline void project(bf16* out, const bf16* inp, const bf16* weight, const bf16* bias, const bf16* residual, ProjectionSize size,
                    const CudaExec& exec) {
  gemm({.d = out,
        .a = inp,
        .b = weight,
        .c = residual,
        .M = size.N,
        .N = size.O,
        .K = size.K,
        .transpose_b = true,
        .beta = residual ? 1.0f : 0.0f,
        .epilogue = bias ? Epilogue::bias : Epilogue::none,
        .bias = bias},
       exec);
}

// dinp (N, K) = dout · weight, times gelu'(gelu_input (N, K)) if that is not null.
inline void project_input_grad(bf16* dinp, const bf16* dout, const bf16* weight, const bf16* gelu_input, ProjectionSize size,
                               const CudaExec& exec) {
  gemm({.d = dinp,
        .a = dout,
        .b = weight,
        .M = size.N,
        .N = size.K,
        .K = size.O,
        .epilogue = gelu_input ? Epilogue::dgelu : Epilogue::none,
        .aux = const_cast<bf16*>(gelu_input)},  // read only with dgelu
       exec);
}

// dweight (O, K) += doutᵀ · inp, in FP32.
inline void project_weight_grad(float* dweight, const bf16* dout, const bf16* inp, ProjectionSize size, const CudaExec& exec) {
  gemm({.d = dweight,
        .a = dout,
        .b = inp,
        .c = dweight,
        .M = size.O,
        .N = size.K,
        .K = size.N,
        .transpose_a = true,
        .float_out = true,
        .beta = 1.0f},
       exec);
}

}  // namespace speedrun::kernels

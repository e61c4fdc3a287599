// The MLP on CUDA.
//   gelu   cuBLASLt's epilogues (tanh form): up stores pre and post from one product, backward multiplies dpost by gelu'(pre) in
//   the product relu2  post = max(pre, 0)² in place after the up product; backward: dpre = dpost·2·√post in place, summed over
//   columns for the bias on
//          the way (one pass)
// Traffic   beside the products: gelu nothing forward, 2·N·F bytes backward for the bias; relu2 4·N·F forward and 6·N·F backward.
// Numerics  FP32 between load and store. relu2's pre is rounded to bf16 at the product's store, then squared and rounded once.
#include "kernels/base/column_sum.cuh"
#include "kernels/gemm/projection_cuda.h"
#include "kernels/mlp/mlp.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;

// post (count) in place.
__global__ void __launch_bounds__(kThreads) relu2_forward(bf16* post, int64_t vectors) {
  const int64_t vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vector >= vectors) return;
  float x[kVec];
  load8(post + vector * kVec, x);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = x[i] < 0 ? 0 : x[i] * x[i];  // NaN stays NaN, so that it is seen
  store8(post + vector * kVec, x);
}

// dpost becomes dpre; the sums take the stored values, which are what the products see.
struct Relu2Backward {
  bf16* dhidden;
  const bf16* post;
  __device__ void operator()(int64_t index, float (&values)[kVec]) const {
    float y[kVec];
    load8(dhidden + index, values);
    load8(post + index, y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] *= 2 * sqrtf(y[i]);
    const uint4 stored = pack8(values);
    store16(dhidden + index, stored);
    unpack8(stored, values);
  }
};

struct Gelu {
  bf16* post;
  bf16* pre;
  const bf16* inp;
  const bf16* weight;
  const bf16* bias;
};

void up_gelu(const Gelu& args, ProjectionSize size, const CudaExec& exec) {
  gemm({.d = args.post,
        .a = args.inp,
        .b = args.weight,
        .M = size.N,
        .N = size.O,
        .K = size.K,
        .transpose_b = true,
        .epilogue = args.bias ? Epilogue::gelu_aux_bias : Epilogue::gelu_aux,
        .bias = args.bias,
        .aux = args.pre},
       exec);
}

}  // namespace

void mlp_forward(const MlpForward<bf16>& args, const CudaExec& exec) {
  const ProjectionSize up{.N = args.N, .K = args.C, .O = args.F}, down{.N = args.N, .K = args.F, .O = args.C};
  switch (args.activation) {
    case Activation::gelu:
      require(args.pre != nullptr, "mlp: gelu keeps pre, which is null");
      up_gelu({.post = args.post, .pre = args.pre, .inp = args.inp, .weight = args.up_weight, .bias = args.up_bias}, up, exec);
      break;
    case Activation::relu2: {
      project(args.post, args.inp, args.up_weight, args.up_bias, nullptr, up, exec);
      const int64_t vectors = args.N * args.F / kVec;
      relu2_forward<<<grid_size(ceil_div(vectors, kThreads), "mlp"), kThreads, 0, exec.stream>>>(args.post, vectors);
      check_launch("mlp: relu2 of N = ", args.N, ", F = ", args.F);
      break;
    }
  }
  project(args.out, args.post, args.down_weight, args.down_bias, args.residual, down, exec);
}

void mlp_backward(const MlpBackward<bf16>& args, const CudaExec& exec) {
  const ProjectionSize up{.N = args.N, .K = args.C, .O = args.F}, down{.N = args.N, .K = args.F, .O = args.C};
  if (args.ddown_bias) column_sum(args.ddown_bias, args.dout, args.scratch, args.N, args.C, exec);
  project_weight_grad(args.ddown_weight, args.dout, args.post, down, exec);
  switch (args.activation) {
    case Activation::gelu:
      require(args.pre != nullptr, "mlp: gelu's backward reads pre, which is null");
      project_input_grad(args.dhidden, args.dout, args.down_weight, args.pre, down, exec);
      if (args.dup_bias) column_sum(args.dup_bias, args.dhidden, args.scratch, args.N, args.F, exec);
      break;
    case Activation::relu2:
      project_input_grad(args.dhidden, args.dout, args.down_weight, nullptr, down, exec);
      column_sum_of(args.dup_bias, args.scratch, Relu2Backward{args.dhidden, args.post}, args.N, args.F, exec, "mlp");
      break;
  }
  project_weight_grad(args.dup_weight, args.dhidden, args.inp, up, exec);
  project_input_grad(args.dinp, args.dhidden, args.up_weight, nullptr, up, exec);
}

}  // namespace speedrun::kernels

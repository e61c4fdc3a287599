#include "kernels/head/head_fp8_cuda.h"

#include "kernels/base/error.h"

namespace speedrun::kernels {

void check_head_fp8(const HeadLoss<bf16>& args, const CudaExec& exec) {
  constexpr int kMultiple = 16;
  require(exec.compute_capability == 90, "head: FP8 needs a GPU of compute capability 9.0, this one has ",
          exec.compute_capability / 10, '.', exec.compute_capability % 10);
  require(args.bias == nullptr && args.dbias == nullptr, "head: FP8 takes no bias");
  require(args.C % kMultiple == 0 && args.V % kMultiple == 0 && args.N % kMultiple == 0 && args.chunk % kMultiple == 0,
          "head: C = ", args.C, ", V = ", args.V, ", N = ", args.N, ", chunk = ", args.chunk, " must be multiples of 16 with FP8");
  require(args.dinp == nullptr || args.fp8.row_shift != nullptr, "head: FP8 gradients need row_shift");
}

void head_fp8_logits(const HeadLoss<bf16>& args, int64_t begin, ProjectionSize size, const CudaExec& exec) {
  const HeadFp8& fp8 = args.fp8;
  fp8_quantize({.out = fp8.inp8,
                .out_t = args.dinp != nullptr ? fp8.inp8_t : nullptr,
                .inp = args.inp + begin * args.C,
                .scale = fp8.inp_scale,
                .rows = size.N,
                .cols = args.C,
                .scaling = Fp8Scaling::fixed,
                .count = fp8.count},
               exec);
  gemm({.d = args.logits,
        .a = {fp8.inp8, &fp8.inp_scale->scale},
        .b = {fp8.weight8, &fp8.weight_scale->scale},
        .M = size.N,
        .N = size.O,
        .K = size.K,
        .transpose_b = true,
        .accumulation = Accumulation::fast},
       exec);
}

void head_fp8_gradients(const HeadLoss<bf16>& args, int64_t begin, ProjectionSize size, const CudaExec& exec) {
  const HeadFp8& fp8 = args.fp8;
  gemm({.d = args.dinp + begin * args.C,
        .a = {fp8.grad8, &fp8.grad_scale8->scale},
        .b = {fp8.weight8_t, &fp8.weight_scale->scale},
        .M = size.N,
        .N = size.K,
        .K = size.O,
        .transpose_b = true},
       exec);
  gemm({.d = args.dweight,
        .a = {fp8.grad8_t, &fp8.grad_scale8->scale},
        .b = {fp8.inp8_t, &fp8.inp_scale->scale},
        .c = args.dweight,
        .M = size.O,
        .N = size.K,
        .K = size.N,
        .transpose_b = true,
        .float_out = true,
        .beta = 1},
       exec);
}

}  // namespace speedrun::kernels

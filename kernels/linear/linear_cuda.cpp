// Linear layer on CUDA: three cuBLASLt products; the bias is the product's epilogue, the residual its C operand.
// Traffic   beside the products, the bias gradient reads dout once more (2·N·O bytes).
// Numerics  sums in FP32, one rounding at the store; weight gradients accumulate in FP32 inside the product (beta = 1).
#include "kernels/base/column_sum_cuda.h"
#include "kernels/base/error.h"
#include "kernels/gemm/projection_fp8_cuda.h"
#include "kernels/linear/linear.h"

namespace speedrun::kernels {

void linear_forward(const LinearForward<bf16>& args, const CudaExec& exec) {
  const ProjectionSize size{.N = args.N, .K = args.K, .O = args.O};
  if (args.bias == nullptr && args.residual == nullptr)
    return project("linear", args.out, args.inp, args.weight, args.fp8, size, exec);
  require(args.fp8.weight8 == nullptr, "linear: FP8 takes no bias and no residual");
  project(args.out, args.inp, args.weight, args.bias, args.residual, size, exec);
}

void linear_backward(const LinearBackward<bf16>& args, const CudaExec& exec) {
  const ProjectionSize size{.N = args.N, .K = args.K, .O = args.O};
  if (args.dbias) column_sum(args.dbias, args.dout, args.scratch, args.N, args.O, exec);
  project_backward("linear", args.dinp, args.dweight, args.dout, args.inp, args.weight, args.fp8, size, exec);
}

}  // namespace speedrun::kernels

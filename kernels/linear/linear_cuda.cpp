// Linear layer on CUDA: three cuBLASLt products; the bias is the product's epilogue, the residual its C operand.
// Traffic   beside the products, the bias gradient reads dout once more (2·N·O bytes).
// Numerics  sums in FP32, one rounding at the store; weight gradients accumulate in FP32 inside the product (beta = 1).
#include "kernels/base/column_sum_cuda.h"
#include "kernels/base/error.h"
#include "kernels/gemm/projection_cuda.h"
#include "kernels/linear/linear.h"

namespace speedrun::kernels {

void linear_forward(const LinearForward<bf16>& args, const CudaExec& exec) {
  project(args.out, args.inp, args.weight, args.bias, args.residual, {.N = args.N, .K = args.K, .O = args.O}, exec);
}

void linear_backward(const LinearBackward<bf16>& args, const CudaExec& exec) {
  const ProjectionSize size{.N = args.N, .K = args.K, .O = args.O};
  if (args.dbias) column_sum(args.dbias, args.dout, args.scratch, args.N, args.O, exec);
  project_weight_grad(args.dweight, args.dout, args.inp, size, exec);
  if (args.dinp) project_input_grad(args.dinp, args.dout, args.weight, nullptr, size, exec);
}

}  // namespace speedrun::kernels

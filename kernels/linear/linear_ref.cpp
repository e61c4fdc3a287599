#include "kernels/base/column_sum.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/gemm/projection_fp8_ref.h"
#include "kernels/linear/linear.h"

namespace speedrun::kernels {

int64_t bias_grad_scratch(int64_t N, int O) { return column_sum_parts(N) * O; }

template <class T>
void linear_forward(const LinearForward<T>& a, const HostExec& exec) {
  if (a.bias == nullptr && a.residual == nullptr) return projection_ref(a.out, a.inp, a.weight, a.fp8, a.N, a.K, a.O, exec);
  require(a.fp8.weight8 == nullptr, "linear: FP8 takes no bias and no residual");
  affine_ref(a.out, a.inp, a.weight, a.bias, a.residual, a.N, a.K, a.O, exec);
}

template <class T>
void linear_backward(const LinearBackward<T>& a, const HostExec& exec) {
  if (a.dbias != nullptr) column_sum(a.dbias, a.dout, a.scratch, a.N, a.O, exec);
  projection_grad_ref(a.dinp, a.dweight, a.dout, a.inp, a.weight, a.fp8, a.N, a.K, a.O, exec);
}

template void linear_forward(const LinearForward<float>&, const HostExec&);
template void linear_forward(const LinearForward<double>&, const HostExec&);
template void linear_backward(const LinearBackward<float>&, const HostExec&);
template void linear_backward(const LinearBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

#include "kernels/gemm/projection_fp8_ref.h"

#include "kernels/base/host_parallel.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/gemm/fp8_product_ref.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kElements = 1 << 14;  // of one task
constexpr const char* kOp = "projection";

}  // namespace

template <class T, class A>
void fp8_activation_ref(T* out, const A* a, const Fp8Scale& scale_a, const e4m3* b, const Fp8Scale& scale_b, int64_t N, int64_t K,
                        int64_t O, const HostExec& exec) {
  fp8_product_ref(Fp8ProductRef<T, A>{out, a, b, scale_a.scale, scale_b.scale, N, O, K}, exec);
  parallel_ranges(exec, N * O, kElements, [&](int64_t begin, int64_t end) { round_stored(out + begin, end - begin, exec); });
}

template <class T, class A, class B>
void fp8_weight_grad_ref(T* dweight, const A* a, const Fp8Scale& scale_a, const B* b, const Fp8Scale& scale_b, int64_t M, int64_t K,
                         int64_t N, const HostExec& exec) {
  fp8_product_ref(Fp8ProductRef<T, A, B>{dweight, a, b, scale_a.scale, scale_b.scale, M, K, N, T{1}}, exec);
}

template <class T>
void projection_ref(T* out, const T* inp, const T* weight, const ProjectionFp8& fp8, int64_t N, int K, int O,
                    const HostExec& exec) {
  if (fp8.weight8 == nullptr) {
    affine_ref(out, inp, weight, static_cast<const T*>(nullptr), static_cast<const T*>(nullptr), N, K, O, exec);
    return;
  }
  require_forward_operands(kOp, fp8);
  fp8_copies(forward_inp(fp8), inp, N, K, exec);
  fp8_activation_ref(out, fp8.inp.codes, *fp8.inp.scale, fp8.weight8, *fp8.weight_scale, N, K, O, exec);
}

template <class T>
void projection_grad_ref(T* dinp, Acc<T>* dweight, const T* dout, const T* inp, const T* weight, const ProjectionFp8& fp8,
                         int64_t N, int K, int O, const HostExec& exec) {
  require_backward_operands(kOp, fp8);
  fp8_copies(fp8.dout, dout, N, O, exec);
  if (fp8.inp.codes_t != nullptr) {
    fp8_copies(backward_inp(fp8), inp, N, K, exec);
    fp8_weight_grad_ref(dweight, fp8.dout.codes_t, *fp8.dout.scale, fp8.inp.codes_t, *fp8.inp.scale, O, K, N, exec);
  } else {
    affine_weight_grad_ref(dweight, dout, inp, N, K, O, exec);
  }
  if (dinp == nullptr) return;
  if (fp8.weight8_t != nullptr) {
    fp8_activation_ref(dinp, fp8.dout.codes, *fp8.dout.scale, fp8.weight8_t, *fp8.weight_scale, N, O, K, exec);
  } else {
    affine_input_grad_ref(dinp, dout, weight, N, K, O, exec);
  }
}

template void fp8_activation_ref(float*, const e4m3*, const Fp8Scale&, const e4m3*, const Fp8Scale&, int64_t, int64_t, int64_t,
                                 const HostExec&);
template void fp8_activation_ref(float*, const e5m2*, const Fp8Scale&, const e4m3*, const Fp8Scale&, int64_t, int64_t, int64_t,
                                 const HostExec&);
template void fp8_weight_grad_ref(float*, const e4m3*, const Fp8Scale&, const e5m2*, const Fp8Scale&, int64_t, int64_t, int64_t,
                                  const HostExec&);
template void fp8_weight_grad_ref(float*, const e5m2*, const Fp8Scale&, const e4m3*, const Fp8Scale&, int64_t, int64_t, int64_t,
                                  const HostExec&);
template void projection_ref(float*, const float*, const float*, const ProjectionFp8&, int64_t, int, int, const HostExec&);
template void projection_grad_ref(float*, float*, const float*, const float*, const float*, const ProjectionFp8&, int64_t, int, int,
                                  const HostExec&);
template void fp8_activation_ref(double*, const e4m3*, const Fp8Scale&, const e4m3*, const Fp8Scale&, int64_t, int64_t, int64_t,
                                 const HostExec&);
template void fp8_activation_ref(double*, const e5m2*, const Fp8Scale&, const e4m3*, const Fp8Scale&, int64_t, int64_t, int64_t,
                                 const HostExec&);
template void fp8_weight_grad_ref(double*, const e4m3*, const Fp8Scale&, const e5m2*, const Fp8Scale&, int64_t, int64_t, int64_t,
                                  const HostExec&);
template void fp8_weight_grad_ref(double*, const e5m2*, const Fp8Scale&, const e4m3*, const Fp8Scale&, int64_t, int64_t, int64_t,
                                  const HostExec&);
template void projection_ref(double*, const double*, const double*, const ProjectionFp8&, int64_t, int, int, const HostExec&);
template void projection_grad_ref(double*, double*, const double*, const double*, const double*, const ProjectionFp8&, int64_t, int,
                                  int, const HostExec&);

}  // namespace speedrun::kernels

#include "kernels/gemm/affine_ref.h"

#include "kernels/base/host_parallel.h"
#include "kernels/gemm/gemm_ref.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kRows = 64;  // of one task of the element-wise passes

// out = bias + residual, which the product is then added to.
template <class T>
void start_rows(T* out, const T* bias, const T* residual, int64_t N, int64_t O, const HostExec& exec) {
  parallel_ranges(exec, N, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      T* row = out + n * O;
      for (int64_t o = 0; o < O; ++o)
        row[o] = (residual != nullptr ? residual[n * O + o] : T{0}) + (bias != nullptr ? bias[o] : T{0});
    }
  });
}

}  // namespace

template <class T>
void affine_ref(T* out, const T* inp, const T* weight, const T* bias, const T* residual, int64_t N, int64_t K, int64_t O,
                const HostExec& exec) {
  const bool add = bias != nullptr || residual != nullptr;
  if (add) start_rows(out, bias, residual, N, O, exec);
  gemm_ref(GemmRef<T>{.c = out,
                      .a = inp,
                      .b = weight,
                      .M = N,
                      .N = O,
                      .K = K,
                      .lda = K,
                      .ldb = K,
                      .ldc = O,
                      .transpose_b = true,
                      .beta = static_cast<T>(add ? 1 : 0)},
           exec);
  round_rows(out, N, O, exec);
}

template <class T>
void affine_input_grad_ref(T* dinp, const T* dout, const T* weight, int64_t N, int64_t K, int64_t O, const HostExec& exec) {
  gemm_ref(GemmRef<T>{.c = dinp, .a = dout, .b = weight, .M = N, .N = K, .K = O, .lda = O, .ldb = K, .ldc = K}, exec);
  round_rows(dinp, N, K, exec);
}

template <class T>
void affine_weight_grad_ref(Acc<T>* dweight, const T* dout, const T* inp, int64_t N, int64_t K, int64_t O, const HostExec& exec) {
  gemm_ref(
      GemmRef<T>{
          .c = dweight, .a = dout, .b = inp, .M = O, .N = K, .K = N, .lda = O, .ldb = K, .ldc = K, .transpose_a = true, .beta = 1},
      exec);
}

template void affine_ref(float*, const float*, const float*, const float*, const float*, int64_t, int64_t, int64_t,
                         const HostExec&);
template void affine_input_grad_ref(float*, const float*, const float*, int64_t, int64_t, int64_t, const HostExec&);
template void affine_weight_grad_ref<float>(float*, const float*, const float*, int64_t, int64_t, int64_t, const HostExec&);
template void affine_ref(double*, const double*, const double*, const double*, const double*, int64_t, int64_t, int64_t,
                         const HostExec&);
template void affine_input_grad_ref(double*, const double*, const double*, int64_t, int64_t, int64_t, const HostExec&);
template void affine_weight_grad_ref<double>(double*, const double*, const double*, int64_t, int64_t, int64_t, const HostExec&);

}  // namespace speedrun::kernels

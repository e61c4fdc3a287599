#include <cmath>

#include "kernels/base/host_parallel.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/gemm/fp8_product_ref.h"
#include "kernels/relu2_mlp/relu2_mlp.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kElements = 1 << 14;  // of one task

template <class T>
constexpr const T* kNone = nullptr;

// out (N, O) = a · bᵀ · scales, an activation.
template <class T>
void fp8_product(T* out, const e4m3* a, const Fp8Scale& scale_a, const e4m3* b, const Fp8Scale& scale_b, int64_t N, int64_t K,
                 int64_t O, const HostExec& exec) {
  fp8_product_ref(Fp8ProductRef<T, e4m3>{out, a, b, scale_a.scale, scale_b.scale, N, O, K}, exec);
  parallel_ranges(exec, N * O, kElements, [&](int64_t begin, int64_t end) { round_stored(out + begin, end - begin, exec); });
}

}  // namespace

template <class T>
void relu2_mlp_forward(const Relu2MlpForward<T>& a, const HostExec& exec) {
  const Relu2MlpFp8& fp8 = a.fp8;
  if (fp8.up8 != nullptr) {
    fp8_quantize(Fp8Quantize<T>{fp8.inp8, nullptr, a.inp, fp8.inp_scale, a.N, a.C, fp8.inp_scaling, fp8.count}, exec);
    fp8_product(a.post, fp8.inp8, *fp8.inp_scale, fp8.up8, *fp8.up_scale, a.N, a.C, a.F, exec);
  } else {
    affine_ref(a.post, a.inp, a.up_weight, kNone<T>, kNone<T>, a.N, a.C, a.F, exec);
  }
  parallel_ranges(exec, a.N * a.F, kElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T pre = a.post[i];
      a.post[i] = exec.store(pre < 0 ? T{0} : pre * pre);  // NaN stays NaN
    }
  });
  if (fp8.down8 != nullptr) {
    fp8_quantize(Fp8Quantize<T>{fp8.post8, nullptr, a.post, fp8.post_scale, a.N, a.F, fp8.post_scaling, fp8.count}, exec);
    fp8_product(a.out, fp8.post8, *fp8.post_scale, fp8.down8, *fp8.down_scale, a.N, a.F, a.C, exec);
  } else {
    // Stored (F, C), the down weights stand to the activations as other layers' do to their output's gradient.
    affine_input_grad_ref(a.out, static_cast<const T*>(a.post), a.down_weight, a.N, a.C, a.F, exec);
  }
}

template <class T>
void relu2_mlp_backward(const Relu2MlpBackward<T>& a, const HostExec& exec) {
  affine_weight_grad_ref(a.ddown_weight, a.post, a.dout, a.N, a.C, a.F, exec);
  affine_ref(a.dhidden, a.dout, a.down_weight, kNone<T>, kNone<T>, a.N, a.C, a.F, exec);
  parallel_ranges(exec, a.N * a.F, kElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) a.dhidden[i] = exec.store(a.dhidden[i] * (2 * std::sqrt(a.post[i])));
  });
  const T* dpre = a.dhidden;
  affine_weight_grad_ref(a.dup_weight, dpre, a.inp, a.N, a.C, a.F, exec);
  affine_input_grad_ref(a.dinp, dpre, a.up_weight, a.N, a.C, a.F, exec);
}

template void relu2_mlp_forward(const Relu2MlpForward<float>&, const HostExec&);
template void relu2_mlp_forward(const Relu2MlpForward<double>&, const HostExec&);
template void relu2_mlp_backward(const Relu2MlpBackward<float>&, const HostExec&);
template void relu2_mlp_backward(const Relu2MlpBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

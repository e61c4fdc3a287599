#include <cmath>

#include "kernels/base/host_parallel.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/gemm/projection_fp8_ref.h"
#include "kernels/relu2_mlp/relu2_mlp.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kElements = 1 << 14;  // of one task

template <class T>
constexpr const T* kNone = nullptr;

}  // namespace

template <class T>
void relu2_mlp_forward(const Relu2MlpForward<T>& a, const HostExec& exec) {
  const Relu2MlpFp8& fp8 = a.fp8;
  if (fp8.up8 != nullptr) {
    fp8_quantize(Fp8Quantize<T>{fp8.inp8, nullptr, a.inp, fp8.inp_scale, a.N, a.C, fp8.inp_scaling, fp8.count}, exec);
    fp8_activation_ref(a.post, fp8.inp8, *fp8.inp_scale, fp8.up8, *fp8.up_scale, a.N, a.C, a.F, exec);
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
    fp8_activation_ref(a.out, fp8.post8, *fp8.post_scale, fp8.down8, *fp8.down_scale, a.N, a.F, a.C, exec);
  } else {
    // Stored (F, C), the down weights stand to the activations as other layers' do to their output's gradient.
    affine_input_grad_ref(a.out, static_cast<const T*>(a.post), a.down_weight, a.N, a.C, a.F, exec);
  }
}

template <class T>
void relu2_mlp_backward(const Relu2MlpBackward<T>& a, const HostExec& exec) {
  const Relu2MlpBackwardFp8& fp8 = a.fp8;
  require_backward_operands(fp8);
  const bool input_grad = fp8.up8_t != nullptr, weight_grad = fp8.inp.codes_t != nullptr;
  fp8_copies(fp8.dout, a.dout, a.N, a.C, exec);
  if (weight_grad) {
    fp8_copies(fp8.post, a.post, a.N, a.F, exec);
    fp8_weight_grad_ref(a.ddown_weight, fp8.post.codes_t, *fp8.post.scale, fp8.dout.codes_t, *fp8.dout.scale, a.F, a.C, a.N, exec);
  } else {
    affine_weight_grad_ref(a.ddown_weight, a.post, a.dout, a.N, a.C, a.F, exec);
  }
  if (input_grad) {
    fp8_activation_ref(a.dhidden, fp8.dout.codes, *fp8.dout.scale, fp8.down8, *fp8.down_scale, a.N, a.C, a.F, exec);
  } else {
    affine_ref(a.dhidden, a.dout, a.down_weight, kNone<T>, kNone<T>, a.N, a.C, a.F, exec);
  }
  parallel_ranges(exec, a.N * a.F, kElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) a.dhidden[i] = exec.store(a.dhidden[i] * (2 * std::sqrt(a.post[i])));
  });
  const T* dpre = a.dhidden;
  fp8_copies(fp8.dpre, dpre, a.N, a.F, exec);
  if (weight_grad) {
    fp8_copies(fp8.inp, a.inp, a.N, a.C, exec);
    fp8_weight_grad_ref(a.dup_weight, fp8.dpre.codes_t, *fp8.dpre.scale, fp8.inp.codes_t, *fp8.inp.scale, a.F, a.C, a.N, exec);
  } else {
    affine_weight_grad_ref(a.dup_weight, dpre, a.inp, a.N, a.C, a.F, exec);
  }
  if (input_grad) {
    fp8_activation_ref(a.dinp, fp8.dpre.codes, *fp8.dpre.scale, fp8.up8_t, *fp8.up_scale, a.N, a.F, a.C, exec);
  } else {
    affine_input_grad_ref(a.dinp, dpre, a.up_weight, a.N, a.C, a.F, exec);
  }
}

template void relu2_mlp_forward(const Relu2MlpForward<float>&, const HostExec&);
template void relu2_mlp_forward(const Relu2MlpForward<double>&, const HostExec&);
template void relu2_mlp_backward(const Relu2MlpBackward<float>&, const HostExec&);
template void relu2_mlp_backward(const Relu2MlpBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

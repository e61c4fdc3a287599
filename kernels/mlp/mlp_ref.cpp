#include "kernels/base/column_sum.h"
#include "kernels/base/fast_math.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/mlp/mlp.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kElements = 8192;  // of one task

// gelu uses 0.5·(1 + tanh u) = σ(2u), which loses no digits where tanh is near −1.
constexpr double kTwoRootTwoOverPi = 1.5957691216057308;  // 2·√(2/π)
constexpr double kCubic = 0.044715;

template <class T>
struct Gelu {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(T* post, const T* pre, int64_t count) {
    using S = Simd<T, W>;
    for (int64_t i = 0; i < count; i += S::kLanes) {
      const typename S::Vec x = load_lanes<S>(pre + i, count - i);
      const typename S::Vec twice_u = static_cast<T>(kTwoRootTwoOverPi) * (x + static_cast<T>(kCubic) * x * x * x);
      store_lanes<S>(post + i, x * vector_logistic<S>(twice_u), count - i);
    }
  }
};

// gradient <- gradient · gelu'(pre),  gelu' = σ + x·σ·(1 − σ)·(2u)'
template <class T>
struct GeluBackward {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(T* gradient, const T* pre, int64_t count) {
    using S = Simd<T, W>;
    for (int64_t i = 0; i < count; i += S::kLanes) {
      const typename S::Vec x = load_lanes<S>(pre + i, count - i);
      const typename S::Vec twice_u = static_cast<T>(kTwoRootTwoOverPi) * (x + static_cast<T>(kCubic) * x * x * x);
      const typename S::Vec slope = static_cast<T>(kTwoRootTwoOverPi) * (1 + static_cast<T>(3 * kCubic) * x * x);
      const typename S::Vec logistic = vector_logistic<S>(twice_u);
      const typename S::Vec derivative = logistic + x * logistic * (1 - logistic) * slope;
      store_lanes<S>(gradient + i, load_lanes<S>(gradient + i, count - i) * derivative, count - i);
    }
  }
};

template <class T>
void relu2(T* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] > 0 ? values[i] * values[i] : T{0};
}

template <class T>
void relu2_backward(T* gradient, const T* post, int64_t count) {
  for (int64_t i = 0; i < count; ++i) gradient[i] *= 2 * std::sqrt(post[i]);
}

}  // namespace

template <class T>
void mlp_forward(const MlpForward<T>& a, const HostExec& exec) {
  constexpr const T* kNone = nullptr;
  const bool gelu = a.activation == Activation::gelu;
  affine_ref(gelu ? a.pre : a.post, a.inp, a.up_weight, a.up_bias, kNone, a.N, a.C, a.F, exec);
  parallel_ranges(exec, a.N * a.F, kElements, [&](int64_t begin, int64_t end) {
    if (gelu) {
      simd_dispatch<Gelu<T>>(a.post + begin, static_cast<const T*>(a.pre + begin), end - begin);
    } else {
      relu2(a.post + begin, end - begin);
    }
    round_stored(a.post + begin, end - begin, exec);
  });
  affine_ref(a.out, static_cast<const T*>(a.post), a.down_weight, a.down_bias, a.residual, a.N, a.F, a.C, exec);
}

template <class T>
void mlp_backward(const MlpBackward<T>& a, const HostExec& exec) {
  if (a.ddown_bias != nullptr) column_sum(a.ddown_bias, a.dout, a.scratch, a.N, a.C, exec);
  affine_weight_grad_ref(a.ddown_weight, a.dout, a.post, a.N, a.F, a.C, exec);
  affine_input_grad_ref(a.dhidden, a.dout, a.down_weight, a.N, a.F, a.C, exec);
  parallel_ranges(exec, a.N * a.F, kElements, [&](int64_t begin, int64_t end) {
    if (a.activation == Activation::gelu) {
      simd_dispatch<GeluBackward<T>>(a.dhidden + begin, a.pre + begin, end - begin);
    } else {
      relu2_backward(a.dhidden + begin, a.post + begin, end - begin);
    }
    round_stored(a.dhidden + begin, end - begin, exec);
  });
  const T* dpre = a.dhidden;
  if (a.dup_bias != nullptr) column_sum(a.dup_bias, dpre, a.scratch, a.N, a.F, exec);
  affine_weight_grad_ref(a.dup_weight, dpre, a.inp, a.N, a.C, a.F, exec);
  affine_input_grad_ref(a.dinp, dpre, a.up_weight, a.N, a.C, a.F, exec);
}

template void mlp_forward(const MlpForward<float>&, const HostExec&);
template void mlp_forward(const MlpForward<double>&, const HostExec&);
template void mlp_backward(const MlpBackward<float>&, const HostExec&);
template void mlp_backward(const MlpBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/base/column_sum.h"
#include "kernels/base/fast_math.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/head/head_loss.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kRows = 8;  // tokens of one task
constexpr double kSigmoidHeight = 23, kSigmoidShift = 5, kSigmoidWidth = 7.5;

// z = cap(logit)
template <class S, class T>
SPEEDRUN_ALWAYS_INLINE typename S::Vec cap(const typename S::Vec& x, Softcap kind, T c) {
  using Vec = typename S::Vec;
  if (kind == Softcap::none) return x;
  if (kind == Softcap::sigmoid) {
    const Vec argument = (x + static_cast<T>(kSigmoidShift)) / static_cast<T>(kSigmoidWidth);
    return static_cast<T>(kSigmoidHeight) * vector_logistic<S>(argument);
  }
  return c * x / S::sqrt(x * x + c * c);
}

// dz/dlogit from z:  rational (1 − z²/c²)^(3/2);  sigmoid z·(1 − z/23)/7.5
template <class S, class T>
SPEEDRUN_ALWAYS_INLINE typename S::Vec cap_derivative(const typename S::Vec& z, Softcap kind, T c) {
  using Vec = typename S::Vec;
  if (kind == Softcap::none) return S::fill(1);
  if (kind == Softcap::sigmoid) return z * (1 - z / static_cast<T>(kSigmoidHeight)) / static_cast<T>(kSigmoidWidth);
  const Vec ratio = z / c, square = S::max(Vec{}, 1 - ratio * ratio);
  return square * S::sqrt(square);
}

template <class T>
struct CapRow {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(T* z, const T* logits, int64_t V, Softcap kind, T c) {
    using S = Simd<T, W>;
    for (int64_t j = 0; j < V; j += S::kLanes) store_lanes<S>(z + j, cap<S, T>(load_lanes<S>(logits + j, V - j), kind, c), V - j);
  }
};

// loss = logsumexp(z) − z[target]; with scale not 0 the row of logits becomes scale · (softmax(z) − onehot) · dz/dlogit.
// z (V) is working memory.
template <class T>
struct LossRow {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(T* loss, T* logits, T* z, int64_t V, int64_t target, Softcap kind, T c, bool gradient,
                                         T scale) {
    using S = Simd<T, W>;
    using Vec = typename S::Vec;
    constexpr T kLowest = -std::numeric_limits<T>::infinity();
    Vec largest = S::fill(kLowest), sum{};
    for (int64_t j = 0; j < V; j += S::kLanes) {
      const Vec capped = cap<S, T>(load_lanes<S>(logits + j, V - j), kind, c);
      store_lanes<S>(z + j, capped, V - j);
      largest = S::max(largest, load_lanes<S>(z + j, V - j, kLowest));
    }
    const T top = S::largest(largest);
    for (int64_t j = 0; j < V; j += S::kLanes) sum += vector_exp<S>(load_lanes<S>(z + j, V - j, kLowest) - top);
    const T lse = top + std::log(S::sum(sum));
    *loss = lse - z[target];
    if (!gradient) return;
    const T target_logit = z[target];
    for (int64_t j = 0; j < V; j += S::kLanes) {
      const Vec capped = load_lanes<S>(z + j, V - j);
      store_lanes<S>(logits + j, scale * vector_exp<S>(capped - lse) * cap_derivative<S, T>(capped, kind, c), V - j);
    }
    const Vec one_target = S::fill(target_logit);
    logits[target] = scale * (std::exp(target_logit - lse) - 1) * cap_derivative<S, T>(one_target, kind, c)[0];
  }
};

template <class T>
void loss_chunk(const HeadLoss<T>& a, int64_t first, int64_t count, const HostExec& exec) {
  const bool gradient = a.dinp != nullptr;
  parallel_ranges(exec, count, kRows, [&](int64_t begin, int64_t end) {
    std::vector<T> capped(static_cast<size_t>(a.V));
    for (int64_t t = begin; t < end; ++t) {
      T* row = a.logits + t * a.V;
      simd_dispatch<LossRow<T>>(a.loss + first + t, row, capped.data(), int64_t{a.V}, int64_t{a.targets[first + t]}, a.softcap,
                                static_cast<T>(a.softcap_value), gradient, gradient ? *a.grad_scale : T{0});
      if (gradient) round_stored(row, a.V, exec);
    }
  });
}

}  // namespace

template <class T>
void head_loss(const HeadLoss<T>& a, const HostExec& exec) {
  constexpr const T* kNone = nullptr;
  for (int64_t first = 0; first < a.N; first += a.chunk) {
    const int64_t count = std::min(a.chunk, a.N - first);
    const T* inp = a.inp + first * a.C;
    affine_ref(a.logits, inp, a.weight, a.bias, kNone, count, a.C, a.V, exec);
    loss_chunk(a, first, count, exec);
    if (a.dinp == nullptr) continue;
    const T* dlogits = a.logits;
    if (a.dbias != nullptr) column_sum(a.dbias, dlogits, a.scratch, count, a.V, exec);
    affine_weight_grad_ref(a.dweight, dlogits, inp, count, a.C, a.V, exec);
    affine_input_grad_ref(a.dinp + first * a.C, dlogits, a.weight, count, a.C, a.V, exec);
  }
}

template <class T>
void head_logits(const HeadLogits<T>& a, const HostExec& exec) {
  constexpr const T* kNone = nullptr;
  affine_ref(a.logits, a.inp, a.weight, a.bias, kNone, a.N, a.C, a.V, exec);
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    T* rows = a.logits + begin * a.V;
    const int64_t count = (end - begin) * a.V;
    simd_dispatch<CapRow<T>>(rows, static_cast<const T*>(rows), count, a.softcap, static_cast<T>(a.softcap_value));
    round_stored(rows, count, exec);
  });
}

template void head_loss(const HeadLoss<float>&, const HostExec&);
template void head_loss(const HeadLoss<double>&, const HostExec&);
template void head_logits(const HeadLogits<float>&, const HostExec&);
template void head_logits(const HeadLogits<double>&, const HostExec&);

}  // namespace speedrun::kernels

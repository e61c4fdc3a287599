#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/base/column_sum.h"
#include "kernels/base/error.h"
#include "kernels/base/fast_math.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/gemm/fp8_product_ref.h"
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

// What one token's loss sums: columns with their weights, equal columns merged, and the weight of the softmax.
template <class T>
struct RowTerms {
  int count = 0;
  int64_t column[kMaxLossTerms + 1];
  T weight[kMaxLossTerms + 1];
  T total = 0;  // S

  void add(int64_t target, T w) {
    for (int i = 0; i < count; ++i) {
      if (column[i] != target) continue;
      weight[i] += w;
      return;
    }
    column[count] = target;
    weight[count++] = w;
  }
};

template <class T>
RowTerms<T> row_terms(const HeadLoss<T>& a, int64_t token) {
  RowTerms<T> terms;
  if (a.loss_weights == nullptr) {
    terms.add(a.targets[token], 1);
    terms.total = 1;
    return terms;
  }
  const int64_t left = a.row_tokens - token % a.row_tokens;
  for (int k = 0; k < a.loss_terms; ++k) {
    terms.total += a.loss_weights->next[k];
    if (k < left) terms.add(a.targets[token + k], a.loss_weights->next[k]);
  }
  const int32_t prefix = a.prefix != nullptr ? a.prefix[a.targets[token]] : -1;
  if (prefix >= 0) {
    terms.total += a.loss_weights->prefix;
    terms.add(prefix, a.loss_weights->prefix);
  }
  return terms;
}

// loss = Σ weight·(logsumexp(z) − z[column]); unless scale is null the row of logits becomes
// scale · (S·softmax(z) − Σ weight·onehot(column)) · dz/dlogit. z (V) is working memory.
template <class T>
struct LossRow {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(T* loss, T* logits, T* z, int64_t V, const RowTerms<T>* terms, Softcap kind, T c,
                                         const T* scale) {
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
    *loss = 0;
    for (int i = 0; i < terms->count; ++i) *loss += terms->weight[i] * (lse - z[terms->column[i]]);
    if (scale == nullptr) return;
    const T softmax_scale = *scale * terms->total;
    for (int64_t j = 0; j < V; j += S::kLanes) {
      const Vec capped = load_lanes<S>(z + j, V - j);
      store_lanes<S>(logits + j, softmax_scale * vector_exp<S>(capped - lse) * cap_derivative<S, T>(capped, kind, c), V - j);
    }
    for (int i = 0; i < terms->count; ++i) {
      const T target = z[terms->column[i]];
      const Vec one_target = S::fill(target);
      logits[terms->column[i]] =
          *scale * (terms->total * std::exp(target - lse) - terms->weight[i]) * cap_derivative<S, T>(one_target, kind, c)[0];
    }
  }
};

// E5M2 of a row of gradients in units of the scale, into row t of grad8 (count, V) and column t of grad8_t (V, count).
template <class T>
void store_fp8(const HeadFp8& fp8, const T* row, int64_t V, int64_t t, int64_t count, std::atomic<uint32_t>& saturated,
               std::atomic<uint32_t>& flushed) {
  uint32_t row_saturated = 0, row_flushed = 0;
  for (int64_t v = 0; v < V; ++v) {
    const float value = static_cast<float>(row[v]);
    const e5m2 code = to_e5m2(value);
    fp8.grad8[t * V + v] = code;
    fp8.grad8_t[v * count + t] = code;
    row_saturated += std::abs(value) > kE5m2Max;
    row_flushed += row[v] != 0 && to_float(code) == 0;
  }
  saturated += row_saturated;
  flushed += row_flushed;
}

// Losses of the tokens first … first+count and, with gradients, dlogits in place (FP8: in grad8 and grad8_t).
template <class T>
void loss_chunk(const HeadLoss<T>& a, int64_t first, int64_t count, const HostExec& exec) {
  const bool gradient = a.dinp != nullptr, in_fp8 = gradient && a.fp8.weight8 != nullptr;
  const T scale = in_fp8 ? static_cast<T>(kE4m3Max / a.fp8.grad_bound) : gradient ? *a.grad_scale : T{0};
  const T* scale_pointer = gradient ? &scale : nullptr;
  std::atomic<uint32_t> saturated = 0, flushed = 0;
  parallel_ranges(exec, count, kRows, [&](int64_t begin, int64_t end) {
    std::vector<T> capped(static_cast<size_t>(a.V));
    for (int64_t t = begin; t < end; ++t) {
      T* row = a.logits + t * a.V;
      const RowTerms<T> terms = row_terms(a, first + t);
      const RowTerms<T>* row_terms_pointer = &terms;
      simd_dispatch<LossRow<T>>(a.loss + first + t, row, capped.data(), int64_t{a.V}, row_terms_pointer, a.softcap,
                                static_cast<T>(a.softcap_value), scale_pointer);
      if (in_fp8) {
        store_fp8(a.fp8, row, a.V, t, count, saturated, flushed);
      } else if (gradient) {
        round_stored(row, a.V, exec);
      }
    }
  });
  if (!in_fp8) return;
  a.fp8.grad_scale8->scale = static_cast<float>(a.fp8.grad_bound / kE4m3Max * static_cast<double>(*a.grad_scale));
  if (!a.fp8.count) return;
  a.fp8.grad_scale8->saturated += saturated;
  a.fp8.grad_scale8->flushed += flushed;
}

template <class T>
void logits_fp8(const HeadLoss<T>& a, const T* inp, int64_t count, const HostExec& exec) {
  const HeadFp8& fp8 = a.fp8;
  fp8_quantize(Fp8Quantize<T>{.out = fp8.inp8,
                              .out_t = a.dinp != nullptr ? fp8.inp8_t : nullptr,
                              .inp = inp,
                              .scale = fp8.inp_scale,
                              .rows = count,
                              .cols = a.C,
                              .scaling = Fp8Scaling::fixed,
                              .count = fp8.count},
               exec);
  fp8_product_ref(Fp8ProductRef<T, e4m3>{.c = a.logits,
                                         .a = fp8.inp8,
                                         .b = fp8.weight8,
                                         .scale_a = fp8.inp_scale->scale,
                                         .scale_b = fp8.weight_scale->scale,
                                         .M = count,
                                         .N = a.V,
                                         .K = a.C},
                  exec);
  round_rows(a.logits, count, a.V, exec);
}

template <class T>
void gradients_fp8(const HeadLoss<T>& a, int64_t first, int64_t count, const HostExec& exec) {
  const HeadFp8& fp8 = a.fp8;
  T* dinp = a.dinp + first * a.C;
  fp8_product_ref(Fp8ProductRef<T, e5m2>{.c = dinp,
                                         .a = fp8.grad8,
                                         .b = fp8.weight8_t,
                                         .scale_a = fp8.grad_scale8->scale,
                                         .scale_b = fp8.weight_scale->scale,
                                         .M = count,
                                         .N = a.C,
                                         .K = a.V},
                  exec);
  round_rows(dinp, count, a.C, exec);
  fp8_product_ref(Fp8ProductRef<T, e5m2>{.c = a.dweight,
                                         .a = fp8.grad8_t,
                                         .b = fp8.inp8_t,
                                         .scale_a = fp8.grad_scale8->scale,
                                         .scale_b = fp8.inp_scale->scale,
                                         .M = a.V,
                                         .N = a.C,
                                         .K = count,
                                         .beta = 1},
                  exec);
}

template <class T>
void check(const HeadLoss<T>& a) {
  if (a.fp8.weight8 != nullptr) require(a.bias == nullptr && a.dbias == nullptr, "head: FP8 takes no bias");
  if (a.loss_weights == nullptr) return;
  require(a.loss_terms >= 1 && a.loss_terms <= kMaxLossTerms && a.row_tokens > 0 && a.N % a.row_tokens == 0, "head: ", a.loss_terms,
          " loss terms (at most ", kMaxLossTerms, ") in rows of ", a.row_tokens, " of ", a.N, " tokens");
}

}  // namespace

template <class T>
void head_loss(const HeadLoss<T>& a, const HostExec& exec) {
  constexpr const T* kNone = nullptr;
  check(a);
  const bool in_fp8 = a.fp8.weight8 != nullptr;
  for (int64_t first = 0; first < a.N; first += a.chunk) {
    const int64_t count = std::min(a.chunk, a.N - first);
    const T* inp = a.inp + first * a.C;
    if (in_fp8) {
      logits_fp8(a, inp, count, exec);
    } else {
      affine_ref(a.logits, inp, a.weight, a.bias, kNone, count, a.C, a.V, exec);
    }
    loss_chunk(a, first, count, exec);
    if (a.dinp == nullptr) continue;
    if (in_fp8) {
      gradients_fp8(a, first, count, exec);
      continue;
    }
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

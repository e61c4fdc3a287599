#include <cmath>
#include <numbers>

#include "kernels/base/column_sum.h"
#include "kernels/base/error.h"
#include "kernels/gate_net/gate_net.h"
#include "kernels/gate_net/gate_net_parts.h"
#include "kernels/gemm/gemm_ref.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kRows = 64;  // of one task
constexpr int kMostHidden = 1024;

template <class A>
A normal_cdf(A x) {
  return static_cast<A>(0.5) * (1 + std::erf(x / std::numbers::sqrt2_v<A>));
}

template <class A>
A gelu_derivative(A x) {
  const A density = std::exp(static_cast<A>(-0.5) * x * x) * std::numbers::inv_sqrtpi_v<A> / std::numbers::sqrt2_v<A>;
  return normal_cdf(x) + x * density;
}

template <class Args>
void check_args(const char* op, const Args& a) {
  require((a.w1 == nullptr) == (a.w2 == nullptr), op, ": w1 and w2 come together");
  require(a.w1 == nullptr || (a.G > 0 && a.G <= kMostHidden), op, ": G = ", a.G, ", must be 1 to ", kMostHidden);
}

template <class Args>
auto scale_of(const Args& a) {
  using T = std::remove_cvref_t<decltype(*a.bias)>;
  return a.scale != nullptr ? *a.scale : static_cast<T>(a.constant_scale);
}

// GELU of a row of hidden values, as the second product reads it
template <class T>
void activate(T* activated, const T* hidden, int G, const HostExec& exec) {
  for (int k = 0; k < G; ++k) activated[k] = exec.store(hidden[k] * normal_cdf(hidden[k]));
}

// One token: sums += dout ⊗ [gelu(hidden), 1]; dhidden.
template <class T>
void backward_token(const GateNetBackward<T>& a, int64_t n, T scale, Acc<T>* dw2, Acc<T>* dbias, const HostExec& exec) {
  const T* dout = a.dout + n * a.O;
  for (int o = 0; o < a.O; ++o) dbias[o] += dout[o];
  if (a.w1 == nullptr) return;
  const T* hidden = a.hidden + n * a.G;
  T activated[kMostHidden], gradient[kMostHidden];
  std::fill_n(gradient, a.G, T{0});
  activate(activated, hidden, a.G, exec);
  for (int o = 0; o < a.O; ++o) {
    const T* w2 = a.w2 + int64_t{o} * a.G;
    for (int k = 0; k < a.G; ++k) {
      dw2[int64_t{o} * a.G + k] += dout[o] * activated[k];
      gradient[k] += dout[o] * w2[k];
    }
  }
  for (int k = 0; k < a.G; ++k) a.dhidden[n * a.G + k] = exec.store(gradient[k] * scale * gelu_derivative(hidden[k]));
}

}  // namespace

int64_t gate_net_scratch(int64_t N, int G, int O) { return (gate_net_parts(N) + 1) * O * (G + int64_t{1}); }

template <class T>
void gate_net_forward(const GateNetForward<T>& a, const HostExec& exec) {
  check_args("gate_net_forward", a);
  const T scale = scale_of(a);
  if (a.w1 != nullptr) {
    gemm_ref(GemmRef<T>{.c = a.hidden,
                        .a = a.inp,
                        .b = a.w1,
                        .M = a.N,
                        .N = a.G,
                        .K = a.C,
                        .lda = a.C,
                        .ldb = a.C,
                        .ldc = a.G,
                        .transpose_b = true},
             exec);
  }
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    T activated[kMostHidden];
    for (int64_t n = begin; n < end; ++n) {
      if (a.w1 != nullptr) {
        round_stored(a.hidden + n * a.G, a.G, exec);
        activate(activated, a.hidden + n * a.G, a.G, exec);
      }
      for (int o = 0; o < a.O; ++o) {
        Acc<T> sum = a.bias[o];
        for (int k = 0; a.w1 != nullptr && k < a.G; ++k) sum += activated[k] * a.w2[int64_t{o} * a.G + k];
        a.out[n * a.O + o] = exec.store(sum * scale);
      }
    }
  });
}

template <class T>
void gate_net_backward(const GateNetBackward<T>& a, const HostExec& exec) {
  using A = Acc<T>;
  check_args("gate_net_backward", a);
  const T scale = scale_of(a);
  const int64_t parts = gate_net_parts(a.N), weights = a.w1 != nullptr ? int64_t{a.O} * a.G : 0, size = weights + a.O;
  parallel(exec, parts, [&](int64_t part) {
    A* sums = a.scratch + part * size;
    std::fill_n(sums, size, A{0});
    for (int64_t n = part_begin(part, parts, a.N); n < part_begin(part + 1, parts, a.N); ++n)
      backward_token(a, n, scale, sums, sums + weights, exec);
  });
  A* totals = a.scratch + parts * size;
  std::fill_n(totals, size, A{0});
  add_parts(totals, a.scratch, parts, size, exec);

  A dscale = 0;
  for (int64_t i = 0; i < weights; ++i) {
    a.dw2[i] += totals[i] * scale;
    dscale += totals[i] * a.w2[i];
  }
  for (int o = 0; o < a.O; ++o) {
    a.dbias[o] += totals[weights + o] * scale;
    dscale += totals[weights + o] * a.bias[o];
  }
  if (a.dscale != nullptr) *a.dscale += dscale;
  if (a.w1 == nullptr) return;

  gemm_ref(GemmRef<T>{.c = a.dw1,
                      .a = a.dhidden,
                      .b = a.inp,
                      .M = a.G,
                      .N = a.C,
                      .K = a.N,
                      .lda = a.G,
                      .ldb = a.C,
                      .ldc = a.C,
                      .transpose_a = true,
                      .beta = 1},
           exec);
  gemm_ref(GemmRef<T>{.c = a.dinp,
                      .a = a.dhidden,
                      .b = a.w1,
                      .M = a.N,
                      .N = a.C,
                      .K = a.G,
                      .lda = a.G,
                      .ldb = a.C,
                      .ldc = a.C,
                      .beta = a.accumulate ? T{1} : T{0}},
           exec);
  round_rows(a.dinp, a.N, a.C, exec);
}

template void gate_net_forward(const GateNetForward<float>&, const HostExec&);
template void gate_net_forward(const GateNetForward<double>&, const HostExec&);
template void gate_net_backward(const GateNetBackward<float>&, const HostExec&);
template void gate_net_backward(const GateNetBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

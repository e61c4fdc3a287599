#include <cmath>

#include "kernels/base/column_sum.h"
#include "kernels/base/simd.h"
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_parts.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kRows = 32;  // of one task

template <class T>
struct ForwardRows {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(const NormForward<T>* args, int64_t begin, int64_t end) {
    using S = Simd<T, W>;
    using Vec = typename S::Vec;
    const NormForward<T> a = *args;
    for (int64_t n = begin; n < end; ++n) {
      const T* x = a.inp + n * a.C;
      T mean = 0;
      if (a.kind == Norm::layer) {
        Vec sum{};
        for (int c = 0; c < a.C; c += S::kLanes) sum += load_lanes<S>(x + c, a.C - c);
        mean = S::sum(sum) / static_cast<T>(a.C);
        a.mean[n] = mean;
      }
      Vec squares{};
      for (int c = 0; c < a.C; c += S::kLanes) {
        const Vec centred = load_lanes<S>(x + c, a.C - c, mean) - mean;
        squares += centred * centred;
      }
      const T rstd = 1 / std::sqrt(S::sum(squares) / static_cast<T>(a.C) + static_cast<T>(a.eps));
      a.rstd[n] = rstd;
      T* out = a.out + n * a.C;
      for (int c = 0; c < a.C; c += S::kLanes) {
        const int64_t left = a.C - c;
        Vec y = (load_lanes<S>(x + c, left) - mean) * rstd;
        if (a.gain != nullptr) y *= load_lanes<S>(a.gain + c, left);
        if (a.shift != nullptr) y += load_lanes<S>(a.shift + c, left);
        store_lanes<S>(out + c, y, left);
      }
    }
  }
};

// With x̂ = (x − mean)·rstd and dy = dout·gain:  dx = rstd·(dy − mean(dy) − x̂·mean(dy·x̂)), without the mean(dy) for rms.
template <class T>
struct BackwardRows {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(const NormBackward<T>* args, T* dgain, T* dshift, int64_t begin, int64_t end) {
    using S = Simd<T, W>;
    using Vec = typename S::Vec;
    const NormBackward<T> a = *args;
    const T inverse_c = 1 / static_cast<T>(a.C);
    for (int64_t n = begin; n < end; ++n) {
      const T* x = a.inp + n * a.C;
      const T* dout = a.dout + n * a.C;
      const T mean = a.kind == Norm::layer ? a.mean[n] : T{0}, rstd = a.rstd[n];
      Vec sum_dy{}, sum_dy_x{};
      for (int c = 0; c < a.C; c += S::kLanes) {
        const int64_t left = a.C - c;
        const Vec g = load_lanes<S>(dout + c, left), normed = (load_lanes<S>(x + c, left) - mean) * rstd;
        const Vec dy = a.gain != nullptr ? g * load_lanes<S>(a.gain + c, left) : g;
        sum_dy += dy;
        sum_dy_x += dy * normed;
        if (dgain != nullptr) store_lanes<S>(dgain + c, load_lanes<S>(dgain + c, left) + g * normed, left);
        if (dshift != nullptr) store_lanes<S>(dshift + c, load_lanes<S>(dshift + c, left) + g, left);
      }
      const T mean_dy = a.kind == Norm::layer ? S::sum(sum_dy) * inverse_c : T{0}, mean_dy_x = S::sum(sum_dy_x) * inverse_c;
      for (int c = 0; c < a.C; c += S::kLanes) {
        const int64_t left = a.C - c;
        const Vec g = load_lanes<S>(dout + c, left), normed = (load_lanes<S>(x + c, left) - mean) * rstd;
        const Vec dy = a.gain != nullptr ? g * load_lanes<S>(a.gain + c, left) : g;
        Vec dx = rstd * (dy - mean_dy - normed * mean_dy_x);
        if (a.dinp_add != nullptr) dx += load_lanes<S>(a.dinp_add + n * a.C + c, left);
        store_lanes<S>(a.dinp + n * a.C + c, dx, left);
      }
    }
  }
};

}  // namespace

int64_t norm_backward_scratch(int64_t N, int C) { return 2 * norm_backward_parts(N) * C; }

template <class T>
void norm_forward(const NormForward<T>& a, const HostExec& exec) {
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    simd_dispatch<ForwardRows<T>>(&a, begin, end);
    round_stored(a.out + begin * a.C, (end - begin) * a.C, exec);
  });
}

template <class T>
void norm_backward(const NormBackward<T>& a, const HostExec& exec) {
  const int64_t parts = norm_backward_parts(a.N);
  Acc<T>* dgain_parts = a.scratch;
  Acc<T>* dshift_parts = a.scratch + parts * a.C;
  parallel(exec, parts, [&](int64_t part) {
    Acc<T>* dgain = a.dgain != nullptr ? dgain_parts + part * a.C : nullptr;
    Acc<T>* dshift = a.dshift != nullptr ? dshift_parts + part * a.C : nullptr;
    if (dgain != nullptr) std::fill_n(dgain, a.C, Acc<T>{0});
    if (dshift != nullptr) std::fill_n(dshift, a.C, Acc<T>{0});
    const int64_t begin = part_begin(part, parts, a.N), end = part_begin(part + 1, parts, a.N);
    simd_dispatch<BackwardRows<T>>(&a, dgain, dshift, begin, end);
    round_stored(a.dinp + begin * a.C, (end - begin) * a.C, exec);
  });
  if (a.dgain != nullptr) add_parts(a.dgain, dgain_parts, parts, a.C, exec);
  if (a.dshift != nullptr) add_parts(a.dshift, dshift_parts, parts, a.C, exec);
}

template void norm_forward(const NormForward<float>&, const HostExec&);
template void norm_forward(const NormForward<double>&, const HostExec&);
template void norm_backward(const NormBackward<float>&, const HostExec&);
template void norm_backward(const NormBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

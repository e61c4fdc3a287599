#include <algorithm>
#include <cmath>

#include "kernels/base/host_parallel.h"
#include "kernels/head_gate/head_gate.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kRows = 32;          // tokens of one task
constexpr double kLeastSquare = 1e-8;  // ‖v‖² below which v's direction counts less

template <class T>
Acc<T> dot(const T* x, const T* y, int D) {
  Acc<T> sum = 0;
  for (int d = 0; d < D; ++d) sum += x[d] * y[d];
  return sum;
}

}  // namespace

template <class T>
void head_gate_forward(const HeadGateForward<T>& a, const HostExec& exec) {
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int h = 0; h < a.H; ++h) {
        const int64_t at = (t * a.H + h) * a.D, coefficient = t * a.stride + h;
        const T *y = a.y + at, *v = a.alpha != nullptr ? a.v + at : nullptr;
        const Acc<T> gate = a.gate != nullptr ? a.gate[coefficient] : T{1};
        Acc<T> along = 0;  // what of v is taken away
        if (v != nullptr) {
          const Acc<T> square = std::max(dot(v, v, a.D), static_cast<Acc<T>>(kLeastSquare));
          along = std::tanh(a.alpha[coefficient]) * dot(y, v, a.D) / square;
        }
        for (int d = 0; d < a.D; ++d) a.out[at + d] = exec.store(gate * (v != nullptr ? y[d] - along * v[d] : y[d]));
      }
    }
  });
}

// With z = y − τ·(y·v/n)·v, τ = tanh α, n = max(‖v‖², 1e−8), and dz = gate·dout:
//   dgate = dout·z;   dy = dz − τ·(dz·v/n)·v;   dα = −(1 − τ²)·(y·v/n)·(dz·v)
//   dv = −τ·((y·v/n)·dz + (dz·v/n)·y − 2·(y·v/n)·(dz·v/n)·v), the last term only where n is ‖v‖²
template <class T>
void head_gate_backward(const HeadGateBackward<T>& a, const HostExec& exec) {
  parallel_ranges(exec, a.N, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int h = 0; h < a.H; ++h) {
        const int64_t at = (t * a.H + h) * a.D, coefficient = t * a.stride + h;
        const T *y = a.y + at, *dout = a.dout + at;
        const Acc<T> gate = a.gate != nullptr ? a.gate[coefficient] : T{1};
        Acc<T> dgate = dot(dout, y, a.D);
        if (a.alpha == nullptr) {
          for (int d = 0; d < a.D; ++d) a.dy[at + d] = exec.store(gate * dout[d]);
        } else {
          const T* v = a.v + at;
          const Acc<T> tau = std::tanh(a.alpha[coefficient]), norm = dot(v, v, a.D), dout_v = dot(dout, v, a.D);
          const bool floored = norm <= static_cast<Acc<T>>(kLeastSquare);
          const Acc<T> square = floored ? static_cast<Acc<T>>(kLeastSquare) : norm;
          const Acc<T> y_share = dot(y, v, a.D) / square, dz_share = gate * dout_v / square;
          const Acc<T> own = floored ? 0 : 2 * y_share * dz_share;
          a.dalpha[coefficient] = exec.store(-(1 - tau * tau) * y_share * gate * dout_v);
          dgate -= tau * y_share * dout_v;
          for (int d = 0; d < a.D; ++d) {
            const Acc<T> dz = gate * dout[d];
            a.dv[at + d] = exec.store(-tau * (y_share * dz + dz_share * y[d] - own * v[d]));
            a.dy[at + d] = exec.store(dz - tau * dz_share * v[d]);  // the last read of dout[d] is above: dy may be dout
          }
        }
        if (a.gate != nullptr) a.dgate[coefficient] = exec.store(dgate);
      }
    }
  });
}

template void head_gate_forward(const HeadGateForward<float>&, const HostExec&);
template void head_gate_forward(const HeadGateForward<double>&, const HostExec&);
template void head_gate_backward(const HeadGateBackward<float>&, const HostExec&);
template void head_gate_backward(const HeadGateBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

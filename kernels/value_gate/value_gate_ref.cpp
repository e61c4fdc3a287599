#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/base/column_sum.h"
#include "kernels/value_gate/value_gate.h"
#include "kernels/value_gate/value_gate_parts.h"

namespace speedrun::kernels {

int64_t value_gate_scratch(int64_t N, int H, int P) { return value_gate_parts(N) * H * 2 * P; }

template <class T>
void value_gate_forward(const ValueGateForward<T>& a, const HostExec& exec) {
  parallel_ranges(exec, a.N, kValueGateTile, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int h = 0; h < a.H; ++h) {
        const T* weight = a.weight + int64_t{h} * 2 * a.P;
        Acc<T> sum = 0;
        for (int c = 0; c < a.P; ++c) sum += weight[c] * a.inp[t * a.C + c];
        for (int c = 0; c < a.P; ++c) sum += weight[a.P + c] * a.embed[t * a.C + c];
        a.gate[t * a.H + h] = exec.store(2 / (1 + std::exp(-sum)));
      }
    }
  });
}

// With g = 2·σ(z): dg/dz = 2·σ·(1 − σ) = g·(1 − g/2).
template <class T>
void value_gate_backward(const ValueGateBackward<T>& a, const HostExec& exec) {
  const int64_t parts = value_gate_parts(a.N), rows = value_gate_part_rows(a.N), weights = int64_t{a.H} * 2 * a.P;
  parallel(exec, parts, [&](int64_t part) {
    Acc<T>* partial = a.scratch + part * weights;
    std::fill_n(partial, weights, Acc<T>{0});
    std::vector<Acc<T>> dchannels(2 * static_cast<size_t>(a.P));
    for (int64_t t = part * rows; t < std::min(a.N, (part + 1) * rows); ++t) {
      std::fill(dchannels.begin(), dchannels.end(), Acc<T>{0});
      for (int h = 0; h < a.H; ++h) {
        const Acc<T> gate = a.gate[t * a.H + h], dz = a.dgate[t * a.H + h] * gate * (1 - gate / 2);
        for (int c = 0; c < 2 * a.P; ++c) {
          const int64_t w = int64_t{h} * 2 * a.P + c;
          partial[w] += dz * (c < a.P ? a.inp[t * a.C + c] : a.embed[t * a.C + c - a.P]);
          dchannels[c] += dz * a.weight[w];
        }
      }
      for (int c = 0; c < a.P; ++c) {
        T &dinp = a.dinp[t * a.C + c], &dembed = a.dembed[t * a.C + c];
        dinp = exec.store(dinp + dchannels[c]);
        dembed = exec.store(dembed + dchannels[a.P + c]);
      }
    }
  });
  add_parts(a.dweight, a.scratch, parts, weights, exec);
}

template void value_gate_forward(const ValueGateForward<float>&, const HostExec&);
template void value_gate_forward(const ValueGateForward<double>&, const HostExec&);
template void value_gate_backward(const ValueGateBackward<float>&, const HostExec&);
template void value_gate_backward(const ValueGateBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

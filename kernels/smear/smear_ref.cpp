#include <cmath>

#include "kernels/base/error.h"
#include "kernels/base/host_parallel.h"
#include "kernels/smear/smear.h"
#include "kernels/smear/smear_parts.h"

namespace speedrun::kernels {
namespace {

// σ(Σ_{c < G} gate_weight[c] · inp[t][c])
template <class T>
Acc<T> gate(const T* gate_weight, const T* inp, int G) {
  Acc<T> sum = 0;
  for (int c = 0; c < G; ++c) sum += gate_weight[c] * inp[c];
  return 1 / (1 + std::exp(-sum));
}

void check_shape(const char* op, int64_t N, int64_t row_tokens, int C, int G) {
  require(N > 0 && row_tokens > 0 && N % row_tokens == 0, op, ": N = ", N, " must be a multiple of row_tokens = ", row_tokens);
  require(G > 0 && G <= kSmearMaxGate && G <= C, op, ": the gate looks at ", G, " of ", C, " channels, expected 1 to ",
          kSmearMaxGate);
}

}  // namespace

int64_t smear_scratch(int64_t N) { return kSmearSums * smear_parts(N); }

template <class T>
void smear_forward(const SmearForward<T>& a, const HostExec& exec) {
  check_shape("smear_forward", a.N, a.row_tokens, a.C, a.G);
  parallel_ranges(exec, a.N, kSmearPartRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* inp = a.inp + t * a.C;
      T* __restrict out = a.out + t * a.C;
      const Acc<T> factor = t % a.row_tokens == 0 ? 0 : *a.lambda * gate(a.gate_weight, inp, a.G);
      const T* before = t % a.row_tokens == 0 ? inp : inp - a.C;
      for (int c = 0; c < a.C; ++c) out[c] = inp[c] + factor * before[c];
    }
    round_stored(a.out + begin * a.C, (end - begin) * a.C, exec);
  });
}

// With s = σ(a_t), a_t = Σ_c gate_weight[c]·inp[t][c] and dot_t = Σ_c dout[t]·inp[t−1] (0 at the first token of a row):
//   da_t = λ·s·(1 − s)·dot_t;   dinp[t] = dout[t] + λ·s_{t+1}·dout[t+1] (not at the last token of a row) + da_t·gate_weight
//   dgate_weight += Σ_t da_t·inp[t];   dlambda += Σ_t s·dot_t
template <class T>
void smear_backward(const SmearBackward<T>& a, const HostExec& exec) {
  check_shape("smear_backward", a.N, a.row_tokens, a.C, a.G);
  const int64_t parts = smear_parts(a.N);
  parallel(exec, parts, [&](int64_t part) {
    const int64_t begin = part * kSmearPartRows, end = std::min(a.N, begin + kSmearPartRows);
    Acc<T> sums[kSmearSums] = {};
    for (int64_t t = begin; t < end; ++t) {
      const T* inp = a.inp + t * a.C;
      const T* dout = a.dout + t * a.C;
      T* __restrict dinp = a.dinp + t * a.C;
      const bool last = (t + 1) % a.row_tokens == 0;
      const Acc<T> next_factor = last ? 0 : *a.lambda * gate(a.gate_weight, inp + a.C, a.G);
      const T* next_dout = last ? dout : dout + a.C;
      for (int c = 0; c < a.C; ++c) dinp[c] = dout[c] + next_factor * next_dout[c];
      if (t % a.row_tokens == 0) continue;
      Acc<T> dot = 0;
      for (int c = 0; c < a.C; ++c) dot += dout[c] * inp[c - a.C];
      const Acc<T> s = gate(a.gate_weight, inp, a.G), da = *a.lambda * s * (1 - s) * dot;
      for (int c = 0; c < a.G; ++c) {
        dinp[c] += da * a.gate_weight[c];
        sums[c] += da * inp[c];
      }
      sums[kSmearMaxGate] += s * dot;
    }
    round_stored(a.dinp + begin * a.C, (end - begin) * a.C, exec);
    for (int i = 0; i < kSmearSums; ++i) a.scratch[i * parts + part] = sums[i];
  });
  auto add_parts_to = [&](Acc<T>& target, int sum_idx) {
    Acc<T> sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += a.scratch[sum_idx * parts + part];
    target += sum;
  };
  for (int c = 0; c < a.G; ++c) add_parts_to(a.dgate_weight[c], c);
  add_parts_to(*a.dlambda, kSmearMaxGate);
}

template void smear_forward(const SmearForward<float>&, const HostExec&);
template void smear_forward(const SmearForward<double>&, const HostExec&);
template void smear_backward(const SmearBackward<float>&, const HostExec&);
template void smear_backward(const SmearBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

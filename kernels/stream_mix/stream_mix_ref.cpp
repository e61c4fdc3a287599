#include <cmath>

#include "kernels/base/error.h"
#include "kernels/base/host_parallel.h"
#include "kernels/base/simd.h"
#include "kernels/stream_mix/stream_mix.h"
#include "kernels/stream_mix/stream_mix_parts.h"

namespace speedrun::kernels {
namespace {

template <class T>
T scalar_factor(const MixTerm<T>& term) {
  if (term.scalar == nullptr) return 1;
  return term.sigmoid ? 1 / (1 + std::exp(-*term.scalar)) : *term.scalar;
}

template <class T>
T gate_factor(const MixTerm<T>& term, int64_t t) {
  const T add = static_cast<T>(term.gate_add);
  return term.gate != nullptr ? term.gate[t * term.gate_stride] + add : add;
}

// One token: out = Σ_i factors[i] · src_i.
template <class T>
struct ForwardRow {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(const StreamMixForward<T>* args, const T* factors, int64_t t) {
    using S = Simd<T, W>;
    const int64_t C = args->C, row = t * C;
    for (int64_t c = 0; c < C; c += S::kLanes) {
      typename S::Vec sum{};
      for (int i = 0; i < args->num_terms; ++i) sum += factors[i] * load_lanes<S>(args->terms[i].src + row + c, C - c);
      store_lanes<S>(args->out + row + c, sum, C - c);
    }
  }
};

// One token: dots[i] = Σ_c src_i · dout where a gate or scalar asks for it, and the gradients of the src's. All reads of an element
// come before its writes: a dsrc may be dout.
template <class T>
struct BackwardRow {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(const StreamMixBackward<T>* args, const T* factors, T* dots, int64_t t) {
    using S = Simd<T, W>;
    using Vec = typename S::Vec;
    const int64_t C = args->C, row = t * C;
    Vec sums[kMaxMixTerms] = {};
    for (int64_t c = 0; c < C; c += S::kLanes) {
      const int64_t left = C - c;
      const Vec dout = load_lanes<S>(args->dout + row + c, left);
      for (int i = 0; i < args->num_terms; ++i) {
        const MixTermGrad<T>& grad = args->grads[i];
        if (grad.dscalar != nullptr || grad.dgate != nullptr) sums[i] += dout * load_lanes<S>(args->terms[i].src + row + c, left);
        if (grad.dsrc == nullptr) continue;
        Vec dsrc = factors[i] * dout;
        if (grad.accumulate) dsrc += load_lanes<S>(grad.dsrc + row + c, left);
        store_lanes<S>(grad.dsrc + row + c, dsrc, left);
      }
    }
    for (int i = 0; i < args->num_terms; ++i) dots[i] = S::sum(sums[i]);
  }
};

}  // namespace

int64_t stream_mix_scratch(int64_t N) { return kMaxMixTerms * stream_mix_parts(N); }

template <class T>
void stream_mix_forward(const StreamMixForward<T>& a, const HostExec& exec) {
  require(a.num_terms > 0 && a.num_terms <= kMaxMixTerms, "stream_mix_forward: ", a.num_terms, " terms, expected 1 to ",
          kMaxMixTerms);
  parallel_ranges(exec, a.N, kMixPartRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T factors[kMaxMixTerms];
      for (int i = 0; i < a.num_terms; ++i) factors[i] = scalar_factor(a.terms[i]) * gate_factor(a.terms[i], t);
      simd_dispatch<ForwardRow<T>>(&a, static_cast<const T*>(factors), t);
    }
    round_stored(a.out + begin * a.C, (end - begin) * a.C, exec);
  });
}

template <class T>
void stream_mix_backward(const StreamMixBackward<T>& a, const HostExec& exec) {
  require(a.num_terms > 0 && a.num_terms <= kMaxMixTerms, "stream_mix_backward: ", a.num_terms, " terms, expected 1 to ",
          kMaxMixTerms);
  const int64_t parts = stream_mix_parts(a.N);
  parallel(exec, parts, [&](int64_t part) {
    const int64_t begin = part * kMixPartRows, end = std::min(a.N, begin + kMixPartRows);
    Acc<T> dfactor_sums[kMaxMixTerms] = {};
    for (int64_t t = begin; t < end; ++t) {
      T scalars[kMaxMixTerms], gates[kMaxMixTerms], factors[kMaxMixTerms], dots[kMaxMixTerms];
      for (int i = 0; i < a.num_terms; ++i) {
        scalars[i] = scalar_factor(a.terms[i]);
        gates[i] = gate_factor(a.terms[i], t);
        factors[i] = scalars[i] * gates[i];
      }
      simd_dispatch<BackwardRow<T>>(&a, static_cast<const T*>(factors), static_cast<T*>(dots), t);
      for (int i = 0; i < a.num_terms; ++i) {
        if (a.grads[i].dgate != nullptr) a.grads[i].dgate[t * a.terms[i].gate_stride] = exec.store(scalars[i] * dots[i]);
        dfactor_sums[i] += gates[i] * dots[i];
      }
    }
    for (int i = 0; i < a.num_terms; ++i) {
      if (a.grads[i].dsrc != nullptr) round_stored(a.grads[i].dsrc + begin * a.C, (end - begin) * a.C, exec);
      if (a.grads[i].dscalar != nullptr) a.scratch[i * parts + part] = dfactor_sums[i];
    }
  });
  for (int i = 0; i < a.num_terms; ++i) {
    if (a.grads[i].dscalar == nullptr) continue;
    Acc<T> dfactor = 0;
    for (int64_t part = 0; part < parts; ++part) dfactor += a.scratch[i * parts + part];
    const Acc<T> factor = scalar_factor(a.terms[i]);
    *a.grads[i].dscalar += a.terms[i].sigmoid ? dfactor * factor * (1 - factor) : dfactor;
  }
}

template void stream_mix_forward(const StreamMixForward<float>&, const HostExec&);
template void stream_mix_forward(const StreamMixForward<double>&, const HostExec&);
template void stream_mix_backward(const StreamMixBackward<float>&, const HostExec&);
template void stream_mix_backward(const StreamMixBackward<double>&, const HostExec&);

}  // namespace speedrun::kernels

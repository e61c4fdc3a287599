#include <cmath>

#include "kernels/adamw/adamw.h"
#include "kernels/base/host_parallel.h"
#include "kernels/base/simd.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kElements = 16384;  // of one task

// The numbers of a step in the arithmetic's type.
template <class A>
struct Constants {
  A beta1, one_minus_beta1, beta2, one_minus_beta2, eps, grad_scale, decay, step_size, root_correction2;
};

template <class A, AdamForm kForm>
struct Update {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(A* __restrict weight, A* __restrict m, A* __restrict v, const A* __restrict grad,
                                         int64_t count, const Constants<A>* constants) {
    const Constants<A> c = *constants;
    for (int64_t i = 0; i < count; ++i) {
      const A g = grad[i] * c.grad_scale;
      m[i] = c.beta1 * m[i] + c.one_minus_beta1 * g;
      v[i] = c.beta2 * v[i] + c.one_minus_beta2 * g * g;
      if constexpr (kForm == AdamForm::adamw) {
        const A decayed = weight[i] - c.decay * weight[i];
        weight[i] = decayed - c.step_size * m[i] / (std::sqrt(v[i]) / c.root_correction2 + c.eps);
      } else {
        const A step = c.step_size * m[i] / (std::sqrt(v[i]) + c.eps);
        weight[i] -= step * weight[i] > 0 ? step + c.decay * weight[i] : step;
      }
    }
  }
};

}  // namespace

template <class T>
void adamw_update(const AdamW<T>& a, const HostExec& exec) {
  using A = Acc<T>;
  if (a.verdict->skip != 0) return;
  const AdamStep& step = *a.step;
  const A root_correction2 = std::sqrt(static_cast<A>(step.correction2));
  const A step_size = static_cast<A>(step.lr) / static_cast<A>(step.correction1);
  const Constants<A> constants{.beta1 = static_cast<A>(a.beta1),
                               .one_minus_beta1 = static_cast<A>(1 - a.beta1),
                               .beta2 = static_cast<A>(a.beta2),
                               .one_minus_beta2 = static_cast<A>(1 - a.beta2),
                               .eps = static_cast<A>(a.eps),
                               .grad_scale = static_cast<A>(a.verdict->grad_scale),
                               .decay = a.decays ? static_cast<A>(step.decay) : A{0},
                               .step_size = a.form == AdamForm::cautious ? step_size * root_correction2 : step_size,
                               .root_correction2 = root_correction2};
  A* m = static_cast<A*>(a.m);
  A* v = static_cast<A*>(a.v);
  parallel_ranges(exec, a.n, kElements, [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    A* weight = static_cast<A*>(a.weight.value + begin);
    if (a.form == AdamForm::cautious) {
      simd_dispatch<Update<A, AdamForm::cautious>>(weight, m + begin, v + begin, a.grad + begin, count, &constants);
    } else {
      simd_dispatch<Update<A, AdamForm::adamw>>(weight, m + begin, v + begin, a.grad + begin, count, &constants);
    }
    if (a.weight.split == MasterSplit::none) round_stored(a.weight.value + begin, count, exec);
    if (a.bf16_state) {
      round_stored(m + begin, count, exec);
      round_stored(v + begin, count, exec);
    }
  });
}

template void adamw_update(const AdamW<float>&, const HostExec&);
template void adamw_update(const AdamW<double>&, const HostExec&);

}  // namespace speedrun::kernels

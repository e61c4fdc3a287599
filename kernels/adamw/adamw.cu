// Adam on one parameter, in one pass:
//   g = grad · grad_scale;   m ← β1·m + (1−β1)·g;   v ← β2·v + (1−β2)·g²
//   adamw     θ ← θ − decay·θ;   θ ← θ − (lr/correction1)·m / (√v/√correction2 + ε)
//   cautious  u = lr·√correction2/correction1 · m/(√v + ε);   θ ← θ − (u + [u·θ > 0]·decay·θ)
// Layout    flat arrays, 16-byte aligned; the last n mod 8 elements are done one by one.
// Work      8 elements a thread.
// Traffic   bytes an element, in and out: master 4 + 4 (`none` 2 + 2), state 8 + 8 (BF16 4 + 4), gradient 4 in: 28 with both in
//           full.
// Numerics  FP32; the master is joined from and split into (value, low) exactly; BF16 state and `none` weights are rounded to
//           nearest even.
#include <cuda_runtime.h>

#include "kernels/adamw/adamw.h"
#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/base/master_vec.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;

// Launch constants in FP32, rounded once from the config's doubles.
struct AdamConstants {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
};

// What the step changes in it, the same for every element.
struct StepSizes {
  float decay, step_size, sqrt_correction2;
};

// One element; w, m and v are updated in place.
template <AdamForm kForm>
__device__ __forceinline__ void update(float& w, float& m, float& v, float g, const AdamConstants& k, const StepSizes& s) {
  m = k.beta1 * m + k.one_minus_beta1 * g;
  v = k.beta2 * v + k.one_minus_beta2 * (g * g);
  if constexpr (kForm == AdamForm::adamw) {
    w -= s.decay * w;
    w -= s.step_size * m / (sqrtf(v) / s.sqrt_correction2 + k.eps);
  } else {
    const float u = s.step_size * m / (sqrtf(v) + k.eps);
    w -= u * w > 0 ? u + s.decay * w : u;
  }
}

template <class State, AdamForm kForm>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamW<bf16> p, AdamConstants k) {
  if (p.verdict->skip != 0) return;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (first >= p.n) return;
  const AdamStep step = *p.step;
  const float grad_scale = p.verdict->grad_scale, sqrt_correction2 = sqrtf(step.correction2);
  const StepSizes sizes{.decay = p.decays ? step.decay : 0.0f,
                        .step_size = step.lr / step.correction1 * (kForm == AdamForm::cautious ? sqrt_correction2 : 1.0f),
                        .sqrt_correction2 = sqrt_correction2};
  State* m_state = static_cast<State*>(p.m);
  State* v_state = static_cast<State*>(p.v);
  const MasterSplit split = p.weight.split;
  const bool has_low = p.weight.low != nullptr;

  if (first + kVec > p.n) {
    for (int64_t i = first; i < p.n; ++i) {
      float w = join_master(p.weight.value[i], has_low ? p.weight.low[i] : uint16_t{0}, split);
      float m = static_cast<float>(m_state[i]), v = static_cast<float>(v_state[i]);
      update<kForm>(w, m, v, p.grad[i] * grad_scale, k, sizes);
      m_state[i] = static_cast<State>(m);
      v_state[i] = static_cast<State>(v);
      bf16 value;
      uint16_t low;
      split_master(w, split, value, low);
      p.weight.value[i] = value;
      if (has_low) p.weight.low[i] = low;
    }
    return;
  }

  float m[kVec], v[kVec], g[kVec];
  load8(m_state + first, m);
  load8(v_state + first, v);
  load8(p.grad + first, g);
  float w[kVec];
  load_masters8(p.weight, first, w);
#pragma unroll
  for (int j = 0; j < kVec; ++j) update<kForm>(w[j], m[j], v[j], g[j] * grad_scale, k, sizes);
  store8(m_state + first, m);
  store8(v_state + first, v);
  store_masters8(p.weight, first, w);
}

}  // namespace

void adamw_update(const AdamW<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "adamw_update";
  require(args.n > 0, kOp, ": n = ", args.n);
  require(args.weight.value != nullptr && args.m != nullptr && args.v != nullptr && args.grad != nullptr && args.step != nullptr &&
              args.verdict != nullptr,
          kOp, ": null pointer");
  require((args.weight.low == nullptr) == (args.weight.split == MasterSplit::none), kOp,
          ": a weight has a low half exactly if its master is split");
  require_aligned16(kOp, "weight", args.weight.value);
  require_aligned16(kOp, "weight's low half", args.weight.low);
  require_aligned16(kOp, "m", args.m);
  require_aligned16(kOp, "v", args.v);
  require_aligned16(kOp, "grad", args.grad);
  const AdamConstants constants{.beta1 = static_cast<float>(args.beta1),
                                .one_minus_beta1 = static_cast<float>(1 - args.beta1),
                                .beta2 = static_cast<float>(args.beta2),
                                .one_minus_beta2 = static_cast<float>(1 - args.beta2),
                                .eps = static_cast<float>(args.eps)};
  const unsigned grid = grid_size(ceil_div(args.n, int64_t{kThreads} * kVec), kOp);
  const bool cautious = args.form == AdamForm::cautious;
  const auto kernel = args.bf16_state ? (cautious ? adamw_kernel<bf16, AdamForm::cautious> : adamw_kernel<bf16, AdamForm::adamw>)
                                      : (cautious ? adamw_kernel<float, AdamForm::cautious> : adamw_kernel<float, AdamForm::adamw>);
  kernel<<<grid, kThreads, 0, exec.stream>>>(args, constants);
  check_launch(kOp, ": n = ", args.n);
}

}  // namespace speedrun::kernels

#pragma once
// Adam on one parameter:  g = grad · verdict.grad_scale;   m ← β1·m + (1−β1)·g;   v ← β2·v + (1−β2)·g²   and then
//   adamw     θ ← θ − decay·θ;   θ ← θ − (lr/correction1) · m / (√v/√correction2 + ε)
//             (Loshchilov & Hutter 2019, decoupled decay applied first, as PyTorch's fused form; decay = lr·weight_decay)
//   cautious  u = lr·√correction2/correction1 · m / (√v + ε);   if u·θ > 0: u ← u + decay·θ;   θ ← θ − u
//             (modded-nanogpt record #89: ε beside the uncorrected root, decay only where the step shrinks the weight;
//             decay = lr²·weight_decay)
// Arithmetic in Acc<T>. Does nothing if verdict.skip is set. Cost on CUDA with a full master and FP32 state: 16 bytes read, 12
// written an element.
#include "kernels/base/exec.h"
#include "kernels/base/step_values.h"
#include "kernels/base/weight.h"

namespace speedrun::kernels {

enum class AdamForm : int { adamw, cautious };

template <class T>
struct AdamW {
  WeightRef<T> weight;  // (n)
  void* m;              // (n) state; Acc<T>, or bf16 if bf16_state (CUDA only: on the CPU it is Acc<T>, rounded if round_bf16)
  void* v;              // (n)
  bool bf16_state;
  const Acc<T>* grad;          // (n)
  const AdamStep* step;        // on the device
  const StepVerdict* verdict;  // on the device
  int64_t n;
  double beta1, beta2, eps;
  AdamForm form = AdamForm::adamw;
  bool decays = true;  // false: step->decay is taken as 0
};

template <class T>
void adamw_update(const AdamW<T>& args, const HostExec& exec);
void adamw_update(const AdamW<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// Loss and gradient bookkeeping of a step: sums in a fixed order, finiteness, the global norm and the clipping factor.
// Cost: reads each gradient once.
#include "kernels/base/exec.h"
#include "kernels/base/step_values.h"

namespace speedrun::kernels {

// verdict->loss_sum += Σ loss[t], in double, in a fixed order.
template <class T>
struct LossSum {
  StepVerdict* verdict;  // on the device
  const Acc<T>* loss;    // (N)
  int64_t N;
};

// A parameter's gradient, or this rank's part of it, inside the one gradient buffer.
struct GradSegment {
  int64_t offset;     // elements from the start of the buffer; a multiple of 64
  int64_t count;      // 0: none of it here
  int32_t group = 0;  // a bit of GradVerdict::groups, 0 … 31
};

// grad_sums: sums[p] = Σ grad² over segment p (double, fixed order; not finite if any element is not); 0 for a group that is not
// due. grad_verdict, from sums (of all ranks): not finite loss_sum or any sums[p] -> skip = 1 and bad_parameter (first p; -1 for
// the loss, which is looked at first); grad_norm = √Σ sums; grad_scale = grad_clip > 0 && grad_norm > grad_clip ? grad_clip /
// grad_norm : 1. skip, once set, stays and bad_parameter keeps its first value.
template <class T>
struct GradVerdict {
  StepVerdict* verdict;         // on the device
  double* sums;                 // (num_segments) on the device
  double* scratch;              // grad_verdict_scratch(num_segments) elements on the device
  const Acc<T>* grads;          // the gradient buffer
  const GradSegment* segments;  // (num_segments) in device memory
  int num_segments;
  double grad_clip;       // 0: off
  uint32_t groups = ~0u;  // those that update in this step
};

int64_t grad_verdict_scratch(int num_segments);  // elements of double

template <class T>
void loss_sum(const LossSum<T>& args, const HostExec& exec);
template <class T>
void grad_sums(const GradVerdict<T>& args, const HostExec& exec);
template <class T>
void grad_verdict(const GradVerdict<T>& args, const HostExec& exec);
void loss_sum(const LossSum<bf16>& args, const CudaExec& exec);
void grad_sums(const GradVerdict<bf16>& args, const CudaExec& exec);
void grad_verdict(const GradVerdict<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// What changes from step to step, in device memory, so that one CUDA graph serves every step. The host writes StepValues before a
// step; the step's own kernels write StepVerdict.
#include <cstdint>

namespace speedrun::kernels {

// For one parameter group under Adam.
struct AdamStep {
  float lr = 0;
  float decay = 0;        // adamw: lr · weight_decay; cautious: lr² · weight_decay
  float correction1 = 1;  // 1 − β1^t
  float correction2 = 1;  // 1 − β2^t
};

// For one parameter group under Muon.
struct MuonStep {
  float lr = 0;     // with the group's multiplier
  float decay = 0;  // muon: lr · weight_decay; normuon: η · weight_decay · lr, with η the rate without the group's multiplier
  float momentum = 0;  // μ
};

// Written by step_verdict, read by the optimizer kernels, polled by the host.
struct StepVerdict {
  uint32_t skip = 0;          // not 0: a loss or gradient was not finite; stays set, optimizer kernels do nothing any more
  int32_t bad_parameter = 0;  // index of the first parameter with a non-finite gradient; -1: the loss
  float grad_norm = 0;        // global L2 norm before clipping
  float grad_scale = 1;       // clipping factor, applied to every gradient by the optimizer kernels
  double loss_sum = 0;        // Σ over the step's tokens
};

}  // namespace speedrun::kernels

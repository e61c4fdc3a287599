#pragma once
// What changes from step to step, in device memory, so that one CUDA graph serves every step. The host writes StepValues before a
// step; the step's own kernels write StepVerdict.
#include <cstdint>

namespace speedrun::kernels {

// For one AdamW parameter group.
struct AdamStep {
  float lr = 0;
  float decay = 0;        // lr · weight_decay: θ ← θ − decay·θ
  float correction1 = 1;  // 1 − β1^t
  float correction2 = 1;  // 1 − β2^t
};

struct MuonStep {
  float lr = 0;
  float decay = 0;     // lr · weight_decay
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

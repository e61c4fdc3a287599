#pragma once
// An optimizer's first moment after a jump of its weights: it belongs to where they were, and is zeroed. A refused jump leaves it.
#include <cstdint>

#include "kernels/base/exec.h"
#include "kernels/extrapolation/extrapolation.h"

namespace speedrun::kernels {

struct ResetMoment {
  void* moment;  // 16-byte aligned
  int64_t bytes;
  const JumpReport* report;  // on the device
};

void reset_moment(const ResetMoment& args, const HostExec& exec);
void reset_moment(const ResetMoment& args, const CudaExec& exec);

}  // namespace speedrun::kernels

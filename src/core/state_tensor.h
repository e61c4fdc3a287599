#pragma once
// A tensor of a run's state beside the parameters (optimizer moments, FP8 scales), for checkpoints.
#include <cstdint>
#include <string>

#include "kernels/base/dtype.h"

namespace speedrun {

struct StateTensor {
  std::string name;  // "adam.m/h.0.norm1.gain"
  DType dtype;
  void* data;  // device memory
  int64_t count;
};

}  // namespace speedrun

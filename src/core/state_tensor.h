#pragma once
// A tensor of a run's state beside the parameters (optimizer moments, FP8 scales), for checkpoints.
#include <cstdint>
#include <string>

#include "kernels/base/dtype.h"

namespace speedrun {

struct StateTensor {
  enum class Held {
    whole,  // the same on every rank
    part,   // elements of the tensor that only this rank has; those of all ranks, in their order, are the whole
    sum     // every rank has a whole tensor, and what counts is their sum
  };
  std::string name;  // "adam.m/h.0.norm1.gain"
  DType dtype;
  void* data;     // device memory
  int64_t count;  // elements in `data`
  Held held = Held::whole;
  int64_t begin = 0, whole_count = 0;  // part: its first element in the whole tensor, elements of that
};

}  // namespace speedrun

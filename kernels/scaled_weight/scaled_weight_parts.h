#pragma once
// How the tensors are cut: the same number of parts for each, so that the bits depend neither on the GPU nor on the number of
// threads. Enough to spread a few matrices over any GPU.
#include <cstdint>

#include "kernels/base/dtype.h"

namespace speedrun::kernels {

inline constexpr int kScaledWeightParts = 64;

// First element of a part of n elements; parts begin at multiples of 8, part == kScaledWeightParts gives n.
SPEEDRUN_HD constexpr int64_t scaled_weight_begin(int64_t part, int64_t n) {
  const int64_t elements = (n + 8 * kScaledWeightParts - 1) / (8 * kScaledWeightParts) * 8;
  return part * elements < n ? part * elements : n;
}

}  // namespace speedrun::kernels

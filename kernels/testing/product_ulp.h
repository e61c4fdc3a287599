#pragma once
// The last term of the tolerance rule for FP32 results of tensor-core products: each of the K/16 steps adds to a partial sum that
// is truncated, not rounded, to 24 bits, so that errors pile up to K/16 ulps at worst. 16 bits for short sums as elsewhere.
#include <algorithm>
#include <bit>

#include "kernels/testing/compare.h"

namespace speedrun::testing {

inline Ulp product_ulp(int64_t K) {
  const int steps_log2 = static_cast<int>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(K / 16, 1))));
  return static_cast<Ulp>(std::min(16, 23 - steps_log2));
}

}  // namespace speedrun::testing

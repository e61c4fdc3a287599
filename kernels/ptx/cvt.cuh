#pragma once
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#include <cstdint>

namespace speedrun::ptx {

// Two floats to BF16 (nearest even), negative results to 0, NaN stays NaN (sm_80 and later). `low` becomes the low half.
__device__ __forceinline__ uint32_t cvt_rn_relu_bf16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

}  // namespace speedrun::ptx

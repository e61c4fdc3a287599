#pragma once
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-min

namespace speedrun::ptx {

// The smaller one; NaN if either is (fminf passes over it). sm_80 and later.
__device__ __forceinline__ float min_nan(float x, float y) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

}  // namespace speedrun::ptx

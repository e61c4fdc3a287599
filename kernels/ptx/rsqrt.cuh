#pragma once
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rsqrt

namespace speedrun::ptx {

// 1/√x to 2^−22.9 relative in one instruction; subnormal numbers count as 0, 1/√0 = inf.
__device__ __forceinline__ float rsqrt_approx_ftz(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace speedrun::ptx

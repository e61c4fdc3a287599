#pragma once
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp

namespace speedrun::ptx {

// 1/x to 1 ulp in one instruction; subnormal numbers count as 0.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace speedrun::ptx

#pragma once
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2

namespace speedrun::ptx {

// 2^x to 2 ulp in one instruction; subnormal results are 0, 2^−inf = 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace speedrun::ptx

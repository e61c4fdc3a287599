#pragma once
// From a pre-activation to what is stored; the element-wise and the fused kernel share it, so that they give the same bits:
//   post = bf16(max(bf16(pre), 0)²)
// NaN stays NaN. post8 = e4m3(post · (1 / scale)) and the maximum: Fp8Tally (kernels/fp8/fp8_tally.cuh).
#include <cuda_bf16.h>

#include "kernels/ptx/cvt.cuh"

namespace speedrun::kernels {

// post of two pre-activations as BF16 (pre0's in the low half); never negative, never −0.
__device__ __forceinline__ uint32_t post_bf16x2(float pre0, float pre1) {
  const uint32_t relu = ptx::cvt_rn_relu_bf16x2(pre0, pre1);
  const __nv_bfloat162 r = *reinterpret_cast<const __nv_bfloat162*>(&relu);
  const __nv_bfloat162 post = __hmul2_rn(r, r);
  return *reinterpret_cast<const uint32_t*>(&post);
}

}  // namespace speedrun::kernels

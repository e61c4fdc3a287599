#pragma once
// What a kernel learns about a tensor on its way to FP8: the largest |x| and, on request, how many values saturate or vanish. Kept
// per thread, reduced per block, one atomic each per block: maxima and integer sums do not depend on the order.
#include "kernels/base/cuda_vec.cuh"
#include "kernels/fp8/fp8_convert.cuh"
#include "kernels/fp8/fp8_scale.h"

namespace speedrun::kernels {

template <bool kCount>
struct Fp8Tally {
  uint32_t largest_bf16x2 = 0;  // |x| of the values in even and in odd places; BF16 bits without the sign order like the values
  uint32_t saturated = 0, flushed = 0;

  __device__ __forceinline__ void see(uint4 raw) {
    constexpr uint32_t kMagnitudes = 0x7fff7fffu;
    const uint32_t low = __vmaxu2(raw.x & kMagnitudes, raw.y & kMagnitudes),
                   high = __vmaxu2(raw.z & kMagnitudes, raw.w & kMagnitudes);
    largest_bf16x2 = __vmaxu2(largest_bf16x2, __vmaxu2(low, high));
  }

  // Eight values to FP8, element 0 in the lowest byte.
  template <class Fp8 = e4m3>
  __device__ __forceinline__ uint2 convert(uint4 raw, float inverse_scale) {
    float x[kVec], scaled[kVec];
    unpack8(raw, x);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      scaled[i] = x[i] * inverse_scale;
      if constexpr (kCount) {
        saturated += is_saturated<Fp8>(scaled[i]);
        flushed += is_flushed<Fp8>(x[i], scaled[i]);
      }
    }
    return to_fp8x8<Fp8>(scaled);
  }

  // Bits of the largest |x| seen.
  __device__ __forceinline__ uint32_t largest() const { return max(largest_bf16x2 << 16, largest_bf16x2 & 0xffff0000u); }

  // Adds this block's tally to the tensor's; every thread of the one-dimensional block calls it, at most once.
  template <int kThreads>
  __device__ __forceinline__ void deliver(Fp8Scale* scale, bool raise_amax) const {
    constexpr int kWarps = kThreads / kWarpSize;
    constexpr unsigned kAll = 0xffffffffu;
    __shared__ uint32_t warp_amax[kWarps], warp_saturated[kWarps], warp_flushed[kWarps];
    if (!kCount && !raise_amax) return;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const uint32_t amax = __reduce_max_sync(kAll, largest());
    const uint32_t all_saturated = kCount ? __reduce_add_sync(kAll, saturated) : 0;
    const uint32_t all_flushed = kCount ? __reduce_add_sync(kAll, flushed) : 0;
    if (lane == 0) warp_amax[warp] = amax, warp_saturated[warp] = all_saturated, warp_flushed[warp] = all_flushed;
    __syncthreads();
    if (warp != 0) return;
    if (raise_amax) {
      const uint32_t block = __reduce_max_sync(kAll, lane < kWarps ? warp_amax[lane] : 0);
      if (lane == 0 && block != 0) atomicMax(&scale->amax, block);
    }
    if constexpr (kCount) {
      const uint32_t block_saturated = __reduce_add_sync(kAll, lane < kWarps ? warp_saturated[lane] : 0);
      const uint32_t block_flushed = __reduce_add_sync(kAll, lane < kWarps ? warp_flushed[lane] : 0);
      if (lane == 0 && block_saturated != 0) atomicAdd(&scale->saturated, block_saturated);
      if (lane == 0 && block_flushed != 0) atomicAdd(&scale->flushed, block_flushed);
    }
  }
};

}  // namespace speedrun::kernels

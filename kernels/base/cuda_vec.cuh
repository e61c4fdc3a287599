#pragma once
// 16-byte loads and stores of bf16 and float, and reductions in a fixed order (the same bits every run).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/base/dtype.h"

namespace speedrun::kernels {

inline constexpr int kWarpSize = 32;
inline constexpr int kVec = 8;  // bf16 values in 16 bytes

// Two bf16 in one 32-bit word <-> two floats; element 0 is the low half.
__device__ __forceinline__ float2 unpack_bf16x2(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void unpack8(uint4 raw, float (&out)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16x2(words[i]);
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return {pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7])};
}

// p is 16-byte aligned.
__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
// Data that is read or written once and would only push other data out of L2.
__device__ __forceinline__ uint4 load16_streaming(const void* p) { return __ldcs(static_cast<const uint4*>(p)); }
__device__ __forceinline__ void store16_streaming(void* p, uint4 v) { __stcs(static_cast<uint4*>(p), v); }

__device__ __forceinline__ void load8(const bf16* p, float (&out)[8]) { unpack8(load16(p), out); }
__device__ __forceinline__ void store8(bf16* p, const float (&v)[8]) { store16(p, pack8(v)); }
__device__ __forceinline__ void load8(const float* p, float (&out)[8]) {
  const float4 a = *reinterpret_cast<const float4*>(p);
  const float4 b = *reinterpret_cast<const float4*>(p + 4);
  out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
  out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}
__device__ __forceinline__ void store8(float* p, const float (&v)[8]) {
  *reinterpret_cast<float4*>(p) = {v[0], v[1], v[2], v[3]};
  *reinterpret_cast<float4*>(p + 4) = {v[4], v[5], v[6], v[7]};
}

// Over `Lanes` neighbouring lanes (a power of two); all lanes of a group end with the same bits. Every lane of the warp calls it.
template <int Lanes = kWarpSize>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}
template <int Lanes = kWarpSize>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}
template <int Lanes = kWarpSize>
__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Sum over a one-dimensional block of `Threads`; every thread calls it and gets the same bits. Synchronises before it returns, so
// that `partials` may be used again at once.
template <int Threads, class T>
__device__ __forceinline__ T block_sum(T value, T (&partials)[Threads / kWarpSize]) {
  static_assert(Threads % kWarpSize == 0 && Threads <= 1024);
  constexpr int kWarps = Threads / kWarpSize;
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0) partials[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  T total = partials[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) total += partials[w];
  __syncthreads();
  return total;
}

// Maximum over the block, as block_sum. NaN is passed over (fmaxf).
template <int Threads>
__device__ __forceinline__ float block_max(float value, float (&partials)[Threads / kWarpSize]) {
  static_assert(Threads % kWarpSize == 0 && Threads <= 1024);
  constexpr int kWarps = Threads / kWarpSize;
  value = warp_max(value);
  if (threadIdx.x % kWarpSize == 0) partials[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float total = partials[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) total = fmaxf(total, partials[w]);
  __syncthreads();
  return total;
}

}  // namespace speedrun::kernels

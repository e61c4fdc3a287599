#pragma once
// Eight neighbouring weights with their FP32 masters in registers: joined on load, split on store (kernels/base/weight.h).
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/weight.h"

namespace speedrun::kernels {

// offset: of the first weight; weight.value + offset and weight.low + offset are 16-byte aligned.
__device__ __forceinline__ void load_masters8(const WeightRef<bf16>& weight, int64_t offset, float (&masters)[kVec]) {
  const uint4 raw_value = load16(weight.value + offset);
  const uint4 raw_low = weight.low != nullptr ? load16(weight.low + offset) : uint4{0, 0, 0, 0};
  const uint32_t values[4] = {raw_value.x, raw_value.y, raw_value.z, raw_value.w};
  const uint32_t lows[4] = {raw_low.x, raw_low.y, raw_low.z, raw_low.w};
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const int shift = 16 * (j % 2);  // element 0 of a pair is the low half of its word
    bf16 value;
    value.bits = static_cast<uint16_t>(values[j / 2] >> shift);
    masters[j] = join_master(value, static_cast<uint16_t>(lows[j / 2] >> shift), weight.split);
  }
}

__device__ __forceinline__ void store_masters8(const WeightRef<bf16>& weight, int64_t offset, const float (&masters)[kVec]) {
  uint32_t values[4] = {}, lows[4] = {};
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const int shift = 16 * (j % 2);
    bf16 value;
    uint16_t low;
    split_master(masters[j], weight.split, value, low);
    values[j / 2] |= static_cast<uint32_t>(value.bits) << shift;
    lows[j / 2] |= static_cast<uint32_t>(low) << shift;
  }
  store16(weight.value + offset, {values[0], values[1], values[2], values[3]});
  if (weight.low != nullptr) store16(weight.low + offset, {lows[0], lows[1], lows[2], lows[3]});
}

}  // namespace speedrun::kernels

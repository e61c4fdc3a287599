#pragma once
// A trained tensor as the optimizer kernels see it.
#include <cstdint>

#include "kernels/base/dtype.h"

namespace speedrun::kernels {

// How a BF16 weight and its exact FP32 master share 32 bits:
//   nearest    value = master rounded to nearest, ties away from zero; low = master's bits − (value's bits << 16), a signed 16-bit
//   number,
//              so that the BF16 weight the products use is the rounded one.
//   truncated  value = upper 16 bits, low = lower 16 bits (modded-nanogpt record #89).
//   none       the BF16 value is all there is; updates are computed in FP32 and rounded to nearest at the store.
enum class MasterSplit : int { nearest, truncated, none };

// T = bf16: value and low live on the device. T = float or double: value is the master, low is null, split is ignored (with
// HostExec::round_bf16 the value of a `none` weight is rounded at the store).
template <class T>
struct WeightRef {
  T* value = nullptr;       // (n)
  uint16_t* low = nullptr;  // (n) or null
  MasterSplit split = MasterSplit::none;
};

// Bits of the FP32 master <-> (value, low); the same arithmetic on host and device.
SPEEDRUN_HD inline float join_master(bf16 value, uint16_t low, MasterSplit split) {
  const uint32_t high = static_cast<uint32_t>(value.bits) << 16;
  if (split == MasterSplit::truncated) return std::bit_cast<float>(high | low);
  if (split == MasterSplit::nearest)
    return std::bit_cast<float>(high + static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(low))));
  return std::bit_cast<float>(high);
}

SPEEDRUN_HD inline void split_master(float master, MasterSplit split, bf16& value, uint16_t& low) {
  const uint32_t bits = std::bit_cast<uint32_t>(master);
  if (split == MasterSplit::truncated) {
    value.bits = static_cast<uint16_t>(bits >> 16);
    low = static_cast<uint16_t>(bits);
  } else {
    // Ties go up (half away from zero), not to even: then low stays within int16_t: −0x8000 … 0x7fff.
    value.bits = static_cast<uint16_t>((bits + (split == MasterSplit::nearest ? 0x8000u : 0x7fffu + ((bits >> 16) & 1u))) >> 16);
    low = static_cast<uint16_t>(bits);  // bits − (value << 16) modulo 2^16
  }
}

}  // namespace speedrun::kernels

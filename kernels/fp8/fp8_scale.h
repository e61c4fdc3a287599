#pragma once
// The arithmetic of FP8 scales and maxima, the same on host and device (so that codes agree to the bit): a value is multiplied by
// the rounded reciprocal of its scale in FP32, then converted.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/fp8/fp8.h"

namespace speedrun::kernels {

inline constexpr uint32_t kInfinityBits = 0x7f800000u;  // |x| as bits: below, finite; above, NaN

SPEEDRUN_HD inline uint32_t magnitude_bits(float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffffu; }
SPEEDRUN_HD inline bool finite_maximum(uint32_t amax) { return amax < kInfinityBits; }

// max(amax, 1e−12) · margin / 448, for a finite maximum. Double in between: no rounding depends on how a compiler fuses.
SPEEDRUN_HD inline float delayed_scale(uint32_t amax, double margin) {
  const double largest = static_cast<double>(std::bit_cast<float>(amax));
  return static_cast<float>((largest > 1e-12 ? largest : 1e-12) * margin / static_cast<double>(kE4m3Max));
}

// The scale of a tensor with this maximum. Not finite: NaN, so that everything computed from the tensor shows it.
SPEEDRUN_HD inline float current_scale(uint32_t amax) {
  return finite_maximum(amax) ? delayed_scale(amax, 1) : std::numeric_limits<float>::quiet_NaN();
}

// What Fp8Scale counts, by a value before conversion, in units of the scale. The reciprocal's and the scale's rounding may put a
// tensor's own maximum a hair above 448: not saturated.
SPEEDRUN_HD inline bool is_saturated(float scaled) {
  return magnitude_bits(scaled) > std::bit_cast<uint32_t>(kE4m3Max * (1 + 0x1p-20f));
}
// Half of E4M3's smallest number, 2⁻⁹, is a tie that goes to the even neighbour, 0.
SPEEDRUN_HD inline bool is_flushed(float value, float scaled) {
  return value != 0 && magnitude_bits(scaled) <= std::bit_cast<uint32_t>(0x1p-10f);
}

}  // namespace speedrun::kernels

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

// Largest number of a type, and half of its smallest one, a tie that goes to the even neighbour, 0.
template <class Fp8>
struct Fp8Range;
template <>
struct Fp8Range<e4m3> {
  static constexpr float largest = kE4m3Max, vanishes = 0x1p-10f;
};
template <>
struct Fp8Range<e5m2> {
  static constexpr float largest = kE5m2Max, vanishes = 0x1p-17f;
};

// max(amax, 1e−12) · margin / largest, for a finite maximum. Double in between: no rounding depends on how a compiler fuses.
SPEEDRUN_HD inline float delayed_scale(uint32_t amax, double margin, float largest) {
  const double maximum = static_cast<double>(std::bit_cast<float>(amax));
  return static_cast<float>((maximum > 1e-12 ? maximum : 1e-12) * margin / static_cast<double>(largest));
}

// The scale of a tensor with this maximum. Not finite: NaN, so that everything computed from the tensor shows it.
SPEEDRUN_HD inline float current_scale(uint32_t amax, float largest, double margin = 1) {
  return finite_maximum(amax) ? delayed_scale(amax, margin, largest) : std::numeric_limits<float>::quiet_NaN();
}

// What fp8_next_scales makes of a scale; `bad` if the maximum is not finite.
struct NextScale {
  float scale;
  bool bad;
};
SPEEDRUN_HD inline NextScale next_scale(const Fp8Scale& scale, double margin, float largest, bool forget_zeros) {
  if (!finite_maximum(scale.amax)) {
    const bool is_nan = !(scale.scale == scale.scale);
    return {forget_zeros && is_nan ? 0.0f : scale.scale, true};
  }
  return {forget_zeros && scale.amax == 0 ? 0.0f : delayed_scale(scale.amax, margin, largest), false};
}

// What Fp8Scale counts, by a value before conversion, in units of the scale. The reciprocal's and the scale's rounding may put a
// tensor's own maximum a hair above the largest number: not saturated.
template <class Fp8>
SPEEDRUN_HD inline bool is_saturated(float scaled) {
  return magnitude_bits(scaled) > std::bit_cast<uint32_t>(Fp8Range<Fp8>::largest * (1 + 0x1p-20f));
}
template <class Fp8>
SPEEDRUN_HD inline bool is_flushed(float value, float scaled) {
  return value != 0 && magnitude_bits(scaled) <= std::bit_cast<uint32_t>(Fp8Range<Fp8>::vanishes);
}

}  // namespace speedrun::kernels

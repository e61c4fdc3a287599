#include "kernels/fp8/fp8_types.h"

#include <algorithm>

namespace speedrun {
namespace {

// An 8-bit format by its mantissa bits, exponent bias and the code of its largest finite value.
template <int kMantissa, int kBias, int kMaxCode>
struct Format {
  static constexpr int kFloatMantissa = 23, kFloatBias = 127;
  static constexpr int kDropped = kFloatMantissa - kMantissa;
  static constexpr int kLowestExponent = kFloatBias + 1 - kBias;  // float's exponent field of the smallest normal number

  static uint8_t encode(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;
    const int exponent = static_cast<int>(magnitude >> kFloatMantissa);
    // In units of the format's spacing at this exponent; below the smallest normal number the spacing stays what it is there.
    const int shift = kDropped + std::max(kLowestExponent - exponent, 0);
    int units = 0;
    if (shift <= kFloatMantissa + 1) {  // else below half of the smallest number; this covers float's own subnormals
      const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      const uint32_t rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
      units = static_cast<int>(mantissa >> shift);
      if (rest > half || (rest == half && units % 2 == 1)) ++units;
    }
    // A carry out of the mantissa steps to the next exponent by itself.
    const int code = (std::max(exponent - kLowestExponent, 0) << kMantissa) + units;
    return static_cast<uint8_t>(((bits >> 24) & 0x80u) | static_cast<uint32_t>(std::min(code, kMaxCode)));
  }

  // Finite codes only.
  static float decode(uint8_t code) {
    const uint32_t sign = (code & 0x80u) << 24, magnitude = code & 0x7fu, exponent = magnitude >> kMantissa;
    if (exponent == 0) {
      const float spacing = std::bit_cast<float>(static_cast<uint32_t>(kLowestExponent - kMantissa) << kFloatMantissa);
      return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * spacing));
    }
    return std::bit_cast<float>(sign | ((magnitude << kDropped) + (static_cast<uint32_t>(kFloatBias - kBias) << kFloatMantissa)));
  }
};

using E4m3 = Format<3, 7, 0x7e>;
using E5m2 = Format<2, 15, 0x7b>;

float quiet_nan(uint8_t code) { return std::bit_cast<float>(0x7fc00000u | (code & 0x80u) << 24); }

}  // namespace

e4m3 to_e4m3(float value) { return {E4m3::encode(value)}; }
e5m2 to_e5m2(float value) { return {E5m2::encode(value)}; }

float to_float(e4m3 value) { return (value.bits & 0x7fu) == 0x7fu ? quiet_nan(value.bits) : E4m3::decode(value.bits); }

float to_float(e5m2 value) {
  const uint32_t magnitude = value.bits & 0x7fu;
  if (magnitude > 0x7cu) return quiet_nan(value.bits);
  if (magnitude == 0x7cu) return std::bit_cast<float>(0x7f800000u | (value.bits & 0x80u) << 24);
  return E5m2::decode(value.bits);
}

}  // namespace speedrun

#pragma once
// The two 8-bit floating-point storage types and their conversions, the same on host and device (kernels use the hardware's cvt,
// which gives the same values).
#include <bit>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace speedrun {

struct e4m3 {
  uint8_t bits = 0;
};
struct e5m2 {
  uint8_t bits = 0;
};

inline constexpr float kE4m3Max = 448;
inline constexpr float kE5m2Max = 57344;

// Round to nearest even, saturating; NaN stays NaN, ±∞ saturates.
e4m3 to_e4m3(float value);
e5m2 to_e5m2(float value);
float to_float(e4m3 value);
float to_float(e5m2 value);

}  // namespace speedrun

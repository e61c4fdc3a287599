#pragma once
// exp and the logistic function on vectors (kernels/base/simd.h). float: a polynomial, error below 2 ulp; double: std::exp lane by
// lane.
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/base/simd.h"

namespace speedrun::kernels {

// e^x. float: x = n·ln 2 + r with |r| <= ln 2 / 2 and e^r by its Taylor polynomial of degree 7 (truncation below 2^-27 there);
// results below the smallest normal number are 0, above the largest infinity; NaN stays NaN.
template <class S>
SPEEDRUN_ALWAYS_INLINE typename S::Vec vector_exp(const typename S::Vec& x) {
  using Vec = typename S::Vec;
  if constexpr (sizeof(x[0]) == 8) {
    Vec y{};
    for (int i = 0; i < S::kLanes; ++i) y[i] = std::exp(x[i]);
    return y;
  } else {
    constexpr float kLog2e = 1.44269504088896341f;
    constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // n·kLn2High is exact for |n| < 2^15
    constexpr float kRound = 12582912.0f;                          // 1.5·2^23: adding it rounds to an integer in the low bits
    constexpr float kLowest = -87.336544f, kHighest = 88.722839f;  // ln of the smallest normal and of the largest number
    const Vec lowest = S::fill(kLowest), highest = S::fill(kHighest);
    Vec t = x < lowest ? lowest : x;
    t = t > highest ? highest : t;
    const Vec shifted = t * kLog2e + kRound;
    const Vec n = shifted - kRound;
    const Vec r = (t - n * kLn2High) - n * kLn2Low;
    Vec p = S::fill(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    p = p + 1.0f;
    // 2^n in two factors: n = 128 occurs just below the upper limit, where 2^n alone is not a float.
    const typename S::Mask exponent = reinterpret_cast<typename S::Mask>(shifted) - std::bit_cast<int32_t>(kRound);
    const typename S::Mask half = exponent >> 1;
    p = p * reinterpret_cast<Vec>((half + 127) << 23);
    p = p * reinterpret_cast<Vec>((exponent - half + 127) << 23);
    p = x < lowest ? Vec{} : p;
    p = x > highest ? S::fill(std::numeric_limits<float>::infinity()) : p;
    return x == x ? p : x;
  }
}

// 1 / (1 + e^-x)
template <class S>
SPEEDRUN_ALWAYS_INLINE typename S::Vec vector_logistic(const typename S::Vec& x) {
  return 1 / (1 + vector_exp<S>(-x));
}

}  // namespace speedrun::kernels

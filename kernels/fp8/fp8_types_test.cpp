#include "kernels/fp8/fp8_types.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/testing/random.h"

namespace speedrun {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The formats by their definition: ±2^(e − bias)·(1 + m/2^bits), subnormal ±2^(1 − bias)·m/2^bits.
struct E4m3 {
  using Type = e4m3;
  static constexpr int kMantissa = 3, kBias = 7, kMaxCode = 0x7e;
  static constexpr float kMax = kE4m3Max;
  static Type encode(float x) { return to_e4m3(x); }
};
struct E5m2 {
  using Type = e5m2;
  static constexpr int kMantissa = 2, kBias = 15, kMaxCode = 0x7b;
  static constexpr float kMax = kE5m2Max;
  static Type encode(float x) { return to_e5m2(x); }
};

template <class F>
double definition(int code) {
  const int exponent = (code & 0x7f) >> F::kMantissa, mantissa = code & ((1 << F::kMantissa) - 1);
  const double fraction = mantissa / std::ldexp(1.0, F::kMantissa);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - F::kBias) : std::ldexp(1 + fraction, exponent - F::kBias);
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest code by search, ties to the even one.
template <class F>
int nearest(float value) {
  const double magnitude = std::min(std::abs(static_cast<double>(value)), static_cast<double>(F::kMax));
  int best = 0;
  for (int code = 1; code <= F::kMaxCode; ++code) {
    const double error = std::abs(definition<F>(code) - magnitude), best_error = std::abs(definition<F>(best) - magnitude);
    if (error < best_error || (error == best_error && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

template <class F>
class Fp8Types : public ::testing::Test {
 protected:
  static void expect_nearest(float value) {
    ASSERT_EQ(int{F::encode(value).bits}, nearest<F>(value)) << value << " = " << std::hexfloat << value;
  }
};
using Formats = ::testing::Types<E4m3, E5m2>;
TYPED_TEST_SUITE(Fp8Types, Formats);

TYPED_TEST(Fp8Types, EveryCodeHasItsValueAndComesBack) {
  for (int code = 0; code < 256; ++code) {
    const typename TypeParam::Type stored{static_cast<uint8_t>(code)};
    const float value = to_float(stored);
    EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
    if ((code & 0x7f) <= TypeParam::kMaxCode) {
      EXPECT_EQ(static_cast<double>(value), definition<TypeParam>(code)) << code;
      EXPECT_EQ(int{TypeParam::encode(value).bits}, code);
    } else if (std::is_same_v<TypeParam, E5m2> && (code & 0x7f) == 0x7c) {
      EXPECT_TRUE(std::isinf(value)) << code;
    } else {
      EXPECT_TRUE(std::isnan(value)) << code;
    }
  }
  EXPECT_EQ(definition<TypeParam>(TypeParam::kMaxCode), static_cast<double>(TypeParam::kMax));
}

TYPED_TEST(Fp8Types, EveryBf16RoundsToTheNearest) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    bf16 stored;
    stored.bits = static_cast<uint16_t>(bits);
    const float value = static_cast<float>(stored);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(TypeParam::encode(value)))) << bits;
    } else if (std::isinf(value)) {
      EXPECT_EQ(to_float(TypeParam::encode(value)), std::copysign(TypeParam::kMax, value));
    } else {
      this->expect_nearest(value);
    }
  }
}

TYPED_TEST(Fp8Types, TiesGoToEvenAndTheirNeighboursToTheirSide) {
  for (int code = 0; code < TypeParam::kMaxCode; ++code) {
    const float tie = static_cast<float>((definition<TypeParam>(code) + definition<TypeParam>(code + 1)) / 2);
    for (const float value : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, kInfinity)}) {
      this->expect_nearest(value);
      this->expect_nearest(-value);
    }
    EXPECT_EQ(int{TypeParam::encode(tie).bits} % 2, 0) << code;
  }
}

TYPED_TEST(Fp8Types, EdgesOfFloat) {
  for (const float value : {0.0f, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(),
                            std::numeric_limits<float>::max(), 1.0f, 0x1p-10f, 0x1.000002p-10f, 0x1p-17f, 0x1.000002p-17f}) {
    this->expect_nearest(value);
    this->expect_nearest(-value);
  }
  EXPECT_EQ(to_float(TypeParam::encode(kInfinity)), TypeParam::kMax);
  EXPECT_EQ(to_float(TypeParam::encode(-kInfinity)), -TypeParam::kMax);
  EXPECT_TRUE(std::isnan(to_float(TypeParam::encode(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isnan(to_float(TypeParam::encode(-std::numeric_limits<float>::signaling_NaN()))));
}

TYPED_TEST(Fp8Types, RandomFloatsRoundToTheNearest) {
  testing::Random random = testing::test_random();
  for (int i = 0; i < 20'000; ++i) {
    const float value = static_cast<float>(random.normal() * std::exp2(random.uniform(-20, 18)));
    this->expect_nearest(value);
  }
}

}  // namespace
}  // namespace speedrun

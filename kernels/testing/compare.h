#pragma once
// One tolerance rule for every low-precision kernel:
//   err(kernel, truth) <= 2 · err(baseline, truth) + one ulp of the largest true value
// truth = the reference in float or double on the same (BF16-rounded) inputs, baseline = the reference that rounds wherever the
// kernel stores BF16, so the bound follows from the number format and not from taste. Checked for the largest error and, so that
// small values count too, for the root mean square. Positions of NaN and infinity must agree first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/testing/random.h"

namespace speedrun::testing {

// Values of any element type as doubles.
template <class T>
std::vector<double> to_double(const std::vector<T>& values) {
  std::vector<double> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if constexpr (std::is_same_v<T, bf16>) {
      out[i] = static_cast<float>(values[i]);
    } else {
      out[i] = static_cast<double>(values[i]);
    }
  }
  return out;
}

// BF16 inputs as the reference's type; exact.
template <class To>
std::vector<To> widen(const std::vector<bf16>& values) {
  std::vector<To> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = static_cast<To>(static_cast<float>(values[i]));
  return out;
}

// Spacing of numbers near |value|: `bits` of mantissa after the leading one (BF16 7, float 23).
inline double ulp(double value, int bits) { return value == 0 ? 0 : std::ldexp(1.0, std::ilogb(value) - bits); }

// What the last term of the rule is an ulp of: the format the result is stored in, or for float accumulators a coarser one.
enum class Ulp : int { bf16 = 7, accumulated = 16, float32 = 21 };

template <class Got, class Truth, class Baseline>
::testing::AssertionResult within_rule(const std::vector<Got>& got_values, const std::vector<Truth>& truth_values,
                                       const std::vector<Baseline>& baseline_values, Ulp format = Ulp::bf16) {
  const std::vector<double> got = to_double(got_values), truth = to_double(truth_values), baseline = to_double(baseline_values);
  auto failure = [] { return ::testing::AssertionFailure() << "(SPEEDRUN_TEST_SEED=" << test_seed() << ") "; };
  if (got.size() != truth.size() || got.size() != baseline.size()) {
    return failure() << "sizes differ: got " << got.size() << ", truth " << truth.size() << ", baseline " << baseline.size();
  }
  double largest = 0, worst = 0, worst_allowed = 0, sum = 0, sum_allowed = 0, sum_truth = 0;
  size_t worst_index = 0, count = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool both_nan = std::isnan(got[i]) && std::isnan(truth[i]);
    if (both_nan || (std::isinf(truth[i]) && got[i] == truth[i])) continue;
    if (!std::isfinite(got[i]) || !std::isfinite(truth[i])) {
      return failure() << "not finite where it should be (or the reverse): index " << i << " got " << got[i] << ", truth "
                       << truth[i];
    }
    const double error = std::abs(got[i] - truth[i]), allowed = std::abs(baseline[i] - truth[i]);
    largest = std::max(largest, std::abs(truth[i]));
    if (error > worst) {
      worst = error;
      worst_index = i;
    }
    worst_allowed = std::max(worst_allowed, allowed);
    sum += error * error;
    sum_allowed += allowed * allowed;
    sum_truth += truth[i] * truth[i];
    ++count;
  }
  if (count == 0) return ::testing::AssertionSuccess();
  const int bits = static_cast<int>(format);
  const double bound = 2 * worst_allowed + ulp(largest, bits);
  const double n = static_cast<double>(count);
  const double rms = std::sqrt(sum / n), rms_bound = 2 * std::sqrt(sum_allowed / n) + std::ldexp(std::sqrt(sum_truth / n), -bits);
  if (worst <= bound && rms <= rms_bound) return ::testing::AssertionSuccess();
  return failure() << "largest error " << worst << " (bound " << bound << ") at index " << worst_index << " of " << got.size()
                   << ": got " << got[worst_index] << ", truth " << truth[worst_index] << ", baseline " << baseline[worst_index]
                   << "; rms error " << rms << " (bound " << rms_bound << "), largest value " << largest;
}

// Bitwise equality, for "run twice" and for exact arithmetic; reports the first difference.
template <class T>
::testing::AssertionResult same_bits(const std::vector<T>& first, const std::vector<T>& second) {
  if (first.size() != second.size())
    return ::testing::AssertionFailure() << "sizes differ: " << first.size() << " and " << second.size();
  for (size_t i = 0; i < first.size(); ++i) {
    if (std::memcmp(&first[i], &second[i], sizeof(T)) != 0) {
      return ::testing::AssertionFailure() << "(SPEEDRUN_TEST_SEED=" << test_seed() << ") bits differ at index " << i << " of "
                                           << first.size() << ": " << to_double(std::vector<T>{first[i]})[0] << " and "
                                           << to_double(std::vector<T>{second[i]})[0];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace speedrun::testing

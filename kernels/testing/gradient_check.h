#pragma once
// Finite differences in double against an op's own gradients: along random directions (every element takes part) and for single
// elements (which one is wrong). Four-point central differences: error O(h⁴), so 1e-7 of the gradient's size is a safe bound for
// smooth ops.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/testing/random.h"

namespace speedrun::testing {

// An input or parameter and the gradient that the op gave for it.
struct Checked {
  std::string name;
  std::vector<double>* values;
  const std::vector<double>* gradient;
};

struct GradientCheck {
  std::function<double()> objective;  // from the current values
  double step = 1e-4;
  double tolerance = 1e-7;  // relative to the gradient's norm
  int directions = 2, elements = 6;
};

// d objective / dh at h = 0 of values + h·direction.
inline double directional_difference(const GradientCheck& check, std::vector<double>& values,
                                     const std::vector<double>& direction) {
  const std::vector<double> saved = values;
  auto at = [&](double h) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = saved[i] + h * direction[i];
    return check.objective();
  };
  const double h = check.step;
  const double difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
  values = saved;
  return difference;
}

inline void check_gradients(const GradientCheck& check, const std::vector<Checked>& tensors, Random& random) {
  const double rounding = 1e-11 * (1 + std::abs(check.objective()));
  for (const Checked& tensor : tensors) {
    std::vector<double>& values = *tensor.values;
    const std::vector<double>& gradient = *tensor.gradient;
    ASSERT_EQ(values.size(), gradient.size()) << tensor.name;
    double squares = 0;
    for (const double g : gradient) squares += g * g;
    const double bound = check.tolerance * std::sqrt(squares) + rounding;
    ASSERT_TRUE(std::isfinite(bound)) << tensor.name << ": the gradient is not finite";
    for (int i = 0; i < check.directions; ++i) {
      const std::vector<double> direction = random.normal_vector<double>(static_cast<int64_t>(values.size()));
      double expected = 0;
      for (size_t k = 0; k < values.size(); ++k) expected += gradient[k] * direction[k];
      const double found = directional_difference(check, values, direction);
      EXPECT_NEAR(found, expected, 4 * bound)
          << tensor.name << " along a random direction (SPEEDRUN_TEST_SEED=" << test_seed() << ")";
    }
    for (int i = 0; i < check.elements; ++i) {
      const size_t k = static_cast<size_t>(random.below(static_cast<int64_t>(values.size())));
      std::vector<double> direction(values.size());
      direction[k] = 1;
      EXPECT_NEAR(directional_difference(check, values, direction), gradient[k], bound)
          << tensor.name << "[" << k << "] (SPEEDRUN_TEST_SEED=" << test_seed() << ")";
    }
  }
}

// Σ a·b, the objective that turns an op with output a into a scalar with output gradient b.
inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// What an op added to a gradient that started as `before`.
inline std::vector<double> added(const std::vector<double>& after, const std::vector<double>& before) {
  std::vector<double> difference(after.size());
  for (size_t i = 0; i < after.size(); ++i) difference[i] = after[i] - before[i];
  return difference;
}

// An output that the op must write entirely.
template <class T>
std::vector<T> poisoned(int64_t count) {
  return std::vector<T>(static_cast<size_t>(count), std::numeric_limits<T>::quiet_NaN());
}

}  // namespace speedrun::testing

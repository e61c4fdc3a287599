#pragma once
// Fresh random inputs for every test run. The seed is printed once per process; SPEEDRUN_TEST_SEED=<seed> repeats a run exactly.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"

namespace speedrun::testing {

// The run's base seed.
inline uint64_t test_seed() {
  static const uint64_t seed = [] {
    const char* text = std::getenv("SPEEDRUN_TEST_SEED");
    const uint64_t value = text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
    std::cout << "[   seed   ] " << value << " (SPEEDRUN_TEST_SEED=" << value << " repeats this run)\n";
    return value;
  }();
  return seed;
}

// splitmix64: the same numbers with every standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }                              // [0, 1)
  double uniform(double low, double high) { return low + (high - low) * uniform(); }                    // [low, high)
  int64_t below(int64_t bound) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound)); }  // 0 .. bound − 1
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

  // count numbers mean + deviation·N(0, 1), rounded to T (float, double or bf16).
  template <class T>
  std::vector<T> normal_vector(int64_t count, double deviation = 1, double mean = 0) {
    std::vector<T> values(static_cast<size_t>(count));
    for (T& value : values) {
      const double x = mean + deviation * normal();
      if constexpr (std::is_same_v<T, bf16>) {
        value = bf16(static_cast<float>(x));
      } else {
        value = static_cast<T>(x);
      }
    }
    return values;
  }

  // count numbers uniform in [-bound, bound): cheaper, for large inputs.
  template <class T>
  std::vector<T> uniform_vector(int64_t count, double bound = 1) {
    std::vector<T> values(static_cast<size_t>(count));
    for (T& value : values) value = static_cast<T>(static_cast<float>(uniform(-bound, bound)));
    return values;
  }

  std::vector<int32_t> index_vector(int64_t count, int64_t bound) {
    std::vector<int32_t> values(static_cast<size_t>(count));
    for (int32_t& value : values) value = static_cast<int32_t>(below(bound));
    return values;
  }

 private:
  uint64_t state_;
};

// A generator for the running test: the base seed mixed with the test's full name, so that a single test repeats alone.
inline Random test_random() {
  uint64_t hash = test_seed();
  if (const auto* info = ::testing::UnitTest::GetInstance()->current_test_info()) {
    for (const char c : std::string(info->test_suite_name()) + "." + info->name()) {
      hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
    }
  }
  return Random(hash);
}

}  // namespace speedrun::testing

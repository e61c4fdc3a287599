#pragma once
// What holds for every CPU reference: the same bits for any number of threads, and BF16 values in every stored activation if asked.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "kernels/base/exec.h"
#include "kernels/base/thread_pool.h"
#include "kernels/testing/compare.h"

namespace speedrun::testing {

using Outputs = std::vector<std::vector<float>>;  // every tensor an op wrote

// run makes its buffers, runs the op and returns what it wrote.
inline void check_thread_counts(const std::function<Outputs(const kernels::HostExec&)>& run) {
  const Outputs expected = run(kernels::HostExec{});
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    const Outputs found = run(kernels::HostExec{.pool = &pool});
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(same_bits(found[i], expected[i])) << "output " << i << " with " << threads << " threads";
  }
}

inline ::testing::AssertionResult all_bf16(const std::vector<float>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::bit_cast<uint32_t>(values[i]) & 0xffffu)
      return ::testing::AssertionFailure() << "index " << i << ": " << values[i] << " is not a BF16 number";
  }
  return ::testing::AssertionSuccess();
}

// Rounded outputs are BF16 numbers and lie within `relative` of the exact ones' largest value.
inline void check_rounded(const std::vector<float>& rounded, const std::vector<float>& exact, double relative = 0.03) {
  EXPECT_TRUE(all_bf16(rounded));
  double largest = 0;
  for (const float x : exact) largest = std::max(largest, std::abs(static_cast<double>(x)));
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(rounded[i], exact[i], relative * largest) << "index " << i;
}

}  // namespace speedrun::testing

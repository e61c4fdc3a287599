#include "kernels/grad_stats/grad_stats.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  StepVerdict verdict;
  std::vector<GradSegment> segments;
  std::vector<T> grads;
  std::vector<double> sums, scratch;
  double grad_clip = 0;
  uint32_t groups = ~0u;

  Problem(const std::vector<int64_t>& counts, Random& random) {
    int64_t end = 0;
    for (const int64_t count : counts) {
      segments.push_back({.offset = end, .count = count});
      end += (count + 63) / 64 * 64;
    }
    grads = poisoned<T>(end);  // the gaps are nobody's
    for (const GradSegment& segment : segments) {
      const std::vector<T> values = random.normal_vector<T>(segment.count);
      std::copy(values.begin(), values.end(), grads.begin() + segment.offset);
    }
    sums = poisoned<double>(num_segments());
    scratch = poisoned<double>(grad_verdict_scratch(num_segments()));
  }
  int num_segments() const { return static_cast<int>(segments.size()); }
  void run(const HostExec& exec) {
    const GradVerdict<T> args{&verdict,        sums.data(),    scratch.data(), grads.data(),
                              segments.data(), num_segments(), grad_clip,      groups};
    grad_sums(args, exec);
    grad_verdict(args, exec);
  }
};

TEST(GradVerdict, LooksOnlyAtGroupsThatUpdate) {
  Random random = test_random();
  Problem<double> c({100, 3, 70}, random);
  for (int p = 0; p < 3; ++p) c.segments[static_cast<size_t>(p)].group = 31 - p;
  c.grads[static_cast<size_t>(c.segments[1].offset)] = std::numeric_limits<double>::quiet_NaN();
  c.groups = 1u << 31 | 1u << 29;
  c.run(HostExec{});
  EXPECT_EQ(c.verdict.skip, 0u);
  EXPECT_EQ(c.sums[1], 0);
  EXPECT_FLOAT_EQ(c.verdict.grad_norm, static_cast<float>(std::sqrt(c.sums[0] + c.sums[2])));
  EXPECT_GT(c.sums[0], 0);
  c.groups = 1u << 30;
  c.run(HostExec{});
  EXPECT_EQ(c.verdict.skip, 1u);
  EXPECT_EQ(c.verdict.bad_parameter, 1);
}

TEST(LossSum, AddsToWhatIsThere) {
  Random random = test_random();
  for (const int64_t N : {1, 4096, 10001}) {
    const std::vector<double> loss = random.normal_vector<double>(N, 1, 3);
    StepVerdict verdict{.loss_sum = 7};
    loss_sum(LossSum<double>{&verdict, loss.data(), N}, HostExec{});
    double expected = 7;
    for (const double x : loss) expected += x;
    EXPECT_NEAR(verdict.loss_sum, expected, 1e-9);
  }
}

TEST(LossSum, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const std::vector<float> loss = random.normal_vector<float>(30000, 1, 3);
  auto sum = [&](const HostExec& exec) {
    StepVerdict verdict;
    loss_sum(LossSum<float>{&verdict, loss.data(), 30000}, exec);
    return verdict.loss_sum;
  };
  const double expected = sum(HostExec{});
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    EXPECT_EQ(sum(HostExec{.pool = &pool}), expected);
  }
}

TEST(GradVerdict, NormAndClippingFactor) {
  Random random = test_random();
  for (const double relative_clip : {0.0, 0.5, 2.0}) {
    Problem<float> p({1, 63, 64, 5000, 3}, random);
    double total = 0;
    std::vector<double> expected;
    for (const GradSegment& segment : p.segments) {
      double sum = 0;
      for (int64_t i = 0; i < segment.count; ++i) sum += std::pow(static_cast<double>(p.grads[segment.offset + i]), 2);
      expected.push_back(sum);
      total += sum;
    }
    p.grad_clip = relative_clip * std::sqrt(total);
    p.run(HostExec{});
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(p.sums[i], expected[i], 1e-10 * expected[i]);
    EXPECT_NEAR(p.verdict.grad_norm, std::sqrt(total), 1e-5 * std::sqrt(total));
    EXPECT_NEAR(p.verdict.grad_scale, relative_clip == 0.5 ? 0.5 : 1, 1e-6);
    EXPECT_EQ(p.verdict.skip, 0u);
  }
}

TEST(GradVerdict, NamesTheFirstBadParameter) {
  Random random = test_random();
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    Problem<float> p({100, 200, 300, 70}, random);
    p.grads[p.segments[3].offset] = bad;
    p.grads[p.segments[2].offset + 299] = bad;
    p.run(HostExec{});
    EXPECT_EQ(p.verdict.skip, 1u);
    EXPECT_EQ(p.verdict.bad_parameter, 2);
    EXPECT_TRUE(std::isfinite(p.sums[0]) && std::isfinite(p.sums[1]));
    EXPECT_FALSE(std::isfinite(p.sums[2]) || std::isfinite(p.sums[3]));
  }
}

TEST(GradVerdict, TheLossComesFirst) {
  Random random = test_random();
  Problem<float> p({100, 200}, random);
  p.verdict.loss_sum = std::nan("");
  p.grads[p.segments[1].offset] = std::nanf("");
  p.run(HostExec{});
  EXPECT_EQ(p.verdict.skip, 1u);
  EXPECT_EQ(p.verdict.bad_parameter, -1);
}

TEST(GradVerdict, SkipStaysAndKeepsItsFirstReason) {
  Random random = test_random();
  Problem<float> p({100, 200}, random);
  const std::vector<float> good = p.grads;
  p.grads[p.segments[1].offset + 5] = std::nanf("");
  p.run(HostExec{});
  p.grads = good;
  p.grads[p.segments[0].offset] = std::nanf("");
  p.run(HostExec{});
  EXPECT_EQ(p.verdict.bad_parameter, 1);
  p.grads = good;
  p.run(HostExec{});
  EXPECT_EQ(p.verdict.skip, 1u);
  EXPECT_EQ(p.verdict.bad_parameter, 1);
}

TEST(GradVerdict, LargeFiniteGradientsAreNotBad) {
  Random random = test_random();
  Problem<float> p({64}, random);
  std::fill(p.grads.begin(), p.grads.end(), 1e30f);  // whose square is no float
  p.grad_clip = 1;
  p.run(HostExec{});
  EXPECT_EQ(p.verdict.skip, 0u);
  EXPECT_GT(p.verdict.grad_scale, 0);
  EXPECT_NEAR(p.verdict.grad_scale * 8e30, 1, 1e-5);
}

TEST(GradVerdict, ZeroGradient) {
  Random random = test_random();
  Problem<float> p({64, 10}, random);
  std::fill(p.grads.begin(), p.grads.end(), 0.0f);
  p.grad_clip = 1;
  p.run(HostExec{});
  EXPECT_EQ(p.verdict.grad_norm, 0);
  EXPECT_EQ(p.verdict.grad_scale, 1);
  EXPECT_EQ(p.verdict.skip, 0u);
}

TEST(GradVerdict, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start({1000, 70000, 3}, random);
  Problem<float> expected = start;
  expected.run(HostExec{});
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    Problem<float> p = start;
    p.run(HostExec{.pool = &pool});
    EXPECT_TRUE(same_bits(p.sums, expected.sums));
    EXPECT_EQ(p.verdict.grad_norm, expected.verdict.grad_norm);
  }
}

}  // namespace
}  // namespace speedrun::kernels

// CUDA loss sum, gradient norms and verdict against the reference.
#include "kernels/grad_stats/grad_stats.h"

#include <limits>

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A gradient buffer; what lies between the segments is NaN, as padding may be.
struct Buffer {
  std::vector<GradSegment> segments;
  std::vector<float> grads;
  uint32_t groups = ~0u;
};

Buffer make_buffer(const std::vector<int64_t>& counts, testing::Random& random) {
  Buffer buffer;
  int64_t offset = 64;
  for (const int64_t count : counts) {
    buffer.segments.push_back({.offset = offset, .count = count});
    offset += (count + 63) / 64 * 64;
  }
  buffer.grads.assign(static_cast<size_t>(offset), kNan);
  for (const GradSegment& segment : buffer.segments) {
    const std::vector<float> values = random.normal_vector<float>(segment.count, 0.01);
    std::copy(values.begin(), values.end(), buffer.grads.begin() + segment.offset);
  }
  return buffer;
}

class GradStatsCudaTest : public CudaTest {
 protected:
  struct Answer {
    StepVerdict verdict;
    std::vector<double> sums;
  };

  Answer device(const Buffer& buffer, double grad_clip, const StepVerdict& before, Launch launch = Launch::direct) {
    const int num_segments = static_cast<int>(buffer.segments.size());
    auto grads = uploaded("grads", buffer.grads);
    auto segments = uploaded("segments", buffer.segments);
    auto sums = poisoned<double>("sums", num_segments);
    auto scratch = poisoned<double>("scratch", grad_verdict_scratch(num_segments));
    auto verdict = uploaded("verdict", std::vector<StepVerdict>{before});
    const GradVerdict<bf16> args{.verdict = verdict.get(),
                                 .sums = sums.get(),
                                 .scratch = scratch.get(),
                                 .grads = grads.get(),
                                 .segments = segments.get(),
                                 .num_segments = num_segments,
                                 .grad_clip = grad_clip,
                                 .groups = buffer.groups};
    run(launch, [&] {
      grad_sums(args, exec());
      grad_verdict(args, exec());
    });
    return {.verdict = verdict.download()[0], .sums = sums.download()};
  }

  Answer reference(const Buffer& buffer, double grad_clip, StepVerdict verdict) {
    const int num_segments = static_cast<int>(buffer.segments.size());
    std::vector<double> sums(buffer.segments.size()), scratch(static_cast<size_t>(grad_verdict_scratch(num_segments)));
    const GradVerdict<float> args{.verdict = &verdict,
                                  .sums = sums.data(),
                                  .scratch = scratch.data(),
                                  .grads = buffer.grads.data(),
                                  .segments = buffer.segments.data(),
                                  .num_segments = num_segments,
                                  .grad_clip = grad_clip,
                                  .groups = buffer.groups};
    grad_sums(args, truth_exec());
    grad_verdict(args, truth_exec());
    return {.verdict = verdict, .sums = sums};
  }

  void check(const Buffer& buffer, double grad_clip) {
    const Answer got = device(buffer, grad_clip, {}), expected = reference(buffer, grad_clip, {});
    for (size_t p = 0; p < got.sums.size(); ++p) {
      EXPECT_NEAR(got.sums[p], expected.sums[p], 1e-12 * expected.sums[p]) << "segment " << p << " of " << buffer.segments[p].count;
    }
    EXPECT_EQ(got.verdict.skip, 0u);
    EXPECT_FLOAT_EQ(got.verdict.grad_norm, expected.verdict.grad_norm);
    EXPECT_FLOAT_EQ(got.verdict.grad_scale, expected.verdict.grad_scale);
    const Answer again = device(buffer, grad_clip, {}, Launch::captured);
    EXPECT_TRUE(same_bits(got.sums, again.sums)) << "second run";
    EXPECT_EQ(got.verdict.grad_norm, again.verdict.grad_norm);
  }
};

TEST_F(GradStatsCudaTest, SegmentsOfVeryDifferentSizes) {
  testing::Random random = testing::test_random();
  const Buffer buffer =
      make_buffer({1, 2, 3, 64, 5, 768, 1000, 4095, 4096, 4097, 70'000, 256 * 4096, 256 * 4096 + 1, 256 * 4096 * 3 + 770}, random);
  check(buffer, 0);
  check(buffer, 1e9);
  check(buffer, 0.5);
}

TEST_F(GradStatsCudaTest, ManySegments) {
  testing::Random random = testing::test_random();
  check(make_buffer(std::vector<int64_t>(1, 17), random), 1e-3);
  check(make_buffer(std::vector<int64_t>(2'500, 131), random), 1e-3);
}

TEST_F(GradStatsCudaTest, NamesTheFirstBadParameter) {
  testing::Random random = testing::test_random();
  const Buffer good = make_buffer({100, 70'001, 4'097, 1'200'000, 3}, random);
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    for (size_t p = 0; p < good.segments.size(); ++p) {
      Buffer buffer = good;
      const GradSegment& segment = buffer.segments[p];
      buffer.grads[static_cast<size_t>(segment.offset + random.below(segment.count))] = bad;
      buffer.grads[static_cast<size_t>(buffer.segments.back().offset + 2)] = bad;  // the last segment is bad as well
      const Answer got = device(buffer, 1.0, {});
      EXPECT_NE(got.verdict.skip, 0u);
      EXPECT_EQ(got.verdict.bad_parameter, static_cast<int>(p)) << bad;

      // A later good step does not clear the flag, a later bad one does not rename it.
      const Answer later = device(good, 1.0, got.verdict);
      EXPECT_NE(later.verdict.skip, 0u);
      EXPECT_EQ(later.verdict.bad_parameter, static_cast<int>(p));
      const Answer still = device(buffer, 1.0, StepVerdict{.skip = 1, .bad_parameter = 2});
      EXPECT_EQ(still.verdict.bad_parameter, 2);
    }
  }
}

TEST_F(GradStatsCudaTest, FirstAndLastElementsCount) {
  testing::Random random = testing::test_random();
  const Buffer good = make_buffer({70'001, 4'097}, random);
  for (size_t p = 0; p < good.segments.size(); ++p) {
    for (const int64_t element : {int64_t{0}, good.segments[p].count - 1}) {
      Buffer buffer = good;
      buffer.grads[static_cast<size_t>(good.segments[p].offset + element)] = kNan;
      EXPECT_EQ(device(buffer, 0, {}).verdict.bad_parameter, static_cast<int>(p)) << "element " << element;
    }
  }
}

TEST_F(GradStatsCudaTest, ALossThatIsNotFiniteComesFirst) {
  testing::Random random = testing::test_random();
  Buffer buffer = make_buffer({100, 200}, random);
  buffer.grads[70] = kNan;
  for (const double loss : {static_cast<double>(kNan), static_cast<double>(kInfinity)}) {
    const Answer got = device(buffer, 1.0, StepVerdict{.loss_sum = loss});
    EXPECT_NE(got.verdict.skip, 0u);
    EXPECT_EQ(got.verdict.bad_parameter, -1);
  }
}

TEST_F(GradStatsCudaTest, LargeFiniteGradientsAreFinite) {
  testing::Random random = testing::test_random();
  Buffer buffer = make_buffer({5'000}, random);
  for (int64_t i = 0; i < 5'000; ++i) buffer.grads[static_cast<size_t>(64 + i)] = 1e30f;
  const Answer got = device(buffer, 1.0, {});
  EXPECT_EQ(got.verdict.skip, 0u);
  EXPECT_FLOAT_EQ(got.verdict.grad_norm, static_cast<float>(1e30 * std::sqrt(5'000.0)));
}

TEST_F(GradStatsCudaTest, LossSumAddsInDouble) {
  testing::Random random = testing::test_random();
  for (const int64_t N : {1, 7, 1000, 70'000, 524'288}) {
    const std::vector<float> losses = random.normal_vector<float>(N, 1.0, 4.0);
    auto loss = uploaded("loss", losses);
    std::vector<double> sums;
    for (const Launch launch : {Launch::direct, Launch::captured}) {
      auto verdict = uploaded("verdict", std::vector<StepVerdict>{StepVerdict{.loss_sum = 123.25}});
      run(launch, [&] { loss_sum(LossSum<bf16>{.verdict = verdict.get(), .loss = loss.get(), .N = N}, exec()); });
      sums.push_back(verdict.download()[0].loss_sum);
    }
    double expected = 123.25;
    for (const float value : losses) expected += static_cast<double>(value);
    EXPECT_NEAR(sums[0], expected, 1e-12 * expected) << "N=" << N;
    EXPECT_EQ(sums[0], sums[1]) << "N=" << N;
  }
}

TEST_F(GradStatsCudaTest, LooksOnlyAtGroupsThatUpdate) {
  testing::Random random(testing::test_seed());
  Buffer buffer = make_buffer({70'000, 3, 5'000}, random);
  for (int p = 0; p < 3; ++p) buffer.segments[static_cast<size_t>(p)].group = 31 - p;
  buffer.grads[static_cast<size_t>(buffer.segments[1].offset)] = kNan;
  buffer.groups = 1u << 31 | 1u << 29;
  check(buffer, 0.5);
  EXPECT_EQ(device(buffer, 0, {}).sums[1], 0);
  buffer.groups = 1u << 30;
  const Answer bad = device(buffer, 0, {});
  EXPECT_EQ(bad.verdict.skip, 1u);
  EXPECT_EQ(bad.verdict.bad_parameter, 1);
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/adamw/adamw.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t n;
  double beta1 = 0.8, beta2 = 0.95, eps = 1e-10;
  AdamStep step{.lr = 0.03f, .decay = 0.01f};
  StepVerdict verdict{.grad_scale = 0.5f};
  MasterSplit split = MasterSplit::nearest;
  bool bf16_state = false;
  AdamForm form = AdamForm::adamw;
  bool decays = true;
  std::vector<T> weight, m, v, grad;

  Problem(int64_t count, Random& random)
      : n(count),
        weight(random.normal_vector<T>(n)),
        m(static_cast<size_t>(n)),
        v(static_cast<size_t>(n)),
        grad(random.normal_vector<T>(n)) {}

  // t-th step, from 1
  void update(int t, const HostExec& exec) {
    step.correction1 = static_cast<float>(1 - std::pow(beta1, t));
    step.correction2 = static_cast<float>(1 - std::pow(beta2, t));
    adamw_update(AdamW<T>{.weight = {weight.data(), nullptr, split},
                          .m = m.data(),
                          .v = v.data(),
                          .bf16_state = bf16_state,
                          .grad = grad.data(),
                          .step = &step,
                          .verdict = &verdict,
                          .n = n,
                          .beta1 = beta1,
                          .beta2 = beta2,
                          .eps = eps,
                          .form = form,
                          .decays = decays},
                 exec);
  }
};

TEST(AdamW, FollowsTheFormulaForSeveralSteps) {
  Random random = test_random();
  Problem<double> p(40001, random);  // more than two tasks, not a multiple of a vector
  Problem<float> single(40001, random);
  single.weight.assign(p.weight.begin(), p.weight.end());
  std::vector<double> theta = p.weight, m(theta.size()), v(theta.size());
  for (int t = 1; t <= 5; ++t) {
    p.grad = random.normal_vector<double>(p.n);
    single.grad.assign(p.grad.begin(), p.grad.end());
    p.update(t, HostExec{});
    single.update(t, HostExec{});
    for (size_t i = 0; i < theta.size(); ++i) {
      const double g = p.grad[i] * 0.5;
      theta[i] -= static_cast<double>(0.01f) * theta[i];
      m[i] = 0.8 * m[i] + 0.2 * g;
      v[i] = 0.95 * v[i] + 0.05 * g * g;
      const double c1 = p.step.correction1, c2 = p.step.correction2;
      theta[i] -= static_cast<double>(0.03f) / c1 * m[i] / (std::sqrt(v[i]) / std::sqrt(c2) + 1e-10);
      ASSERT_NEAR(p.weight[i], theta[i], 1e-13) << "step " << t << " element " << i;
      ASSERT_NEAR(single.weight[i], theta[i], 2e-5) << "step " << t << " element " << i;
    }
  }
}

TEST(AdamW, CautiousFormFollowsTheFormulaForSeveralSteps) {
  Random random = test_random();
  Problem<double> p(20001, random);
  p.form = AdamForm::cautious;
  p.eps = 0.05;  // large enough that its place beside the uncorrected root shows
  Problem<float> single(20001, random);
  single.form = p.form;
  single.eps = p.eps;
  single.weight.assign(p.weight.begin(), p.weight.end());
  std::vector<double> theta = p.weight, m(theta.size()), v(theta.size());
  // Each element's gradients keep their sign: where m cancels, rounding would decide in float whether the weight decays.
  const std::vector<double> signs = p.grad;
  for (int t = 1; t <= 5; ++t) {
    p.grad = random.normal_vector<double>(p.n);
    for (size_t i = 0; i < signs.size(); ++i) p.grad[i] = std::copysign(p.grad[i], signs[i]);
    p.grad[7] = 0;
    single.grad.assign(p.grad.begin(), p.grad.end());
    p.update(t, HostExec{});
    single.update(t, HostExec{});
    int decayed = 0;
    for (size_t i = 0; i < theta.size(); ++i) {
      const double g = p.grad[i] * 0.5;
      m[i] = 0.8 * m[i] + 0.2 * g;
      v[i] = 0.95 * v[i] + 0.05 * g * g;
      double u = static_cast<double>(0.03f) * std::sqrt(static_cast<double>(p.step.correction2)) /
                 static_cast<double>(p.step.correction1) * m[i] / (std::sqrt(v[i]) + 0.05);
      if (u * theta[i] > 0) {
        u += static_cast<double>(0.01f) * theta[i];
        ++decayed;
      }
      theta[i] -= u;
      ASSERT_NEAR(p.weight[i], theta[i], 1e-13) << "step " << t << " element " << i;
      ASSERT_NEAR(single.weight[i], theta[i], 2e-5) << "step " << t << " element " << i;
    }
    EXPECT_GT(decayed, 5000) << "step " << t;
    EXPECT_LT(decayed, 15000) << "step " << t;
  }
}

TEST(AdamW, CautiousFormLeavesAWeightWithoutAGradientAlone) {
  Random random = test_random();
  Problem<float> p(100, random);
  p.form = AdamForm::cautious;
  std::fill(p.grad.begin(), p.grad.end(), 0.0f);
  const std::vector<float> before = p.weight;
  p.update(1, HostExec{});
  EXPECT_EQ(p.weight, before);
}

TEST(AdamW, WithoutDecayTheStepAloneCounts) {
  Random random = test_random();
  for (const AdamForm form : {AdamForm::adamw, AdamForm::cautious}) {
    Problem<float> p(1000, random);
    p.form = form;
    Problem<float> zero_decay = p;
    zero_decay.step.decay = 0;
    const std::vector<float> before = p.weight;
    p.decays = false;
    p.update(1, HostExec{});
    zero_decay.update(1, HostExec{});
    EXPECT_EQ(p.weight, zero_decay.weight);
    EXPECT_NE(p.weight, before);
  }
}

TEST(AdamW, FirstStepHasTheSizeOfTheLearningRate) {
  Random random = test_random();
  Problem<float> p(100, random);
  p.step.decay = 0;
  const std::vector<float> before = p.weight;
  p.update(1, HostExec{});
  for (size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(std::abs(p.weight[i] - before[i]), 0.03f, 1e-6f);
}

TEST(AdamW, ZeroGradientOnlyDecays) {
  Random random = test_random();
  Problem<float> p(100, random);
  const std::vector<float> before = p.weight;
  std::fill(p.grad.begin(), p.grad.end(), 0.0f);
  p.update(1, HostExec{});
  for (size_t i = 0; i < before.size(); ++i) EXPECT_FLOAT_EQ(p.weight[i], before[i] - 0.01f * before[i]);
  EXPECT_EQ(p.v, std::vector<float>(100));
}

TEST(AdamW, SkipLeavesEverythingAlone) {
  Random random = test_random();
  Problem<float> p(100, random);
  p.verdict.skip = 1;
  p.grad[3] = std::nanf("");
  const Problem<float> before = p;
  p.update(1, HostExec{});
  EXPECT_EQ(p.weight, before.weight);
  EXPECT_EQ(p.m, before.m);
  EXPECT_EQ(p.v, before.v);
}

TEST(AdamW, RoundsWhatCudaStoresAsBf16) {
  Random random = test_random();
  for (const bool bf16_state : {false, true}) {
    for (const MasterSplit split : {MasterSplit::none, MasterSplit::nearest, MasterSplit::truncated}) {
      Problem<float> exact(500, random);
      exact.form = bf16_state ? AdamForm::adamw : AdamForm::cautious;
      exact.split = split;
      exact.bf16_state = bf16_state;
      Problem<float> rounded = exact;
      exact.update(1, HostExec{});
      rounded.update(1, HostExec{.round_bf16 = true});
      for (size_t i = 0; i < exact.weight.size(); ++i) {
        auto stored = [](float x, bool as_bf16) { return as_bf16 ? static_cast<float>(bf16(x)) : x; };
        EXPECT_EQ(rounded.weight[i], stored(exact.weight[i], split == MasterSplit::none));
        EXPECT_EQ(rounded.m[i], stored(exact.m[i], bf16_state));
        EXPECT_EQ(rounded.v[i], stored(exact.v[i], bf16_state));
      }
    }
  }
}

TEST(AdamW, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(50021, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.update(1, exec);
    p.update(2, exec);
    return Outputs{p.weight, p.m, p.v};
  });
}

// ------------------------------------------------------------------------------------------------ the two halves of a master
// weight

std::vector<uint32_t> interesting_bits() {
  std::vector<uint32_t> all;
  for (const uint32_t high : {0x0000u, 0x0001u, 0x007fu, 0x0080u, 0x3f7fu, 0x3f80u, 0x3f81u, 0x4000u, 0x7f00u, 0x7f7eu}) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xfffeu, 0xffffu}) {
      all.push_back(high << 16 | low);
      all.push_back(0x80000000u | high << 16 | low);
    }
  }
  Random random = test_random();
  for (int i = 0; i < 10000; ++i) {
    const auto bits = static_cast<uint32_t>(random.bits());
    if ((bits & 0x7f800000u) != 0x7f800000u) all.push_back(bits);
  }
  return all;
}

TEST(MasterSplits, JoinGivesBackEveryBit) {
  for (const MasterSplit split : {MasterSplit::nearest, MasterSplit::truncated}) {
    for (const uint32_t bits : interesting_bits()) {
      bf16 value;
      uint16_t low = 0;
      split_master(std::bit_cast<float>(bits), split, value, low);
      EXPECT_EQ(std::bit_cast<uint32_t>(join_master(value, low, split)), bits) << std::hex << bits;
    }
  }
}

TEST(MasterSplits, NearestValueIsTheRoundedWeight) {
  for (const uint32_t bits : interesting_bits()) {
    const float master = std::bit_cast<float>(bits);
    bf16 value;
    uint16_t low = 0;
    split_master(master, MasterSplit::nearest, value, low);
    if ((bits & 0xffffu) == 0x8000u) {
      EXPECT_EQ(value.bits, (bits >> 16) + 1) << "a tie goes away from zero: " << std::hex << bits;
    } else {
      EXPECT_EQ(value.bits, bf16(master).bits) << std::hex << bits;
    }
  }
}

TEST(MasterSplits, TruncatedValueIsTheUpperHalf) {
  for (const uint32_t bits : interesting_bits()) {
    bf16 value;
    uint16_t low = 0;
    split_master(std::bit_cast<float>(bits), MasterSplit::truncated, value, low);
    EXPECT_EQ(value.bits, bits >> 16);
    EXPECT_EQ(low, bits & 0xffffu);
  }
}

TEST(MasterSplits, NoneRoundsToNearestEven) {
  for (const uint32_t bits : interesting_bits()) {
    bf16 value;
    uint16_t low = 0;
    split_master(std::bit_cast<float>(bits), MasterSplit::none, value, low);
    EXPECT_EQ(value.bits, bf16(std::bit_cast<float>(bits)).bits);
    EXPECT_EQ(std::bit_cast<uint32_t>(join_master(value, low, MasterSplit::none)), uint32_t{value.bits} << 16);
  }
}

}  // namespace
}  // namespace speedrun::kernels

// Snapshots, sums, averages and jumps of parameters that lie in pieces.
#include <numeric>

#include "kernels/extrapolation/extrapolation_sequence_test.h"
#include "kernels/extrapolation/reset_moment.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

TEST(JumpWeights, TensorsOfNormZeroStayZero) {
  Random random = test_random();
  for (const Method method : kAll) {
    auto sequence = random_sequence<float>(4, 300, random);
    for (std::vector<float>& x : sequence.x) std::fill(x.begin() + 100, x.begin() + 200, 0.0f);
    sequence.weights = sequence.x.back();
    sequence.cut({100, 100, 0, 100});
    JumpPlan plan = plan_of(method);
    plan.fixed[1] = 0.5;
    plan.max_jump = 0.001;
    EXPECT_EQ(sequence.jump(plan).refusal, JumpRefusal::none);
    for (size_t i = 0; i < 300; ++i) {
      EXPECT_TRUE(std::isfinite(sequence.weights[i]));
      EXPECT_EQ(sequence.weights[i] == 0, i / 100 == 1) << i;
    }
  }
}

TEST(JumpWeights, AVectorOfNormZeroMovesByNothingToSpeakOf) {
  Sequence<double> sequence({{1, 0}, {0, 1}, {0, 0}});
  JumpPlan plan = plan_of(Method::rre);
  plan.max_jump = 0.001;
  const JumpReport report = sequence.jump(plan);
  EXPECT_EQ(report.refusal, JumpRefusal::none);
  EXPECT_EQ(report.capped_jump, 0.001);
  EXPECT_NEAR(norm(sequence.weights), 0.001 * 1e-12, 1e-20);  // a norm counts as at least 1e−12
}

TEST(SnapshotSums, DoNotDependOnThePieces) {
  Random random = test_random();
  for (int k = 2; k <= kMaxSnapshots; ++k) {
    auto sequence = random_sequence<float>(k, 5'000, random, 0.1);
    const std::vector<double> whole = sequence.sums();
    sequence.cut({1, 7, 0, 1992, 2999, 1});
    const std::vector<double> cut = sequence.sums();
    ASSERT_EQ(whole.size(), cut.size());
    const double size = *std::max_element(whole.begin(), whole.end());
    for (size_t s = 0; s < whole.size(); ++s) EXPECT_NEAR(whole[s], cut[s], 1e-12 * size);

    // By hand, in the documented order.
    size_t s = 0;
    for (size_t i = 0; i + 1 < static_cast<size_t>(k); ++i) {
      for (size_t j = i; j + 1 < static_cast<size_t>(k); ++j) {
        const std::vector<double> u = difference(to_double(sequence.x[i + 1]), to_double(sequence.x[i])),
                                  v = difference(to_double(sequence.x[j + 1]), to_double(sequence.x[j]));
        EXPECT_NEAR(whole[s++], std::inner_product(u.begin(), u.end(), v.begin(), 0.0), 1e-12 * size);
      }
    }
    EXPECT_NEAR(whole[s], std::pow(norm(sequence.newest()), 2), 1e-12 * size);
  }
}

TEST(SnapshotSums, RanksCountEveryElementOnce) {
  Random random = test_random();
  auto sequence = random_sequence<double>(4, 1'000, random);
  const std::vector<double> expected = sequence.sums();
  sequence.cut({300, 600, 100});
  auto other = sequence;
  sequence.pieces[1].counted = false;
  other.pieces[0].counted = other.pieces[2].counted = false;
  const std::vector<double> first = sequence.sums(), second = other.sums();
  for (size_t s = 0; s < expected.size(); ++s) EXPECT_NEAR(first[s] + second[s], expected[s], 1e-12 * expected.back());
  EXPECT_GT(first.back(), 0);
  EXPECT_GT(second.back(), 0);
}

TEST(SnapshotSums, OfNoPiecesAreZero) {
  Random random = test_random();
  auto sequence = random_sequence<float>(3, 10, random);
  sequence.pieces.clear();
  for (const double sum : sequence.sums()) EXPECT_EQ(sum, 0);
}

TEST(JumpWeights, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  auto start = random_sequence<float>(5, 3'000, random);
  start.cut({1000, 1, 999, 500, 500});
  check_thread_counts([&](const HostExec& exec) {
    auto sequence = start;
    std::vector<float> snapshot(3'000), average = sequence.x[0];
    sequence.jump(plan_of(Method::rre), exec);
    take_snapshot(TakeSnapshot<float>{sequence.pieces.data(), 5, snapshot.data()}, exec);
    average_weights(AverageWeights<float>{sequence.pieces.data(), 5, average.data(), 0.1f}, exec);
    return Outputs{sequence.weights, snapshot, average};
  });
}

TEST(TakeSnapshot, GoesToThePiecesPlacesAndBack) {
  Random random = test_random();
  std::vector<float> weights = random.normal_vector<float>(100);
  const std::vector<float> before = weights;
  const std::vector<SnapshotPiece<float>> pieces = {{.weight = {.value = weights.data() + 60}, .offset = 3, .count = 40},
                                                    {.weight = {.value = weights.data()}, .offset = 50, .count = 60}};
  std::vector<float> snapshot(120, -1.0f);
  take_snapshot(TakeSnapshot<float>{pieces.data(), 2, snapshot.data()}, HostExec{});
  for (size_t i = 0; i < 120; ++i) {
    const float expected = i >= 3 && i < 43 ? before[i + 57] : i >= 50 && i < 110 ? before[i - 50] : -1.0f;
    EXPECT_EQ(snapshot[i], expected) << i;
  }
  std::fill(weights.begin(), weights.end(), 0.0f);
  jump_weights(
      JumpWeights<float>{
          .pieces = pieces.data(), .num_pieces = 2, .snapshots = {snapshot.data()}, .k = 1, .report = nullptr, .result = nullptr},
      HostExec{});
  EXPECT_TRUE(same_bits(weights, before));
}

TEST(AverageWeights, StartsAndFollows) {
  std::vector<double> weights = {1, -2, 3}, average(3, std::nan(""));
  const SnapshotPiece<double> piece{.weight = {.value = weights.data()}, .offset = 0, .count = 3};
  average_weights(AverageWeights<double>{&piece, 1, average.data(), 1}, HostExec{});
  EXPECT_TRUE(same_bits(average, weights));
  const std::vector<double> first = weights;
  weights = {5, 6, 7};
  average_weights(AverageWeights<double>{&piece, 1, average.data(), 0.25}, HostExec{});
  for (size_t i = 0; i < 3; ++i) EXPECT_DOUBLE_EQ(average[i], 0.75 * first[i] + 0.25 * weights[i]);
}

TEST(JumpWeights, ResultMayBeASnapshotAndIsWhatIsStored) {
  Random random = test_random();
  for (const bool round_bf16 : {false, true}) {
    const HostExec exec{.round_bf16 = round_bf16};
    for (size_t target = 0; target < 4; ++target) {
      auto sequence = random_sequence<float>(4, 500, random), separate = sequence;
      std::vector<float> result(500);
      const JumpReport report = sequence.report(plan_of(Method::rre));
      separate.apply(&report, result.data(), exec);
      sequence.apply(&report, sequence.x[target].data(), exec);
      EXPECT_TRUE(same_bits(sequence.weights, separate.weights));
      EXPECT_TRUE(same_bits(result, separate.weights));
      EXPECT_TRUE(same_bits(sequence.x[target], result));
      if (round_bf16) {
        EXPECT_TRUE(all_bf16(result));
      }
    }
  }
}

TEST(ResetMoment, OnlyAfterAJump) {
  const std::vector<float> before = {1, 2, 3};
  for (const JumpRefusal refusal : {JumpRefusal::none, JumpRefusal::singular}) {
    JumpReport report;
    report.refusal = refusal;
    std::vector<float> moment = before;
    reset_moment(ResetMoment{.moment = moment.data(), .bytes = 2 * sizeof(float), .report = &report}, HostExec{});
    EXPECT_TRUE(same_bits(moment, refusal == JumpRefusal::none ? std::vector<float>{0, 0, 3} : before));
  }
}

}  // namespace
}  // namespace speedrun::kernels

// The methods: what is exact, who says so, and what is refused.
#include <numeric>

#include "kernels/extrapolation/extrapolation_plan.h"
#include "kernels/extrapolation/extrapolation_sequence_test.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

// x_n = limit + Σ rates_r^n · mode_r: a linear fixed-point iteration with so many modes in its error.
template <class T>
struct LinearIteration {
  std::vector<double> limit;
  Sequence<T> sequence;

  static LinearIteration make(const std::vector<double>& rates, int k, Random& random) {
    constexpr int64_t kCount = 500;
    const std::vector<double> limit = random.normal_vector<double>(kCount);
    std::vector<std::vector<double>> modes;
    for (size_t r = 0; r < rates.size(); ++r) modes.push_back(random.normal_vector<double>(kCount));
    std::vector<std::vector<T>> x(static_cast<size_t>(k), std::vector<T>(kCount));
    for (int n = 0; n < k; ++n) {
      for (size_t i = 0; i < kCount; ++i) {
        double value = limit[i];
        for (size_t r = 0; r < rates.size(); ++r) value += std::pow(rates[r], n) * modes[r][i];
        x[static_cast<size_t>(n)][i] = static_cast<T>(value);
      }
    }
    return {.limit = limit, .sequence = Sequence<T>(x)};
  }

  // Distance to the limit after a jump, relative to the newest snapshot's.
  double error_after(Method method) const {
    Sequence<T> jumping = sequence;
    JumpPlan plan = plan_of(method);
    plan.regularization = 0;
    const JumpReport report = jumping.jump(plan);
    EXPECT_EQ(report.refusal, JumpRefusal::none);
    return norm(difference(to_double(jumping.weights), limit)) / norm(difference(sequence.newest(), limit));
  }
};

TEST(Extrapolation, IsExactOnALinearIteration) {
  Random random = test_random();
  for (const std::vector<double>& rates : {std::vector<double>{0.9}, {0.9, 0.5}, {0.9, 0.6, -0.4}}) {
    const int k = static_cast<int>(rates.size()) + 2;
    const auto exact = LinearIteration<double>::make(rates, k, random);
    const auto rounded = LinearIteration<float>::make(rates, k, random);
    for (const Method method : {Method::rre, Method::mpe, Method::anderson}) {
      // What is left are the ridge of 1e−10 and, in FP32, the rounding of the iterates, whose differences cancel.
      EXPECT_LT(exact.error_after(method), 1e-6) << "k = " << k << ", method " << static_cast<int>(method);
      EXPECT_LT(rounded.error_after(method), 1e-4) << "k = " << k << ", method " << static_cast<int>(method);
    }
    // The suffix sums lead away from the limit.
    if (k > 3) {
      EXPECT_GT(exact.error_after(Method::rre_suffix), 1) << "k = " << k;
      EXPECT_GT(rounded.error_after(Method::rre_suffix), 1) << "k = " << k;
    }
  }
}

TEST(Extrapolation, OneModeMoreThanDifferencesIsNotExact) {
  Random random = test_random();
  const auto iteration = LinearIteration<double>::make({0.9, 0.6, -0.4}, 4, random);
  for (const Method method : {Method::rre, Method::mpe, Method::anderson}) {
    const double error = iteration.error_after(method);
    EXPECT_GT(error, 1e-3) << static_cast<int>(method);
    EXPECT_LT(error, 1) << static_cast<int>(method);
  }
}

TEST(Extrapolation, RandomDifferencesOfEqualSize) {
  Random random = test_random();
  const auto sequence = random_sequence<float>(4, 40'000, random);
  const JumpReport suffix = sequence.report(plan_of(Method::rre_suffix)), prefix = sequence.report(plan_of(Method::rre));
  for (int j = 0; j < 3; ++j) {
    EXPECT_NEAR(suffix.c[j], 1.0 / 3, 0.03);
    EXPECT_NEAR(suffix.weights[j], (3 - j) / 3.0, 0.03);
    EXPECT_NEAR(prefix.weights[j], (j + 1) / 3.0, 0.03);
  }
  EXPECT_DOUBLE_EQ(suffix.weights[0], 1);
  EXPECT_NEAR(prefix.weights[2], 1, 1e-14);
  EXPECT_NEAR(prefix.condition, 1, 0.1);
}

// What result #34 of modded-nanogpt's optimization track does, step by step, on whole vectors.
struct Record {
  std::vector<double> x;  // after
  double ratio = 0;       // ‖δ‖ / ‖x_3‖ before the cap
  double identity = 0;    // the same from the differences' products alone

  explicit Record(const std::vector<std::vector<double>>& h) {
    constexpr double kDamping = 0.875, kMaxJump = 0.001;
    std::vector<std::vector<double>> u;
    for (size_t i = 0; i < 3; ++i) u.push_back(difference(h[i + 1], h[i]));
    double g[3][3], a[3][3];
    for (size_t i = 0; i < 3; ++i) {
      for (size_t j = 0; j < 3; ++j) g[i][j] = a[i][j] = std::inner_product(u[i].begin(), u[i].end(), u[j].begin(), 0.0);
    }
    const double trace = g[0][0] + g[1][1] + g[2][2];
    for (int i = 0; i < 3; ++i) a[i][i] += 1e-6 * std::max(trace, 0.0) / 3 + 1e-10;
    double c[3];
    const double determinant = det(a);
    for (int column = 0; column < 3; ++column) {  // Cramer's rule for a c = 1
      double replaced[3][3];
      for (int i = 0; i < 3; ++i) {
        for (int j = 0; j < 3; ++j) replaced[i][j] = j == column ? 1 : a[i][j];
      }
      c[column] = det(replaced) / determinant;
    }
    const double sum = c[0] + c[1] + c[2];
    for (double& value : c) value /= sum;
    const double gamma[3] = {c[0] + c[1] + c[2], c[1] + c[2], c[2]};
    x = h[3];
    for (size_t e = 0; e < x.size(); ++e) {
      const double target = h[3][e] - (gamma[0] * u[0][e] + gamma[1] * u[1][e] + gamma[2] * u[2][e]);
      x[e] = h[3][e] + kDamping * (target - h[3][e]);
    }
    std::vector<double> delta = difference(x, h[3]);
    ratio = norm(delta) / std::max(norm(h[3]), 1e-12);
    if (ratio > kMaxJump) {
      for (double& value : delta) value *= kMaxJump / ratio;
    }
    for (size_t e = 0; e < x.size(); ++e) x[e] = h[3][e] + delta[e];
    double square = 0;
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 3; ++j) square += gamma[i] * g[i][j] * gamma[j];
    }
    identity = kDamping * std::sqrt(square) / norm(h[3]);
  }

  static double det(const double (&a)[3][3]) {
    return a[0][0] * (a[1][1] * a[2][2] - a[1][2] * a[2][1]) - a[0][1] * (a[1][0] * a[2][2] - a[1][2] * a[2][0]) +
           a[0][2] * (a[1][0] * a[2][1] - a[1][1] * a[2][0]);
  }
};

template <class T>
void expect_record(double step, bool capped, double tolerance) {
  Random random = test_random();
  auto sequence = random_sequence<T>(4, 3'000, random, step);
  std::vector<std::vector<double>> h;
  for (const std::vector<T>& x : sequence.x) h.push_back(to_double(x));
  const Record record(h);
  JumpPlan plan = plan_of(Method::rre_suffix);
  plan.damping = 0.875;
  plan.max_jump = 0.001;
  const JumpReport report = sequence.jump(plan);
  EXPECT_NEAR(record.ratio, record.identity, 1e-9 * record.ratio);
  EXPECT_NEAR(report.jump, record.ratio, 1e-9 * record.ratio);
  EXPECT_NEAR(report.capped_jump, std::min(record.ratio, 0.001), 1e-9 * record.ratio);
  EXPECT_EQ(report.capped_jump < report.jump, capped) << report.jump;
  for (size_t i = 0; i < record.x.size(); ++i) EXPECT_NEAR(static_cast<double>(sequence.weights[i]), record.x[i], tolerance) << i;
}

TEST(Extrapolation, TheRecordsFormula) {
  for (const bool capped : {false, true}) {
    expect_record<double>(capped ? 0.01 : 1e-4, capped, 1e-14);
    expect_record<float>(capped ? 0.01 : 1e-4, capped, 3e-7);
  }
}

TEST(Extrapolation, EqualDifferencesAreSharedByTheRidge) {
  std::vector<std::vector<double>> x(4, std::vector<double>(100));
  for (size_t n = 0; n < 4; ++n) {
    for (size_t i = 0; i < 100; ++i) x[n][i] = 1 + static_cast<double>(n) * (static_cast<double>(i % 7) - 3) / 64;
  }
  const JumpReport report = Sequence<double>(x).report(plan_of(Method::rre_suffix));
  EXPECT_EQ(report.refusal, JumpRefusal::none);
  for (int j = 0; j < 3; ++j) EXPECT_NEAR(report.c[j], 1.0 / 3, 1e-6);
}

TEST(Extrapolation, AndersonMixesResidualsIn) {
  Random random = test_random();
  for (const double mixing : {0.0, 0.3, 1.0}) {
    auto sequence = random_sequence<double>(5, 200, random, 0.3);
    JumpPlan plan = plan_of(Method::anderson);
    plan.mixing = mixing;
    const JumpReport report = sequence.jump(plan);
    ASSERT_EQ(report.refusal, JumpRefusal::none);
    const auto& x = sequence.x;
    for (size_t e = 0; e < 200; ++e) {
      double expected = 0;
      for (size_t i = 0; i < 4; ++i) expected += report.c[i] * (x[i][e] + mixing * (x[i + 1][e] - x[i][e]));
      EXPECT_NEAR(sequence.weights[e], expected, 1e-13);
    }
    const JumpReport rre = sequence.report(plan_of(Method::rre));
    for (int j = 0; j < 4; ++j) EXPECT_EQ(report.c[j], rre.c[j]);
  }
}

TEST(Extrapolation, MpeIsALeastSquaresFitOfTheNewestDifference) {
  Random random = test_random();
  const auto sequence = random_sequence<double>(5, 200, random, 0.3);
  JumpPlan plan = plan_of(Method::mpe);
  plan.regularization = 0;
  const JumpReport report = sequence.report(plan);
  ASSERT_EQ(report.refusal, JumpRefusal::none);
  // The residual Σ c_i u_i is orthogonal to every difference but the newest.
  std::vector<std::vector<double>> u;
  std::vector<double> residual(200);
  for (size_t j = 0; j < 4; ++j) {
    u.push_back(difference(sequence.x[j + 1], sequence.x[j]));
    for (size_t e = 0; e < 200; ++e) residual[e] += report.c[j] * u[j][e];
  }
  for (size_t j = 0; j < 3; ++j) EXPECT_NEAR(std::inner_product(residual.begin(), residual.end(), u[j].begin(), 0.0), 0, 1e-9) << j;
  EXPECT_NEAR(report.c[0] + report.c[1] + report.c[2] + report.c[3], 1, 1e-14);
}

TEST(Extrapolation, LinearGoesOnAlongTheMeanDifference) {
  Random random = test_random();
  for (const int k : {2, 4, 8}) {
    auto sequence = random_sequence<double>(k, 100, random);
    JumpPlan plan = plan_of(Method::linear);
    plan.horizon = 5;
    plan.damping = 0.5;
    const JumpReport report = sequence.jump(plan);
    EXPECT_EQ(report.condition, 0);
    const std::vector<double> oldest = sequence.x.front(), newest = sequence.newest();
    for (size_t i = 0; i < 100; ++i)
      EXPECT_NEAR(sequence.weights[i], newest[i] + 0.5 * 5 * (newest[i] - oldest[i]) / (k - 1), 1e-14);
  }
}

TEST(Extrapolation, FixedBlendsTwoVectors) {
  Random random = test_random();
  auto sequence = random_sequence<double>(2, 100, random, 1);
  JumpPlan plan = plan_of(Method::fixed);
  plan.fixed[0] = 0.6;
  sequence.jump(plan);
  for (size_t i = 0; i < 100; ++i) EXPECT_NEAR(sequence.weights[i], 0.6 * sequence.x[0][i] + 0.4 * sequence.x[1][i], 1e-14);
}

TEST(Extrapolation, TheReportIsWhatHappens) {
  Random random = test_random();
  for (const Method method : kAll) {
    for (int k = 2; k <= kMaxSnapshots; ++k) {
      for (const double max_jump : {0.0, 1e-3, 1e3}) {
        auto sequence = random_sequence<double>(k, 300, random, 0.1);
        JumpPlan plan = plan_of(method);
        plan.max_jump = max_jump;
        plan.damping = 0.75;
        plan.mixing = 0.5;
        for (int j = 0; j + 1 < k; ++j) plan.fixed[j] = random.uniform(0.5, 1.5);
        const JumpReport report = sequence.jump(plan);
        ASSERT_EQ(report.refusal, JumpRefusal::none);
        EXPECT_EQ(report.differences, k - 1);
        const double found = norm(difference(sequence.weights, sequence.newest())) / norm(sequence.newest());
        EXPECT_NEAR(found, report.capped_jump, 1e-10 * found) << "method " << static_cast<int>(method) << ", k = " << k;
        EXPECT_EQ(report.capped_jump, max_jump == 1e-3 ? max_jump : report.jump);
        EXPECT_GT(report.jump, 1e-3);
        const double sum = std::accumulate(report.c, report.c + kMaxSnapshots - 1, 0.0);
        EXPECT_NEAR(sum, method == Method::linear || method == Method::fixed ? 0 : 1, 1e-12);
      }
    }
  }
}

// Sums whose matrix has these eigenvalues, in a random basis.
std::vector<double> sums_with_eigenvalues(const std::vector<double>& eigenvalues, Random& random) {
  const size_t m = eigenvalues.size();
  std::vector<std::vector<double>> basis;
  while (basis.size() < m) {
    std::vector<double> next = random.normal_vector<double>(static_cast<int64_t>(m));
    for (int pass = 0; pass < 2; ++pass) {
      for (const std::vector<double>& b : basis) {
        const double along = std::inner_product(next.begin(), next.end(), b.begin(), 0.0);
        for (size_t i = 0; i < m; ++i) next[i] -= along * b[i];
      }
    }
    const double length = norm(next);
    for (double& value : next) value /= length;
    basis.push_back(next);
  }
  std::vector<double> sums;
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = i; j < m; ++j) {
      double sum = 0;
      for (size_t r = 0; r < m; ++r) sum += basis[r][i] * eigenvalues[r] * basis[r][j];
      sums.push_back(sum);
    }
  }
  sums.push_back(1);
  return sums;
}

JumpReport report_on(const std::vector<double>& sums, int k, double regularization = 0) {
  const StepVerdict verdict;
  JumpReport report;
  JumpPlan plan = plan_of(Method::rre);
  plan.regularization = regularization;
  plan.k = k;
  plan.sums = sums.data();
  plan.verdict = &verdict;
  plan.report = &report;
  plan_jump(plan, HostExec{});
  return report;
}

TEST(Extrapolation, ConditionNumber) {
  Random random = test_random();
  for (const std::vector<double>& eigenvalues : {std::vector<double>{3}, {5, 5}, {7, 1e-3, 2}, {1e8, 1, 3, 10, 1e4, 2e7, 5}}) {
    const std::vector<double> sums = sums_with_eigenvalues(eigenvalues, random);
    const auto m = static_cast<int>(eigenvalues.size());
    const auto [smallest, largest] = std::minmax_element(eigenvalues.begin(), eigenvalues.end());
    for (const double regularization : {0.0, 0.1}) {
      const double ridge = regularization * std::accumulate(eigenvalues.begin(), eigenvalues.end(), 0.0) / m;
      const double expected = (*largest + ridge) / (*smallest + ridge);
      EXPECT_NEAR(report_on(sums, m + 1, regularization).condition, expected, 1e-6 * expected);
    }
  }
}

TEST(Extrapolation, SolvesWhereThePivotIsZero) {
  SmallMatrix a{.at = {{0, 1, 0}, {1, 0, 2}, {0, 2, 3}}, .n = 3};
  Coefficients b{.at = {2, 13, 19}};
  solve(a, b);
  EXPECT_DOUBLE_EQ(b.at[0], 3);
  EXPECT_DOUBLE_EQ(b.at[1], 2);
  EXPECT_DOUBLE_EQ(b.at[2], 5);
}

// ---------------------------------------------------------------- refusals

template <class T>
void expect_refused(Sequence<T> sequence, const JumpPlan& plan, JumpRefusal why) {
  const std::vector<T> before = sequence.weights;
  const JumpReport report = sequence.report(plan);
  EXPECT_EQ(report.refusal, why) << "method " << static_cast<int>(plan.method);
  EXPECT_EQ(report.differences, sequence.k() - 1);
  EXPECT_EQ(report.jump, 0);
  EXPECT_EQ(report.capped_jump, 0);
  EXPECT_TRUE(std::isfinite(report.condition));
  for (int j = 0; j < kMaxSnapshots - 1; ++j) EXPECT_TRUE(report.weights[j] == 0 && report.c[j] == 0);
  std::vector<T> result(before.size(), T{5});
  sequence.apply(&report, result.data());
  EXPECT_TRUE(same_bits(sequence.weights, before));
  EXPECT_TRUE(same_bits(result, before));
}

TEST(Extrapolation, RefusesEqualSnapshots) {
  Random random = test_random();
  for (const Method method : kAll) {
    JumpPlan plan = plan_of(method);
    plan.fixed[0] = 1;
    expect_refused(Sequence<float>({4, random.normal_vector<float>(100)}), plan, JumpRefusal::no_change);
    expect_refused(Sequence<double>({3, std::vector<double>(100)}), plan, JumpRefusal::no_change);
  }
}

TEST(Extrapolation, RefusesCollinearDifferencesWithoutEnoughRidge) {
  Random random = test_random();
  std::vector<float> direction(1000);
  for (float& value : direction) value = static_cast<float>(random.below(2001) - 1000);
  for (const std::vector<float>& steps : {std::vector<float>{1, 1, 1}, {1, 2, -3}, {4, 2, 1, 5, 3, 7, 6}}) {
    std::vector<std::vector<float>> x = {direction};
    for (const float step : steps) {
      x.push_back(x.back());
      for (size_t i = 0; i < direction.size(); ++i) x.back()[i] += step * direction[i];
    }
    for (const Method method : kSolving) {
      JumpPlan plan = plan_of(method);
      plan.regularization = 1e-18;
      expect_refused(Sequence<float>(x), plan, JumpRefusal::singular);
      plan.regularization = 1e-6;
      EXPECT_EQ(Sequence<float>(x).report(plan).refusal, JumpRefusal::none);
    }
  }
}

TEST(Extrapolation, RefusesAVanishingSumOfCoefficients) {
  // mpe: u_0 = u_1 give c_0 = −1, c_1 = 1.
  const std::vector<std::vector<double>> x = {{0, 1e4}, {1e4, 1e4}, {2e4, 1e4}};
  JumpPlan plan = plan_of(Method::mpe);
  plan.regularization = 0;
  expect_refused(Sequence<double>(x), plan, JumpRefusal::singular);
}

TEST(Extrapolation, RefusesWhatIsNotFinite) {
  Random random = test_random();
  for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    for (const Method method : kAll) {
      for (size_t snapshot = 0; snapshot < 4; ++snapshot) {
        auto sequence = random_sequence<float>(4, 100, random);
        sequence.x[snapshot][static_cast<size_t>(random.below(100))] = bad;
        if (snapshot == 3) sequence.weights = sequence.x.back();
        sequence.cut({100});
        expect_refused(sequence, plan_of(method), JumpRefusal::not_finite);
      }
    }
  }
}

TEST(Extrapolation, SumsThatAreNotFiniteComeFirst) {
  EXPECT_EQ(report_on({0, 0, 0, std::nan("")}, 3).refusal, JumpRefusal::not_finite);
  EXPECT_EQ(report_on({0, HUGE_VAL, 0, 1}, 3).refusal, JumpRefusal::not_finite);
  EXPECT_EQ(report_on({0, 0, 0, 1}, 3).refusal, JumpRefusal::no_change);
  EXPECT_EQ(report_on({1e8, 1e8, 1e8, 1}, 3).refusal, JumpRefusal::singular);
  EXPECT_EQ(report_on({1, 0.5, 1, 1}, 3).refusal, JumpRefusal::none);
}

TEST(Extrapolation, RefusesAfterAStepThatWasNotFinite) {
  Random random = test_random();
  for (const Method method : kAll) {
    auto sequence = random_sequence<float>(4, 100, random);
    sequence.verdict.skip = 1;
    expect_refused(sequence, plan_of(method), JumpRefusal::not_finite);
  }
}

TEST(Extrapolation, RefusesAJumpBeyondTheLargestFloat) {
  Random random = test_random();
  const auto sequence = random_sequence<float>(4, 100, random);
  JumpPlan plan = plan_of(Method::linear);
  for (const double horizon : {1e39, 1e200, HUGE_VAL, std::nan("")}) {
    plan.horizon = horizon;
    expect_refused(sequence, plan, JumpRefusal::not_finite);
  }
  plan.max_jump = 0.5;
  plan.horizon = 1e39;  // with a cap it is a jump like any other
  EXPECT_EQ(sequence.report(plan).refusal, JumpRefusal::none);
  plan.horizon = 1e200;  // its square is no number any more
  expect_refused(sequence, plan, JumpRefusal::not_finite);
}

}  // namespace
}  // namespace speedrun::kernels

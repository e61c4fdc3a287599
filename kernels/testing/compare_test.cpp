// The comparison rule itself: it must reject what it exists to reject.
#include "kernels/testing/compare.h"

#include <limits>

namespace speedrun::testing {
namespace {

TEST(Compare, AcceptsRoundingAndRejectsMore) {
  const std::vector<double> truth = {1.0, -2.0, 0.5, 100.0};
  std::vector<double> got = truth, baseline = truth;
  EXPECT_TRUE(within_rule(got, truth, baseline));
  got[3] = 100.5;  // one bf16 ulp of 100
  EXPECT_TRUE(within_rule(got, truth, baseline));
  got[3] = 101.1;
  EXPECT_FALSE(within_rule(got, truth, baseline));
  baseline[3] = 100.4;  // now the baseline errs as well
  EXPECT_TRUE(within_rule(got, truth, baseline));
}

TEST(Compare, RejectsSmallValuesThatAreAllWrong) {
  std::vector<double> truth(1000, 0.01), got(1000, 0.012);
  truth[0] = got[0] = 0.5;
  EXPECT_FALSE(within_rule(got, truth, truth));
}

TEST(Compare, PositionsOfNonFiniteValuesMustAgree) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(within_rule(std::vector<double>{1, nan}, std::vector<double>{1, 2}, std::vector<double>{1, 2}));
  EXPECT_FALSE(within_rule(std::vector<double>{1, 2}, std::vector<double>{1, nan}, std::vector<double>{1, 2}));
  EXPECT_TRUE(within_rule(std::vector<double>{1, nan}, std::vector<double>{1, nan}, std::vector<double>{1, nan}));
}

TEST(Compare, SameBitsSeesSignedZero) {
  EXPECT_TRUE(same_bits(std::vector<float>{1, 0}, std::vector<float>{1, 0}));
  EXPECT_FALSE(same_bits(std::vector<float>{1, 0}, std::vector<float>{1, -0.0f}));
}

TEST(Random, SameSeedSameNumbers) {
  Random a(7), b(7), c(8);
  const auto x = a.normal_vector<float>(100);
  EXPECT_EQ(x, b.normal_vector<float>(100));
  EXPECT_NE(x, c.normal_vector<float>(100));
}

}  // namespace
}  // namespace speedrun::testing

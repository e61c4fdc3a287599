// Which updates are remembered and when a jump is due, against lists that are kept here.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "fmt/format.h"
#include "src/optim/extrapolation.h"
#include "src/optim/test_extrapolation.h"

namespace speedrun {
namespace {

TEST(ExtrapolationStep, NothingWithoutAMethod) {
  Config config;
  for (int n = 0; n <= config.schedule.steps; ++n) {
    const ExtrapolationStep step = extrapolation_step(config, n, 0);
    EXPECT_FALSE(step.snapshot || step.jump || step.readout) << n;
  }
}

TEST(ExtrapolationStep, OfTheRecord) {
  const Config config = config_of_34();
  std::set<int> jumps;
  for (int n = 0; n <= config.schedule.steps; ++n) {
    const ExtrapolationStep step = extrapolation_step(config, n, 0);
    EXPECT_EQ(step.snapshot, n >= 2820 && n <= 2925) << n;
    EXPECT_FALSE(step.readout);
    if (step.jump) jumps.insert(n);
  }
  std::set<int> expected;
  for (int n = 2825; n <= 2925; n += 5) expected.insert(n);
  EXPECT_EQ(jumps, expected);
}

// Every combination against a list: how many snapshots there are, and where a jump or a read-out is due.
TEST(ExtrapolationStep, CountsLikeAList) {
  int jumps = 0;
  for (const bool to_weights : {true, false}) {
    for (const int interval : {1, 2, 3}) {
      for (const int every : {1, 2, 4, 5}) {
        for (const int history : {2, 3, 4, 8}) {
          for (const auto& [start, stop, begin] :
               {std::tuple(0, 0, 0), {7, 33, 0}, {7, 40, 12}, {20, 41, 12}, {0, 0, 13}, {3, 9, 12}}) {
            Config config = config_of(ExtrapolationKind::linear);
            config.schedule.steps = 43;
            config.extrapolation.apply = to_weights ? ExtrapolationApply::weights : ExtrapolationApply::readout;
            config.extrapolation.snapshot_every = interval;
            config.extrapolation.every = every * interval;
            config.extrapolation.history = history;
            config.extrapolation.start = start;
            config.extrapolation.stop = stop;
            int list = 0;
            for (int n = begin; n <= 43; ++n) {
              const bool within = n >= start && n <= (stop == 0 ? 43 : stop);
              const bool pushed = within && n % interval == 0;
              if (pushed) ++list;
              const bool due = pushed && n % (every * interval) == 0 && list >= history;
              const ExtrapolationStep step = extrapolation_step(config, n, begin);
              const std::string at = fmt::format("n {}, interval {}, every {}, history {}, {}-{}, begin {}, weights {}", n,
                                                 interval, every * interval, history, start, stop, begin, to_weights);
              ASSERT_EQ(step.snapshot, pushed) << at;
              ASSERT_EQ(step.jump, due && to_weights) << at;
              ASSERT_EQ(step.readout, due && !to_weights) << at;
              ASSERT_EQ(step.taken, pushed ? list : step.taken) << at;
              if (step.jump) list = 1;
              jumps += step.jump;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(jumps, 500);
}

TEST(ExtrapolationStep, ScaleMovesStartAndStopAlone) {
  Config config = config_of(ExtrapolationKind::rre);
  config.schedule.steps = 80;
  config.schedule.scale = 0.5;
  config.extrapolation.start = 21;
  config.extrapolation.stop = 61;
  std::set<int> snapshots, jumps;
  for (int n = 0; n <= 40; ++n) {
    if (extrapolation_step(config, n, 0).snapshot) snapshots.insert(n);
    if (extrapolation_step(config, n, 0).jump) jumps.insert(n);
  }
  EXPECT_EQ(*snapshots.begin(), 11) << "10.5, halves up";
  EXPECT_EQ(*snapshots.rbegin(), 31) << "30.5";
  EXPECT_EQ(jumps, (std::set<int>{15, 20, 25, 30}));
}

TEST(ExtrapolationStep, AveragesEndWithOneJumpOrAreReadAnywhere) {
  for (const ExtrapolationKind method : {ExtrapolationKind::ema, ExtrapolationKind::average}) {
    Config config = config_of(method);
    config.extrapolation.start = 10;
    config.extrapolation.stop = 31;
    config.extrapolation.snapshot_every = 3;
    for (const int begin : {0, 14}) {
      const int first = method == ExtrapolationKind::ema ? std::max(10, begin) : begin == 0 ? 12 : 15;
      for (int n = begin; n <= 40; ++n) {
        config.extrapolation.apply = ExtrapolationApply::weights;
        const ExtrapolationStep step = extrapolation_step(config, n, begin);
        const bool within = n >= first && n <= 31;
        EXPECT_EQ(step.snapshot, within && (method == ExtrapolationKind::ema || n % 3 == 0)) << n;
        EXPECT_EQ(step.jump, n == 31) << n;
        EXPECT_FALSE(step.readout);
        config.extrapolation.apply = ExtrapolationApply::readout;
        EXPECT_EQ(extrapolation_step(config, n, begin).readout, within && n > first) << n;
        EXPECT_FALSE(extrapolation_step(config, n, begin).jump);
      }
    }
  }
}

}  // namespace
}  // namespace speedrun

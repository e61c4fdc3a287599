#include "src/optim/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <sstream>
#include <string>
#include <vector>

namespace speedrun {
namespace {

// The Optimization Track's baseline.
Config track() {
  Config config;
  config.schedule.steps = 3250;
  config.schedule.lr.shape = DecayShape::linear;
  config.schedule.lr.cooldown_steps = 2275;
  config.eval.every = 125;
  config.eval.dense_every = 25;
  return config;
}

// llm.c's GPT-2.
Config gpt2() {
  Config config;
  config.schedule.steps = 18865;
  config.schedule.lr.shape = DecayShape::cosine;
  config.schedule.lr.warmup_steps = 700;
  return config;
}

TEST(LrFactor, OptimizationTrackBaseline) {
  const Config config = track();
  for (int step = 0; step <= 975; ++step) EXPECT_EQ(lr_factor(config.schedule, step), 1.0) << step;
  for (int step = 976; step < 3250; ++step) EXPECT_EQ(lr_factor(config.schedule, step), (3250 - step) / 2275.0) << step;
  EXPECT_NEAR(lr_factor(config.schedule, 3249), 4.4e-4, 0.005e-4);
  EXPECT_EQ(lr_factor(config.schedule, 3250), 0.0);
  EXPECT_EQ(lr_factor(config.schedule, 4000), 0.0);
}

TEST(LrFactor, WarmupAndCosineOfGpt2) {
  Config config = gpt2();
  config.schedule.lr.final_fraction = 0.1;
  EXPECT_EQ(lr_factor(config.schedule, 0), 1.0 / 700);
  EXPECT_EQ(lr_factor(config.schedule, 349), 0.5);
  EXPECT_EQ(lr_factor(config.schedule, 699), 1.0);
  for (const int step : {700, 701, 9000, 18000, 18864}) {
    const double progress = (step - 700.0) / (18865 - 700);
    EXPECT_NEAR(lr_factor(config.schedule, step), 0.1 + 0.9 * 0.5 * (1 + std::cos(std::numbers::pi * progress)), 1e-15) << step;
  }
  EXPECT_EQ(lr_factor(config.schedule, 18865), 0.1);
}

TEST(LrFactor, Power) {
  Config config;
  config.schedule.steps = 100;
  config.schedule.lr.shape = DecayShape::power;
  config.schedule.lr.cooldown_steps = 40;
  config.schedule.lr.power = 1.2;
  EXPECT_EQ(lr_factor(config.schedule, 60), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(config.schedule, 90), std::pow(0.25, 1.2));
  EXPECT_EQ(lr_factor(config.schedule, 100), 0.0);
}

// For every shape and all small step counts: between the floor and 1, rising in the warm-up, never rising after it, at the floor at
// the end, finite everywhere.
TEST(LrFactor, NeverRisesAgainAndNeverPassesTheFloor) {
  for (const DecayShape shape : {DecayShape::constant, DecayShape::linear, DecayShape::cosine, DecayShape::power}) {
    for (const double floor : {0.0, 0.1, 1.0}) {
      for (int steps = 0; steps <= 6; ++steps) {
        for (int warmup = 0; warmup <= steps; ++warmup) {
          for (int cooldown = 0; warmup + cooldown <= steps; ++cooldown) {
            Config::Schedule schedule;
            schedule.steps = steps;
            schedule.lr = {
                .warmup_steps = warmup, .shape = shape, .cooldown_steps = cooldown, .final_fraction = floor, .power = 0.7};
            double previous = 0;
            for (int step = 0; step < steps + 3; ++step) {
              const double factor = lr_factor(schedule, step);
              ASSERT_TRUE(std::isfinite(factor));
              ASSERT_LE(factor, 1.0);
              if (step < warmup) {
                ASSERT_EQ(factor, (step + 1.0) / warmup);
              } else {
                ASSERT_GE(factor, floor);
                ASSERT_TRUE(step == warmup || factor <= previous);
                ASSERT_TRUE(step != warmup || step == steps || factor == 1.0);
                ASSERT_TRUE(step < steps || shape == DecayShape::constant || factor == floor);
              }
              previous = factor;
            }
          }
        }
      }
    }
  }
}

TEST(StepCounts, ScaleMultipliesEveryCount) {
  Config config = track();
  config.schedule.lr.warmup_steps = 100;
  config.schedule.momentum.warmup_steps = 300;
  config.schedule.momentum.cooldown_steps = 50;
  config.schedule.scale = 0.1;
  EXPECT_EQ(step_counts(config.schedule), (StepCounts{325, 10, 228, 30, 5}));  // 227.5 rounds up
  EXPECT_EQ(num_steps(config), 325);
  config.schedule.scale = 2;
  EXPECT_EQ(step_counts(config.schedule), (StepCounts{6500, 200, 4550, 600, 100}));
}

TEST(StepCounts, NoCountIsScaledAwayAndNoneIsTooLong) {
  Config::Schedule schedule;
  schedule.steps = 4;
  schedule.lr = {.warmup_steps = 1, .shape = DecayShape::linear, .cooldown_steps = 3};
  schedule.scale = 0.5;
  EXPECT_EQ(step_counts(schedule), (StepCounts{2, 1, 1, 0, 0})) << "1 + 2 do not fit into 2";
  schedule.scale = 1e-6;
  EXPECT_EQ(step_counts(schedule), (StepCounts{1, 1, 0, 0, 0}));
  EXPECT_EQ(lr_factor(schedule, 0), 1.0);
  schedule.steps = 0;
  schedule.lr = {};
  schedule.scale = 1000;
  EXPECT_EQ(step_counts(schedule), StepCounts{}) << "0 stays 0";
}

TEST(StepCounts, ZeroCooldownIsAllAfterTheWarmup) {
  EXPECT_EQ(step_counts(gpt2().schedule).lr_cooldown, 18165);
  Config::Schedule constant;
  EXPECT_EQ(step_counts(constant).lr_cooldown, 0);
}

TEST(Momentum, WarmupPeakAndCooldown) {
  Config config;
  config.schedule.steps = 3020;
  config.schedule.momentum = {.start = 0.85, .warmup_steps = 300, .final = 0.85, .cooldown_steps = 100};
  EXPECT_EQ(muon_momentum(config, 0), 0.85);
  EXPECT_NEAR(muon_momentum(config, 150), 0.9, 1e-15);
  EXPECT_EQ(muon_momentum(config, 300), 0.95);
  EXPECT_EQ(muon_momentum(config, 2920), 0.95);
  EXPECT_NEAR(muon_momentum(config, 2921), 0.949, 1e-15);
  EXPECT_NEAR(muon_momentum(config, 3019), 0.851, 1e-15);
  EXPECT_NEAR(muon_momentum(config, 3500), 0.85, 1e-15);
  config.schedule.momentum = {};
  EXPECT_EQ(muon_momentum(config, 0), 0.95) << "constant without warm-up";
  EXPECT_EQ(muon_momentum(config, 3019), 0.95);
}

TEST(ScheduleAt, GroupsHaveTheirOwnRates) {
  Config config = track();
  config.optim.embedding.lr = 0.7;
  config.optim.matrix = {.optimizer = OptimizerKind::muon, .lr = 0.025, .weight_decay = 0.05, .weight_decay_multiplier = 3};
  config.optim.head = {.lr = 0.004, .lr_multiplier = 0.5, .every = 2};
  const StepValues values = schedule_at(config, 3249);
  EXPECT_EQ(values.lr_factor, 1 / 2275.0);
  EXPECT_DOUBLE_EQ(values.group(ParameterGroup::embedding).lr, 0.7 / 2275);
  EXPECT_DOUBLE_EQ(values.group(ParameterGroup::matrix).lr, 0.025 / 2275);
  EXPECT_DOUBLE_EQ(values.group(ParameterGroup::head).lr, 0.002 / 2275);
  EXPECT_DOUBLE_EQ(values.group(ParameterGroup::matrix).weight_decay, 0.15);
  EXPECT_EQ(values.batch_tokens, 524288);
  EXPECT_EQ(values.muon_momentum, 0.95);
  EXPECT_FALSE(schedule_at(config, 0).group(ParameterGroup::head).update) << "every second step: the odd ones";
  EXPECT_TRUE(schedule_at(config, 1).group(ParameterGroup::head).update);
  EXPECT_TRUE(schedule_at(config, 0).group(ParameterGroup::matrix).update);
}

std::vector<int> due_steps(const Config& config, bool (*due)(const Config&, int)) {
  std::vector<int> steps;
  for (int completed = 0; completed <= num_steps(config) + 1; ++completed) {
    if (due(config, completed)) steps.push_back(completed);
  }
  return steps;
}

TEST(EvalDue, OptimizationTrackBaseline) {
  std::vector<int> expected;
  for (int step = 0; step < 2925; step += 125) expected.push_back(step);
  for (int step = 2925; step <= 3250; step += 25) expected.push_back(step);
  EXPECT_EQ(due_steps(track(), eval_due), expected);
}

TEST(EvalDue, ZeroIsOnlyTheEnd) {
  Config config;
  config.schedule.steps = 7;
  config.eval.every = 0;
  EXPECT_EQ(due_steps(config, eval_due), (std::vector<int>{0, 7}));
  config.eval.at_start = false;
  EXPECT_EQ(due_steps(config, eval_due), (std::vector<int>{7}));
  config.eval.every = 3;
  EXPECT_EQ(due_steps(config, eval_due), (std::vector<int>{3, 6, 7}));
  config.schedule.steps = 0;
  EXPECT_EQ(due_steps(config, eval_due), (std::vector<int>{0})) << "the end of a run without steps";
}

TEST(EvalDue, DenseStartIsExactWhereTheFractionIsNot) {
  Config config;
  config.eval = {.every = 0, .dense_every = 1, .dense_from = 0.1, .at_start = false};
  for (int steps = 10; steps <= 1000; steps += 10) {
    config.schedule.steps = steps;
    EXPECT_EQ(due_steps(config, eval_due).front(), steps / 10);
  }
}

TEST(CheckpointDue, EveryAndEnd) {
  Config config;
  config.schedule.steps = 7;
  config.checkpoint = {.every = 3, .at_end = true};
  EXPECT_EQ(due_steps(config, checkpoint_due), (std::vector<int>{3, 6, 7}));
  config.checkpoint.at_end = false;
  EXPECT_EQ(due_steps(config, checkpoint_due), (std::vector<int>{3, 6}));
  config.checkpoint.every = 0;
  EXPECT_EQ(due_steps(config, checkpoint_due), (std::vector<int>{}));
}

TEST(PrintSchedule, OneLineAStepItsNumberFirst) {
  Config config = track();
  config.schedule.scale = 0.004;
  std::string text;
  const auto append = [&](const std::string& piece) { text += piece; };
  print_schedule(config, append);
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line, "# step lr_factor lr.embedding lr.position lr.head lr.matrix lr.vector momentum batch_tokens eval checkpoint");
  int step = 0;
  for (; std::getline(lines, line); ++step) {
    std::istringstream words(line);
    int number = -1;
    double factor = -1, lr = -1;
    words >> number >> factor >> lr;
    EXPECT_EQ(number, step);
    EXPECT_NEAR(factor, lr_factor(config.schedule, step), 1e-7);
    EXPECT_NEAR(lr, 6e-4 * factor, 1e-10);
  }
  EXPECT_EQ(step, 13);
  config.schedule.steps = 0;
  text.clear();
  print_schedule(config, append);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << "the header alone";
}

TEST(PrintSchedule, ALongScheduleComesInPieces) {
  Config config = track();
  config.schedule.steps = 20000;
  config.schedule.scale = 1;
  int64_t lines = 0;
  size_t longest = 0;
  print_schedule(config, [&](const std::string& piece) {
    EXPECT_EQ(piece.back(), '\n');
    lines += std::count(piece.begin(), piece.end(), '\n');
    longest = std::max(longest, piece.size());
  });
  EXPECT_EQ(lines, 20001);
  EXPECT_LT(longest, size_t{1} << 17);
}

}  // namespace
}  // namespace speedrun

#include "src/optim/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
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

// Record #89 of the Main Track: what of configs/main_track.json the schedule depends on.
Config record() {
  Config config;
  config.model.architecture = Architecture::main_track;
  config.model.positions = PositionKind::rotary;
  config.model.num_heads = 6;
  config.model.attention_scale = 0.1;
  config.model.yarn = true;
  config.model.tied_until_split = true;
  config.data.reader = ReaderKind::documents;
  config.eval.final_window_short = 768;
  config.eval.final_window_long = 2560;
  config.optim.matrix = {.optimizer = OptimizerKind::normuon, .lr = 0.023, .weight_decay = 1.2};
  config.optim.down = config.optim.matrix;
  config.optim.down.lr_multiplier = 2;
  const auto adam = [](double multiplier, double decay_multiplier) {
    return Config::Group{.optimizer = OptimizerKind::adam,
                         .lr = 0.008,
                         .lr_multiplier = multiplier,
                         .weight_decay = 0.005,
                         .weight_decay_multiplier = decay_multiplier,
                         .every = 2};
  };
  config.optim.embedding = config.optim.head = adam(1, 150);
  config.optim.bigram = config.optim.value_embedding = adam(75, 5);
  config.optim.mudd = adam(0.25, 1);
  config.optim.mudd_gate = adam(0.1, 1);
  config.optim.scalar = adam(5, 0);
  config.schedule.steps = 0;
  config.schedule.lr = {.shape = DecayShape::linear, .cooldown_steps = 762, .final_fraction = 0.15, .hold_steps = 15};
  config.schedule.momentum = {.start = 0.85, .warmup_steps = 300, .final = 0.85, .cooldown_steps = 50};
  config.schedule.stages = {
      {0,
       {.steps = 423,
        .batch_tokens = 131072,
        .max_seq_len = 896,
        .window_short = 128,
        .window_long = 384,
        .mtp_start = {1, 0.5, 0.25},
        .mtp_end = {1, 0.5, 0},
        .prefix_start = 0.25,
        .prefix_end = 0.25}},
      {1,
       {.steps = 424,
        .batch_tokens = 262144,
        .window_short = 384,
        .window_long = 896,
        .lr_multiplier = 1.52,
        .mtp_start = {1, 0.5},
        .mtp_end = {1, 0},
        .prefix_start = 0.25,
        .prefix_end = 0}},
      {2, {.steps = 423, .batch_tokens = 393216, .window_short = 640, .window_long = 1408, .lr_multiplier = 1.73}},
      {3, {.steps = 15, .batch_tokens = 393216, .window_short = 768, .window_long = 1664}}};
  config.schedule.split_step = 847;
  return config;
}

TEST(LrFactor, HoldKeepsTheFinalFraction) {
  Config::Schedule schedule;
  schedule.steps = 100;
  schedule.lr = {.shape = DecayShape::linear, .cooldown_steps = 40, .final_fraction = 0.2, .hold_steps = 10};
  EXPECT_EQ(lr_factor(schedule, 50), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 51), 0.2 + 0.8 * 39 / 40);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 89), 0.2 + 0.8 / 40);
  for (int step = 90; step < 105; ++step) EXPECT_EQ(lr_factor(schedule, step), 0.2);
  schedule.lr.cooldown_steps = 0;
  EXPECT_EQ(step_counts(schedule).lr_cooldown, 90) << "all before the hold";
  schedule.lr.shape = DecayShape::constant;
  EXPECT_EQ(step_counts(schedule).lr_hold, 0);
}

TEST(LrFactor, StagesOfTheRecord) {
  const Config config = record();
  EXPECT_EQ(num_steps(config), 1285);
  for (int step = 0; step < 423; ++step) EXPECT_EQ(lr_factor(config.schedule, step), 1.0) << step;
  for (int step = 423; step <= 508; ++step) EXPECT_EQ(lr_factor(config.schedule, step), 1.52) << step;
  for (int step = 509; step < 1270; ++step) {
    const double fallen = (step - 508) / 762.0, multiplier = step < 847 ? 1.52 : 1.73;
    EXPECT_NEAR(lr_factor(config.schedule, step), multiplier * (1 - fallen) + 0.15 * fallen, 1e-14) << step;
  }
  EXPECT_NEAR(lr_factor(config.schedule, 846), 0.912, 5e-4);
  EXPECT_NEAR(lr_factor(config.schedule, 847), 1.027, 5e-4) << "the next stage's multiplier";
  EXPECT_NEAR(lr_factor(config.schedule, 1269), 0.15207, 5e-6);
  for (int step = 1270; step < 1290; ++step) EXPECT_EQ(lr_factor(config.schedule, step), 0.15) << step;
}

TEST(Momentum, OfTheRecord) {
  const Config config = record();
  EXPECT_NEAR(muon_momentum(config, 150), 0.9, 1e-15);
  EXPECT_EQ(muon_momentum(config, 300), 0.95);
  EXPECT_EQ(muon_momentum(config, 1235), 0.95);
  EXPECT_NEAR(muon_momentum(config, 1284), 0.852, 1e-15);
}

TEST(Stages, OfTheRecord) {
  const Config config = record();
  const std::vector<StageValues> stages = stages_of(config);
  ASSERT_EQ(stages.size(), 4u);
  const std::vector<int> begins = {0, 423, 847, 1270};
  const std::vector<int64_t> batches = {131072, 262144, 393216, 393216}, documents = {896, 2048, 2048, 2048};
  const std::vector<int> shorts = {128, 384, 640, 768}, longs = {384, 896, 1408, 1664}, terms = {3, 2, 1, 1};
  const std::vector<double> scales = {0.1, 0.1169460, 0.1275175, 0.1317780};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(stages[i].begin, begins[i]);
    EXPECT_EQ(stages[i].end, i < 3 ? begins[i + 1] : 1285);
    EXPECT_EQ(stages[i].batch_tokens, batches[i]);
    EXPECT_EQ(stages[i].row_tokens, batches[i] / 8);
    EXPECT_EQ(stages[i].max_seq_len, documents[i]);
    EXPECT_EQ(stages[i].window_short, shorts[i]);
    EXPECT_EQ(stages[i].window_long, longs[i]);
    EXPECT_EQ(stages[i].loss_terms, terms[i]);
    EXPECT_EQ(stages[i].prefix_loss, i < 2);
    EXPECT_NEAR(stages[i].attention_scale, scales[i], 5e-8);
    EXPECT_EQ(stages[i].rotary_frequencies[0], 1.0);
  }
  ASSERT_EQ(stages[0].rotary_frequencies.size(), 32u);
  for (int i = 0; i < 32; ++i) EXPECT_DOUBLE_EQ(stages[0].rotary_frequencies[static_cast<size_t>(i)], std::pow(1024, -i / 31.0));
  const std::vector<std::array<double, 3>> frequencies = {
      {0.100042, 0.012341, 4.1853e-4}, {0.079231, 0.007963, 2.6634e-4}, {0.073630, 0.006769, 2.2536e-4}};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(stages[i + 1].rotary_frequencies[8], frequencies[i][0], 1e-6);
    EXPECT_NEAR(stages[i + 1].rotary_frequencies[16], frequencies[i][1], 1e-6);
    EXPECT_NEAR(stages[i + 1].rotary_frequencies[31], frequencies[i][2], 5e-9);
  }
  StageValues last = stages[3];
  last.window_long = 2560;
  EXPECT_EQ(final_evaluation_stage(config), last) << "no further stretching";
}

TEST(Stages, OneWithoutStages) {
  Config config = track();
  config.model.window_long = 128;
  const std::vector<StageValues> stages = stages_of(config);
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_EQ(stages[0].end, 3250);
  EXPECT_EQ(stages[0].batch_tokens, 524288);
  EXPECT_EQ(stages[0].row_tokens, 1024);
  EXPECT_EQ(stages[0].window_long, 128);
  EXPECT_EQ(stages[0].loss_terms, 1);
  EXPECT_FALSE(stages[0].prefix_loss);
  EXPECT_EQ(stages[0].attention_scale, 0.125);
  EXPECT_TRUE(stages[0].rotary_frequencies.empty()) << "learned positions";
  EXPECT_EQ(final_evaluation_stage(config), stages[0]);
  config.schedule.steps = 0;
  EXPECT_EQ(stages_of(config).size(), 1u);
}

TEST(Stages, UnsetValuesAreThoseWithoutStages) {
  Config config;
  config.train.batch_tokens = 4096;
  config.data.max_seq_len = 77;
  config.model.window_short = 5;
  config.schedule.stages[0] = {.steps = 3};
  config.schedule.stages[1] = {.steps = 0, .batch_tokens = 1024};
  config.schedule.stages[2] = {.steps = 2, .window_short = 9};
  const std::vector<StageValues> stages = stages_of(config);
  ASSERT_EQ(stages.size(), 2u) << "one without steps is left out";
  EXPECT_EQ(stages[0].batch_tokens, 4096);
  EXPECT_EQ(stages[0].max_seq_len, 77);
  EXPECT_EQ(stages[0].window_short, 5);
  EXPECT_EQ(stages[1].window_short, 9);
  EXPECT_EQ(stages[1].begin, 3);
  EXPECT_EQ(schedule_at(config, 2).stage, 0);
  EXPECT_EQ(schedule_at(config, 3).stage, 1);
  EXPECT_EQ(schedule_at(config, 9).stage, 1) << "beyond the end";
}

TEST(Stages, ScaleAppliesToEachStage) {
  Config config = record();
  config.schedule.scale = 0.1;
  const std::vector<StageValues> stages = stages_of(config);
  ASSERT_EQ(stages.size(), 4u);
  EXPECT_EQ(stages[0].end, 42);
  EXPECT_EQ(stages[1].end, 84);
  EXPECT_EQ(stages[2].end, 126);
  EXPECT_EQ(stages[3].end, 128);
  EXPECT_EQ(num_steps(config), 128);
  EXPECT_EQ(step_counts(config.schedule), (StepCounts{128, 0, 76, 30, 5, 2, 85}));
  config.schedule.scale = 1e-9;
  EXPECT_EQ(num_steps(config), 4) << "a step each";
  for (int step = 0; step < 4; ++step) EXPECT_EQ(schedule_at(config, step).stage, step);
}

TEST(ScheduleAt, LossWeightsOfTheRecord) {
  const Config config = record();
  for (const int step : {0, 1, 200, 422}) {
    const StepValues values = schedule_at(config, step);
    EXPECT_EQ(values.next_weights[0], 1.0);
    EXPECT_EQ(values.next_weights[1], 0.5);
    EXPECT_NEAR(values.next_weights[2], 0.25 * (1 - step / 423.0), 1e-15);
    EXPECT_EQ(values.prefix_weight, 0.25);
  }
  for (const int step : {423, 424, 600, 846}) {
    const StepValues values = schedule_at(config, step);
    EXPECT_EQ(values.next_weights[0], 1.0);
    EXPECT_NEAR(values.next_weights[1], 0.5 * (1 - (step - 423) / 424.0), 1e-15);
    EXPECT_EQ(values.next_weights[2], 0.0);
    EXPECT_NEAR(values.prefix_weight, 0.25 * (1 - (step - 423) / 424.0), 1e-15);
    EXPECT_EQ(values.batch_tokens, 262144);
  }
  for (const int step : {847, 1270, 1284}) {
    EXPECT_EQ(schedule_at(config, step).next_weights, (std::array<double, 3>{1, 0, 0}));
    EXPECT_EQ(schedule_at(config, step).prefix_weight, 0.0);
  }
}

TEST(ScheduleAt, TiedUntilTheSplit) {
  Config config = record();
  const auto updates = [&](ParameterGroup group, int step) { return schedule_at(config, step).group(group).update; };
  for (int step = 0; step < 1285; ++step) {
    const StepValues values = schedule_at(config, step);
    EXPECT_EQ(values.tied, step <= 847) << step;
    EXPECT_EQ(values.split, step == 847) << step;
    EXPECT_EQ(updates(ParameterGroup::head, step), step % 2 == 1) << step;
    EXPECT_EQ(updates(ParameterGroup::embedding, step), step % 2 == 1 && step > 847) << step;
    EXPECT_TRUE(updates(ParameterGroup::down, step));
  }
  config.schedule.scale = 0.1;  // 84.7 -> 85
  EXPECT_TRUE(schedule_at(config, 85).split);
  config.schedule.scale = 0.5;  // 423.5 -> 424 -> 425
  EXPECT_TRUE(schedule_at(config, 425).split);
  EXPECT_FALSE(schedule_at(config, 424).split);
  config.schedule.split_step = 0;
  EXPECT_TRUE(schedule_at(config, 600).tied) << "never split";
  EXPECT_FALSE(schedule_at(config, 0).split);
  config.model.tied_until_split = false;
  EXPECT_FALSE(schedule_at(config, 0).tied);
}

TEST(ScheduleAt, GroupsOfTheRecord) {
  const Config config = record();
  const auto lr = [&](ParameterGroup group, int step) { return schedule_at(config, step).group(group).lr; };
  const auto decay = [&](ParameterGroup group) { return schedule_at(config, 1).group(group).weight_decay; };
  using enum ParameterGroup;
  EXPECT_DOUBLE_EQ(lr(matrix, 1), 0.023);
  EXPECT_DOUBLE_EQ(lr(down, 1), 0.046);
  EXPECT_DOUBLE_EQ(lr(bigram, 423), 0.008 * 75 * 1.52);
  EXPECT_DOUBLE_EQ(lr(mudd, 1), 0.002);
  EXPECT_DOUBLE_EQ(decay(head), 0.75);
  EXPECT_DOUBLE_EQ(decay(value_embedding), 0.025);
  EXPECT_DOUBLE_EQ(decay(mudd_gate), 0.005);
  EXPECT_EQ(decay(scalar), 0.0);
  std::set<const Config::Group*> distinct;
  for (int i = 0; i < kNumParameterGroups; ++i) distinct.insert(&group_config(config.optim, static_cast<ParameterGroup>(i)));
  EXPECT_EQ(distinct.size(), static_cast<size_t>(kNumParameterGroups));
  EXPECT_EQ(&group_config(config.optim, mudd_gate), &config.optim.mudd_gate);
  EXPECT_EQ(&group_config(config.optim, down), &config.optim.down);
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

TEST(EndStep, ARunMayEndBeforeItsSchedule) {
  Config config;
  config.schedule.steps = 7;
  config.eval = {.every = 3, .at_start = false};
  config.checkpoint = {.every = 0, .at_end = true};
  EXPECT_EQ(end_step(config), 7);
  config.train.stop_step = 5;
  EXPECT_EQ(end_step(config), 5);
  EXPECT_EQ(due_steps(config, eval_due), (std::vector<int>{3, 5, 6, 7}));
  EXPECT_EQ(due_steps(config, checkpoint_due), (std::vector<int>{5}));
  config.train.stop_step = 8;
  EXPECT_EQ(end_step(config), 7);
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
  EXPECT_EQ(line,
            "# step lr_factor lr.embedding lr.position lr.head lr.matrix lr.vector momentum batch_tokens row_tokens max_seq_len "
            "window_short window_long attention_scale next_1 next_2 next_3 prefix tied eval checkpoint");
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

TEST(PrintSchedule, ColumnsOfTheRecord) {
  Config config = record();
  config.schedule.scale = 0.1;
  std::string text;
  print_schedule(config, [&](const std::string& piece) { text += piece; });
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  std::istringstream header(line);
  std::vector<std::string> names;
  for (std::string name; header >> name;) {
    if (name != "#") names.push_back(name);
  }
  const auto column = [&](const std::string& name) {
    const auto found = std::find(names.begin(), names.end(), name);
    EXPECT_NE(found, names.end()) << name;
    return static_cast<size_t>(found - names.begin());
  };
  EXPECT_EQ(std::count(names.begin(), names.end(), "lr.position"), 0);
  for (int step = 0; std::getline(lines, line); ++step) {
    std::istringstream words(line);
    std::vector<double> numbers;
    for (double number; words >> number;) numbers.push_back(number);
    ASSERT_EQ(numbers.size(), names.size()) << line;
    const StepValues values = schedule_at(config, step);
    const StageValues stage = stages_of(config)[static_cast<size_t>(values.stage)];
    EXPECT_EQ(numbers[column("step")], step);
    EXPECT_NEAR(numbers[column("lr.down")], values.group(ParameterGroup::down).lr, 1e-8);
    EXPECT_EQ(numbers[column("row_tokens")], static_cast<double>(stage.row_tokens));
    EXPECT_EQ(numbers[column("window_long")], stage.window_long);
    EXPECT_NEAR(numbers[column("attention_scale")], stage.attention_scale, 1e-8);
    EXPECT_NEAR(numbers[column("next_2")], values.next_weights[1], 1e-8);
    EXPECT_NEAR(numbers[column("prefix")], values.prefix_weight, 1e-8);
    EXPECT_EQ(numbers[column("tied")], values.tied ? 1 : 0);
  }
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

#include "src/train/data_setup.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>

#include "src/config/config_io.h"
#include "src/data/sufficiency.h"
#include "src/optim/schedule.h"

namespace speedrun {
namespace {

const std::string kConfigs = std::string(SPEEDRUN_SOURCE_DIR) + "/configs/";

TEST(StepShape, ChangesAtTheFirstStepOfAStage) {
  const Config config = load_config(kConfigs + "main_track.json");
  const auto expect = [&](int step, int64_t batch, int64_t row, int64_t max_seq_len) {
    const StepShape shape = step_shape(config, step);
    EXPECT_EQ(shape.batch_tokens, batch) << step;
    EXPECT_EQ(shape.row_tokens, row) << step;
    EXPECT_EQ(shape.max_seq_len, max_seq_len) << step;
  };
  expect(0, 131072, 16384, 896);
  expect(422, 131072, 16384, 896);
  expect(423, 262144, 32768, 2048);
  expect(846, 262144, 32768, 2048);
  expect(847, 393216, 49152, 2048);
  expect(1284, 393216, 49152, 2048);
  EXPECT_EQ(row_tokens(config), 49152);
  EXPECT_EQ(eval_row_tokens(config), 262144);
  int64_t steps = 0, tokens = 0;
  for (const StepRun& run : step_runs(config, num_steps(config))) {
    steps += run.count;
    tokens += run.count * run.shape.batch_tokens;
  }
  EXPECT_EQ(steps, 1285);
  EXPECT_EQ(tokens, 338821120);
}

// The shipped config of the record, at the points where its schedule is known.
TEST(MainTrackConfig, ScheduleOfTheRecord) {
  const Config config = load_config(kConfigs + "main_track.json");
  ASSERT_EQ(num_steps(config), 1285);
  EXPECT_EQ(lr_factor(config.schedule, 422), 1.0);
  EXPECT_EQ(lr_factor(config.schedule, 508), 1.52);
  EXPECT_NEAR(lr_factor(config.schedule, 846), 0.912, 5e-4);
  EXPECT_NEAR(lr_factor(config.schedule, 847), 1.027, 5e-4);
  EXPECT_NEAR(lr_factor(config.schedule, 1269), 0.15207, 5e-6);
  EXPECT_EQ(lr_factor(config.schedule, 1270), 0.15);
  EXPECT_NEAR(muon_momentum(config, 1284), 0.852, 1e-15);
  EXPECT_TRUE(schedule_at(config, 847).split);
  EXPECT_EQ(schedule_at(config, 0).next_weights, (std::array<double, 3>{1, 0.5, 0.25}));
  EXPECT_EQ(schedule_at(config, 423).prefix_weight, 0.25);
  EXPECT_NEAR(stages_of(config)[1].attention_scale, 0.1169460, 5e-8);
  EXPECT_NEAR(stages_of(config)[3].attention_scale, 0.1317780, 5e-8);
  EXPECT_EQ(final_evaluation_stage(config).window_short, 768);
  EXPECT_EQ(final_evaluation_stage(config).window_long, 2560);
  // Rates and decay of a step at factor 1; adam decays by the square of its rate.
  const auto rate = [&](ParameterGroup group) { return schedule_at(config, 1).group(group).lr; };
  const auto decay = [&](ParameterGroup group) {
    return rate(group) * rate(group) * schedule_at(config, 1).group(group).weight_decay;
  };
  using enum ParameterGroup;
  EXPECT_DOUBLE_EQ(rate(matrix), 0.023);
  EXPECT_DOUBLE_EQ(rate(down), 0.046);
  EXPECT_DOUBLE_EQ(rate(scalar), 0.04);
  EXPECT_DOUBLE_EQ(rate(smear), 8e-5);
  EXPECT_DOUBLE_EQ(rate(value_gate), 0.008);
  EXPECT_DOUBLE_EQ(rate(post_lambda), 0.008);
  EXPECT_DOUBLE_EQ(rate(resid_lambda), 0.04);
  EXPECT_DOUBLE_EQ(rate(mudd), 0.002);
  EXPECT_DOUBLE_EQ(rate(mudd_gate), 0.0008);
  EXPECT_NEAR(decay(head), 4.8e-5, 1e-15);
  EXPECT_NEAR(decay(bigram), 0.009, 1e-15);
  EXPECT_NEAR(decay(value_embedding), 0.009, 1e-15);
  for (const ParameterGroup group : {scalar, smear, resid_lambda, post_lambda}) EXPECT_EQ(decay(group), 0.0);
}

TEST(StepShape, OneRunWithoutStages) {
  const Config rows = load_config(kConfigs + "optimization_track.json");
  ASSERT_EQ(step_runs(rows, num_steps(rows)).size(), 1u);
  EXPECT_EQ(step_runs(rows, num_steps(rows))[0].count, 3250);
  EXPECT_EQ(step_shape(rows, 3249).row_tokens, 1024);
  EXPECT_EQ(row_tokens(rows), 1024);
  EXPECT_EQ(eval_row_tokens(rows), 1024);
  Config documents = rows;
  documents.data.reader = ReaderKind::documents;
  EXPECT_EQ(row_tokens(documents), 65536);
  EXPECT_EQ(eval_row_tokens(documents), 65536) << "that of the training rows";
}

// The bundled sample, through the borders of the stages: the stream continues from every step's state.
TEST(Stages, ResumeAroundTheBorders) {
  const Config config = load_config(kConfigs + "main_track_tiny.json");
  const ReaderOptions options = train_reader_options(config);
  EXPECT_TRUE(check_sufficient(ReaderRule::documents, options, step_runs(config, num_steps(config))).sufficient);
  const auto reader = make_train_reader(config, options);
  std::vector<StepRows> steps;
  std::vector<ReaderState> states;
  for (int step = 0; step < num_steps(config); ++step) {
    states.push_back(reader->state());
    steps.emplace_back();
    reader->next(step_shape(config, step), 0, 1, steps.back());
  }
  for (const StageValues& stage : stages_of(config)) {
    for (int start = std::max(stage.begin - 1, 0); start <= stage.begin + 1; ++start) {
      const auto resumed = make_train_reader(config, options);
      resumed->restore(states[static_cast<size_t>(start)]);
      for (int step = start; step < std::min(start + 3, num_steps(config)); ++step) {
        StepRows rows;
        resumed->next(step_shape(config, step), 0, 1, rows);
        const StepRows& expected = steps[static_cast<size_t>(step)];
        EXPECT_EQ(rows.row_tokens, stages_of(config)[static_cast<size_t>(schedule_at(config, step).stage)].row_tokens) << step;
        EXPECT_EQ(rows.inputs, expected.inputs) << "resumed at " << start << ", step " << step;
        EXPECT_EQ(rows.targets, expected.targets);
        EXPECT_EQ(rows.doc_start, expected.doc_start);
      }
    }
  }
}

TEST(ValidationRows, DocumentsAreCutAtRowEnds) {
  const Config config = load_config(kConfigs + "main_track_tiny.json");
  const ValidationReader reader = make_validation_reader(config);
  EXPECT_EQ(reader.row_tokens(), 2048);
  EXPECT_EQ(reader.num_rows(), 16);
  StepRows rows;
  reader.read(0, reader.num_rows(), rows);
  const auto bos = static_cast<int32_t>(config.model.vocab_size - 1);
  int64_t borders = 0;
  for (size_t i = 0; i < rows.inputs.size(); ++i) {
    const auto t = static_cast<int32_t>(i % 2048);
    const int32_t expected = t == 0 || rows.inputs[i] == bos ? t : rows.doc_start[i - 1];
    ASSERT_EQ(rows.doc_start[i], expected) << i;
    borders += rows.inputs[i] == bos ? 1 : 0;
  }
  EXPECT_GT(borders, 0);
}

}  // namespace
}  // namespace speedrun

#include "src/train/timeline.h"

#include <gtest/gtest.h>

#include <map>

#include "src/core/device.h"
#include "src/train/test_run.h"

namespace speedrun {
namespace {

template <class Call>
void expect_refused(const Call& call, const std::vector<std::string>& names) {
  const std::string message = refusal_of(call);
  for (const std::string& name : names) EXPECT_NE(message.find(name), std::string::npos) << name << " in: " << message;
}

std::vector<StageValues> stages(const std::vector<int>& lengths) {
  std::vector<StageValues> result;
  int begin = 0;
  for (const int length : lengths) {
    StageValues stage;
    stage.begin = begin;
    stage.end = begin += length;
    result.push_back(stage);
  }
  return result;
}

using Windows = std::vector<std::pair<int, int>>;
Windows windows(const TimelineOptions& options, const std::vector<int>& lengths, int first, int end, int pause_every = 0) {
  Windows result;
  const auto pauses_after = [&](int step) { return pause_every > 0 && (step + 1) % pause_every == 0; };
  for (const TimelineSteps& window : timeline_windows(options, stages(lengths), first, end, pauses_after))
    result.push_back({window.first, window.count});
  return result;
}

TEST(TimelineWindows, AreInTheMiddleOfEveryStage) {
  EXPECT_EQ(windows({}, {100, 20, 4, 2, 0, 1}, 0, 127), (Windows{{48, 4}, {108, 4}, {120, 4}, {124, 2}, {126, 1}}));
}

TEST(TimelineWindows, OfAResumedRunAreInItsOwnSteps) { EXPECT_EQ(windows({}, {100, 20}, 110, 120), (Windows{{113, 4}})); }

TEST(TimelineWindows, AvoidPausesWhereTheyCan) {
  EXPECT_EQ(windows({}, {100}, 0, 100, 50), (Windows{{50, 4}}));  // not 48 to 51: a validation after step 49
  EXPECT_EQ(windows({}, {100}, 0, 100, 52), (Windows{{48, 4}}));  // a pause after the last one is none between them
  EXPECT_EQ(windows({}, {100}, 0, 100, 1), (Windows{{48, 4}}));
}

TEST(TimelineWindows, AsGiven) {
  const TimelineOptions options{.file = "t.json", .steps = TimelineSteps{10, 5}};
  EXPECT_EQ(windows(options, {12, 8}, 0, 20), (Windows{{10, 5}}));
  EXPECT_EQ(windows(options, {12, 8}, 0, 12), (Windows{{10, 2}}));
  EXPECT_EQ(windows(options, {12, 8}, 13, 20), (Windows{{13, 2}}));
  expect_refused([&] { windows(options, {10}, 0, 10); }, {"--timeline-steps", "10:5", "0 to 9"});
  expect_refused([&] { windows(options, {}, 0, 0); }, {"--timeline-steps", "no steps"});
  const TimelineOptions huge{.file = "t.json", .steps = TimelineSteps{2, 2147483647}};
  EXPECT_EQ(windows(huge, {10}, 0, 10), (Windows{{2, 8}}));
}

TEST(TimelineSteps, AreTwoIntegers) {
  EXPECT_EQ(parse_timeline_steps("100:4").first, 100);
  EXPECT_EQ(parse_timeline_steps("0:1").count, 1);
  for (const char* text :
       {"", ":", "1", "1:", ":1", "1:0", "-1:4", "1:-4", "1:2:3", "1:2 ", "1.5:2", "a:b", "1-2", "99999999999:1"})
    expect_refused([&] { parse_timeline_steps(text); }, {"--timeline-steps", "FIRST:COUNT"});
}

TEST(TimelineFile, NeedsAFolder) {
  const TestFolder folder;
  check_timeline_file((folder.path() / "t.json").string());
  check_timeline_file("t.json");
  expect_refused([] { check_timeline_file(""); }, {"--timeline"});
  expect_refused([&] { check_timeline_file(folder.path().string()); }, {"--timeline", folder.path().string()});
  expect_refused([&] { check_timeline_file((folder.path() / "absent" / "t.json").string()); }, {"--timeline", "absent"});
}

TEST(Timeline, NeedsAGpu) {
  const auto device = make_cpu_device(1);
  expect_refused([&] { Timeline({.file = "t.json"}, *device, stages({4}), 4, nullptr); },
                 {"--timeline", "GPU", "CPU", "train.device=cuda"});
}

// A real run: the kernels of its graphs are in the trace, as many in every step. A validation after step 9 parts the window.
TEST(Timeline, RecordsTheStepsOfARun) {
  std::string why_not;
  if (!cuda_available(&why_not)) GTEST_SKIP() << "NO GPU, NOT TESTED: " << why_not;
  const TestFolder folder;
  const auto config = write_test_config(
      folder.path(), {{"model", {{"width", 64}, {"num_heads", 1}, {"mlp_hidden", 128}}}, {"train", {{"device", "cuda"}}}});
  const std::string file = (folder.path() / "trace.json").string();
  Log log;
  TrainOptions options;
  options.config = load_config(config, {});
  options.config_name = "test";
  options.timeline = {.file = file, .steps = TimelineSteps{8, 4}};
  try {
    ASSERT_EQ(train(options, log), 0);
  } catch (const InputError& error) {
    if (std::string(error.what()).find("no CUPTI library") == std::string::npos) throw;
    GTEST_SKIP() << "NO CUPTI, NOT TESTED: " << error.what();
  }
  const nlohmann::json trace = read_json_file(file), windows = trace["otherData"]["windows"];
  ASSERT_EQ(windows.size(), 2u);
  std::map<std::string, int> kernels[2];  // by window
  double begin_of_second = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X" && event["name"] == "steps 10 to 11") begin_of_second = event["ts"];
  }
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X" && event["args"].contains("grid"))
      ++kernels[event["ts"].get<double>() >= begin_of_second ? 1 : 0][event["name"]];
  }
  for (int w = 0; w < 2; ++w) {
    EXPECT_EQ(windows[w]["first_step"], 8 + 2 * w);
    EXPECT_EQ(windows[w]["steps"], 2);
    EXPECT_GT(windows[w]["compute_ms"], 0.0);
    EXPECT_GE(windows[w]["step_ms"], windows[w]["compute_ms"]);
    EXPECT_EQ(windows[w]["communication_ms"], 0.0);
    for (const auto& [name, count] : kernels[w]) EXPECT_EQ(count % 2, 0) << name << ": " << count << " times in 2 steps";
  }
  EXPECT_EQ(kernels[0], kernels[1]);
  EXPECT_GE(kernels[0]["embedding_forward_kernel"], 4);  // one for each of the two micro-batches of two steps
}

}  // namespace
}  // namespace speedrun

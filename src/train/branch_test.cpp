// Runs that branch off a checkpoint with other keys, and weight extrapolation in them.
#include <algorithm>
#include <cmath>

#include "fmt/format.h"
#include "src/train/clock.h"
#include "src/train/test_run.h"

namespace speedrun {
namespace {

constexpr int kBranch = 7;  // a checkpoint of the test's config

class Branch : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = write_test_config(folder_.path());
    ASSERT_EQ(train_config(config_), 0);
  }

  std::filesystem::path run(const std::string& name) const { return folder_.path() / "runs" / name; }
  std::filesystem::path checkpoint() const { return checkpoint_path(run("r"), kBranch); }
  std::string log(const std::string& name) const { return read_file((run(name) / "log.txt").string()); }
  nlohmann::json result(const std::string& name) const { return read_json_file((run(name) / "result.json").string()); }

  void branch(const std::string& name, std::vector<std::string> overrides = {}, const std::string& from = "r") {
    overrides.push_back("run.name=" + name);
    ASSERT_EQ(branch_run(checkpoint_path(run(from), kBranch), overrides), 0);
  }
  std::string refusal(const std::vector<std::string>& overrides) {
    return refusal_of([&] { branch_run(checkpoint(), overrides); });
  }
  std::vector<nlohmann::json> jumps(const std::string& name) const {
    std::vector<nlohmann::json> lines = read_metrics(run(name));
    std::erase_if(lines, [](const nlohmann::json& line) { return !line.contains("jump"); });
    return lines;
  }
  std::vector<int> steps_of_jumps(const std::string& name) const {
    std::vector<int> steps;
    for (const nlohmann::json& line : jumps(name)) steps.push_back(line["step"].get<int>());
    return steps;
  }
  std::vector<double> tail(const std::string& name) const {
    const std::vector<double> losses = train_losses(run(name));
    return {losses.end() - (20 - kBranch), losses.end()};
  }

  TestFolder folder_;
  std::filesystem::path config_;
};

// Of the test's model's updates, which are large.
const std::vector<std::string> kRre = {"extrapolation.method=rre", "extrapolation.max_jump=0"};

std::vector<std::string> with(std::vector<std::string> overrides, const std::vector<std::string>& more) {
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

void expect_holds(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in:\n" << text;
}

TEST_F(Branch, IsARunOfItsOwnThatGoesOn) {
  const std::string source_log = log("r"), source_metrics = read_file((run("r") / "metrics.jsonl").string());
  branch("b", {"optim.matrix.lr=0.02", "train.seed=5"});
  EXPECT_EQ(log("r"), source_log);
  EXPECT_EQ(read_file((run("r") / "metrics.jsonl").string()), source_metrics);
  EXPECT_EQ(load_config(run("b") / "config.json").optim.matrix.lr, 0.02);
  for (const auto& line : read_metrics(run("b"))) EXPECT_GE(line["step"].get<int>(), kBranch);
  const CheckpointMeta meta = read_checkpoint_meta(checkpoint());
  expect_holds(log("b"), fmt::format("branches from {} after 7 steps", checkpoint().string()));
  expect_holds(log("b"), "changed since the checkpoint: optim.matrix.lr from 0.01 to 0.02");
  expect_holds(log("b"), "changed since the checkpoint: train.seed from 1337 to 5");
  EXPECT_EQ(tail("b")[0], tail("r")[0]) << "the weights are the checkpoint's";
  EXPECT_NE(tail("b")[1], tail("r")[1]) << "the learning rate is the new one";
  const nlohmann::json found = result("b"), from = {{"checkpoint", checkpoint().string()}, {"step", kBranch}};
  EXPECT_EQ(found["from"], from);
  EXPECT_EQ(result("r")["from"], nullptr);
  EXPECT_EQ(found["tokens"], 20 * 256);
  EXPECT_GT(found["clock_s"].get<double>(), meta.clock_s[static_cast<int>(Phase::training)]);
  EXPECT_EQ(std::filesystem::exists(checkpoint_path(run("b"), kBranch)), false);
  // Where it came from is not forgotten by a resume.
  std::filesystem::remove(checkpoint_path(run("b"), 20));
  ASSERT_EQ(resume_run(run("b")), 0);
  EXPECT_EQ(result("b")["from"], from);
}

TEST_F(Branch, AFinishedRunGoesOnWithALongerSchedule) {
  ASSERT_EQ(branch_run(checkpoint_path(run("r"), 20), {"schedule.steps=26", "run.name=b"}), 0);
  ASSERT_EQ(resume_run(run("r"), {"schedule.steps=26"}), 0);
  const std::vector<double> resumed = train_losses(run("r"));
  EXPECT_EQ(train_losses(run("b")), std::vector<double>(resumed.end() - 6, resumed.end()));
  EXPECT_EQ(checkpoint_state(checkpoint_path(run("b"), 26)), checkpoint_state(checkpoint_path(run("r"), 26)));
}

TEST_F(Branch, WhatMayNotChangeIsRefusedAndLeavesNoFolder) {
  for (const std::string key : {"model.activation=relu2", "model.num_layers=3", "train.batch_tokens=128", "train.seq_len=16"})
    expect_holds(refusal({"run.name=b", key}), "was trained with " + key.substr(0, key.find('=')));
  expect_holds(refusal({"run.name=b", "schedule.steps=6"}), "has 7 steps done, the schedule has 6");
  expect_holds(refusal({"run.name=b", "train.init_weights=w.safetensors"}), "train.init_weights");
  expect_holds(refusal({"run.name=b", "optim.matrix.optimizer=muon"}), "of another model or optimizer");
  write_test_shard(folder_.path() / "train_2.bin", 3000, 9);
  expect_holds(refusal({"run.name=b"}), "trained on other shards");
  EXPECT_FALSE(std::filesystem::exists(run("b")));
}

TEST_F(Branch, ADamagedCheckpointIsRefusedEvenByADryRun) {
  std::string content = read_file(checkpoint().string());
  content[content.size() / 2] = static_cast<char>(content[content.size() / 2] ^ 1);
  std::ofstream(checkpoint(), std::ios::binary) << content;
  expect_holds(refusal({"run.name=b"}), "step_000007.ckpt: damaged checkpoint");
  Log log;
  TrainOptions options;
  options.from = checkpoint();
  options.config = load_config(config_);
  options.dry_run = true;
  expect_holds(refusal_of([&] { train(options, log); }), "step_000007.ckpt: damaged checkpoint");
  EXPECT_FALSE(std::filesystem::exists(run("b")));
}

TEST_F(Branch, TheScaleOfStagesStays) {
  const auto config = write_test_config(folder_.path(), main_track_patch());
  ASSERT_EQ(train_config(config, {"run.name=m"}), 0);
  const std::string message = refusal_of([&] { branch_run(checkpoint_path(run("m"), kBranch), {"schedule.scale=0.5"}); });
  expect_holds(message, "was trained with schedule.scale");
}

TEST_F(Branch, AReachedTargetCountsForALowerOneOnlyIfItIsBelow) {
  ASSERT_EQ(train_config(config_, {"run.name=hit", "train.target_loss=100"}), 0);
  branch("same", {}, "hit");
  EXPECT_EQ(result("same")["reached_at"]["step"], 0);
  branch("lower", {"train.target_loss=0.1"}, "hit");
  EXPECT_EQ(result("lower")["reached"], false);
}

TEST_F(Branch, ArmsWithAndWithoutExtrapolationPartAtTheFirstJump) {
  branch("none");
  branch("rre", kRre);
  EXPECT_EQ(tail("none"), tail("r"));
  // The weights at the checkpoint are the first of four snapshots; the loss of update 10 is the first behind the jump.
  EXPECT_EQ(steps_of_jumps("rre"), (std::vector<int>{10, 15, 20}));
  const std::vector<double> with_rre = tail("rre"), without = tail("none");
  const auto part = std::mismatch(with_rre.begin(), with_rre.end(), without.begin()).first - with_rre.begin();
  EXPECT_EQ(part, 10 - kBranch);
  const std::string text = log("rre");
  expect_holds(text, "changed since the checkpoint: extrapolation.method from \"none\" to \"rre\"");
  expect_holds(text, "weight extrapolation begins anew after 7 steps");
  expect_holds(text, "weight extrapolation: rre");
  expect_holds(text, "step 10: jump rre ");
  expect_holds(text, " of the weights' norm, c = ");
  EXPECT_EQ(text.find("capped"), std::string::npos);
  for (const nlohmann::json& line : jumps("rre")) {
    EXPECT_GT(line["jump"].get<double>(), 0);
    EXPECT_EQ(line["jump_capped"], line["jump"]);
    EXPECT_EQ(line["refused"], nullptr);
    ASSERT_EQ(line["c"].size(), 3u);
    EXPECT_NEAR(line["c"][0].get<double>() + line["c"][1].get<double>() + line["c"][2].get<double>(), 1, 1e-9);
  }
}

TEST_F(Branch, ACappedJumpSaysSo) {
  branch("b", {"extrapolation.method=rre_suffix", "extrapolation.max_jump=1e-6"});
  expect_holds(log("b"), "of the weights' norm, capped to 1e-06, c = ");
  for (const nlohmann::json& line : jumps("b")) EXPECT_NEAR(line["jump_capped"].get<double>(), 1e-6, 1e-9);
}

TEST_F(Branch, ARefusedJumpSaysWhyAndChangesNothing) {
  std::vector<std::string> still;
  for (const std::string group : {"matrix", "embedding", "position", "head", "vector"}) {
    still.push_back("optim." + group + ".lr=0");
    still.push_back("optim." + group + ".weight_decay=0");
  }
  branch("still", still);
  branch("b", with(still, kRre));
  expect_holds(log("b"), "step 10: jump rre refused: no change, the weights are as they were");
  ASSERT_EQ(jumps("b").size(), 3u);
  EXPECT_EQ(jumps("b")[0]["refused"], "no change");
  EXPECT_EQ(tail("b"), tail("still"));
}

TEST_F(Branch, AResumedRunHasItsHistory) {
  ASSERT_EQ(train_config(config_, with(kRre, {"run.name=whole"})), 0);
  ASSERT_EQ(train_config(config_, with(kRre, {"run.name=cut"})), 0);
  // Between two jumps: the history holds where the first one led, and the updates since.
  for (const int step : {14, 20}) std::filesystem::remove(checkpoint_path(run("cut"), step));
  ASSERT_EQ(resume_run(run("cut")), 0);
  EXPECT_EQ(steps_of_jumps("cut"), (std::vector<int>{5, 10, 15, 20}));
  EXPECT_EQ(jumps("cut"), jumps("whole"));
  EXPECT_EQ(train_losses(run("cut")), train_losses(run("whole")));
  EXPECT_EQ(checkpoint_state(checkpoint_path(run("cut"), 20)), checkpoint_state(checkpoint_path(run("whole"), 20)));
  EXPECT_EQ(log("cut").find("begins anew"), std::string::npos);
  // So has a branch with the same keys; one with others begins anew, and one without needs none.
  branch("same", {}, "whole");
  EXPECT_EQ(tail("same"), tail("whole"));
  branch("other", {"extrapolation.history=5"}, "whole");
  expect_holds(log("other"), "weight extrapolation begins anew after 7 steps");
  EXPECT_EQ(steps_of_jumps("other"), (std::vector<int>{15, 20})) << "five snapshots from 7 on are there after 11";
  branch("none", {"extrapolation.method=none"}, "whole");
  EXPECT_TRUE(jumps("none").empty());
  EXPECT_EQ(log("none").find("begins anew"), std::string::npos);
  // A resume with other keys.
  for (const int step : {14, 20}) std::filesystem::remove(checkpoint_path(run("cut"), step));
  ASSERT_EQ(resume_run(run("cut"), {"extrapolation.method=mpe"}), 0);
  expect_holds(log("cut"), "weight extrapolation begins anew after 7 steps");
  EXPECT_EQ(steps_of_jumps("cut"), (std::vector<int>{5, 10, 15, 20}));
}

TEST_F(Branch, AReadOutIsForValidationsAlone) {
  for (const std::string method : {"average", "ema", "rre"}) {
    branch(method, {"extrapolation.method=" + method, "extrapolation.apply=readout", "extrapolation.max_jump=0"});
    EXPECT_EQ(tail(method), tail("r")) << "training goes on as without it";
    std::vector<nlohmann::json> validations = read_metrics(run(method)), expected = read_metrics(run("r"));
    for (auto* lines : {&validations, &expected})
      std::erase_if(*lines, [](const auto& line) { return !line.contains("val_loss") || line["step"] <= kBranch; });
    ASSERT_EQ(validations.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(validations[i]["val_loss_raw"], expected[i]["val_loss"]) << method;
      EXPECT_NE(validations[i]["val_loss"], expected[i]["val_loss"]) << method;
      EXPECT_TRUE(std::isfinite(validations[i]["val_loss"].get<double>()));
    }
    EXPECT_EQ(result(method)["val_loss"], validations[1]["val_loss"]);
    EXPECT_EQ(result(method)["val_loss_raw"], result("r")["val_loss"]);
    expect_holds(log(method), fmt::format("step 20/20  validation loss {:.4f} ({:.4f} without the read-out) on 512 tokens",
                                          validations[1]["val_loss"].get<double>(), expected[1]["val_loss"].get<double>()));
    expect_holds(log(method), "step 20: read-out " + method);
    const CheckpointMeta meta = read_checkpoint_meta(checkpoint_path(run(method), 20));
    EXPECT_EQ(meta.last_val_loss, validations[1]["val_loss"].get<double>());
    ASSERT_TRUE(meta.last_val_loss_raw);
    EXPECT_EQ(*meta.last_val_loss_raw, expected[1]["val_loss"].get<double>());
  }
  EXPECT_EQ(result("r")["val_loss_raw"], nullptr);
  // Of a target between the two, the read-out decides.
  const double loss = result("average")["val_loss"].get<double>(), raw = result("r")["val_loss"].get<double>();
  branch("target", {"extrapolation.method=average", "extrapolation.apply=readout",
                    fmt::format("train.target_loss={:.17g}", (loss + raw) / 2), "eval.every=0"});
  EXPECT_EQ(result("target")["reached"], loss < raw);
}

}  // namespace
}  // namespace speedrun

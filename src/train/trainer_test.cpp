// Runs from start to end on the CPU: learning, exact resume, what a non-finite value does, what must not change a result.
#include "src/train/trainer.h"

#include <csignal>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "fmt/format.h"
#include "src/core/device.h"
#include "src/train/checkpoint.h"
#include "src/train/data_setup.h"
#include "src/train/engine.h"
#include "src/train/evaluate.h"
#include "src/train/saved_model.h"
#include "src/train/test_run.h"
#include "src/train/weights_file.h"

namespace speedrun {
namespace {

// `call` must end with exit code 3 and a message that holds every part.
void expect_non_finite(const std::function<void()>& call, const std::vector<std::string>& parts) {
  try {
    call();
    ADD_FAILURE() << "a value that is not finite was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::non_finite);
    for (const std::string& part : parts) EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// The parameters of a run's state under their own names, as a weights file holds them.
std::vector<StateEntry> parameters_of(Engine& engine) {
  std::vector<StateEntry> parameters;
  for (StateEntry& entry : engine.state()) {
    if (!entry.name.starts_with(kParameterPrefix)) continue;
    entry.name.erase(0, kParameterPrefix.size());
    parameters.push_back(std::move(entry));
  }
  return parameters;
}

enum class Track { gpt2, optimization, main };

const char* name_of(Track track) {
  if (track == Track::gpt2) return "Gpt2";
  return track == Track::optimization ? "OptimizationTrack" : "MainTrack";
}

nlohmann::json patch_of(Track track) {
  if (track == Track::gpt2) return nlohmann::json::object();
  return track == Track::optimization ? optimization_track_patch() : main_track_patch();
}

struct Setup {
  Track track;
  bool cuda;
};

class EveryTrack : public ::testing::TestWithParam<Setup> {
 protected:
  void SetUp() override {
    std::string why_not;
    if (GetParam().cuda && !cuda_available(&why_not)) GTEST_SKIP() << "NO GPU, NOT TESTED: " << why_not;
  }
  static bool main_track() { return GetParam().track == Track::main; }
  static nlohmann::json patch() {
    nlohmann::json patch = patch_of(GetParam().track);
    if (!GetParam().cuda) return patch;
    // The smallest model that the CUDA kernels take: one head of 64.
    if (!main_track()) patch.merge_patch({{"model", {{"width", 64}, {"num_heads", 1}, {"mlp_hidden", 128}}}});
    patch.merge_patch({{"train", {{"device", "cuda"}}}});
    return patch;
  }
  // The patched config has 20 steps.
  static std::string steps(int count) {
    return main_track() ? fmt::format("schedule.scale={}", count / 20.0) : fmt::format("schedule.steps={}", count);
  }
};

TEST_P(EveryTrack, LearnsAndReportsItsResult) {
  TestFolder folder;
  const auto config = write_test_config(folder.path(), patch());
  EXPECT_EQ(train_config(config, {steps(60), "data.repeat=12", "train.target_loss=3.0"}), 0);
  const auto run = folder.path() / "runs" / "r";
  const std::vector<double> losses = train_losses(run);
  ASSERT_EQ(losses.size(), 60u);
  // The Main Track's is a sum of several terms.
  if (!main_track()) {
    EXPECT_NEAR(losses[0], std::log(304.0), 0.6);
  }
  EXPECT_LT(losses.back(), 3.0);
  const auto result = nlohmann::json::parse(read_file((run / "result.json").string()));
  EXPECT_EQ(result["reached"], true);
  EXPECT_EQ(result["steps"], 60);
  EXPECT_EQ(result["tokens"], main_track() ? 42 * 256 + 18 * 512 : 60 * 256);
  EXPECT_LE(result["reached_at"]["step"].get<int>(), 60);
  EXPECT_TRUE(std::filesystem::exists(run / "log.txt"));
  EXPECT_TRUE(std::filesystem::exists(run / "config.json"));
}

TEST_P(EveryTrack, ResumeEqualsNoInterruption) {
  TestFolder folder;
  const auto config = write_test_config(folder.path(), patch());
  ASSERT_EQ(train_config(config), 0);
  const auto whole = folder.path() / "runs" / "r";
  // A second run that loses everything after its checkpoint at step 7, then goes on.
  ASSERT_EQ(train_config(config, {"run.name=cut"}), 0);
  const auto cut = folder.path() / "runs" / "cut";
  for (const int step : {14, 20}) std::filesystem::remove(checkpoint_path(cut, step));
  ASSERT_EQ(resume_run(cut), 0);
  EXPECT_EQ(train_losses(cut), train_losses(whole));
  EXPECT_EQ(checkpoint_state(checkpoint_path(cut, 20)), checkpoint_state(checkpoint_path(whole, 20)));
  const CheckpointMeta a = read_checkpoint_meta(checkpoint_path(whole, 20)), b = read_checkpoint_meta(checkpoint_path(cut, 20));
  EXPECT_EQ(a.reader, b.reader);
  EXPECT_EQ(a.last_val_loss, b.last_val_loss);
}

TEST_P(EveryTrack, ABranchWithUnchangedKeysEqualsNoInterruption) {
  TestFolder folder;
  ASSERT_EQ(train_config(write_test_config(folder.path(), patch())), 0);
  const auto whole = folder.path() / "runs" / "r", branch = folder.path() / "runs" / "r-2";
  ASSERT_EQ(branch_run(checkpoint_path(whole, 7)), 0);
  const std::vector<double> losses = train_losses(whole);
  EXPECT_EQ(train_losses(branch), std::vector<double>(losses.begin() + 7, losses.end()));
  for (const int step : {14, 20}) {
    EXPECT_EQ(checkpoint_state(checkpoint_path(branch, step)), checkpoint_state(checkpoint_path(whole, step)));
    const CheckpointMeta a = read_checkpoint_meta(checkpoint_path(whole, step)),
                         b = read_checkpoint_meta(checkpoint_path(branch, step));
    EXPECT_EQ(a.reader, b.reader);
    EXPECT_EQ(a.last_val_loss, b.last_val_loss);
  }
}

TEST_P(EveryTrack, SameBitsTwiceAndOtherBitsForAnotherSeed) {
  TestFolder folder;
  const auto config = write_test_config(folder.path(), patch());
  train_config(config, {steps(5), "run.name=a"});
  train_config(config, {steps(5), "run.name=b", "train.threads=3"});
  train_config(config, {steps(5), "run.name=c", "train.seed=2"});
  const auto runs = folder.path() / "runs";
  EXPECT_EQ(train_losses(runs / "a"), train_losses(runs / "b"));
  EXPECT_NE(train_losses(runs / "a"), train_losses(runs / "c"));
}

TEST_P(EveryTrack, TheMicroBatchDoesNotMatterBeyondRounding) {
  TestFolder folder;
  const auto config = write_test_config(folder.path(), patch());
  const auto runs = folder.path() / "runs";
  const int64_t whole = main_track() ? 512 : 256;
  for (const int64_t micro_batch : {int64_t{64}, int64_t{128}, whole})
    train_config(config,
                 {"run.name=" + std::to_string(micro_batch), "train.micro_batch_tokens=" + std::to_string(micro_batch), steps(8),
                  // the one scaling that looks at a micro-batch alone is left out
                  main_track() ? "fp8.mlp_up_scaling=fixed" : "train.log_every=1"});
  const std::vector<double> reference = train_losses(runs / std::to_string(whole));
  for (const char* name : {"64", "128"}) {
    const std::vector<double> losses = train_losses(runs / name);
    ASSERT_EQ(losses.size(), reference.size());
    for (size_t i = 0; i < losses.size(); ++i)
      EXPECT_NEAR(losses[i], reference[i], GetParam().cuda ? 2e-2 : (main_track() ? 2e-3 : 2e-4)) << name << " step " << i;
    EXPECT_NEAR(losses[0], reference[0], GetParam().cuda ? 5e-4 : 1e-6);
  }
}

TEST_P(EveryTrack, WarmUpLeavesNoTrace) {
  TestFolder folder;
  const Config config = load_config(write_test_config(folder.path(), patch()));
  const auto device = GetParam().cuda ? make_cuda_device(0) : make_cpu_device(2);
  const auto state_after = [&](int warm_ups_before_the_weights) {
    auto engine = make_engine(config, *device,
                              {.micro_batch_tokens = 256, .evaluation_row_tokens = eval_row_tokens(config), .training = true});
    for (int i = 0; i < warm_ups_before_the_weights; ++i) engine->warm_up();
    engine->initialize(3);
    std::vector<std::pair<std::string, std::vector<std::byte>>> state;
    for (const StateEntry& entry : engine->state()) state.emplace_back(entry.name, entry.read());
    return state;
  };
  EXPECT_EQ(state_after(0), state_after(1)) << "parameters, optimizer state, summed gradients and FP8 scales, to the bit";
}

INSTANTIATE_TEST_SUITE_P(Trainer, EveryTrack,
                         ::testing::Values(Setup{Track::gpt2, false}, Setup{Track::optimization, false}, Setup{Track::main, false},
                                           Setup{Track::gpt2, true}, Setup{Track::optimization, true}, Setup{Track::main, true}),
                         [](const auto& param) {
                           return std::string(name_of(param.param.track)) + (param.param.cuda ? "Cuda" : "Cpu");
                         });

// Every parameter a little away from where it starts, where many gradients vanish.
void move_parameters(Engine& engine) {
  for (const StateEntry& entry : engine.state()) {
    if (!entry.name.starts_with(kParameterPrefix) || entry.name.ends_with("bigram.sign")) continue;
    std::vector<std::byte> bytes = entry.read();
    auto* values = reinterpret_cast<float*>(bytes.data());
    for (size_t i = 0; i < bytes.size() / sizeof(float); ++i)
      values[i] += static_cast<float>(0.05 * random_normal(21, hash_bytes(entry.name.data(), entry.name.size()), i));
    entry.write(bytes);
  }
}

// The whole model on both devices: same weights, same batch, FP32 against BF16.
class CudaAgainstCpu : public ::testing::TestWithParam<Track> {};

TEST_P(CudaAgainstCpu, EveryGradientAgreesToBf16) {
  std::string why_not;
  if (!cuda_available(&why_not)) GTEST_SKIP() << "NO GPU, NOT TESTED: " << why_not;
  TestFolder folder;
  const bool main_track = GetParam() == Track::main;
  nlohmann::json patch = patch_of(GetParam());
  // Documents, a window and three heads; weights away from zero so that every gradient is alive.
  if (main_track) {
    patch.merge_patch({{"fp8", {{"mlp_up", "bf16"}, {"mlp_down", "bf16"}, {"head", "bf16"}}}});
  } else {
    patch.merge_patch({{"model",
                        {{"width", 192},
                         {"num_heads", 3},
                         {"mlp_hidden", 256},
                         {"init", "gpt2"},
                         {"window_short", 20},
                         {"layers", {{"1", {{"window", "short"}}}}}}},
                       {"train", {{"batch_tokens", 512}, {"micro_batch_tokens", 256}}}});
  }
  const Config config = load_config(write_test_config(folder.path(), patch));
  const auto gradients_on = [&](std::unique_ptr<Device> device, double* loss) {
    auto engine = make_engine(config, *device, {.micro_batch_tokens = 256, .evaluation_row_tokens = 32, .training = true});
    engine->warm_up();
    engine->initialize(4);
    if (main_track) move_parameters(*engine);
    auto reader = make_train_reader(config, train_reader_options(config));
    StepRows rows;
    reader->next(step_shape(config, 0), 0, 1, rows);
    for (size_t i = 0; i < rows.doc_start.size() && !main_track; ++i) rows.doc_start[i] = static_cast<int32_t>(i % 32 / 12 * 12);
    std::vector<std::pair<std::string, std::vector<float>>> gradients;
    for (const StateEntry& entry : engine->gradients(rows, loss)) {
      const auto bytes = entry.read();
      std::vector<float> values(bytes.size() / sizeof(float));
      std::memcpy(values.data(), bytes.data(), bytes.size());
      gradients.emplace_back(entry.name, values);
    }
    return gradients;
  };
  double cpu_loss = 0, rounded_loss = 0, cuda_loss = 0;
  const auto cpu = gradients_on(make_cpu_device(2), &cpu_loss);
  // What BF16 activations alone cost: sums over all tokens that almost cancel (single factors) cannot be better than this.
  const auto rounded = gradients_on(make_cpu_device(2, true), &rounded_loss);
  const auto cuda = gradients_on(make_cuda_device(0), &cuda_loss);
  EXPECT_NEAR(cuda_loss, cpu_loss, 2e-3 * cpu_loss);
  for (size_t p = 0; p < cpu.size(); ++p) {
    if (cpu[p].first == "bigram.sign" || (main_track && cpu[p].first == "wte")) continue;  // not trained; still the head
    double error = 0, rounding = 0, norm = 0;
    for (size_t i = 0; i < cpu[p].second.size(); ++i) {
      const double a = cpu[p].second[i], b = cuda[p].second[i], c = rounded[p].second[i];
      error += (a - b) * (a - b);
      rounding += (a - c) * (a - c);
      norm += a * a;
    }
    ASSERT_GT(norm, 0) << cpu[p].first;
    EXPECT_LT(std::sqrt(error), std::max(0.03 * std::sqrt(norm), 3 * std::sqrt(rounding))) << cpu[p].first;
  }
}

INSTANTIATE_TEST_SUITE_P(Trainer, CudaAgainstCpu, ::testing::Values(Track::gpt2, Track::optimization, Track::main),
                         [](const auto& param) { return std::string(name_of(param.param)); });

TEST(Trainer, ANonFiniteGradientStopsTheRunBeforeTheWeightsAndKeepsTheGoodCheckpoint) {
  TestFolder folder;
  const auto config_path = write_test_config(folder.path(), {{"checkpoint", {{"every", 3}}}, {"schedule", {{"steps", 3}}}});
  ASSERT_EQ(train_config(config_path), 0);
  const auto run = folder.path() / "runs" / "r";
  const Config config = load_config(run / "config.json");
  auto device = make_cpu_device(1);
  auto engine = make_engine(config, *device, {.micro_batch_tokens = 128, .evaluation_row_tokens = 32, .training = true});
  engine->warm_up();
  load_checkpoint(checkpoint_path(run, 3), engine->state(), false);
  // One weight becomes infinite: the loss of the next step is NaN.
  for (const StateEntry& entry : engine->state()) {
    if (entry.name != "parameter/h.1.mlp.down.weight") continue;
    auto bytes = entry.read();
    const float infinite = std::numeric_limits<float>::infinity();
    std::memcpy(bytes.data(), &infinite, sizeof infinite);
    entry.write(bytes);
  }
  const uint64_t before = engine->weights_hash();
  auto reader = make_train_reader(config, train_reader_options(config));
  StepRows rows;
  for (int step = 0; step < 2; ++step) {
    reader->next(step_shape(config, step), 0, 1, rows);
    engine->submit_step(step, rows);
    const auto result = engine->wait_result();
    ASSERT_TRUE(result);
    EXPECT_FALSE(result->finite);
    EXPECT_EQ(result->bad_tensor, "loss");
  }
  EXPECT_EQ(engine->weights_hash(), before);
}

TEST(Trainer, ANonFiniteLossEndsTheRunWithItsOwnExitCode) {
  TestFolder folder;
  const auto config_path = write_test_config(folder.path());
  ASSERT_EQ(train_config(config_path, {"schedule.steps=1"}), 0);
  // Initial weights with an infinity in them.
  const Config config = load_config(config_path);
  auto device = make_cpu_device(1);
  auto engine = make_engine(config, *device, {.micro_batch_tokens = 128, .evaluation_row_tokens = 32, .training = true});
  engine->warm_up();
  engine->initialize(1);
  std::vector<StateEntry> weights = parameters_of(*engine);
  for (StateEntry& entry : weights) {
    if (entry.name != "h.0.attn.qkv.weight") continue;
    std::vector<std::byte> bytes = entry.read();
    const float infinite = std::numeric_limits<float>::infinity();
    std::memcpy(bytes.data() + 40, &infinite, sizeof infinite);
    entry = small_entry(
        entry.name, entry.dtype, entry.shape, [bytes] { return bytes; }, nullptr);
  }
  const auto file = folder.path() / "bad.safetensors";
  save_tensors(file, weights, {});
  expect_non_finite([&] { train_config(config_path, {"train.init_weights=" + file.string(), "run.name=bad"}); }, {"step 0"});
  for (const auto& line : read_metrics(folder.path() / "runs" / "bad"))
    EXPECT_TRUE(!line.contains("loss") || line["loss"].is_null());
}

TEST(Trainer, WeightsFromAFileAreTheOnesUsed) {
  TestFolder folder;
  const auto config_path = write_test_config(folder.path());
  const Config config = load_config(config_path);
  auto device = make_cpu_device(1);
  const auto make = [&] {
    auto engine = make_engine(config, *device, {.micro_batch_tokens = 128, .evaluation_row_tokens = 32, .training = true});
    engine->warm_up();
    return engine;
  };
  auto a = make(), b = make();
  a->initialize(5);
  std::vector<StateEntry> weights = parameters_of(*a);
  save_tensors(folder.path() / "w.safetensors", weights, {});
  load_weights(folder.path() / "w.safetensors", b->state());
  EXPECT_EQ(a->weights_hash(), b->weights_hash());
  weights.pop_back();
  save_tensors(folder.path() / "w.safetensors", weights, {});
  EXPECT_THROW(load_weights(folder.path() / "w.safetensors", b->state()), InputError);
}

TEST(Trainer, EvaluationDoesNotDependOnTheMicroBatch) {
  TestFolder folder;
  const auto config_path = write_test_config(folder.path(), {{"eval", {{"tokens", 32 * 11}}}});
  const Config config = load_config(config_path);
  auto device = make_cpu_device(2);
  std::vector<double> losses;
  for (const int64_t micro_batch : {32, 96, 256, 1024}) {
    auto engine = make_engine(config, *device, {.micro_batch_tokens = micro_batch, .evaluation_row_tokens = 32, .training = false});
    engine->warm_up();
    engine->initialize(3);
    losses.push_back(evaluate(*engine, make_validation_reader(config), 0));
  }
  for (const double loss : losses) EXPECT_NEAR(loss, losses[0], 1e-5);
}

TEST(Trainer, ASignalSavesAndAResumeGoesOn) {
  TestFolder folder;
  const auto config = write_test_config(folder.path());
  ASSERT_EQ(train_config(config), 0);
  std::thread killer;
  // The signal comes while the second run is in its loop: its handler is installed as the run starts.
  const auto run = folder.path() / "runs" / "stopped";
  killer = std::thread([&] {
    while (!std::filesystem::exists(run / "metrics.jsonl") ||
           read_file((run / "metrics.jsonl").string()).find("\"loss\"") == std::string::npos) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::raise(SIGTERM);
  });
  const int code = train_config(config, {"run.name=stopped", "schedule.steps=38"});
  killer.join();
  ASSERT_EQ(code, 128 + SIGTERM);
  const auto result = nlohmann::json::parse(read_file((run / "result.json").string()));
  EXPECT_EQ(result["outcome"], "SIGTERM");
  ASSERT_LT(result["steps"].get<int>(), 38);
  ASSERT_EQ(resume_run(run), 0);
  EXPECT_EQ(train_losses(run).size(), 38u);
}

TEST(Trainer, ARunThatEndsEarlyIsTheBeginningOfTheWholeOne) {
  TestFolder folder;
  const auto config = write_test_config(folder.path(), {{"schedule", {{"lr", {{"shape", "linear"}, {"cooldown_steps", 15}}}}}});
  ASSERT_EQ(train_config(config), 0);
  const auto whole = folder.path() / "runs" / "r", run = folder.path() / "runs" / "early";
  ASSERT_EQ(train_config(config, {"run.name=early", "train.stop_step=9"}), 0);
  const std::vector<double> losses = train_losses(whole);
  EXPECT_EQ(train_losses(run), std::vector<double>(losses.begin(), losses.begin() + 9));
  const auto result = read_json_file((run / "result.json").string());
  EXPECT_EQ(result["outcome"], "stopped at step");
  EXPECT_EQ(result["steps"], 9);
  EXPECT_TRUE(result["val_loss"].is_number());
  const std::string message = refusal_of([&] { resume_run(run, {"train.stop_step=8"}); });
  for (const char* part : {"step_000009.ckpt", "9 steps", "train.stop_step = 8"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  ASSERT_EQ(resume_run(run, {"train.stop_step=0"}), 0);
  EXPECT_EQ(train_losses(run), losses);
  EXPECT_EQ(checkpoint_state(checkpoint_path(run, 20)), checkpoint_state(checkpoint_path(whole, 20)));
}

TEST(Trainer, RowsOfDocumentsTrainAndResumeExactly) {
  TestFolder folder;
  nlohmann::json patch = optimization_track_patch();
  // Four rows of 64 tokens, documents of 97 tokens cut at 40: every row holds borders.
  patch.merge_patch(
      {{"data", {{"reader", "documents"}, {"document_rows", 4}, {"max_seq_len", 40}, {"repeat", 3}}}, {"eval", {{"tokens", 640}}}});
  const auto config = write_test_config(folder.path(), patch);
  ASSERT_EQ(train_config(config), 0);
  ASSERT_EQ(train_config(config, {"run.name=cut"}), 0);
  const auto runs = folder.path() / "runs";
  for (const int step : {14, 20}) std::filesystem::remove(checkpoint_path(runs / "cut", step));
  ASSERT_EQ(resume_run(runs / "cut"), 0);
  const std::vector<double> losses = train_losses(runs / "r");
  EXPECT_EQ(train_losses(runs / "cut"), losses);
  EXPECT_LT(losses.back(), losses.front() - 0.5);
}

TEST(Trainer, TooLittleDataIsRefusedBeforeTheFirstStep) {
  TestFolder folder;
  const auto config = write_test_config(folder.path());
  const std::string message = refusal_of([&] { train_config(config, {"schedule.steps=1000"}); });
  EXPECT_NE(message.find("data.repeat"), std::string::npos) << message;
  EXPECT_EQ(train_config(config, {"schedule.steps=1000", "train.stop_step=2"}), 0) << "data for what is trained suffice";
}

TEST(Trainer, ARefusedStartLeavesNoFolder) {
  TestFolder folder;
  const auto config = write_test_config(folder.path());
  EXPECT_THROW(train_config(config, {"data.train=absent.bin"}), InputError);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "runs" / "r"));
}

TEST(Trainer, AValidationLossThatIsNotFiniteEndsTheRunWithoutACheckpointOfIt) {
  TestFolder folder;
  const auto config = write_test_config(folder.path(), {{"eval", {{"every", 2}}}, {"checkpoint", {{"every", 1}}}});
  const auto run = folder.path() / "runs" / "r";
  ASSERT_EQ(train_config(config, {"schedule.steps=1"}), 0);
  // Decay alone makes the embedding infinite in one update, with finite gradients.
  expect_non_finite(
      [&] {
        resume_run(run, {"schedule.steps=2", "optim.embedding.weight_decay=1e300"});
      },
      {"validation loss after 2 steps", checkpoint_path(run, 1).string()});
  EXPECT_FALSE(std::filesystem::exists(checkpoint_path(run, 2)));
}

TEST(Trainer, WeightsThatAreNotFiniteAreNotSaved) {
  TestFolder folder;
  const auto config = write_test_config(folder.path(), {{"eval", {{"every", 0}}}, {"checkpoint", {{"every", 1}}}});
  const auto run = folder.path() / "runs" / "r";
  ASSERT_EQ(train_config(config, {"schedule.steps=1"}), 0);
  expect_non_finite(
      [&] {
        resume_run(run, {"schedule.steps=9", "optim.embedding.weight_decay=1e300"});
      },
      {"parameter/wte is not finite", checkpoint_path(run, 1).string()});
  EXPECT_FALSE(std::filesystem::exists(checkpoint_path(run, 2)));
  EXPECT_TRUE(std::filesystem::exists(run / "result.json"));
  EXPECT_EQ(resume_run(run, {"schedule.steps=3", "optim.embedding.weight_decay=0"}), 0) << "the good checkpoint goes on";
}

TEST(Trainer, ResumeWithAnotherModelOrOtherStepsIsRefusedByKey) {
  TestFolder folder;
  ASSERT_EQ(train_config(write_test_config(folder.path())), 0);
  const auto refusal = [&](const std::vector<std::string>& changes) {
    return refusal_of([&] { resume_run(folder.path() / "runs" / "r", changes); });
  };
  for (const std::string key : {"model.activation=relu2", "model.norm_eps=0.001", "model.num_layers=3", "train.batch_tokens=128",
                                "train.seq_len=16", "data.max_seq_len=16"}) {
    const std::string message = refusal({"schedule.steps=25", key});
    EXPECT_NE(message.find("was trained with " + key.substr(0, key.find('='))), std::string::npos) << message;
  }
  EXPECT_EQ(refusal({"schedule.steps=25", "optim.matrix.lr=0.02"}), "accepted");
  const std::string log = read_file((folder.path() / "runs" / "r" / "log.txt").string());
  EXPECT_NE(log.find("changed since the checkpoint: optim.matrix.lr from 0.01 to 0.02"), std::string::npos);
}

TEST(Trainer, GradientsOfAResumedRunLeaveTheRunAlone) {
  TestFolder folder;
  ASSERT_EQ(train_config(write_test_config(folder.path()), {"schedule.steps=8"}), 0);  // newest checkpoint: step 8
  const auto run = folder.path() / "runs" / "r";
  std::filesystem::remove(checkpoint_path(run, 8));
  const auto files = [&] { return read_file((run / "log.txt").string()) + read_file((run / "metrics.jsonl").string()); };
  const std::string before = files();
  Log log;
  TrainOptions options;
  options.resume = run;
  options.config = load_config(run / "config.json");
  options.gradients_file = (folder.path() / "gradients.safetensors").string();
  EXPECT_EQ(train(options, log), 0);
  EXPECT_TRUE(std::filesystem::exists(options.gradients_file));
  EXPECT_EQ(files(), before);
}

TEST(Trainer, ResumeWithOtherShardsIsRefused) {
  TestFolder folder;
  const auto config = write_test_config(folder.path());
  ASSERT_EQ(train_config(config), 0);
  write_test_shard(folder.path() / "train_2.bin", 3000, 9);
  EXPECT_THROW(resume_run(folder.path() / "runs" / "r", {"schedule.steps=25"}), InputError);
}

TEST(SavedModel, EvaluatesAsTheRunDid) {
  TestFolder folder;
  const auto config = write_test_config(folder.path());
  ASSERT_EQ(train_config(config), 0);
  const auto run = folder.path() / "runs" / "r";
  Log log;
  SavedModel model = open_saved_model(run, {}, SavedModelUse::evaluation, log);
  EXPECT_EQ(model.step, 20);
  const double loss = evaluate(*model.engine, make_validation_reader(model.config), model.step);
  EXPECT_NEAR(loss, read_checkpoint_meta(checkpoint_path(run, 20)).last_val_loss, 1e-5);
}

}  // namespace
}  // namespace speedrun

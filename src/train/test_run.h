#pragma once
// A tiny run for the tests of this folder: shards, config, ways to begin it, what it leaves.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/config/config_io.h"
#include "src/core/device.h"
#include "src/core/file.h"
#include "src/core/log.h"
#include "src/core/random.h"
#include "src/core/test_folder.h"
#include "src/core/test_refusal.h"
#include "src/data/token_shard.h"
#include "src/train/checkpoint.h"
#include "src/train/data_setup.h"
#include "src/train/engine.h"
#include "src/train/trainer.h"

namespace speedrun {

constexpr int kTestVocabulary = 300;

inline nlohmann::json read_json_file(const std::string& path) {
  return nlohmann::json::parse(read_file(path), nullptr, true, true);
}

// Text with structure to learn: each id is mostly its predecessor plus 1 or plus 2.
inline void write_test_shard(const std::filesystem::path& path, int64_t tokens, uint64_t seed) {
  std::vector<uint16_t> ids(static_cast<size_t>(tokens));
  uint32_t id = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint32_t draw = philox(seed, 1, i)[0];
    id = draw % 16 == 0 ? philox(seed, 2, i)[0] % 40 : (id + 1 + draw % 2) % 40;
    ids[i] = static_cast<uint16_t>(i % 97 == 0 ? kTestVocabulary - 1 : id);
  }
  write_shard(path.string(), ids);
}

// A config of a two-layer model in `folder`, with its shards. `extra` is merged over it.
inline std::filesystem::path write_test_config(const std::filesystem::path& folder,
                                               const nlohmann::json& extra = nlohmann::json::object()) {
  write_test_shard(folder / "train_0.bin", 5000, 1);
  write_test_shard(folder / "train_1.bin", 5000, 2);
  write_test_shard(folder / "val_0.bin", 2000, 3);
  nlohmann::json config = {{"model",
                            {{"vocab_size", kTestVocabulary},
                             {"vocab_padding", 16},
                             {"num_layers", 2},
                             {"width", 16},
                             {"num_heads", 2},
                             {"mlp_hidden", 32},
                             {"max_positions", 32}}},
                           {"data", {{"train", "train_*.bin"}, {"val", "val_*.bin"}}},
                           {"train",
                            {{"batch_tokens", 256},
                             {"micro_batch_tokens", 128},
                             {"seq_len", 32},
                             {"device", "cpu"},
                             {"threads", 2},
                             {"target_loss", 0.1}}},
                           {"eval", {{"every", 10}, {"tokens", 512}}},
                           {"checkpoint", {{"every", 7}, {"keep", 10}}},
                           {"run", {{"dir", (folder / "runs").string()}, {"name", "r"}}},
                           {"optim", {{"matrix", {{"lr", 0.01}}}, {"embedding", {{"lr", 0.01}}}}},
                           {"schedule", {{"steps", 20}}}};
  config.merge_patch(extra);
  const std::filesystem::path path = folder / "test.json";
  std::ofstream(path) << config.dump(2);
  return path;
}

// An Optimization Track model at the same size: Muon, RMS norms, rotary, untied head, sum reduction.
inline nlohmann::json optimization_track_patch() {
  return {{"model",
           {{"norm", "rmsnorm"},
            {"norm_eps", 0x1p-23},
            {"embedding_norm", true},
            {"positions", "rotary"},
            {"qk_norm", true},
            {"attention_scale", 0.3},
            {"activation", "relu2"},
            {"tied_head", false},
            {"head_bias", true},
            {"softcap", "rational"},
            {"init", "zero_projections"}}},
          {"train", {{"reduction", "sum"}}},
          {"optim", {{"matrix", {{"optimizer", "muon"}, {"lr", 0.02}}}, {"head", {{"lr", 0.02}}}, {"embedding", {{"lr", 0.05}}}}}};
}

// The Main Track's model with every feature, FP8 included, at a size that both devices take: the bundled tiny config on the test's
// shards, with four short stages (20 steps) and the split of head and embedding in the second.
inline nlohmann::json main_track_patch() {
  const nlohmann::json config = read_json_file(SPEEDRUN_SOURCE_DIR "/configs/main_track_tiny.json");
  nlohmann::json patch = {
      {"model", config["model"]}, {"optim", config["optim"]}, {"fp8", config["fp8"]}, {"schedule", config["schedule"]}};
  patch.merge_patch(
      {{"model",
        {{"vocab_size", kTestVocabulary},
         {"vocab_padding", 16},
         {"bigram_rows", 512},
         {"bigram_sign_rows", 32},
         {"dc_window", 12}}},
       {"data",
        {{"reader", "documents"}, {"vocabulary", SPEEDRUN_SOURCE_DIR "/data/gpt2_vocab"}, {"max_seq_len", 64}, {"repeat", 4}}},
       {"train", {{"batch_tokens", 256}, {"reduction", "row_mean"}}},
       {"eval", {{"row_tokens", 64}, {"final_window_short", 24}, {"final_window_long", 48}}},
       {"schedule",
        {{"lr", {{"cooldown_steps", 12}, {"hold_steps", 2}}},
         {"momentum", {{"warmup_steps", 4}, {"cooldown_steps", 2}}},
         {"split_step", 11},
         {"stages", nullptr}}}});
  const int steps[] = {8, 6, 4, 2};
  for (int i = 0; i < 4; ++i) {
    nlohmann::json stage = config["schedule"]["stages"][std::to_string(i)];
    stage.merge_patch({{"steps", steps[i]}, {"batch_tokens", i < 2 ? 256 : 512}, {"max_seq_len", 32 + 16 * i}});
    stage.merge_patch({{"window_short", 8 + 4 * i}, {"window_long", 16 + 8 * i}});
    patch["schedule"]["stages"][std::to_string(i)] = stage;
  }
  patch["schedule"]["steps"] = 0;
  patch["model"]["max_positions"] = nullptr;  // of the other architecture: taken out of what this is merged over
  return patch;
}

inline std::vector<nlohmann::json> read_metrics(const std::filesystem::path& run) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(run / "metrics.jsonl");
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

inline int train_config(const std::filesystem::path& config, const std::vector<std::string>& overrides = {}) {
  Log log;
  TrainOptions options;
  options.config = load_config(config, overrides);
  options.config_name = "test";
  return train(options, log);
}

inline int resume_run(const std::filesystem::path& run, const std::vector<std::string>& overrides = {}) {
  Log log;
  TrainOptions options;
  options.resume = run;
  options.config = load_config(run / "config.json", overrides);
  return train(options, log);
}

// A new run from a checkpoint, with the config that it holds.
inline int branch_run(const std::filesystem::path& checkpoint, const std::vector<std::string>& overrides = {}) {
  Log log;
  TrainOptions options;
  options.from = checkpoint;
  options.config =
      parse_config(read_checkpoint_meta(checkpoint).config, checkpoint.string(), std::filesystem::current_path(), overrides);
  options.config_name = "test";
  return train(options, log);
}

inline std::vector<double> train_losses(const std::filesystem::path& run) {
  std::vector<double> losses;
  for (const auto& line : read_metrics(run)) {
    if (line.contains("loss")) losses.push_back(line["loss"].get<double>());
  }
  return losses;
}

// All bytes of a checkpoint that are state: everything but the clock and the header that holds it.
inline std::vector<std::pair<std::string, std::vector<std::byte>>> checkpoint_state(const std::filesystem::path& file) {
  const CheckpointMeta meta = read_checkpoint_meta(file);
  const Config config = parse_config(meta.config, file.string(), file.parent_path());
  auto device = config.train.device == DeviceChoice::cuda ? make_cuda_device(0) : make_cpu_device(1);
  auto engine = make_engine(
      config, *device,
      {.micro_batch_tokens = config.train.micro_batch_tokens, .evaluation_row_tokens = eval_row_tokens(config), .training = true});
  engine->warm_up();
  load_checkpoint(file, engine->state(), false);
  std::vector<std::pair<std::string, std::vector<std::byte>>> state;
  for (const StateEntry& entry : engine->state()) state.emplace_back(entry.name, entry.read());
  return state;
}

}  // namespace speedrun

#include "src/train/run_record.h"

#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "fmt/format.h"
#include "src/core/file.h"

namespace speedrun {
namespace {

using Json = nlohmann::ordered_json;

Json optional_number(const std::optional<double>& value) { return value && std::isfinite(*value) ? Json(*value) : Json(nullptr); }

Json shards_json(const ShardList& list) {
  Json shards = Json::array();
  for (const ShardInfo& shard : list.shards) {
    shards.push_back({{"path", shard.path},
                      {"tokens", shard.num_tokens},
                      {"content_hash", fmt::format("{:016x}", shard_content_hash(shard.path))}});
  }
  return shards;
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

std::string executable_hash() {
  const std::string content = read_file("/proc/self/exe");
  return fmt::format("{:016x}", hash_bytes(content.data(), content.size()));
}

Json result_json(const Config& config, const RunRecord& record, const PhaseClock& clock, const Device& device,
                 const ShardList& train_shards, const ShardList& val_shards) {
  const BuildInfo build = build_info();
  const double seconds = clock.seconds(Phase::training);
  const double tokens = static_cast<double>(record.tokens);
  Json reached = nullptr;
  if (record.reached)
    reached = {{"step", record.reached->step}, {"clock_s", record.reached->clock_s}, {"val_loss", record.reached->loss}};
  Json from = nullptr;
  if (!record.from_checkpoint.empty()) from = {{"checkpoint", record.from_checkpoint}, {"step", record.from_step}};
  const double peak = device.peak_bf16_flops() * record.ranks;
  return {{"outcome", record.outcome},
          {"reached", record.reached.has_value()},
          {"target_loss", config.train.target_loss},
          {"reached_at", reached},
          {"val_loss", optional_number(record.val_loss)},
          {"val_loss_raw", optional_number(record.val_loss_raw)},
          {"train_loss", optional_number(record.train_loss)},
          {"steps", record.steps},
          {"tokens", record.tokens},
          {"parameters", record.parameters},
          {"seed", config.train.seed},
          {"from", from},
          {"clock_s", seconds},
          {"startup_s", clock.seconds(Phase::startup)},
          {"warmup_s", clock.seconds(Phase::warmup)},
          {"validation_s", clock.seconds(Phase::validation)},
          {"checkpoint_s", clock.seconds(Phase::checkpoint)},
          {"total_s", clock.total()},
          {"first_step_s", record.first_step_s},
          {"tokens_per_s", seconds > 0 ? tokens / seconds : 0},
          {"mfu", peak > 0 && seconds > 0 ? Json(record.flops / seconds / peak) : Json(nullptr)},
          {"joules", record.joules > 0 ? Json(record.joules) : Json(nullptr)},
          {"joules_per_token", record.joules > 0 && tokens > 0 ? Json(record.joules / tokens) : Json(nullptr)},
          {"machine", {{"host", host_name()}, {"device", device.name()}, {"ranks", record.ranks}}},
          {"build",
           {{"version", build.version},
            {"commit", build.commit},
            {"cuda", build.cuda},
            {"cublaslt", build.cublas},
            {"architectures", build.architectures},
            {"executable_hash", executable_hash()}}},
          {"train_shards", shards_json(train_shards)},
          {"val_shards", shards_json(val_shards)}};
}

}  // namespace speedrun

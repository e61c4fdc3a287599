#include "src/train/start.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/config/config_io.h"
#include "src/dist/message.h"
#include "src/optim/schedule.h"
#include "src/train/run_report.h"
#include "src/train/weights_file.h"

namespace speedrun {
namespace {

// Keys that decide the model, or which tokens a step sees.
bool must_stay(std::string_view key, const Config& config) {
  constexpr std::array<std::string_view, 5> kFixed = {"train.batch_tokens", "train.seq_len", "data.reader", "data.max_seq_len",
                                                      "data.document_rows"};
  const bool model = key.starts_with("model.") && key != "model.init";
  const bool rows_of_a_stage = key.starts_with("schedule.stages.") &&
                               (key.ends_with(".steps") || key.ends_with(".batch_tokens") || key.ends_with(".max_seq_len"));
  const bool steps_of_a_stage = key == "schedule.scale" && !config.schedule.stages.empty();
  return model || rows_of_a_stage || steps_of_a_stage || std::find(kFixed.begin(), kFixed.end(), key) != kFixed.end();
}

// Refuses a change of what must stay, logs the others. True if one of them was of weight extrapolation.
bool compare_configs(const StartPoint& start, const Config& config, Log& log) {
  bool extrapolation = false;
  const std::string file = start.checkpoint.string();
  for (const KeyChange& change : changed_keys(parse_config(start.meta.config, file, std::filesystem::current_path()), config)) {
    if (must_stay(change.key, config)) {
      throw InputError(fmt::format("{}: was trained with {} = {}, not {}: go on with the same value, or start a new run", file,
                                   change.key, change.before, change.after));
    }
    if (change.key == "train.init_weights" && !config.train.init_weights.empty()) {
      throw InputError(fmt::format("{}: train.init_weights = {}: the weights are those of the checkpoint: leave the key out", file,
                                   change.after));
    }
    extrapolation |= change.key.starts_with("extrapolation.");
    log.line(fmt::format("changed since the checkpoint: {} from {} to {}", change.key, change.before, change.after));
  }
  return extrapolation;
}

// Rank 0's choice, on every rank.
std::filesystem::path choose_checkpoint(const TrainOptions& options, Control& control, Log& log) {
  std::string path;
  if (control.rank() == 0) {
    path = options.resume ? find_checkpoint(*options.resume, [&](const std::string& text) { log.warn(text); }).string()
                          : options.from->string();
  }
  const Bytes chosen = control.broadcast(MessageWriter().text(path).take());
  path = MessageReader(chosen).text();
  // Each rank took its config from what it was given.
  if (options.from && path != options.from->string()) {
    throw InputError(fmt::format("--from: rank 0 goes on from {}, rank {} from {}: name the checkpoint's file", path,
                                 control.rank(), options.from->string()));
  }
  return path;
}

}  // namespace

void set_initial_weights(const Config& config, Engine& engine) {
  engine.initialize(config.train.seed);
  if (!config.train.init_weights.empty()) load_weights(config.train.init_weights, engine.state());
}

std::optional<StartPoint> find_start(const TrainOptions& options, const ShardList& shards, Control& control, Log& log) {
  if (!options.resume && !options.from) return std::nullopt;
  StartPoint start;
  start.branch = options.from.has_value();
  start.checkpoint = choose_checkpoint(options, control, log);
  start.meta = read_checkpoint_meta(start.checkpoint);
  start.new_extrapolation = compare_configs(start, options.config, log);
  const std::string file = start.checkpoint.string();
  if (start.meta.shards_hash != fmt::format("{:016x}", shards.hash)) {
    throw InputError(fmt::format("{}: was trained on other shards (hash {}, data.train has {:016x}): go on with the same data",
                                 file, start.meta.shards_hash, shards.hash));
  }
  const int steps = num_steps(options.config);
  if (start.meta.step > steps) {
    throw InputError(
        fmt::format("{}: has {} steps done, the schedule has {}: raise schedule.steps to go on", file, start.meta.step, steps));
  }
  if (start.meta.step > end_step(options.config)) {
    throw InputError(fmt::format("{}: has {} steps done, more than train.stop_step = {}: raise that, or set it to 0", file,
                                 start.meta.step, options.config.train.stop_step));
  }
  return start;
}

void go_on_from(const StartPoint& start, const Config& config, int rank, Engine& engine, Reader& reader, PhaseClock& clock,
                RunRecord& record, Log& log) {
  const CheckpointMeta& meta = start.meta;
  const bool extrapolates = config.extrapolation.method != ExtrapolationKind::none;
  load_checkpoint(start.checkpoint, engine.state(), false, start.new_extrapolation ? kExtrapolationPrefix : std::string_view());
  reader.restore(meta.reader);
  for (int p = 0; p < kNumPhases; ++p) clock.add(static_cast<Phase>(p), meta.clock_s[p]);
  if (meta.has_val_loss) record.val_loss = meta.last_val_loss;
  record.val_loss_raw = meta.last_val_loss_raw;
  // The target may have changed: the validation that reached the former one counts if it is at or below the new one.
  if (meta.reached_step >= 0 && meta.reached_loss <= config.train.target_loss)
    record.reached = TargetReached{meta.reached_step, meta.reached_clock_s, meta.reached_loss};
  if (rank == 0) record.joules = meta.joules;
  record.from_checkpoint = start.branch ? start.checkpoint.string() : meta.from_checkpoint;
  record.from_step = start.branch ? meta.step : meta.from_step;
  log.line(fmt::format("{} {} after {} steps, clock {}", start.branch ? "branches from" : "resumed from", start.checkpoint.string(),
                       meta.step, duration_text(clock.seconds(Phase::training))));
  if (start.new_extrapolation && extrapolates) {
    engine.restart_extrapolation(meta.step);
    log.line(fmt::format("weight extrapolation begins anew after {} steps: its keys have changed", meta.step));
  }
}

}  // namespace speedrun

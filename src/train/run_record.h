#pragma once
// What a run leaves in result.json, and the machine it ran on.
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "src/config/config.h"
#include "src/core/device.h"
#include "src/data/shard_list.h"
#include "src/train/clock.h"

namespace speedrun {

struct TargetReached {
  int step = -1;  // completed updates
  double clock_s = 0;
  double loss = 0;
};

struct RunRecord {
  int steps = 0;
  int64_t tokens = 0;
  std::optional<TargetReached> reached;
  std::optional<double> val_loss, train_loss;  // the last ones
  std::optional<double> val_loss_raw;          // of the weights without the read-out that val_loss is of
  double joules = 0;                           // of the training clock's time, all ranks; 0: not measured
  int ranks = 1;
  double flops = 0;  // of the model, training alone
  int64_t parameters = 0;
  double first_step_s = 0;      // from the start of the process's work to the end of the first step
  std::string outcome;          // "finished", "stopped at target", "stopped at step", "SIGINT", …
  std::string from_checkpoint;  // that the run branched from, after from_step steps; empty: it did not
  int from_step = 0;
};

nlohmann::ordered_json result_json(const Config& config, const RunRecord& record, const PhaseClock& clock, const Device& device,
                                   const ShardList& train_shards, const ShardList& val_shards);

std::string executable_hash();  // of /proc/self/exe

}  // namespace speedrun

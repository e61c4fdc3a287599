#pragma once
// Where a run begins: with fresh weights or those of a file; at its own newest checkpoint (a resumed run); or at a checkpoint that
// another run made (a branch: a run of its own, on the same data with the same model, whose other keys may differ).
#include <filesystem>
#include <optional>

#include "src/config/config.h"
#include "src/core/log.h"
#include "src/data/reader.h"
#include "src/data/shard_list.h"
#include "src/dist/control.h"
#include "src/train/checkpoint.h"
#include "src/train/clock.h"
#include "src/train/engine.h"
#include "src/train/run_record.h"
#include "src/train/trainer.h"

namespace speedrun {

struct StartPoint {
  std::filesystem::path checkpoint;
  CheckpointMeta meta;
  bool branch = false;             // the checkpoint is another run's
  bool new_extrapolation = false;  // extrapolation.* has changed: what the checkpoint remembers of the weights is not for this run
};

// A run that begins: weights drawn from the seed, or those of train.init_weights.
void set_initial_weights(const Config& config, Engine& engine);

// What options.resume or options.from goes on from; nothing for a run that begins. Rank 0 looks for all. Throws InputError where
// the run has another model, other steps or, by `shards`, other data than the checkpoint; the log says which other keys have
// changed.
std::optional<StartPoint> find_start(const TrainOptions& options, const ShardList& shards, Control& control, Log& log);

// Weights, optimizer, data, clock and record as they were at the checkpoint. The energy, of all ranks together, goes to rank 0.
void go_on_from(const StartPoint& start, const Config& config, int rank, Engine& engine, Reader& reader, PhaseClock& clock,
                RunRecord& record, Log& log);

}  // namespace speedrun

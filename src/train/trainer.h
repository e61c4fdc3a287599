#pragma once
// The training loop of one run: data, clock, validation, checkpoints, metrics.
#include <filesystem>
#include <optional>
#include <string>

#include "src/config/config.h"
#include "src/core/log.h"
#include "src/dist/world.h"
#include "src/train/timeline.h"

namespace speedrun {

struct TrainOptions {
  Config config;
  std::string config_name;                         // for the run's folder
  std::optional<std::filesystem::path> resume;     // a run's folder: go on from its newest good checkpoint
  std::optional<std::filesystem::path> from = {};  // a checkpoint of another run: this new run goes on from there, with `config`
  bool dry_run = false;                            // check data and memory, then stop
  World world = {};                                // the ranks of the run, and which this process is
  std::string gradients_file;                      // write the first step's gradients (safetensors) and stop
  TimelineOptions timeline = {};
};

// Throws InputError, one line, if so many ranks cannot share the config's steps.
void check_ranks(const Config& config, int ranks);

// Returns the process's exit code: 0; 130 or 143 after SIGINT or SIGTERM (a checkpoint is written); 3 after a non-finite loss or
// gradient. With several ranks (which check_ranks has let pass) every rank's process calls it; rank 0 alone logs and writes, and if
// one of them fails all end.
int train(const TrainOptions& options, Log& log);

}  // namespace speedrun

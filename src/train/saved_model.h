#pragma once
// A model from a run's folder, a checkpoint file or a config, ready to evaluate or to write.
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/log.h"
#include "src/train/engine.h"

namespace speedrun {

// generation: one row of generation_row_tokens (generate.h) at a time; questions: many such rows
enum class SavedModelUse { evaluation, generation, questions };

struct SavedModel {
  Config config;  // the run's, with the overrides
  int step = 0;   // completed updates
  std::unique_ptr<Device> device;
  std::unique_ptr<Engine> engine;  // without gradients or optimizer
};

// `path`: a run's folder (its newest good checkpoint) or a checkpoint. Throws InputError naming what is missing or damaged.
SavedModel open_saved_model(const std::filesystem::path& path, const std::vector<std::string>& overrides, SavedModelUse use,
                            Log& log);

// What a run of this config begins with. Throws InputError where train.init_weights does not fit.
SavedModel make_initial_model(const Config& config, SavedModelUse use, Log& log);

}  // namespace speedrun

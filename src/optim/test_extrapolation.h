#pragma once
// Configs for the tests of weight extrapolation.
#include "src/config/config.h"

namespace speedrun {

inline Config config_of(ExtrapolationKind method) {
  Config config;
  config.schedule.steps = 40;
  config.optim.matrix.optimizer = config.optim.down.optimizer = OptimizerKind::muon;
  config.extrapolation.method = method;
  config.extrapolation.max_jump = 0;
  return config;
}

// The record's keys.
inline Config config_of_34() {
  Config config = config_of(ExtrapolationKind::rre_suffix);
  config.schedule.steps = 3020;
  config.extrapolation = {.method = ExtrapolationKind::rre_suffix, .start = 2820, .stop = 2925, .damping = 0.875};
  return config;
}

}  // namespace speedrun

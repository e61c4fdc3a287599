#pragma once
#include <memory>

#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/log.h"
#include "src/dist/world.h"

namespace speedrun {

// The device of train.device: automatic takes a GPU if there is a usable one and the model fits its kernels, else the CPU, and logs
// why. With several ranks each takes a GPU of its own (dist.ranks_per_gpu), or its part of the CPU's threads.
std::unique_ptr<Device> choose_device(const Config& config, Log& log, const World& world = {});

}  // namespace speedrun

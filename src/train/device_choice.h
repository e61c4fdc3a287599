#pragma once
#include <memory>

#include "src/config/config.h"
#include "src/core/device.h"
#include "src/core/log.h"

namespace speedrun {

// The device of train.device: automatic takes a GPU if there is a usable one and the model fits its kernels, else the CPU, and logs
// why.
std::unique_ptr<Device> choose_device(const Config& config, Log& log);

}  // namespace speedrun

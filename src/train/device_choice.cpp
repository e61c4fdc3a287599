#include "src/train/device_choice.h"

#include <algorithm>
#include <thread>

#include "src/config/config_io.h"

namespace speedrun {

std::unique_ptr<Device> choose_device(const Config& config, Log& log, const World& world) {
  const auto cpu = [&](const std::string& reason) {
    int threads = config.train.threads;
    if (threads == 0 && world.local_size > 1)
      threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world.local_size);
    std::unique_ptr<Device> device = make_cpu_device(threads);
    log.line("device: " + device->name() + reason);
    return device;
  };
  if (config.train.device == DeviceChoice::cpu) return cpu("");
  std::string why_not;
  if (config.train.device == DeviceChoice::automatic && !cuda_available(&why_not)) return cpu(" (" + why_not + ")");
  if (world.size > 1 && config.train.device_ordinal != 0)
    throw InputError("train.device_ordinal: several ranks take the GPUs from 0 on; choose others with CUDA_VISIBLE_DEVICES");
  std::unique_ptr<Device> device =
      make_cuda_device(world.size > 1 ? world.local_rank / config.dist.ranks_per_gpu : config.train.device_ordinal);
  validate_for_cuda(config, "train.device=cuda");
  log.line("device: " + device->name());
  return device;
}

}  // namespace speedrun

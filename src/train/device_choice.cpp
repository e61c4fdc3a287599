#include "src/train/device_choice.h"

#include "src/config/config_io.h"

namespace speedrun {

std::unique_ptr<Device> choose_device(const Config& config, Log& log) {
  const auto cpu = [&](const std::string& reason) {
    std::unique_ptr<Device> device = make_cpu_device(config.train.threads);
    log.line("device: " + device->name() + reason);
    return device;
  };
  if (config.train.device == DeviceChoice::cpu) return cpu("");
  std::string why_not;
  if (config.train.device == DeviceChoice::automatic && !cuda_available(&why_not)) return cpu(" (" + why_not + ")");
  std::unique_ptr<Device> device = make_cuda_device(config.train.device_ordinal);
  validate_for_cuda(config, "train.device=cuda");
  log.line("device: " + device->name());
  return device;
}

}  // namespace speedrun

#pragma once
// The few counters of NVIDIA's management library that benches print. The library belongs to the driver and is loaded at run time,
// so that the program starts without one.
#include <optional>

namespace speedrun::kernels {

class Nvml {
 public:
  explicit Nvml(int device);  // CUDA device index; never throws: without the library every reading is empty
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  std::optional<double> energy_joules() const;  // since the driver was loaded
  std::optional<double> sm_mhz() const;

 private:
  void* library_ = nullptr;
  void* device_ = nullptr;
};

}  // namespace speedrun::kernels

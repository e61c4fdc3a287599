#include "kernels/bench/nvml_cuda.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>

namespace speedrun::kernels {
namespace {

// nvml.h is not part of every toolkit; these are the parts of its interface used here (0 = success, device handles are pointers).
using NvmlInit = int (*)();
using NvmlDeviceByPciBusId = int (*)(const char*, void**);
using NvmlTotalEnergy = int (*)(void*, unsigned long long*);  // millijoules
using NvmlClockInfo = int (*)(void*, int, unsigned*);         // MHz
constexpr int kNvmlClockSm = 1;

template <class Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

Nvml::Nvml(int device) {
  library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) return;
  const auto init = symbol<NvmlInit>(library_, "nvmlInit_v2");
  const auto by_pci_bus_id = symbol<NvmlDeviceByPciBusId>(library_, "nvmlDeviceGetHandleByPciBusId_v2");
  std::string bus_id(32, '\0');
  if (init == nullptr || by_pci_bus_id == nullptr || init() != 0) return;
  if (cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), device) != cudaSuccess) return;
  if (by_pci_bus_id(bus_id.c_str(), &device_) != 0) device_ = nullptr;
}

Nvml::~Nvml() {
  if (library_ == nullptr) return;
  if (const auto shutdown = symbol<NvmlInit>(library_, "nvmlShutdown")) shutdown();
  dlclose(library_);
}

std::optional<double> Nvml::energy_joules() const {
  if (device_ == nullptr) return {};
  const auto total_energy = symbol<NvmlTotalEnergy>(library_, "nvmlDeviceGetTotalEnergyConsumption");
  unsigned long long millijoules = 0;
  if (total_energy == nullptr || total_energy(device_, &millijoules) != 0) return {};
  return static_cast<double>(millijoules) * 1e-3;
}

std::optional<double> Nvml::sm_mhz() const {
  if (device_ == nullptr) return {};
  const auto clock_info = symbol<NvmlClockInfo>(library_, "nvmlDeviceGetClockInfo");
  unsigned mhz = 0;
  if (clock_info == nullptr || clock_info(device_, kNvmlClockSm, &mhz) != 0) return {};
  return static_cast<double>(mhz);
}

}  // namespace speedrun::kernels

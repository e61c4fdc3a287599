#include "src/core/device.h"

#include "version.h"

namespace speedrun {

const kernels::HostExec& Device::host_exec() const { throw Error("internal: a CPU op was asked of a CUDA device"); }
const kernels::CudaExec& Device::cuda_exec() const { throw Error("internal: a CUDA op was asked of the CPU device"); }

#if !SPEEDRUN_HAS_CUDA
std::unique_ptr<Device> make_cuda_device(int) {
  throw InputError("train.device: this build has no CUDA device (no CUDA toolkit was found when it was configured); use \"cpu\"");
}

bool cuda_available(std::string* why_not) {
  if (why_not != nullptr) *why_not = "built without CUDA";
  return false;
}

BuildInfo build_info() { return {kVersion, kCommit, "none", "none", "none", "cpu"}; }
#endif

}  // namespace speedrun

// Zeroes a moment unless the report says that the jump was refused: 16-byte stores, a grid-stride loop, the last bytes one by one
// by the first threads. Every block reads the report, which the launch before it on the stream has written.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/base/launch.cuh"
#include "kernels/extrapolation/reset_moment.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 8;
constexpr int64_t kVectorBytes = sizeof(uint4);

__global__ void __launch_bounds__(kThreads) reset_moment_kernel(const ResetMoment p) {
  if (p.report->refusal != JumpRefusal::none) return;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x, threads = int64_t{gridDim.x} * kThreads;
  const int64_t vectors = p.bytes / kVectorBytes;
  for (int64_t i = thread; i < vectors; i += threads) static_cast<uint4*>(p.moment)[i] = uint4{};
  const int64_t rest = vectors * kVectorBytes + thread;
  if (rest < p.bytes) static_cast<uint8_t*>(p.moment)[rest] = 0;
}

}  // namespace

void reset_moment(const ResetMoment& args, const CudaExec& exec) {
  constexpr const char* kOp = "reset_moment";
  if (args.bytes == 0) return;
  require(args.moment != nullptr && args.report != nullptr, kOp, ": null pointer");
  require(reinterpret_cast<uintptr_t>(args.moment) % kVectorBytes == 0, kOp, ": moment is not 16-byte aligned");
  const int64_t blocks = std::min(ceil_div(args.bytes, kVectorBytes * kThreads), int64_t{kBlocksPerSm} * exec.num_sms);
  reset_moment_kernel<<<grid_size(blocks, kOp), kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": ", args.bytes, " bytes");
}

}  // namespace speedrun::kernels

#include <cuda_runtime.h>

#include "kernels/attention/paired_doc_start.h"
#include "kernels/base/launch.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) paired_doc_start_kernel(const PairedDocStart p) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= p.N) return;
  const int start = 2 * p.doc_start[t];
  reinterpret_cast<int2*>(p.out)[t] = make_int2(start, start);
}

}  // namespace

void paired_doc_start(const PairedDocStart& args, const CudaExec& exec) {
  paired_doc_start_kernel<<<grid_size(ceil_div(args.N, kThreads), "paired_doc_start"), kThreads, 0, exec.stream>>>(args);
  check_launch("paired_doc_start: N = ", args.N);
}

}  // namespace speedrun::kernels

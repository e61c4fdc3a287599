#include "kernels/base/column_sum.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    add_partials(float* __restrict__ sum, const float* __restrict__ partials, int parts, int64_t C) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= C) return;
  float total = sum[column];
#pragma unroll 16
  for (int part = 0; part < parts; ++part) total += partials[part * C + column];
  sum[column] = total;
}

struct Rows {
  const bf16* inp;
  __device__ void operator()(int64_t index, float (&values)[kVec]) const { load8(inp + index, values); }
};

}  // namespace

void add_column_partials(float* sum, const float* partials, int64_t parts, int64_t C, const CudaExec& exec) {
  add_partials<<<grid_size(ceil_div(C, kThreads), "column_sum"), kThreads, 0, exec.stream>>>(sum, partials, static_cast<int>(parts),
                                                                                             C);
  check_launch("column_sum: ", parts, " parts of ", C, " columns");
}

void column_sum(float* sum, const bf16* inp, float* scratch, int64_t N, int64_t C, const CudaExec& exec) {
  column_sum_of(sum, scratch, Rows{inp}, N, C, exec, "column_sum");
}

}  // namespace speedrun::kernels

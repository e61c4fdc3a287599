// Weights times a learned scalar: out = scalar·weight. Backward: dscalar += Σ grad·weight; grad <- scalar·grad.
//
// Layout    flat tensors named by a table in device memory; 16-byte accesses: n % 8 == 0, pointers 16-byte aligned.
//
// Work      kScaledWeightParts blocks a tensor; backward's partial sums are added by one warp a tensor in a second kernel.
//
// Traffic   4 bytes an element forward, 10 backward: 10 layers of width 768, 23.6 M elements, 94 and 236 MB.
//
// Numerics  one FP32 product, rounded to BF16 or left in FP32; sums in FP64 in an order that n alone fixes: bitwise reproducible.
#include <cuda_runtime.h>

#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/scaled_weight/scaled_weight.h"
#include "kernels/scaled_weight/scaled_weight_parts.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) scale_kernel(const ScaledWeightItem<bf16>* items) {
  const ScaledWeightItem<bf16> item = items[blockIdx.x / kScaledWeightParts];
  const int64_t part = blockIdx.x % kScaledWeightParts;
  const int64_t end = scaled_weight_begin(part + 1, item.n);
  const float scalar = static_cast<float>(*item.scalar);
#pragma unroll 4
  for (int64_t i = scaled_weight_begin(part, item.n) + threadIdx.x * kVec; i < end; i += kThreads * kVec) {
    float x[kVec];
    load8(item.weight + i, x);
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] *= scalar;
    store8(item.out + i, x);
  }
}

__global__ void __launch_bounds__(kThreads) scale_backward_kernel(const ScaledWeightItem<bf16>* items, double* scratch) {
  __shared__ double partials[kThreads / kWarpSize];
  const ScaledWeightItem<bf16> item = items[blockIdx.x / kScaledWeightParts];
  if (item.grad == nullptr) return;
  const int64_t part = blockIdx.x % kScaledWeightParts;
  const int64_t end = scaled_weight_begin(part + 1, item.n);
  const float scalar = static_cast<float>(*item.scalar);
  constexpr int kAhead = 2;  // vectors a thread has in flight
  double sum = 0;
  for (int64_t base = scaled_weight_begin(part, item.n) + threadIdx.x * kVec; base < end; base += kAhead * kThreads * kVec) {
    float grad[kAhead][kVec] = {}, weight[kAhead][kVec] = {};
#pragma unroll
    for (int v = 0; v < kAhead; ++v) {
      const int64_t i = base + v * kThreads * kVec;
      if (i >= end) continue;
      load8(item.grad + i, grad[v]);
      load8(item.weight + i, weight[v]);
    }
#pragma unroll
    for (int v = 0; v < kAhead; ++v) {
      const int64_t i = base + v * kThreads * kVec;
      if (i >= end) continue;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        sum += static_cast<double>(grad[v][j]) * static_cast<double>(weight[v][j]);
        grad[v][j] *= scalar;
      }
      store8(item.grad + i, grad[v]);
    }
  }
  sum = block_sum<kThreads>(sum, partials);
  if (threadIdx.x == 0) scratch[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    add_dscalars_kernel(const ScaledWeightItem<bf16>* items, const double* scratch, int num_items) {
  const int item_idx = blockIdx.x * (kThreads / kWarpSize) + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (item_idx >= num_items || items[item_idx].grad == nullptr) return;  // whole warps leave together
  double sum = 0;
#pragma unroll
  for (int part = lane; part < kScaledWeightParts; part += kWarpSize) {
    sum += scratch[static_cast<int64_t>(item_idx) * kScaledWeightParts + part];
  }
  sum = warp_sum(sum);
  if (lane == 0) *items[item_idx].dscalar = static_cast<float>(static_cast<double>(*items[item_idx].dscalar) + sum);
}

void check_items(const char* op, const ScaledWeights<bf16>& args) {
  require(args.num_items > 0 && args.items != nullptr, op, ": ", args.num_items, " items or a null table");
}

}  // namespace

void scaled_weights_forward(const ScaledWeights<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "scaled_weights_forward";
  check_items(kOp, args);
  const unsigned grid = grid_size(int64_t{args.num_items} * kScaledWeightParts, kOp);
  scale_kernel<<<grid, kThreads, 0, exec.stream>>>(args.items);
  check_launch(kOp, ": ", args.num_items, " items");
}

void scaled_weights_backward(const ScaledWeights<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "scaled_weights_backward";
  check_items(kOp, args);
  require(args.scratch != nullptr, kOp, ": needs scratch");
  const unsigned grid = grid_size(int64_t{args.num_items} * kScaledWeightParts, kOp);
  scale_backward_kernel<<<grid, kThreads, 0, exec.stream>>>(args.items, args.scratch);
  check_launch(kOp, ": ", args.num_items, " items");
  add_dscalars_kernel<<<grid_size(ceil_div(args.num_items, kThreads / kWarpSize), kOp), kThreads, 0, exec.stream>>>(
      args.items, args.scratch, args.num_items);
  check_launch(kOp, ": adding partial sums of ", args.num_items, " items");
}

}  // namespace speedrun::kernels

// Sum of losses; per-parameter sums of squares of the gradient; the verdict on a step.
// Layout    one FP32 gradient buffer; segments start at multiples of 64 elements. scratch (num_segments, kGradSumParts).
// Work      a segment is cut into kGradSumParts parts of at least kMinPartElements, one block each: small segments leave most
//           blocks nothing to do (they write 0), large ones are spread over all. Then the parts are added, one warp a segment;
//           one block makes the verdict of the sums.
// Traffic   4 bytes a gradient element, once: GPT-2 124M 498 MB.
// Numerics  squares and sums in FP64, so no finite gradient overflows; fixed order: bitwise reproducible, on any GPU.
#include <cuda_runtime.h>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/grad_stats/grad_stats.h"
#include "kernels/grad_stats/grad_stats_scratch.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kSingleBlockThreads = 1024;
constexpr int64_t kMinPartElements = 4096;
constexpr int64_t kPartMultiple = 4;  // parts begin at 16-byte boundaries

__global__ void __launch_bounds__(kSingleBlockThreads) loss_sum_kernel(StepVerdict* verdict, const float* loss, int64_t N) {
  __shared__ double partials[kSingleBlockThreads / kWarpSize];
  double sum = 0;
#pragma unroll 8
  for (int64_t t = threadIdx.x; t < N; t += kSingleBlockThreads) sum += static_cast<double>(loss[t]);
  sum = block_sum<kSingleBlockThreads>(sum, partials);
  if (threadIdx.x == 0) verdict->loss_sum += sum;
}

__global__ void __launch_bounds__(kThreads)
    square_sums_kernel(double* scratch, const float* grads, const GradSegment* segments, uint32_t groups) {
  __shared__ double partials[kThreads / kWarpSize];
  const int64_t segment_idx = blockIdx.x / kGradSumParts, part = blockIdx.x % kGradSumParts;
  GradSegment segment = segments[segment_idx];
  if ((groups >> segment.group & 1u) == 0) segment.count = 0;
  const int64_t even = ceil_div(ceil_div(segment.count, kGradSumParts), kPartMultiple) * kPartMultiple;
  const int64_t part_elements = max(kMinPartElements, even);
  const int64_t begin = min(part * part_elements, segment.count), end = min(begin + part_elements, segment.count);
  const float* grad = grads + segment.offset;

  double sum = 0;
  const int64_t vector_end = begin + (end - begin) / 4 * 4;
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x * 4; i < vector_end; i += kThreads * 4) {
    const float4 g = __ldcs(reinterpret_cast<const float4*>(grad + i));
    const double x = g.x, y = g.y, z = g.z, w = g.w;
    sum += (x * x + y * y) + (z * z + w * w);
  }
  if (vector_end + threadIdx.x < end) {
    const double x = grad[vector_end + threadIdx.x];
    sum += x * x;
  }
  sum = block_sum<kThreads>(sum, partials);
  if (threadIdx.x == 0) scratch[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) segment_sums_kernel(double* sums, const double* scratch, int num_segments) {
  const int segment = static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / kWarpSize), lane = threadIdx.x % kWarpSize;
  if (segment >= num_segments) return;
  const double* parts = scratch + static_cast<int64_t>(segment) * kGradSumParts;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kGradSumParts / kWarpSize; ++i) sum += parts[i * kWarpSize + lane];
  sum = warp_sum(sum);
  if (lane == 0) sums[segment] = sum;
}

__global__ void __launch_bounds__(kSingleBlockThreads) verdict_kernel(const GradVerdict<bf16> p) {
  __shared__ double partials[kSingleBlockThreads / kWarpSize];
  __shared__ int first_bad;
  if (threadIdx.x == 0) first_bad = p.num_segments;
  __syncthreads();
  double total = 0;
  for (int segment = threadIdx.x; segment < p.num_segments; segment += kSingleBlockThreads) {
    const double sum = p.sums[segment];
    if (!isfinite(sum)) atomicMin(&first_bad, segment);
    total += sum;
  }
  total = block_sum<kSingleBlockThreads>(total, partials);  // passes a barrier: first_bad is complete
  if (threadIdx.x != 0) return;

  StepVerdict& verdict = *p.verdict;
  const bool bad_loss = !isfinite(verdict.loss_sum);
  if ((bad_loss || first_bad < p.num_segments) && verdict.skip == 0) {
    verdict.skip = 1;
    verdict.bad_parameter = bad_loss ? -1 : first_bad;
  }
  const double norm = sqrt(total);
  verdict.grad_norm = static_cast<float>(norm);
  verdict.grad_scale = p.grad_clip > 0 && norm > p.grad_clip ? static_cast<float>(p.grad_clip / norm) : 1.0f;
}

}  // namespace

void loss_sum(const LossSum<bf16>& args, const CudaExec& exec) {
  require(args.N > 0 && args.loss != nullptr && args.verdict != nullptr, "loss_sum: N = ", args.N, " or a null pointer");
  loss_sum_kernel<<<1, kSingleBlockThreads, 0, exec.stream>>>(args.verdict, args.loss, args.N);
  check_launch("loss_sum: N = ", args.N);
}

void grad_sums(const GradVerdict<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "grad_sums";
  require(args.num_segments > 0, kOp, ": ", args.num_segments, " segments");
  require(args.sums != nullptr && args.scratch != nullptr && args.segments != nullptr, kOp, ": null pointer");
  require_aligned16(kOp, "grads", args.grads);
  const unsigned grid = grid_size(static_cast<int64_t>(args.num_segments) * kGradSumParts, kOp);
  square_sums_kernel<<<grid, kThreads, 0, exec.stream>>>(args.scratch, args.grads, args.segments, args.groups);
  check_launch(kOp, ": sums of squares, ", args.num_segments, " segments");
  const unsigned blocks = grid_size(ceil_div(args.num_segments, kThreads / kWarpSize), kOp);
  segment_sums_kernel<<<blocks, kThreads, 0, exec.stream>>>(args.sums, args.scratch, args.num_segments);
  check_launch(kOp, ": ", args.num_segments, " segments");
}

void grad_verdict(const GradVerdict<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "grad_verdict";
  require(args.num_segments > 0, kOp, ": ", args.num_segments, " segments");
  require(args.verdict != nullptr && args.sums != nullptr, kOp, ": null pointer");
  verdict_kernel<<<1, kSingleBlockThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": ", args.num_segments, " segments");
}

}  // namespace speedrun::kernels

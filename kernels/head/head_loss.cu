// Head on CUDA: per chunk of tokens a product makes the logits, one kernel turns them into losses and, in place, into dlogits, and
// two products and a column sum take these further. Layout    logits (chunk, V) bf16, V % 8 == 0; all pointers 16-byte aligned.
// Work      a block of 512 threads per row. The row is read once and kept in shared memory (V·2 bytes; two blocks fit a Hopper SM
// at
//           V = 50,304); each thread keeps only what it reads again itself. Rows that do not fit are read a second time from L2.
// Traffic   reads and writes N·V elements once (loss only: reads); the products and the bias gradient move 4·N·V more.
// Numerics  FP32 in units of log2; a running maximum with rescaling per thread, then one fixed tree over the block: safe for any
//           soft-cap, bitwise reproducible. One rounding of dlogits at the store.
#include <cfloat>
#include <type_traits>

#include "kernels/base/column_sum_cuda.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/gemm/projection_cuda.h"
#include "kernels/head/head_loss.h"
#include "kernels/ptx/ex2.cuh"
#include "kernels/ptx/rcp.cuh"
#include "kernels/ptx/rsqrt.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kBatch = 4;  // 16-byte loads in flight per thread
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// Capped logit in units of log2 (z·log2 e) and dz/dlogit.
struct Capped {
  float z;
  float slope;
};

template <Softcap kCap>
__device__ __forceinline__ Capped cap(float x, float c) {
  if constexpr (kCap == Softcap::none) {
    return {x * kLog2E, 1.0f};
  } else if constexpr (kCap == Softcap::rational) {
    const float cr = c * ptx::rsqrt_approx_ftz(fmaf(x, x, c * c));
    return {kLog2E * x * cr, cr * cr * cr};
  } else {
    // e is kept finite so that 1 − σ = e·σ holds without cancellation for large x and without inf·0 for very negative x.
    const float e = fminf(ptx::ex2_approx_ftz((x + 5.0f) * (-kLog2E / 7.5f)), 1e30f);
    const float sigma = ptx::rcp_approx_ftz(1.0f + e);
    return {23.0f * kLog2E * sigma, 23.0f / 7.5f * (e * sigma) * sigma};
  }
}

struct RowLoss {
  float* loss;   // (rows)
  bf16* logits;  // (rows, V); becomes dlogits
  const int32_t* targets;
  const float* grad_scale;
  int V;
  float softcap_value;
};

// log2 Σ 2^z of what a thread has seen, as maximum and rescaled sum.
struct RunningSum {
  float max = -FLT_MAX;
  float sum = 0;

  __device__ __forceinline__ void add(const float (&z)[kVec]) {
    float new_max = max;
#pragma unroll
    for (int i = 0; i < kVec; ++i) new_max = fmaxf(new_max, z[i]);
    sum *= ptx::ex2_approx_ftz(max - new_max);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum += ptx::ex2_approx_ftz(z[i] - new_max);
    max = new_max;
  }
};

template <Softcap kCap, bool kGradients, bool kStaged>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) row_loss(const RowLoss p) {
  extern __shared__ uint4 staged_row[];  // (V / 8) if kStaged
  __shared__ float partials[kThreads / kWarpSize];
  const int64_t row_idx = blockIdx.x;
  bf16* const row = p.logits + row_idx * p.V;
  const int num_vectors = p.V / kVec;

  // log2 Σ 2^z over the row. A thread stages exactly the vectors that it reads again below: no barrier needed for them.
  RunningSum running;
  for (int base = threadIdx.x; base < num_vectors; base += kThreads * kBatch) {
    uint4 raw[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kThreads < num_vectors) raw[j] = load16(row + int64_t{base + j * kThreads} * kVec);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kThreads >= num_vectors) break;
      if constexpr (kStaged) staged_row[base + j * kThreads] = raw[j];
      float z[kVec];
      unpack8(raw[j], z);
#pragma unroll
      for (int i = 0; i < kVec; ++i) z[i] = cap<kCap>(z[i], p.softcap_value).z;
      running.add(z);
    }
  }
  const int target = p.targets[row_idx];
  const float target_z =
      cap<kCap>(static_cast<float>(row[target]), p.softcap_value).z;  // before anyone overwrites it (barriers below)
  const float max = block_max<kThreads>(running.max, partials);
  const float sum = block_sum<kThreads>(running.sum * ptx::ex2_approx_ftz(running.max - max), partials);
  const float log_sum = max + log2f(sum);
  if (threadIdx.x == 0) p.loss[row_idx] = (log_sum - target_z) * kLn2;
  if constexpr (!kGradients) return;

  const float scale = *p.grad_scale;
  const int target_vector = target / kVec;
#pragma unroll 2
  for (int vector = threadIdx.x; vector < num_vectors; vector += kThreads) {
    uint4 raw;
    if constexpr (kStaged) {
      raw = staged_row[vector];
    } else {
      raw = load16(row + int64_t{vector} * kVec);
    }
    float x[kVec];
    unpack8(raw, x);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Capped capped = cap<kCap>(x[i], p.softcap_value);
      float residual = ptx::ex2_approx_ftz(capped.z - log_sum);
      if (vector == target_vector && i == target % kVec) residual -= 1.0f;
      x[i] = scale * capped.slope * residual;
    }
    store8(row + int64_t{vector} * kVec, x);
  }
}

constexpr int kCapThreads = 256;

template <Softcap kCap>
__global__ void __launch_bounds__(kCapThreads) cap_logits(bf16* logits, int64_t num_vectors, float softcap_value) {
  const int64_t vector = int64_t{blockIdx.x} * kCapThreads + threadIdx.x;
  if (vector >= num_vectors) return;
  float x[kVec];
  load8(logits + vector * kVec, x);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = cap<kCap>(x[i], softcap_value).z * kLn2;
  store8(logits + vector * kVec, x);
}

// Calls body with the soft-cap as a compile-time constant.
template <class Body>
void dispatch_softcap(Softcap softcap, const Body& body) {
  switch (softcap) {
    case Softcap::none:
      return body(std::integral_constant<Softcap, Softcap::none>{});
    case Softcap::rational:
      return body(std::integral_constant<Softcap, Softcap::rational>{});
    case Softcap::sigmoid:
      return body(std::integral_constant<Softcap, Softcap::sigmoid>{});
  }
  throw Error("head: unknown soft-cap " + std::to_string(static_cast<int>(softcap)));
}

template <Softcap kCap>
void launch_row_loss(const RowLoss& args, int64_t rows, bool gradients, const CudaExec& exec) {
  const unsigned grid = grid_size(rows, "head");
  if (!gradients) {
    row_loss<kCap, false, false><<<grid, kThreads, 0, exec.stream>>>(args);
  } else {
    int device = 0, limit = 0;
    cuda_check(cudaGetDevice(&device), "head: current device");
    cuda_check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "head: shared memory limit");
    const int64_t row_bytes = int64_t{args.V} * 2, static_bytes = sizeof(float) * kThreads / kWarpSize;
    if (row_bytes + static_bytes <= limit) {
      allow_dynamic_smem(row_loss<kCap, true, true>, static_cast<int>(row_bytes), "head");
      row_loss<kCap, true, true><<<grid, kThreads, static_cast<size_t>(row_bytes), exec.stream>>>(args);
    } else {
      row_loss<kCap, true, false><<<grid, kThreads, 0, exec.stream>>>(args);
    }
  }
  check_launch("head: loss of ", rows, " rows, V = ", args.V);
}

void check(int C, int V, Softcap softcap, double softcap_value) {
  require(C > 0 && C % kVec == 0 && V > 0 && V % kVec == 0, "head: C = ", C, ", V = ", V, " must be positive multiples of 8");
  require(softcap != Softcap::rational || softcap_value > 0, "head: the rational soft-cap's value ", softcap_value,
          " must be positive");
}

}  // namespace

void head_loss(const HeadLoss<bf16>& args, const CudaExec& exec) {
  check(args.C, args.V, args.softcap, args.softcap_value);
  require(args.N > 0 && args.chunk > 0, "head: N = ", args.N, ", chunk = ", args.chunk, " must be positive");
  const bool gradients = args.dinp != nullptr;
  for (int64_t begin = 0; begin < args.N; begin += args.chunk) {
    const ProjectionSize size{.N = std::min(args.chunk, args.N - begin), .K = args.C, .O = args.V};
    const bf16* inp = args.inp + begin * args.C;
    project(args.logits, inp, args.weight, args.bias, nullptr, size, exec);
    const RowLoss rows{.loss = args.loss + begin,
                       .logits = args.logits,
                       .targets = args.targets + begin,
                       .grad_scale = args.grad_scale,
                       .V = args.V,
                       .softcap_value = static_cast<float>(args.softcap_value)};
    dispatch_softcap(args.softcap, [&](auto softcap) { launch_row_loss<softcap()>(rows, size.N, gradients, exec); });
    if (!gradients) continue;
    if (args.dbias) column_sum(args.dbias, args.logits, args.scratch, size.N, args.V, exec);
    project_weight_grad(args.dweight, args.logits, inp, size, exec);
    project_input_grad(args.dinp + begin * args.C, args.logits, args.weight, nullptr, size, exec);
  }
}

void head_logits(const HeadLogits<bf16>& args, const CudaExec& exec) {
  check(args.C, args.V, args.softcap, args.softcap_value);
  project(args.logits, args.inp, args.weight, args.bias, nullptr, {.N = args.N, .K = args.C, .O = args.V}, exec);
  if (args.softcap == Softcap::none) return;
  const int64_t num_vectors = args.N * args.V / kVec;
  dispatch_softcap(args.softcap, [&](auto softcap) {
    cap_logits<softcap()><<<grid_size(ceil_div(num_vectors, kCapThreads), "head"), kCapThreads, 0, exec.stream>>>(
        args.logits, num_vectors, static_cast<float>(args.softcap_value));
  });
  check_launch("head: soft-cap of ", args.N, " x ", args.V, " logits");
}

}  // namespace speedrun::kernels

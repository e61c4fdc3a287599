// Gate net: hidden = inp · w1ᵀ;   h = gelu(hidden);   out = (h · w2ᵀ + bias) · scale, exact GELU. Backward:
//   S = doutᵀ·h, s = Σ_N dout:   dw2 += scale·S;   dbias += scale·s;   dscale += Σ w2·S + Σ bias·s
//   dhidden = scale·(dout·w2)·gelu'(hidden);   dw1 += dhiddenᵀ·inp;   dinp = dhidden·w1 (+ dinp)
// Layout    row-major, 16-byte aligned; C and G multiples of 8, G <= 128, O <= 64 of any value: rows of out and dout are not
//           aligned, but 16 of them together are.
// Work      the products with w1 by cuBLASLt. The O side: 8 warps of 16 tokens each on mma m16n8k16; the order of the hidden
//           units inside a product is free, so a lane takes neighbouring ones and reads them 16 bytes at a time. Backward: a
//           block walks through tiles of 128 tokens with gelu(hidden) and dout in shared memory, each warp sums its hidden
//           units of S over all the tile's tokens; another kernel adds the blocks' sums.
// Traffic   forward 2·N·(C + 2·G + O) bytes, backward 2·N·(3·C + 4·G + O), with dinp accumulated.
// Numerics  FP32 sums; hidden, gelu(hidden) as the products read it, dhidden, out and dinp are BF16. Sums over tokens are cut
//           by N alone and added in a fixed order: bitwise reproducible.
#include <cuda_runtime.h>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/gate_net/gate_net.h"
#include "kernels/gate_net/gate_net_parts.h"
#include "kernels/gemm/projection_cuda.h"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/mma.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kTokens = kGateNetTokens;  // of a tile
constexpr int kWarpTokens = 16;
constexpr int kMaxOutputs = 64, kMaxHidden = 128;
constexpr int kPad = 8;  // columns: rows of shared memory then start 4 banks apart
static_assert(kTokens == kWarps * kWarpTokens);

__device__ __forceinline__ float normal_cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }
__device__ __forceinline__ float gelu_derivative(float x) { return normal_cdf(x) + x * (0.39894228f * __expf(-0.5f * x * x)); }
__device__ __forceinline__ float scale_of(const bf16* scale, float constant) {
  return scale != nullptr ? static_cast<float>(*scale) : constant;
}

// A lane's place in the fragments of mma: rows (tokens) `group` and group + 8 of the warp's 16, columns by `thread`.
struct Lane {
  int warp, lane, group, thread;
  __device__ Lane()
      : warp(static_cast<int>(threadIdx.x) / kWarpSize),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        group(lane / 4),
        thread(lane % 4) {}
};

// kG: hidden units, rounded up; those beyond G count as zero. A lane has kG / 4 neighbouring ones of each of its two tokens.
template <int kG>
struct Hidden {
  static constexpr int kEach = kG / 4, kVecs = kEach / kVec, kSteps = kG / 16;
};

// ------------------------------------------------------------------------------------------------ forward
template <int kG>
__global__ void __launch_bounds__(kThreads) forward_kernel(const GateNetForward<bf16> p, int64_t tiles) {
  using H = Hidden<kG>;
  __shared__ uint2 weights[kMaxOutputs / 8 * H::kSteps * kWarpSize];  // w2 in the order of the fragments
  __shared__ __align__(16) bf16 staged[kWarps][kWarpTokens * kMaxOutputs];
  __shared__ float biases[kMaxOutputs];
  const Lane at;
  const int num_n = (p.O + 7) / 8;

  for (int i = threadIdx.x; i < num_n * H::kSteps * kWarpSize; i += kThreads) {
    const int lane = i % kWarpSize, step = i / kWarpSize % H::kSteps;
    const int o = i / kWarpSize / H::kSteps * 8 + lane / 4, k = lane % 4 * H::kEach + step * 4;
    weights[i] = o < p.O && k < p.G ? *reinterpret_cast<const uint2*>(p.w2 + o * p.G + k) : uint2{0, 0};
  }
  if (threadIdx.x < kMaxOutputs) biases[threadIdx.x] = threadIdx.x < p.O ? static_cast<float>(p.bias[threadIdx.x]) : 0.0f;
  const float scale = scale_of(p.scale, static_cast<float>(p.constant_scale));
  __syncthreads();

  bf16* stage = staged[at.warp];
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first = tile * kTokens + at.warp * kWarpTokens;  // of the warp's tokens
    if (first >= p.N) break;                                       // no block-wide barrier follows

    uint32_t h[2][H::kEach / 2];  // gelu(hidden), two units a word
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = first + at.group + 8 * half;
#pragma unroll
      for (int v = 0; v < H::kVecs; ++v) {
        const int k = at.thread * H::kEach + v * kVec;
        float x[kVec] = {};
        if (token < p.N && k < p.G) load8(p.hidden + token * p.G + k, x);
#pragma unroll
        for (int j = 0; j < kVec; ++j) x[j] *= normal_cdf(x[j]);
#pragma unroll
        for (int j = 0; j < kVec / 2; ++j) h[half][v * kVec / 2 + j] = pack_bf16x2(x[2 * j], x[2 * j + 1]);
      }
    }

    __syncwarp();  // the last tile's stores have been read
#pragma unroll
    for (int n = 0; n < kMaxOutputs / 8; ++n) {
      if (n >= num_n) break;
      float sums[4] = {};
#pragma unroll
      for (int step = 0; step < H::kSteps; ++step) {
        const uint32_t a[4] = {h[0][2 * step], h[1][2 * step], h[0][2 * step + 1], h[1][2 * step + 1]};
        const uint2 b = weights[(n * H::kSteps + step) * kWarpSize + at.lane];
        ptx::mma_m16n8k16_bf16(sums, a, b.x, b.y);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int o = n * 8 + at.thread * 2 + i % 2, token = at.group + i / 2 * 8;
        if (o < p.O) stage[token * p.O + o] = bf16((sums[i] + biases[o]) * scale);
      }
    }
    __syncwarp();
    const int count = static_cast<int>(min(int64_t{kWarpTokens}, p.N - first)) * p.O;
    bf16* out = p.out + first * p.O;
    for (int i = at.lane * kVec; i < count; i += kWarpSize * kVec) {
      if (i + kVec <= count) {
        store16(out + i, load16(stage + i));
      } else {
        for (int j = i; j < count; ++j) out[j] = stage[j];
      }
    }
  }
}

// Without a net.
__global__ void __launch_bounds__(kThreads) constant_kernel(const GateNetForward<bf16> p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.N * p.O) return;
  p.out[i] = bf16(static_cast<float>(p.bias[i % p.O]) * scale_of(p.scale, static_cast<float>(p.constant_scale)));
}

// ------------------------------------------------------------------------------------------------ backward
template <int kG>
struct BackwardShared {
  uint2 weights[kG / 8 * (kMaxOutputs / 16) * kWarpSize];  // w2 in the order of the fragments
  __align__(16) bf16 dout[kTokens][kMaxOutputs + kPad];    // zero beyond O and N
  __align__(16) bf16 activated[kTokens][kG + kPad];        // gelu(hidden), zero beyond G and N
};

// The tile's part of dout, which is contiguous in memory, into padded rows.
__device__ __forceinline__ void load_dout(bf16 (&rows)[kTokens][kMaxOutputs + kPad], const bf16* dout, int count, int O) {
  for (int i = threadIdx.x * kVec; i < kTokens * O; i += kThreads * kVec) {
    uint32_t words[4] = {};
    if (i + kVec <= count) {
      const uint4 raw = load16(dout + i);
      words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (i + j < count) words[j / 2] |= uint32_t{dout[i + j].bits} << (16 * (j % 2));
      }
    }
    int row = i / O, column = i % O;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      rows[row][column].bits = static_cast<uint16_t>(words[j / 2] >> (16 * (j % 2)));
      if (++column == O) {
        column = 0;
        ++row;
      }
    }
  }
}

__device__ __forceinline__ uint32_t word_at(const bf16* p) { return *reinterpret_cast<const uint32_t*>(p); }
__device__ __forceinline__ uint32_t shared_address(const bf16* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

template <int kG>
__global__ void __launch_bounds__(kThreads, kG <= 64 ? 2 : 1) backward_kernel(const GateNetBackward<bf16> p, int64_t tiles) {
  using H = Hidden<kG>;
  constexpr int kMaxSteps = kMaxOutputs / 16;  // of 16 outputs each
  constexpr int kColumns = kG / 8 / kWarps;    // of S, in eights, a warp
  extern __shared__ __align__(16) unsigned char memory[];
  BackwardShared<kG>& shared = *reinterpret_cast<BackwardShared<kG>*>(memory);
  const Lane at;
  const int steps = (p.O + 15) / 16;

  // Logical column n of fragment f is the hidden unit (n / 2)·kEach + 2f + n % 2, so that a lane's results are neighbours.
  for (int i = threadIdx.x; i < kG / 8 * steps * kWarpSize; i += kThreads) {
    const int lane = i % kWarpSize, step = i / kWarpSize % steps, fragment = i / kWarpSize / steps;
    const int n = lane / 4, k = n / 2 * H::kEach + 2 * fragment + n % 2;
    uint32_t words[2] = {};
    for (int j = 0; j < 4; ++j) {
      const int o = step * 16 + lane % 4 * 2 + j % 2 + j / 2 * 8;
      if (o < p.O && k < p.G) words[j / 2] |= uint32_t{p.w2[o * p.G + k].bits} << (16 * (j % 2));
    }
    shared.weights[i] = {words[0], words[1]};
  }
  for (int i = threadIdx.x; i < kTokens * (kMaxOutputs + kPad); i += kThreads) shared.dout[0][i] = bf16(0.0f);
  const float scale = scale_of(p.scale, static_cast<float>(p.constant_scale));
  __syncthreads();

  float sums[kColumns][kMaxSteps][4] = {};  // S: rows = outputs, columns = hidden units
  float dout_sums[kMaxSteps][4] = {};       // s, in every column; of warp 0 alone
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first = tile * kTokens;
    const int tokens = static_cast<int>(min(int64_t{kTokens}, p.N - first));
    load_dout(shared.dout, p.dout + first * p.O, tokens * p.O, p.O);
    __syncthreads();

    // dout · w2 of the warp's 16 tokens
    float gradient[kG / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kMaxSteps; ++step) {
      if (step >= steps) break;
      const bf16* row = &shared.dout[at.warp * kWarpTokens + at.group][step * 16 + at.thread * 2];
      constexpr int kEightRows = 8 * (kMaxOutputs + kPad);
      const uint32_t a[4] = {word_at(row), word_at(row + kEightRows), word_at(row + 8), word_at(row + kEightRows + 8)};
#pragma unroll
      for (int fragment = 0; fragment < kG / 8; ++fragment) {
        const uint2 b = shared.weights[(fragment * steps + step) * kWarpSize + at.lane];
        ptx::mma_m16n8k16_bf16(gradient[fragment], a, b.x, b.y);
      }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.warp * kWarpTokens + at.group + 8 * half;
#pragma unroll
      for (int v = 0; v < H::kVecs; ++v) {
        const int k = at.thread * H::kEach + v * kVec;
        const bool inside = row < tokens && k < p.G;
        const int64_t offset = (first + row) * p.G + k;
        float x[kVec] = {}, dx[kVec];
        if (inside) load8(p.hidden + offset, x);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          dx[j] = gradient[(v * kVec + j) / 2][half * 2 + j % 2] * scale * gelu_derivative(x[j]);
          x[j] *= normal_cdf(x[j]);
        }
        if (inside) store8(p.dhidden + offset, dx);
        store8(&shared.activated[row][k], x);
      }
    }
    __syncthreads();

    // S += doutᵀ · gelu(hidden), 32 tokens at a time
#pragma unroll
    for (int token = 0; token < kTokens; token += 32) {
      uint32_t b[kColumns][4];  // both halves of the first and of the second 16 tokens
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        ptx::ldmatrix_x4_trans(b[c], shared_address(&shared.activated[token + at.lane][(at.warp + c * kWarps) * 8]));
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int step = 0; step < kMaxSteps; ++step) {
          if (step >= steps) break;
          uint32_t a[4];
          const int row = token + part * 16 + at.lane % 8 + at.lane / 16 * 8, column = step * 16 + at.lane / 8 % 2 * 8;
          ptx::ldmatrix_x4_trans(a, shared_address(&shared.dout[row][column]));
#pragma unroll
          for (int c = 0; c < kColumns; ++c) ptx::mma_m16n8k16_bf16(sums[c][step], a, b[c][2 * part], b[c][2 * part + 1]);
          constexpr uint32_t kOnes = 0x3f803f80;
          if (at.warp == 0) ptx::mma_m16n8k16_bf16(dout_sums[step], a, kOnes, kOnes);
        }
      }
    }
    __syncthreads();
  }

  // scratch: (parts, O·G + O)
  float* partial = p.scratch + static_cast<int64_t>(blockIdx.x) * (p.O * p.G + p.O);
#pragma unroll
  for (int step = 0; step < kMaxSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int o = step * 16 + at.group + i / 2 * 8;
      if (o >= p.O) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int k = (at.warp + c * kWarps) * 8 + at.thread * 2 + i % 2;
        if (k < p.G) partial[o * p.G + k] = sums[c][step][i];
      }
      if (at.warp == 0 && at.thread == 0 && i % 2 == 0) partial[p.O * p.G + o] = dout_sums[step][i];
    }
  }
}

// Without a net: partial sums of dout alone. Threads are as many as a whole number of tokens has outputs, so each sees one column.
__global__ void __launch_bounds__(kThreads) bias_kernel(const GateNetBackward<bf16> p, int64_t tiles) {
  __shared__ float partials[kThreads];
  const int active = kThreads / p.O * p.O;
  float sum = 0;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t end = min((tile + 1) * kTokens, p.N) * p.O;
    if (threadIdx.x >= active) continue;
    for (int64_t i = tile * kTokens * p.O + threadIdx.x; i < end; i += active) sum += static_cast<float>(p.dout[i]);
  }
  partials[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= p.O) return;
  float total = 0;
  for (int i = threadIdx.x; i < active; i += p.O) total += partials[i];
  p.scratch[static_cast<int64_t>(blockIdx.x) * p.O + threadIdx.x] = total;
}

// totals (size) = Σ_parts scratch (parts, size);   dw2, dbias += scale·totals. weights: how many of `size` are dw2's.
constexpr int kSumColumns = 32, kSumRows = 8;
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    totals_kernel(const GateNetBackward<bf16> p, float* totals, int parts, int size, int weights) {
  __shared__ float shared[kSumRows][kSumColumns];
  const int i = blockIdx.x * kSumColumns + threadIdx.x;
  float sum = 0;
  if (i < size) {
#pragma unroll 4
    for (int part = threadIdx.y; part < parts; part += kSumRows) sum += p.scratch[static_cast<int64_t>(part) * size + i];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || i >= size) return;
  sum = shared[0][threadIdx.x];
#pragma unroll
  for (int y = 1; y < kSumRows; ++y) sum += shared[y][threadIdx.x];
  totals[i] = sum;
  (i < weights ? p.dw2[i] : p.dbias[i - weights]) += sum * scale_of(p.scale, static_cast<float>(p.constant_scale));
}

__global__ void __launch_bounds__(kThreads)
    scale_kernel(const GateNetBackward<bf16> p, const float* totals, int size, int weights) {
  __shared__ float partials[kThreads / kWarpSize];
  float sum = 0;
  for (int i = threadIdx.x; i < size; i += kThreads)
    sum += totals[i] * static_cast<float>(i < weights ? p.w2[i] : p.bias[i - weights]);
  sum = block_sum<kThreads>(sum, partials);
  if (threadIdx.x == 0) *p.dscale += sum;
}

template <class Args>
void check_args(const char* op, const Args& args) {
  require((args.w1 == nullptr) == (args.w2 == nullptr), op, ": w1 and w2 come together");
  require(args.N > 0 && args.O > 0 && args.O <= kMaxOutputs, op, ": N = ", args.N, ", O = ", args.O, "; O must be 1 to ",
          kMaxOutputs);
  if (args.w1 == nullptr) return;
  require(args.C > 0 && args.C % kVec == 0 && args.G > 0 && args.G % kVec == 0 && args.G <= kMaxHidden, op, ": C = ", args.C,
          ", G = ", args.G, "; both must be multiples of 8, G up to ", kMaxHidden);
  require_aligned16(op, "inp", args.inp);
  require_aligned16(op, "hidden", args.hidden);
  require_aligned16(op, "w1", args.w1);
  require_aligned16(op, "w2", args.w2);
}

template <int kG>
void launch_backward(const char* op, const GateNetBackward<bf16>& args, int64_t parts, int64_t tiles, const CudaExec& exec) {
  constexpr int kBytes = sizeof(BackwardShared<kG>);
  allow_dynamic_smem(backward_kernel<kG>, kBytes, op);
  backward_kernel<kG><<<grid_size(parts, op), kThreads, kBytes, exec.stream>>>(args, tiles);
}

}  // namespace

void gate_net_forward(const GateNetForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "gate_net_forward";
  check_args(kOp, args);
  require_aligned16(kOp, "out", args.out);
  if (args.w1 == nullptr) {
    constant_kernel<<<grid_size(ceil_div(args.N * args.O, kThreads), kOp), kThreads, 0, exec.stream>>>(args);
  } else {
    project(args.hidden, args.inp, args.w1, nullptr, nullptr, {.N = args.N, .K = args.C, .O = args.G}, exec);
    constexpr int kBlocksPerSm = 4;
    const int64_t tiles = ceil_div(args.N, kTokens), blocks = std::min<int64_t>(tiles, int64_t{exec.num_sms} * kBlocksPerSm);
    const auto kernel = args.G <= 64 ? forward_kernel<64> : forward_kernel<kMaxHidden>;
    kernel<<<grid_size(blocks, kOp), kThreads, 0, exec.stream>>>(args, tiles);
  }
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C, ", G = ", args.G, ", O = ", args.O);
}

void gate_net_backward(const GateNetBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "gate_net_backward";
  check_args(kOp, args);
  require_aligned16(kOp, "dout", args.dout);
  const int64_t parts = gate_net_parts(args.N), tiles = ceil_div(args.N, kTokens);
  const bool net = args.w1 != nullptr;
  const int weights = net ? args.O * args.G : 0, size = weights + args.O;
  if (!net) {
    bias_kernel<<<grid_size(parts, kOp), kThreads, 0, exec.stream>>>(args, tiles);
  } else {
    require_aligned16(kOp, "dhidden", args.dhidden);
    require_aligned16(kOp, "dinp", args.dinp);
    if (args.G <= 64) {
      launch_backward<64>(kOp, args, parts, tiles, exec);
    } else {
      launch_backward<kMaxHidden>(kOp, args, parts, tiles, exec);
    }
  }
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C, ", G = ", args.G, ", O = ", args.O);

  float* totals = args.scratch + parts * size;
  totals_kernel<<<grid_size(ceil_div(size, kSumColumns), kOp), dim3(kSumColumns, kSumRows), 0, exec.stream>>>(
      args, totals, static_cast<int>(parts), size, weights);
  if (args.dscale != nullptr) scale_kernel<<<1, kThreads, 0, exec.stream>>>(args, totals, size, weights);
  check_launch(kOp, ": adding ", parts, " parts");
  if (!net) return;

  project_weight_grad(args.dw1, args.dhidden, args.inp, {.N = args.N, .K = args.C, .O = args.G}, exec);
  gemm({.d = args.dinp,
        .a = args.dhidden,
        .b = args.w1,
        .c = args.accumulate ? args.dinp : nullptr,
        .M = args.N,
        .N = args.C,
        .K = args.G,
        .beta = args.accumulate ? 1.0f : 0.0f},
       exec);
}

}  // namespace speedrun::kernels

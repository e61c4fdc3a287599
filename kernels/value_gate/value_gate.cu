// Gates of value embeddings: gate[t,h] = 2·σ(w[h]·(inp[t][:P], embed[t][:P])).
// Backward, with dz = dgate·gate·(1 − gate/2):  dinp[:P] += dz·w[:, :P];  dembed[:P] += dz·w[:, P:];  dw += dzᵀ·(inp, embed).
// Layout    inp, embed (N, C) row-major, C % 8 == 0, 16-byte aligned: a token's first 8 or 16 channels are one or two loads.
// Work      a thread per token, weights in shared memory. Backward: a block takes a part of the tokens, 128 at a time; each warp
//           lays its 32 tokens' dz and channels in shared memory, and its lanes then sum the weights' gradients over them. A
//           second kernel adds the parts, a warp per weight.
// Traffic   a sector (32 bytes) of each row is read, backward twice that, and as much written; gates 2·H bytes.
// Numerics  FP32, one rounding at the stores. Tokens, warps and parts are added in an order that N alone fixes.
#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/value_gate/value_gate.h"
#include "kernels/value_gate/value_gate_parts.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = kValueGateTile;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxHeads = 32, kMaxChannels = 16;

// The first P channels of a row, as kVecs vectors; the rest of them are zeros, whatever the row holds there.
template <int kVecs>
struct Channels {
  float x[kVecs * kVec];

  __device__ void load(const bf16* row, int P) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float values[kVec];
      load8(row + i * kVec, values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[i * kVec + j] = i * kVec + j < P ? values[j] : 0.0f;
    }
  }
  // row[c] += x[c] for c < P; the other channels keep their bits.
  __device__ void add_to(bf16* row, int P) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      uint4 raw = load16(row + i * kVec);
      float values[kVec];
      unpack8(raw, values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[j] += x[i * kVec + j];
      const uint4 sums = pack8(values);
      const auto select = [&](uint32_t& kept, uint32_t sum, int first) {
        if (first < P) kept = (kept & 0xffff0000u) | (sum & 0xffffu);
        if (first + 1 < P) kept = (kept & 0xffffu) | (sum & 0xffff0000u);
      };
      select(raw.x, sums.x, i * kVec);
      select(raw.y, sums.y, i * kVec + 2);
      select(raw.z, sums.z, i * kVec + 4);
      select(raw.w, sums.w, i * kVec + 6);
      store16(row + i * kVec, raw);
    }
  }
};

// Weights in shared memory, (H, 2, kVecs·8) floats: those of a head's inp channels, then those of its embed channels, padded with
// zeros. By the whole block.
template <int kVecs>
__device__ __forceinline__ void load_weights(float* shared, const bf16* weight, int H, int P) {
  constexpr int kPadded = kVecs * kVec;
  for (int i = threadIdx.x; i < H * 2 * kPadded; i += kThreads) {
    const int row = i / kPadded, c = i % kPadded;  // rows of P weights
    shared[i] = c < P ? static_cast<float>(weight[row * P + c]) : 0.0f;
  }
  __syncthreads();
}

template <int kVecs>
__global__ void __launch_bounds__(kThreads) value_gate_forward_kernel(const ValueGateForward<bf16> p) {
  constexpr int kPadded = kVecs * kVec;
  __shared__ __align__(16) float weights[kMaxHeads * 2 * kPadded];
  load_weights<kVecs>(weights, p.weight, p.H, p.P);
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= p.N) return;
  Channels<kVecs> inp, embed;
  inp.load(p.inp + token * p.C, p.P);
  embed.load(p.embed + token * p.C, p.P);
  for (int h = 0; h < p.H; ++h) {
    const float* w = weights + h * 2 * kPadded;
    float z = 0;
#pragma unroll
    for (int c = 0; c < kPadded; ++c) z += w[c] * inp.x[c];
#pragma unroll
    for (int c = 0; c < kPadded; ++c) z += w[kPadded + c] * embed.x[c];
    p.gate[token * p.H + h] = bf16(2.0f / (1.0f + expf(-z)));
  }
}

// Of one warp in backward: its tokens' dz (32, H) and channels (32, 2P), rows padded to an odd length against bank conflicts, and
// its sums of the weights' gradients (H, 2P).
struct WarpShared {
  float *dz, *channels, *sums;
  int dz_stride, channels_stride;

  __host__ __device__ static int floats(int H, int P) { return kWarpSize * ((H | 1) + 2 * P + 1) + H * 2 * P; }
  __device__ WarpShared(float* base, int H, int P)
      : dz(base + threadIdx.x / kWarpSize * floats(H, P)),
        channels(dz + kWarpSize * (H | 1)),
        sums(channels + kWarpSize * (2 * P + 1)),
        dz_stride(H | 1),
        channels_stride(2 * P + 1) {}
};

// One token: dinp and dembed; leaves dz and the channels in shared memory.
template <int kVecs>
__device__ __forceinline__ void backward_token(const ValueGateBackward<bf16>& p, int64_t token, const float* weights,
                                               const WarpShared& shared) {
  constexpr int kPadded = kVecs * kVec;
  float* dz = shared.dz + threadIdx.x % kWarpSize * shared.dz_stride;
  float* channels = shared.channels + threadIdx.x % kWarpSize * shared.channels_stride;
  Channels<kVecs> inp, embed, dinp{}, dembed{};
  inp.load(p.inp + token * p.C, p.P);
  embed.load(p.embed + token * p.C, p.P);
  for (int h = 0; h < p.H; ++h) {
    const float gate = static_cast<float>(p.gate[token * p.H + h]);
    dz[h] = static_cast<float>(p.dgate[token * p.H + h]) * gate * (1.0f - 0.5f * gate);
    const float* w = weights + h * 2 * kPadded;
#pragma unroll
    for (int c = 0; c < kPadded; ++c) {
      dinp.x[c] += dz[h] * w[c];
      dembed.x[c] += dz[h] * w[kPadded + c];
    }
  }
#pragma unroll
  for (int c = 0; c < kPadded; ++c) {
    if (c >= p.P) continue;
    channels[c] = inp.x[c];
    channels[p.P + c] = embed.x[c];
  }
  dinp.add_to(p.dinp + token * p.C, p.P);
  dembed.add_to(p.dembed + token * p.C, p.P);
}

// scratch: (H·2P, parts).
template <int kVecs>
__global__ void __launch_bounds__(kThreads) value_gate_backward_kernel(const ValueGateBackward<bf16> p, int64_t part_rows) {
  extern __shared__ __align__(16) float shared_memory[];
  constexpr int kPadded = kVecs * kVec;
  float* weights = shared_memory;
  float* warps = weights + p.H * 2 * kPadded;
  const WarpShared shared(warps, p.H, p.P);
  const int lane = threadIdx.x % kWarpSize, num_weights = p.H * 2 * p.P;
  for (int i = lane; i < num_weights; i += kWarpSize) shared.sums[i] = 0;
  load_weights<kVecs>(weights, p.weight, p.H, p.P);

  const int64_t end = min(p.N, (blockIdx.x + int64_t{1}) * part_rows);
  for (int64_t first = blockIdx.x * part_rows + threadIdx.x / kWarpSize * kWarpSize; first < end; first += kThreads) {
    const int tokens = static_cast<int>(min(int64_t{kWarpSize}, end - first));
    if (lane < tokens) backward_token<kVecs>(p, first + lane, weights, shared);
    __syncwarp();
    for (int i = lane; i < num_weights; i += kWarpSize) {
      const float* dz = shared.dz + i / (2 * p.P);
      const float* channels = shared.channels + i % (2 * p.P);
      float sum = shared.sums[i];
#pragma unroll 8
      for (int token = 0; token < tokens; ++token) sum += dz[token * shared.dz_stride] * channels[token * shared.channels_stride];
      shared.sums[i] = sum;
    }
    __syncwarp();
  }

  __syncthreads();
  for (int i = threadIdx.x; i < num_weights; i += kThreads) {
    const float* sums = warps + kWarpSize * (shared.dz_stride + shared.channels_stride) + i;
    float sum = sums[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += sums[w * WarpShared::floats(p.H, p.P)];
    p.scratch[static_cast<int64_t>(i) * gridDim.x + blockIdx.x] = sum;
  }
}

// dweight[i] += Σ_parts scratch (·, parts), a warp each.
__global__ void __launch_bounds__(kThreads)
    add_value_gate_parts_kernel(float* dweight, const float* scratch, int num_weights, int parts) {
  const int i = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  if (i >= num_weights) return;
  float sum = 0;
#pragma unroll 8
  for (int part = threadIdx.x % kWarpSize; part < parts; part += kWarpSize) sum += scratch[static_cast<int64_t>(i) * parts + part];
  sum = warp_sum(sum);
  if (threadIdx.x % kWarpSize == 0) dweight[i] += sum;
}

template <class Args>
void check(const char* op, const Args& args) {
  require(args.N > 0 && args.H > 0 && args.H <= kMaxHeads && args.P > 0 && args.P <= kMaxChannels && args.P <= args.C &&
              args.C % kVec == 0,
          op, ": N = ", args.N, ", C = ", args.C, ", H = ", args.H, ", P = ", args.P, "; C must be a multiple of 8, H at most ",
          kMaxHeads, ", P at most ", kMaxChannels, " and C");
  require_aligned16(op, "inp", args.inp);
  require_aligned16(op, "embed", args.embed);
}

}  // namespace

void value_gate_forward(const ValueGateForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "value_gate_forward";
  check(kOp, args);
  const auto kernel = args.P <= kVec ? value_gate_forward_kernel<1> : value_gate_forward_kernel<2>;
  kernel<<<grid_size(ceil_div(args.N, kThreads), kOp), kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": N = ", args.N, ", H = ", args.H, ", P = ", args.P);
}

void value_gate_backward(const ValueGateBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "value_gate_backward";
  check(kOp, args);
  require_aligned16(kOp, "dinp", args.dinp);
  require_aligned16(kOp, "dembed", args.dembed);
  const int64_t parts = value_gate_parts(args.N);
  const int vecs = args.P <= kVec ? 1 : 2, num_weights = args.H * 2 * args.P;
  const auto kernel = vecs == 1 ? value_gate_backward_kernel<1> : value_gate_backward_kernel<2>;
  const int floats = args.H * 2 * vecs * kVec + kWarps * WarpShared::floats(args.H, args.P);
  const int shared_bytes = floats * static_cast<int>(sizeof(float));
  allow_dynamic_smem(kernel, shared_bytes, kOp);
  kernel<<<grid_size(parts, kOp), kThreads, shared_bytes, exec.stream>>>(args, value_gate_part_rows(args.N));
  add_value_gate_parts_kernel<<<grid_size(ceil_div(num_weights, kWarps), kOp), kThreads, 0, exec.stream>>>(
      args.dweight, args.scratch, num_weights, static_cast<int>(parts));
  check_launch(kOp, ": N = ", args.N, ", H = ", args.H, ", P = ", args.P);
}

}  // namespace speedrun::kernels

// Smear: out[t] = inp[t] + λ·s_t·inp[t−1], s_t = σ(Σ_{c < G} gate_weight[c]·inp[t][c]); out = inp at the first token of a row.
// Backward, with dot_t = Σ_C dout[t]·inp[t−1] (0 at the first token of a row) and da_t = λ·s_t·(1 − s_t)·dot_t:
//   dinp[t] = dout[t] + λ·s_{t+1}·dout[t+1] + da_t·gate_weight (the middle term not at the last token of a row)
//   dgate_weight += Σ_t da_t·inp[t];   dlambda += Σ_t s_t·dot_t
//
// Layout    row-major (N, C), 16-byte accesses: C % 8 == 0, pointers 16-byte aligned.
//
// Work      one warp a token; lane c of a warp holds channel c of the gate. Backward: the channels that take in da_t, a lane's
// first vector, wait in registers for the dot product; the rest is stored on the way. A block's kSmearPartRows tokens give one
// partial sum of each gradient; a second kernel adds them, one block a sum.
//
// Traffic   forward 4 bytes an element, backward 6; the neighbouring rows come from the caches.
//
// Numerics  FP32, one rounding at the store; sums in an order that depends on (N, C) alone: bitwise reproducible, on any GPU.
#include <cuda_runtime.h>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/smear/smear.h"
#include "kernels/smear/smear_parts.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
static_assert(kSmearMaxGate == kWarpSize);

// This lane's channel of a row's gate input; 0 beyond the gate.
__device__ __forceinline__ float gate_input(const bf16* inp, int lane, int G) {
  return lane < G ? static_cast<float>(inp[lane]) : 0.0f;
}

// σ(Σ weight·input) in every lane.
__device__ __forceinline__ float gate(float weight, float input) { return 1.0f / (1.0f + expf(-warp_sum(weight * input))); }

__global__ void __launch_bounds__(kThreads) smear_forward_kernel(const SmearForward<bf16> p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (t >= p.N) return;
  const bf16* inp = p.inp + t * p.C;
  bf16* out = p.out + t * p.C;
  const bool first = t % p.row_tokens == 0;
  // The first token has no token before it; its own row is read in place of one.
  const bf16* before = first ? inp : inp - p.C;
  float factor = static_cast<float>(*p.lambda) * gate(gate_input(p.gate_weight, lane, p.G), gate_input(inp, lane, p.G));
  if (first) factor = 0;
#pragma unroll 3
  for (int c = lane * kVec; c < p.C; c += kWarpSize * kVec) {
    const uint4 raw = load16(inp + c);
    if (first) {
      store16(out + c, raw);
      continue;
    }
    float x[kVec], y[kVec];
    unpack8(raw, x);
    load8(before + c, y);
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] += factor * y[j];
    store8(out + c, x);
  }
}

__global__ void __launch_bounds__(kThreads) smear_backward_kernel(const SmearBackward<bf16> p) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSmearPartRows;
  const int64_t end = min(begin + kSmearPartRows, p.N);
  const float lambda = static_cast<float>(*p.lambda), weight = gate_input(p.gate_weight, lane, p.G);
  float dweight = 0, dlambda = 0;

  for (int64_t t = begin + warp; t < end; t += kWarps) {
    const bool first = t % p.row_tokens == 0, last = (t + 1) % p.row_tokens == 0;
    const bf16* inp = p.inp + t * p.C;
    const bf16* dout = p.dout + t * p.C;
    bf16* dinp = p.dinp + t * p.C;
    const float input = gate_input(inp, lane, p.G);
    const float s = gate(weight, input);
    const float next_factor = last ? 0.0f : lambda * gate(weight, gate_input(inp + p.C, lane, p.G));

    float dot = 0, held[kVec] = {};
#pragma unroll 3
    for (int c = lane * kVec; c < p.C; c += kWarpSize * kVec) {
      const uint4 raw_dout = load16(dout + c);
      const uint4 raw_next = last ? uint4{0, 0, 0, 0} : load16(dout + p.C + c);
      const uint4 raw_before = first ? uint4{0, 0, 0, 0} : load16(inp - p.C + c);
      float d[kVec], next[kVec], before[kVec];
      unpack8(raw_dout, d);
      unpack8(raw_next, next);
      unpack8(raw_before, before);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        dot += d[j] * before[j];
        d[j] += next_factor * next[j];
      }
      if (c < kSmearMaxGate) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) held[j] = d[j];
      } else {
        store8(dinp + c, d);
      }
    }
    dot = warp_sum(dot);
    const float da = lambda * s * (1.0f - s) * dot;
    dweight += da * input;
    dlambda += s * dot;

    // Lanes 0 … 3 hold the gate's channels; the weights are in 32 lanes.
#pragma unroll
    for (int j = 0; j < kVec; ++j) held[j] += da * __shfl_sync(0xffffffffu, weight, lane * kVec + j);
    if (lane < kSmearMaxGate / kVec && lane * kVec < p.C) store8(dinp + lane * kVec, held);
  }

  // The block's sums, warps in ascending order -> scratch (kSmearSums, blocks).
  __shared__ float shared[kWarps][kSmearSums];
  shared[warp][lane] = dweight;
  if (lane == 0) shared[warp][kSmearMaxGate] = dlambda;
  __syncthreads();
  if (threadIdx.x >= kSmearSums) return;
  float sum = shared[0][threadIdx.x];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared[w][threadIdx.x];
  p.scratch[threadIdx.x * static_cast<int64_t>(gridDim.x) + blockIdx.x] = sum;
}

// Block c < G adds the partial sums of dgate_weight[c], block G those of dlambda.
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const SmearBackward<bf16> p, int64_t parts) {
  __shared__ float partials[kWarps];
  const bool is_lambda = static_cast<int>(blockIdx.x) == p.G;
  const float* scratch = p.scratch + (is_lambda ? kSmearMaxGate : static_cast<int>(blockIdx.x)) * parts;
  float sum = 0;
#pragma unroll 4
  for (int64_t part = threadIdx.x; part < parts; part += kThreads) sum += scratch[part];
  sum = block_sum<kThreads>(sum, partials);
  if (threadIdx.x == 0) *(is_lambda ? p.dlambda : p.dgate_weight + blockIdx.x) += sum;
}

void check_shape(const char* op, int64_t N, int64_t row_tokens, int C, int G) {
  require(N > 0 && C > 0 && C % kVec == 0 && row_tokens > 0 && N % row_tokens == 0, op, ": N = ", N, ", C = ", C,
          ", row_tokens = ", row_tokens, "; C must be a multiple of 8, N of row_tokens");
  require(G > 0 && G <= kSmearMaxGate && G <= C, op, ": the gate looks at ", G, " of ", C, " channels, expected 1 to ",
          kSmearMaxGate);
}

}  // namespace

void smear_forward(const SmearForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "smear_forward";
  check_shape(kOp, args.N, args.row_tokens, args.C, args.G);
  require_aligned16(kOp, "inp", args.inp);
  require_aligned16(kOp, "out", args.out);
  require(args.out != args.inp, kOp, ": out must not be inp");
  smear_forward_kernel<<<grid_size(ceil_div(args.N, kWarps), kOp), kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C);
}

void smear_backward(const SmearBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "smear_backward";
  check_shape(kOp, args.N, args.row_tokens, args.C, args.G);
  require_aligned16(kOp, "inp", args.inp);
  require_aligned16(kOp, "dout", args.dout);
  require_aligned16(kOp, "dinp", args.dinp);
  require(args.dinp != args.dout && args.dinp != args.inp, kOp, ": dinp must be neither dout nor inp");
  require(args.scratch != nullptr, kOp, ": needs scratch");
  const int64_t parts = smear_parts(args.N);
  smear_backward_kernel<<<grid_size(parts, kOp), kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C);
  add_parts_kernel<<<static_cast<unsigned>(args.G + 1), kThreads, 0, exec.stream>>>(args, parts);
  check_launch(kOp, ": adding partial sums, N = ", args.N);
}

}  // namespace speedrun::kernels

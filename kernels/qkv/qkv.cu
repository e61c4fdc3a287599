// Queries, keys and values on CUDA: one product, then one pass in place over the q and k thirds (RMS norm of each head +
// rotary).
// Layout    (N, 3C) row-major; a row is 2H heads of q and k, then v; D = C/H, D % 16 == 0, D <= 512.
// Work      a warp per token. A group of lanes holds a head: lane l has elements 8l … 8l+7 of its first half and the same of
//           its second half, so that a rotary pair is in one lane; 32/lanes heads at a time, with the token's cos and sin kept
//           in registers.
// Traffic   forward reads and writes 2·N·C elements; backward reads 4·N·C and writes 2·N·C.
// Numerics  FP32 between one load and one store; sums over a head by a fixed butterfly.
// Backward  y = R(x·rstd), R a rotation, so Σ dy·y is Σ of the same over unrotated values: dx = Rᵀ(rstd·(dy − y·mean(dy·y))),
//           which needs no normalised x and rotates once.
#include "kernels/base/column_sum_cuda.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/gemm/projection_cuda.h"
#include "kernels/qkv/qkv.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerBlock = kThreads / kWarpSize;

struct HeadPass {
  bf16* data;        // (N, 3C) forward: q and k, in place; backward: their gradients, in place
  const bf16* qkv;   // (N, 3C) backward: the final q and k
  float* rstd;       // (N, 2H) written forward, read backward; null: no norm
  const float* cos;  // (row_tokens, D/2) or null: no rotary
  const float* sin;
  int64_t N, row_tokens;
  int C, num_heads;  // num_heads = 2H: q and k heads are alike
  int D;
  float eps;
};

// The pair of vectors a lane holds of one head.
struct HalfPair {
  float first[kVec], second[kVec];
};

__device__ __forceinline__ HalfPair load_pair(const bf16* p, int half) {
  HalfPair x;
  load8(p, x.first);
  load8(p + half, x.second);
  return x;
}

// Direction +1 rotates, −1 rotates back.
template <int Direction>
__device__ __forceinline__ void rotate(HalfPair& x, const float (&cos)[kVec], const float (&sin)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float a = x.first[i], b = x.second[i], s = Direction * sin[i];
    x.first[i] = a * cos[i] + b * s;
    x.second[i] = b * cos[i] - a * s;
  }
}

__device__ __forceinline__ float dot(const HalfPair& x, const HalfPair& y) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum += x.first[i] * y.first[i] + x.second[i] * y.second[i];
  return sum;
}

// Lanes: per head, the power of two that holds D/16.
template <int Lanes, bool Backward>
__global__ void __launch_bounds__(kThreads) head_pass(const HeadPass p) {
  const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarpSize;
  if (token >= p.N) return;
  const int lane = threadIdx.x % kWarpSize, half = p.D / 2;
  const int offset = lane % Lanes * kVec;  // in the half
  const bool in_head = offset < half;

  float cos[kVec], sin[kVec];
  if (p.cos != nullptr && in_head) {
    const int64_t angle = token % p.row_tokens * half + offset;
    load8(p.cos + angle, cos);
    load8(p.sin + angle, sin);
  }

  const int64_t row = token * 3 * p.C;
#pragma unroll 2
  for (int first_head = 0; first_head < p.num_heads; first_head += kWarpSize / Lanes) {
    const int head = first_head + lane / Lanes;
    const bool active = in_head && head < p.num_heads;
    const int64_t at = row + int64_t{head} * p.D + offset;
    HalfPair x{};
    if (active) x = load_pair(p.data + at, half);
    if constexpr (!Backward) {
      if (p.rstd != nullptr) {
        const float mean_square = warp_sum<Lanes>(dot(x, x)) / static_cast<float>(p.D);
        const float rstd = rsqrtf(mean_square + p.eps);
        if (active && offset == 0) p.rstd[token * p.num_heads + head] = rstd;
#pragma unroll
        for (int i = 0; i < kVec; ++i) x.first[i] *= rstd, x.second[i] *= rstd;
      }
      if (p.cos != nullptr) rotate<1>(x, cos, sin);
    } else {
      if (p.rstd != nullptr) {
        HalfPair y{};
        if (active) y = load_pair(p.qkv + at, half);
        const float mean_dot = warp_sum<Lanes>(dot(x, y)) / static_cast<float>(p.D);
        const float rstd = active ? p.rstd[token * p.num_heads + head] : 0.0f;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          x.first[i] = rstd * (x.first[i] - y.first[i] * mean_dot);
          x.second[i] = rstd * (x.second[i] - y.second[i] * mean_dot);
        }
      }
      if (p.cos != nullptr) rotate<-1>(x, cos, sin);
    }
    if (active) {
      store8(p.data + at, x.first);
      store8(p.data + at + half, x.second);
    }
  }
}

template <int Lanes, bool Backward>
void launch(const HeadPass& pass, const CudaExec& exec) {
  head_pass<Lanes, Backward><<<grid_size(ceil_div(pass.N, kTokensPerBlock), "qkv"), kThreads, 0, exec.stream>>>(pass);
  check_launch("qkv: heads of N = ", pass.N, ", C = ", pass.C, ", D = ", pass.D);
}

template <bool Backward>
void run_head_pass(const HeadPass& pass, const CudaExec& exec) {
  if (pass.rstd == nullptr && pass.cos == nullptr) return;
  const int lanes = pass.D / 16;
  if (lanes <= 1) return launch<1, Backward>(pass, exec);
  if (lanes <= 2) return launch<2, Backward>(pass, exec);
  if (lanes <= 4) return launch<4, Backward>(pass, exec);
  if (lanes <= 8) return launch<8, Backward>(pass, exec);
  if (lanes <= 16) return launch<16, Backward>(pass, exec);
  launch<32, Backward>(pass, exec);
}

void check(int C, int H, int64_t row_tokens, bool rotary) {
  require(H > 0 && C % H == 0 && C / H % 16 == 0 && C / H <= 512, "qkv: C = ", C, ", H = ", H,
          ": the head width C/H must be a multiple of 16, at most 512");
  require(!rotary || row_tokens > 0, "qkv: rotary positions over rows of ", row_tokens, " tokens");
}

}  // namespace

void qkv_forward(const QkvForward<bf16>& args, const CudaExec& exec) {
  check(args.C, args.H, args.row_tokens, args.rotary_cos != nullptr);
  project(args.qkv, args.inp, args.weight, args.bias, nullptr, {.N = args.N, .K = args.C, .O = 3 * args.C}, exec);
  run_head_pass<false>({.data = args.qkv,
                        .qkv = nullptr,
                        .rstd = args.qk_rstd,
                        .cos = args.rotary_cos,
                        .sin = args.rotary_sin,
                        .N = args.N,
                        .row_tokens = args.row_tokens,
                        .C = args.C,
                        .num_heads = 2 * args.H,
                        .D = args.C / args.H,
                        .eps = static_cast<float>(args.eps)},
                       exec);
}

void qkv_backward(const QkvBackward<bf16>& args, const CudaExec& exec) {
  check(args.C, args.H, args.row_tokens, args.rotary_cos != nullptr);
  run_head_pass<true>({.data = args.dqkv,
                       .qkv = args.qkv,
                       .rstd = const_cast<float*>(args.qk_rstd),  // read only backward
                       .cos = args.rotary_cos,
                       .sin = args.rotary_sin,
                       .N = args.N,
                       .row_tokens = args.row_tokens,
                       .C = args.C,
                       .num_heads = 2 * args.H,
                       .D = args.C / args.H,
                       .eps = 0},
                      exec);
  const ProjectionSize size{.N = args.N, .K = args.C, .O = 3 * args.C};
  if (args.dbias) column_sum(args.dbias, args.dqkv, args.scratch, args.N, 3 * args.C, exec);
  project_weight_grad(args.dweight, args.dqkv, args.inp, size, exec);
  project_input_grad(args.dinp, args.dqkv, args.weight, nullptr, size, exec);
}

}  // namespace speedrun::kernels

// Weighted sum of residual-stream tensors:
//   out[t] = Σ_i f_i·g_i[t]·src_i[t]          f_i = scalar_i or σ(scalar_i);  g_i[t] = gate_i[t] + gate_add_i
// Backward, with dot_i[t] = Σ_C src_i·dout:
//   dsrc_i = f_i·g_i·dout (+ dsrc_i);   dgate_i = f_i·dot_i;   dscalar_i += f_i'·Σ_t g_i·dot_i
//
// Layout    row-major (N, C), 16-byte accesses: C % 8 == 0, pointers 16-byte aligned.
//
// Work      one warp a token; the number of terms is a template parameter. A lane's loads of all terms are issued together; what a
// term does not need is skipped by conditions that are the same for the whole grid. Terms that want no gradient, and the identity
// (factor 1, dsrc = dout), do not take part in backward. A block's kMixPartRows tokens give one partial sum of each dscalar; a
// second kernel of one block adds them.
//
// Traffic   forward num_terms + 1 tensors of N·C. Backward dout, the src's with a gate or scalar gradient, the dsrc's (twice where
// they accumulate): λr·x + λp·attn + gate·x0 + gate·bigram 5 forward and 11 backward; N = 49,152, C = 768: 75.5 MB each.
//
// Numerics  FP32, one rounding at the store; sums in an order that depends on (N, C) alone: bitwise reproducible, on any GPU.
#include <cuda_runtime.h>

#include <type_traits>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/stream_mix/stream_mix.h"
#include "kernels/stream_mix/stream_mix_parts.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

__device__ __forceinline__ float scalar_factor(const MixTerm<bf16>& term, float scalar) {
  return term.sigmoid ? 1.0f / (1.0f + expf(-scalar)) : scalar;
}

// f_i of every term; the loads come first, so that their latencies overlap.
template <int kTerms>
__device__ __forceinline__ void scalar_factors(const MixTerm<bf16> (&terms)[kMaxMixTerms], float (&factors)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i) factors[i] = terms[i].scalar != nullptr ? static_cast<float>(*terms[i].scalar) : 1.0f;
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    if (terms[i].scalar != nullptr) factors[i] = scalar_factor(terms[i], factors[i]);
  }
}

// g_i[t] of every term.
template <int kTerms>
__device__ __forceinline__ void gate_factors(const MixTerm<bf16> (&terms)[kMaxMixTerms], int64_t t, float (&gates)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i)
    gates[i] = terms[i].gate != nullptr ? static_cast<float>(terms[i].gate[t * terms[i].gate_stride]) : 0.0f;
#pragma unroll
  for (int i = 0; i < kTerms; ++i) gates[i] += static_cast<float>(terms[i].gate_add);
}

// kVecs: vectors of 8 channels of each term that a lane has in flight; longer rows take more turns.
template <int kTerms, int kVecs>
__global__ void __launch_bounds__(kThreads) mix_forward_kernel(const __grid_constant__ StreamMixForward<bf16> p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (t >= p.N) return;
  const int num_vecs = p.C / kVec;
  const int64_t row = t * p.C;
  float factors[kTerms], gates[kTerms];
  scalar_factors(p.terms, factors);
  gate_factors(p.terms, t, gates);
#pragma unroll
  for (int i = 0; i < kTerms; ++i) factors[i] *= gates[i];

  for (int first = 0; first < num_vecs; first += kVecs * kWarpSize) {
    uint4 raw[kVecs][kTerms];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int vec = first + v * kWarpSize + lane;
      if (vec >= num_vecs) continue;
#pragma unroll
      for (int i = 0; i < kTerms; ++i) raw[v][i] = load16(p.terms[i].src + row + vec * kVec);
    }
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int vec = first + v * kWarpSize + lane;
      if (vec >= num_vecs) continue;
      float sum[kVec] = {};
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        float x[kVec];
        unpack8(raw[v][i], x);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[j] += factors[i] * x[j];
      }
      store8(p.out + row + vec * kVec, sum);
    }
  }
}

__device__ __forceinline__ bool wants_dot(const MixTermGrad<bf16>& grad) {
  return grad.dscalar != nullptr || grad.dgate != nullptr;
}
__device__ __forceinline__ bool accumulates(const MixTermGrad<bf16>& grad) { return grad.dsrc != nullptr && grad.accumulate; }

// Blocks per multiprocessor that the registers must allow.
template <int kTerms>
constexpr int kBackwardBlocks = kTerms <= 4 ? 3 : 2;

template <int kTerms>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<kTerms>)
    mix_backward_kernel(const __grid_constant__ StreamMixBackward<bf16> p) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kMixPartRows;
  const int64_t end = min(begin + kMixPartRows, p.N);
  float scalars[kTerms], dfactors[kTerms] = {};
  scalar_factors(p.terms, scalars);

  for (int64_t t = begin + warp; t < end; t += kWarps) {
    const int64_t row = t * p.C;
    float gates[kTerms], dots[kTerms] = {};
    gate_factors(p.terms, t, gates);

    // No unrolling: it costs registers, thus warps, and all terms' loads are in flight as it is.
#pragma unroll 1
    for (int c = lane * kVec; c < p.C; c += kWarpSize * kVec) {
      uint4 raw_src[kTerms], raw_dsrc[kTerms];
      const uint4 raw_dout = load16(p.dout + row + c);
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        if (wants_dot(p.grads[i])) raw_src[i] = load16(p.terms[i].src + row + c);
        if (accumulates(p.grads[i])) raw_dsrc[i] = load16(p.grads[i].dsrc + row + c);
      }
      float dout[kVec];
      unpack8(raw_dout, dout);
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        if (wants_dot(p.grads[i])) {
          float src[kVec];
          unpack8(raw_src[i], src);
#pragma unroll
          for (int j = 0; j < kVec; ++j) dots[i] += src[j] * dout[j];
        }
        if (p.grads[i].dsrc == nullptr) continue;
        const float factor = scalars[i] * gates[i];
        float dsrc[kVec] = {};
        if (accumulates(p.grads[i])) unpack8(raw_dsrc[i], dsrc);
#pragma unroll
        for (int j = 0; j < kVec; ++j) dsrc[j] += factor * dout[j];
        store8(p.grads[i].dsrc + row + c, dsrc);
      }
    }

    // All terms, wanted or not (0): without conditions the sums' steps overlap.
#pragma unroll
    for (int i = 0; i < kTerms; ++i) dots[i] = warp_sum(dots[i]);
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      dfactors[i] += gates[i] * dots[i];
      if (lane == 0 && p.grads[i].dgate != nullptr) p.grads[i].dgate[t * p.terms[i].gate_stride] = bf16(scalars[i] * dots[i]);
    }
  }

  // The block's sums of Σ_t g_i·dot_i, warps in ascending order -> scratch (kTerms, blocks).
  bool any = false;
#pragma unroll
  for (int i = 0; i < kTerms; ++i) any = any || p.grads[i].dscalar != nullptr;
  if (!any) return;
  __shared__ float shared[kTerms][kWarps];
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) shared[i][warp] = dfactors[i];
  }
  __syncthreads();
  if (threadIdx.x >= kTerms) return;
  float sum = shared[threadIdx.x][0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared[threadIdx.x][w];
  p.scratch[threadIdx.x * static_cast<int64_t>(gridDim.x) + blockIdx.x] = sum;
}

// Adds the partial sums to the dscalars: a group of warps a term, then one thread term after term, so that two terms may share one.
constexpr int kGroupWarps = 5;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;

__global__ void __launch_bounds__(kMaxMixTerms* kGroupThreads)
    add_dscalars_kernel(const __grid_constant__ StreamMixBackward<bf16> p, int64_t parts) {
  __shared__ float shared[kMaxMixTerms * kGroupWarps];
  const int term_idx = threadIdx.x / kGroupThreads;
  float sum = 0;
  if (p.grads[term_idx].dscalar != nullptr) {
#pragma unroll 8
    for (int64_t part = threadIdx.x % kGroupThreads; part < parts; part += kGroupThreads) sum += p.scratch[term_idx * parts + part];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < p.num_terms; ++i) {
    if (p.grads[i].dscalar == nullptr) continue;
    float dfactor = shared[i * kGroupWarps];
#pragma unroll
    for (int w = 1; w < kGroupWarps; ++w) dfactor += shared[i * kGroupWarps + w];
    const float factor = scalar_factor(p.terms[i], static_cast<float>(*p.terms[i].scalar));
    *p.grads[i].dscalar += p.terms[i].sigmoid ? dfactor * factor * (1.0f - factor) : dfactor;
  }
}

// Calls launch(std::integral_constant<int, num_terms>).
template <int kTerms = 1, class Launch>
void dispatch_terms(int num_terms, const Launch& launch) {
  if (num_terms == kTerms) return launch(std::integral_constant<int, kTerms>{});
  if constexpr (kTerms < kMaxMixTerms) dispatch_terms<kTerms + 1>(num_terms, launch);
}

void check_terms(const char* op, const MixTerm<bf16>* terms, int num_terms, int64_t N, int C) {
  require(num_terms > 0 && num_terms <= kMaxMixTerms, op, ": ", num_terms, " terms, expected 1 to ", kMaxMixTerms);
  require(N > 0 && C > 0 && C % kVec == 0, op, ": N = ", N, ", C = ", C, "; C must be a multiple of 8");
  for (int i = 0; i < num_terms; ++i) {
    require(terms[i].src != nullptr, op, ": term ", i, " has no src");
    require_aligned16(op, "src", terms[i].src);
  }
}

}  // namespace

void stream_mix_forward(const StreamMixForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "stream_mix_forward";
  check_terms(kOp, args.terms, args.num_terms, args.N, args.C);
  require_aligned16(kOp, "out", args.out);
  dispatch_terms(args.num_terms, [&](auto terms) {
    mix_forward_kernel<decltype(terms)::value, 3><<<grid_size(ceil_div(args.N, kWarps), kOp), kThreads, 0, exec.stream>>>(args);
  });
  check_launch(kOp, ": ", args.num_terms, " terms, N = ", args.N, ", C = ", args.C);
}

void stream_mix_backward(const StreamMixBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "stream_mix_backward";
  check_terms(kOp, args.terms, args.num_terms, args.N, args.C);
  require_aligned16(kOp, "dout", args.dout);

  StreamMixBackward<bf16> wanted = args;
  for (MixTermGrad<bf16>& grad : wanted.grads) grad = {};
  wanted.num_terms = 0;
  bool any_dscalar = false;
  for (int i = 0; i < args.num_terms; ++i) {
    const MixTerm<bf16>& term = args.terms[i];
    MixTermGrad<bf16> grad = args.grads[i];
    require_aligned16(kOp, "dsrc", grad.dsrc);
    require(grad.dgate == nullptr || term.gate != nullptr, kOp, ": term ", i, " wants the gradient of a gate it does not have");
    require(grad.dscalar == nullptr || term.scalar != nullptr, kOp, ": term ", i,
            " wants the gradient of a scalar it does not have");
    const bool identity = term.scalar == nullptr && term.gate == nullptr && term.gate_add == 1;
    if (identity && grad.dsrc == args.dout && !grad.accumulate) grad.dsrc = nullptr;
    if (grad.dsrc == nullptr && grad.dscalar == nullptr && grad.dgate == nullptr) continue;
    any_dscalar = any_dscalar || grad.dscalar != nullptr;
    wanted.terms[wanted.num_terms] = term;
    wanted.grads[wanted.num_terms] = grad;
    ++wanted.num_terms;
  }
  if (wanted.num_terms == 0) return;
  require(!any_dscalar || args.scratch != nullptr, kOp, ": the gradient of a scalar needs scratch");

  const int64_t parts = stream_mix_parts(args.N);
  dispatch_terms(wanted.num_terms, [&](auto terms) {
    mix_backward_kernel<decltype(terms)::value><<<grid_size(parts, kOp), kThreads, 0, exec.stream>>>(wanted);
  });
  check_launch(kOp, ": ", args.num_terms, " terms, N = ", args.N, ", C = ", args.C);
  if (!any_dscalar) return;
  add_dscalars_kernel<<<1, kMaxMixTerms * kGroupThreads, 0, exec.stream>>>(wanted, parts);
  check_launch(kOp, ": adding the gradients of scalars, N = ", args.N);
}

}  // namespace speedrun::kernels

#pragma once
// Device code that the head's kernels share: soft-caps, the terms of a token's loss, and log2 Σ 2^z.
#include <cfloat>
#include <string>
#include <type_traits>

#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/error.h"
#include "kernels/head/head_loss.h"
#include "kernels/ptx/ex2.cuh"
#include "kernels/ptx/min_nan.cuh"
#include "kernels/ptx/rcp.cuh"
#include "kernels/ptx/rsqrt.cuh"

namespace speedrun::kernels {

inline constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// Capped logit in units of log2 (z·log2 e) and dz/dlogit.
struct Capped {
  float z;
  float slope;
};

// 0 < z < 33.2 in units of log2: sums of 2^z need no maximum.
template <Softcap kCap>
inline constexpr bool kBounded = kCap == Softcap::sigmoid;

// Two at once: σ = 1/(1 + e) of both takes one reciprocal, of (1 + e0)·(1 + e1); the special-function unit is the narrowest place
// of these kernels. A NaN of one reaches the other, which is of the same row.
template <Softcap kCap>
__device__ __forceinline__ void cap_pair(float x0, float x1, float c, Capped& out0, Capped& out1) {
  if constexpr (kCap == Softcap::none) {
    out0 = {x0 * kLog2E, 1.0f};
    out1 = {x1 * kLog2E, 1.0f};
  } else if constexpr (kCap == Softcap::rational) {
    const float cr0 = c * ptx::rsqrt_approx_ftz(fmaf(x0, x0, c * c)), cr1 = c * ptx::rsqrt_approx_ftz(fmaf(x1, x1, c * c));
    out0 = {kLog2E * x0 * cr0, cr0 * cr0 * cr0};
    out1 = {kLog2E * x1 * cr1, cr1 * cr1 * cr1};
  } else {
    // e is at most 2^60, so that 1 − σ = e·σ holds without cancellation for large x, without inf·0 for very negative x, and the
    // product stays finite.
    constexpr float kScale = -kLog2E / 7.5f, kLargest = 0x1p60f;
    const float e0 = ptx::min_nan(ptx::ex2_approx_ftz(fmaf(x0, kScale, 5.0f * kScale)), kLargest);
    const float e1 = ptx::min_nan(ptx::ex2_approx_ftz(fmaf(x1, kScale, 5.0f * kScale)), kLargest);
    const float d0 = 1.0f + e0, d1 = 1.0f + e1, reciprocal = ptx::rcp_approx_ftz(d0 * d1);
    const float sigma0 = reciprocal * d1, sigma1 = reciprocal * d0;
    out0 = {23.0f * kLog2E * sigma0, 23.0f / 7.5f * (e0 * sigma0) * sigma0};
    out1 = {23.0f * kLog2E * sigma1, 23.0f / 7.5f * (e1 * sigma1) * sigma1};
  }
}

template <Softcap kCap>
__device__ __forceinline__ Capped cap(float x, float c) {
  Capped first, second;
  cap_pair<kCap>(x, x, c, first, second);
  return first;
}

template <Softcap kCap>
__device__ __forceinline__ void cap8(const float (&x)[kVec], float c, Capped (&out)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; i += 2) cap_pair<kCap>(x[i], x[i + 1], c, out[i], out[i + 1]);
}

// Σ 2^z of what a thread has seen, as Σ 2^(z − max) and max; bounded: max is 0.
template <Softcap kCap>
struct RunningSum {
  float max = kBounded<kCap> ? 0.0f : -FLT_MAX;
  float sum = 0;

  __device__ __forceinline__ void add(const Capped (&capped)[kVec]) {
    if constexpr (!kBounded<kCap>) {
      float new_max = max;
#pragma unroll
      for (int i = 0; i < kVec; ++i) new_max = fmaxf(new_max, capped[i].z);
      sum *= ptx::ex2_approx_ftz(max - new_max);
      max = new_max;
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum += ptx::ex2_approx_ftz(kBounded<kCap> ? capped[i].z : capped[i].z - max);
  }
};

// The targets of the next tokens and the prefix: head_loss.h's k = 0 … kMaxLossTerms−1, then the prefix.
inline constexpr int kTermSlots = kMaxLossTerms + 1;

struct LossTerms {
  const int32_t* targets;            // (N), of all tokens: a later target may lie in the next chunk
  const LossWeights<bf16>* weights;  // null: the next token alone, weight 1
  const int32_t* prefix;             // (V) or null
  int64_t row_tokens;
  int count;

  // The target that a slot of a token hangs on, −1: none. One load, so that it can be asked for early.
  __device__ __forceinline__ int target(int64_t token, int slot) const {
    if (slot == 0) return targets[token];
    if (weights == nullptr) return -1;
    if (slot == kMaxLossTerms) return prefix != nullptr ? targets[token] : -1;
    return slot < count && token % row_tokens + slot < row_tokens ? targets[token + slot] : -1;
  }
};

struct Term {
  int column = -1;  // −1: not in this token's loss
  float weight = 0;
  float softmax_weight = 0;  // its part of S
};

__device__ __forceinline__ Term loss_term(const LossTerms& terms, int target, int slot) {
  if (terms.weights == nullptr) return slot == 0 ? Term{target, 1.0f, 1.0f} : Term{};
  if (slot == kMaxLossTerms) {
    const int prefix = target >= 0 ? terms.prefix[target] : -1;
    return prefix >= 0 ? Term{prefix, terms.weights->prefix, terms.weights->prefix} : Term{};
  }
  const float weight = slot < terms.count ? terms.weights->next[slot] : 0.0f;
  return {target, target >= 0 ? weight : 0.0f, weight};
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

}  // namespace speedrun::kernels

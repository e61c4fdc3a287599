// Queries, keys and values in three planes on CUDA: one product into raw (N, 3C), then one pass that reads raw once and writes the
// planes (norm, rotary, key shift, value mix). Backward: one pass makes the product's gradient in raw, then two products.
// Layout    raw (N, 3C), planes (N, C), row-major, 16-byte accesses; D = C/H = 64 or 128, H <= 32.
// Work      a warp per token, D/8 lanes a head with 8 neighbouring elements each, so that a rotary pair is in one lane. The angles'
//           sines are made once a token, in shared memory, for all heads (two sets with paired heads).
//           Shifted keys are scattered: a token's warp writes its upper halves to the next token's row (or to key_tail), so nothing
//           is read or normalised twice; backward gathers the other way.
// Traffic   forward reads 3·N·C elements (+ N·C for embeddings, + N·C for added values) and writes 3·N·C; backward reads 5·N·C and
//           writes 3·N·C (embeddings: + N·C read, + N·C written, + N·C read to accumulate).
// Numerics  FP32 between one load and one store; sums over a head by a fixed butterfly, a gate's heads in ascending order.
// Backward  y = R(x·rstd), R a rotation, so Σ dy·y is Σ of the same over unrotated values:
//           dx = Rᵀ(rstd·(dy − y·mean(dy·y))), which needs no normalised x and rotates once.
#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/gemm/projection_fp8_cuda.h"
#include "kernels/qkv/split_qkv.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerBlock = kThreads / kWarpSize;
constexpr int kBatch = 3;  // vectors a lane loads of each tensor before it works on them: 768 channels
constexpr int kMaxHeads = 32;

// cos θ and sin θ of one token: [0] all heads or, with paired heads, even heads; [1] odd heads.
template <int kD>
struct alignas(16) Rotary {
  float cos[2][kD / 4], sin[2][kD / 4];
};

// Where a token and a lane are.
template <int kD>
struct Place {
  static constexpr int kLanes = kD / kVec;                  // of a head
  static constexpr int kHeadsPerStep = kWarpSize / kLanes;  // of a warp
  static constexpr int kBatchHeads = kBatch * kHeadsPerStep;
  int64_t token;
  int64_t position;  // in the row
  int lane;
  int offset;  // of the lane's elements in its head

  __device__ explicit Place(int64_t row_tokens)
      : token(int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarpSize),
        position(token % row_tokens),
        lane(threadIdx.x % kWarpSize),
        offset(lane % kLanes * kVec) {}
  __device__ bool upper() const { return offset >= kD / 2; }  // the half that does not rotate
  __device__ int head(int first_head, int step) const { return first_head + step * kHeadsPerStep + lane / kLanes; }
};

// By the whole warp.
template <int kD>
__device__ __forceinline__ void make_rotary(Rotary<kD>& rotary, const float* frequencies, const Place<kD>& place, bool paired) {
  constexpr int kAngles = kD / 4;
  for (int i = place.lane; i < (paired ? 2 : 1) * kAngles; i += kWarpSize) {
    const int parity = i / kAngles;
    const float position = static_cast<float>(paired ? 2 * place.position + parity : place.position);
    sincosf(position * frequencies[i % kAngles], &rotary.sin[parity][i % kAngles], &rotary.cos[parity][i % kAngles]);
  }
  __syncwarp();
}

// Direction +1 rotates a lane's four pairs, −1 rotates them back; the upper half stays as it is.
template <int kDirection, int kD>
__device__ __forceinline__ void rotate(float (&x)[kVec], const Rotary<kD>& rotary, const Place<kD>& place, int parity) {
  if (place.upper()) return;
  const float4 cos4 = *reinterpret_cast<const float4*>(&rotary.cos[parity][place.offset / 2]);
  const float4 sin4 = *reinterpret_cast<const float4*>(&rotary.sin[parity][place.offset / 2]);
  const float cos[4] = {cos4.x, cos4.y, cos4.z, cos4.w}, sin[4] = {sin4.x, sin4.y, sin4.z, sin4.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float even = x[2 * i], odd = x[2 * i + 1], s = kDirection * sin[i];
    x[2 * i] = cos[i] * even + s * odd;
    x[2 * i + 1] = cos[i] * odd - s * even;
  }
}

__device__ __forceinline__ float dot(const float (&x)[kVec], const float (&y)[kVec]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum += x[i] * y[i];
  return sum;
}

// x <- x / rms over the head, rotated; returns 1/rms. By the whole warp.
template <int kD>
__device__ __forceinline__ float normalize_and_rotate(float (&x)[kVec], const Rotary<kD>& rotary, const Place<kD>& place,
                                                      int parity, float eps) {
  const float mean_square = warp_sum<Place<kD>::kLanes>(dot(x, x)) / kD;
  const float rstd = rsqrtf(mean_square + eps);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] *= rstd;
  rotate<1>(x, rotary, place, parity);
  return rstd;
}

// dy <- the gradient before norm and rotation, from the gradient after them and the values y after them. By the whole warp.
template <int kD>
__device__ __forceinline__ void unrotate_and_unnormalize(float (&dy)[kVec], const float (&y)[kVec], float rstd,
                                                         const Rotary<kD>& rotary, const Place<kD>& place, int parity) {
  const float mean_dot = warp_sum<Place<kD>::kLanes>(dot(dy, y)) / kD;
#pragma unroll
  for (int i = 0; i < kVec; ++i) dy[i] = rstd * (dy[i] - y[i] * mean_dot);
  rotate<-1>(dy, rotary, place, parity);
}

// Beyond the last head: zeros.
__device__ __forceinline__ uint4 load_if(bool active, const bf16* p) { return active ? load16(p) : uint4{0, 0, 0, 0}; }
__device__ __forceinline__ uint4 load_once_if(bool active, const bf16* p) {
  return active ? load16_streaming(p) : uint4{0, 0, 0, 0};
}

template <int kD>
__device__ __forceinline__ void forward_queries_and_keys(const SplitQkvForward<bf16>& p, const Rotary<kD>& rotary,
                                                         const Place<kD>& place) {
  const bf16* raw = p.raw + place.token * 3 * p.C;
  const bool last = place.position + 1 == p.row_tokens;
  for (int first_head = 0; first_head < p.H; first_head += Place<kD>::kBatchHeads) {
    uint4 raw_q[kBatch], raw_k[kBatch];
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int head = place.head(first_head, step), at = head * kD + place.offset;
      raw_q[step] = load_once_if(head < p.H, raw + at);
      raw_k[step] = load_once_if(head < p.H, raw + p.C + at);
    }
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int head = place.head(first_head, step), parity = p.paired ? head % 2 : 0;
      float q[kVec], k[kVec];
      unpack8(raw_q[step], q);
      unpack8(raw_k[step], k);
      const float q_rstd = normalize_and_rotate(q, rotary, place, parity, static_cast<float>(p.eps));
      const float k_rstd = normalize_and_rotate(k, rotary, place, parity, static_cast<float>(p.eps));
      if (head >= p.H) continue;
      if (place.offset == 0) {
        p.qk_rstd[place.token * 2 * p.H + head] = q_rstd;
        p.qk_rstd[place.token * 2 * p.H + p.H + head] = k_rstd;
      }
      const int64_t at = place.token * p.C + head * kD + place.offset;
      store8(p.q + at, q);
      const bool handed_on = p.key_shift && place.upper();
      if (!handed_on || place.position == 0) store8(p.k + at, k);
      if (handed_on && !last) store8(p.k + at + p.C, k);
      if (handed_on && last) store8(p.key_tail + (place.token / p.row_tokens * p.H + head) * (kD / 2) + place.offset - kD / 2, k);
    }
  }
}

template <int kD>
__device__ __forceinline__ void forward_values(const SplitQkvForward<bf16>& p, const Place<kD>& place) {
  const int64_t row = place.token * p.C;
  const bf16* raw = p.raw + place.token * 3 * p.C + 2 * p.C;
  const bool embeds = p.value_embed != nullptr, adds = p.value_add != nullptr;
  for (int first_head = 0; first_head < p.H; first_head += Place<kD>::kBatchHeads) {
    uint4 raw_v[kBatch], raw_embed[kBatch], raw_add[kBatch];
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int head = place.head(first_head, step), at = head * kD + place.offset;
      raw_v[step] = load_once_if(head < p.H, raw + at);
      raw_embed[step] = load_if(embeds && head < p.H, p.value_embed + row + at);
      raw_add[step] = load_if(adds && head < p.H, p.value_add + row + at);
    }
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int head = place.head(first_head, step);
      if (head >= p.H) continue;
      bf16* out = p.v + row + head * kD + place.offset;
      if (!embeds && !adds) {  // the same bits
        store16(out, raw_v[step]);
        continue;
      }
      float v[kVec], embed[kVec], add[kVec];
      unpack8(raw_v[step], v);
      unpack8(raw_embed[step], embed);
      unpack8(raw_add[step], add);
      const float gate = embeds ? static_cast<float>(p.value_gate[place.token * p.value_gate_stride + head / p.gate_heads]) : 0.0f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) v[i] = v[i] + gate * embed[i] + add[i];
      store8(out, v);
    }
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads) split_forward_kernel(const SplitQkvForward<bf16> p) {
  __shared__ Rotary<kD> rotaries[kTokensPerBlock];
  const Place<kD> place(p.row_tokens);
  if (place.token >= p.N) return;  // whole warps, and no warp waits for another
  Rotary<kD>& rotary = rotaries[threadIdx.x / kWarpSize];
  make_rotary(rotary, p.frequencies, place, p.paired);
  forward_queries_and_keys(p, rotary, place);
  forward_values(p, place);
}

template <int kD>
__device__ __forceinline__ void backward_queries_and_keys(const SplitQkvBackward<bf16>& p, const Rotary<kD>& rotary,
                                                          const Place<kD>& place) {
  bf16* raw = p.raw + place.token * 3 * p.C;
  const bool handed_on = p.key_shift && place.upper(), last = place.position + 1 == p.row_tokens;
  for (int first_head = 0; first_head < p.H; first_head += Place<kD>::kBatchHeads) {
    uint4 raw_q[kBatch], raw_dq[kBatch], raw_k[kBatch], raw_dk[kBatch];
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int head = place.head(first_head, step);
      const bool active = head < p.H;
      const int64_t at = place.token * p.C + head * kD + place.offset;
      raw_q[step] = load_if(active, p.q + at);
      raw_dq[step] = load_once_if(active, p.dq + at);
      // The key's upper half and its gradient are in the next token's row; the last one's went to key_tail and has no gradient.
      const bf16* key = p.k + at;
      if (handed_on && !last) key += p.C;
      if (handed_on && last) key = p.key_tail + (place.token / p.row_tokens * p.H + head) * (kD / 2) + place.offset - kD / 2;
      raw_k[step] = load_if(active, key);
      raw_dk[step] = load_once_if(active && !(handed_on && last), p.dk + (handed_on ? at + p.C : at));
    }
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int head = place.head(first_head, step), parity = p.paired ? head % 2 : 0;
      const bool active = head < p.H;
      const int64_t at = place.token * p.C + head * kD + place.offset;
      const int64_t rstd_at = place.token * 2 * p.H + head;
      float q[kVec], dq[kVec], k[kVec], dk[kVec];
      unpack8(raw_q[step], q);
      unpack8(raw_dq[step], dq);
      unpack8(raw_k[step], k);
      unpack8(raw_dk[step], dk);
      if (handed_on && place.position == 0 && active) {  // a row's first token kept its upper half as well
        float kept[kVec];
        load8(p.dk + at, kept);
#pragma unroll
        for (int i = 0; i < kVec; ++i) dk[i] += kept[i];
      }
      unrotate_and_unnormalize(dq, q, active ? p.qk_rstd[rstd_at] : 0.0f, rotary, place, parity);
      unrotate_and_unnormalize(dk, k, active ? p.qk_rstd[rstd_at + p.H] : 0.0f, rotary, place, parity);
      if (!active) continue;
      store8(raw + head * kD + place.offset, dq);
      store8(raw + p.C + head * kD + place.offset, dk);
    }
  }
}

// gate_grads (H): scratch of the warp.
template <int kD>
__device__ __forceinline__ void backward_values(const SplitQkvBackward<bf16>& p, float* gate_grads, const Place<kD>& place) {
  const int64_t row = place.token * p.C, gates = place.token * p.value_gate_stride;
  bf16* raw = p.raw + place.token * 3 * p.C + 2 * p.C;
  const bool embeds = p.value_embed != nullptr, accumulates = embeds && p.accumulate_dvalue_embed;
  for (int first_head = 0; first_head < p.H; first_head += Place<kD>::kBatchHeads) {
    uint4 raw_dv[kBatch], raw_embed[kBatch], raw_dembed[kBatch];
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int head = place.head(first_head, step);
      const int64_t at = row + head * kD + place.offset;
      raw_dv[step] = load_if(head < p.H, p.dv + at);
      raw_embed[step] = load_if(embeds && head < p.H, p.value_embed + at);
      raw_dembed[step] = load_if(accumulates && head < p.H, p.dvalue_embed + at);
    }
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int head = place.head(first_head, step), at = head * kD + place.offset;
      const bool active = head < p.H;
      if (active) store16(raw + at, raw_dv[step]);
      if (!embeds) continue;
      float dv[kVec], embed[kVec], dembed[kVec];
      unpack8(raw_dv[step], dv);
      unpack8(raw_embed[step], embed);
      unpack8(raw_dembed[step], dembed);
      const float gate_grad = warp_sum<Place<kD>::kLanes>(dot(dv, embed));
      if (!active) continue;
      if (place.offset == 0) gate_grads[head] = gate_grad;
      const float gate = static_cast<float>(p.value_gate[gates + head / p.gate_heads]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) dembed[i] += gate * dv[i];
      store8(p.dvalue_embed + row + at, dembed);
    }
  }
  if (!embeds) return;
  __syncwarp();
  for (int gate = place.lane; gate * p.gate_heads < p.H; gate += kWarpSize) {
    float sum = 0;
    for (int head = gate * p.gate_heads; head < min((gate + 1) * p.gate_heads, p.H); ++head) sum += gate_grads[head];
    p.dvalue_gate[gates + gate] = bf16(sum);
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads) split_backward_kernel(const SplitQkvBackward<bf16> p) {
  __shared__ Rotary<kD> rotaries[kTokensPerBlock];
  __shared__ float gate_grads[kTokensPerBlock][kMaxHeads];
  const Place<kD> place(p.row_tokens);
  if (place.token >= p.N) return;  // whole warps, and no warp waits for another
  Rotary<kD>& rotary = rotaries[threadIdx.x / kWarpSize];
  make_rotary(rotary, p.frequencies, place, p.paired);
  backward_queries_and_keys(p, rotary, place);
  backward_values(p, gate_grads[threadIdx.x / kWarpSize], place);
}

// What both directions demand of their arguments; returns D.
template <class Args>
int check(const char* op, const Args& args) {
  const int D = args.H > 0 && args.C % args.H == 0 ? args.C / args.H : 0;
  require((D == 64 || D == 128) && args.H <= kMaxHeads, op, ": C = ", args.C, ", H = ", args.H,
          ": the head width C/H must be 64 or 128, with at most ", kMaxHeads, " heads");
  require(args.N > 0 && args.row_tokens > 0 && args.N % args.row_tokens == 0, op, ": N = ", args.N,
          " tokens are no whole number of rows of ", args.row_tokens);
  require((args.value_embed == nullptr) == (args.value_gate == nullptr), op, ": value embeddings and their gates go together");
  require(args.value_embed == nullptr || args.gate_heads > 0, op, ": ", args.gate_heads, " heads share a gate of value embeddings");
  require(!args.key_shift || args.key_tail != nullptr, op, ": the key shift needs key_tail");
  for (const bf16* pointer : {static_cast<const bf16*>(args.q), static_cast<const bf16*>(args.k),
                              static_cast<const bf16*>(args.key_tail), args.value_embed, static_cast<const bf16*>(args.raw)})
    require_aligned16(op, "an activation", pointer);
  return D;
}

}  // namespace

void split_qkv_forward(const SplitQkvForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "split_qkv_forward";
  const int D = check(kOp, args);
  require_aligned16(kOp, "v", args.v);
  require_aligned16(kOp, "value_add", args.value_add);
  project(kOp, args.raw, args.inp, args.weight, args.fp8, {.N = args.N, .K = args.C, .O = 3 * args.C}, exec);
  const unsigned grid = grid_size(ceil_div(args.N, kTokensPerBlock), kOp);
  const auto kernel = D == 64 ? split_forward_kernel<64> : split_forward_kernel<128>;
  kernel<<<grid, kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C, ", H = ", args.H);
}

void split_qkv_backward(const SplitQkvBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "split_qkv_backward";
  const int D = check(kOp, args);
  require(args.value_embed == nullptr || (args.dvalue_embed != nullptr && args.dvalue_gate != nullptr), kOp,
          ": value embeddings without dvalue_embed or dvalue_gate");
  require_aligned16(kOp, "dq", args.dq);
  require_aligned16(kOp, "dk", args.dk);
  require_aligned16(kOp, "dv", args.dv);
  require_aligned16(kOp, "dvalue_embed", args.dvalue_embed);
  const unsigned grid = grid_size(ceil_div(args.N, kTokensPerBlock), kOp);
  const auto kernel = D == 64 ? split_backward_kernel<64> : split_backward_kernel<128>;
  kernel<<<grid, kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C, ", H = ", args.H);
  project_backward(kOp, args.dinp, args.dweight, args.raw, args.inp, args.weight, args.fp8,
                   {.N = args.N, .K = args.C, .O = 3 * args.C}, exec);
}

}  // namespace speedrun::kernels

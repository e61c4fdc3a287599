// Head by head: XSA, z = y − tanh(α)·(y·v/n)·v with n = max(‖v‖², 1e−8), then out = gate·z.
// Backward, with τ = tanh α and dz = gate·dout:
//   dgate = dout·z;   dy = dz − τ·(dz·v/n)·v;   dα = −(1 − τ²)·(y·v/n)·(dz·v)
//   dv = −τ·((y·v/n)·dz + (dz·v/n)·y − 2·(y·v/n)·(dz·v/n)·v), the last term only where n is ‖v‖²
// Layout    (N, H, D) row-major, D % 8 == 0, D <= 256, 16-byte aligned; α and gate with a stride of their own.
// Work      a group of D/8 lanes (the next power of two) per head, 8 elements a lane; a thread loads two heads before it works.
// Traffic   forward reads 2·N·H·D elements and writes N·H·D; backward reads 3 and writes 2. Without XSA: 1 and 1; 2 and 1.
// Numerics  FP32 between one load and one store; sums over a head by a fixed butterfly, all of them taken of the inputs, so one
//           pass does.
#include <limits>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/head_gate/head_gate.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 2;  // of a thread
constexpr float kLeastSquare = 1e-8f;
constexpr int kMaxHeadWidth = kWarpSize * kVec;

// Head i of a group of kLanes threads; neighbouring groups have neighbouring heads.
template <int kLanes>
struct Place {
  static constexpr int kGroups = kThreads / kLanes;
  int64_t at;           // of the lane's eight elements
  int64_t coefficient;  // index of α and gate
  bool active;
  bool first_lane;

  __device__ Place(int i, int64_t rows, int H, int D, int64_t stride) {
    const int64_t row = (int64_t{blockIdx.x} * kHeads + i) * kGroups + threadIdx.x / kLanes;
    const int offset = threadIdx.x % kLanes * kVec;
    // The launcher has seen to it that rows fit 32 bits, where a division is cheap.
    const uint32_t token = static_cast<uint32_t>(row) / static_cast<uint32_t>(H);
    coefficient = token * stride + (row - int64_t{token} * H);
    at = row * D + offset;
    active = row < rows && offset < D;
    first_lane = offset == 0;
  }
};

__device__ __forceinline__ uint4 load_if(bool active, const bf16* p) { return active ? load16(p) : uint4{0, 0, 0, 0}; }
__device__ __forceinline__ float load_if(bool active, const bf16* p, float otherwise) {
  return active ? static_cast<float>(*p) : otherwise;
}

__device__ __forceinline__ float dot(const float (&x)[kVec], const float (&y)[kVec]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum += x[i] * y[i];
  return sum;
}

template <int kLanes, bool kXsa>
__global__ void __launch_bounds__(kThreads) head_gate_forward_kernel(const HeadGateForward<bf16> p) {
  uint4 raw_y[kHeads], raw_v[kHeads];
  float gate[kHeads], alpha[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const Place<kLanes> place(i, p.N * p.H, p.H, p.D, p.stride);
    raw_y[i] = load_if(place.active, p.y + place.at);
    if constexpr (kXsa) {
      raw_v[i] = load_if(place.active, p.v + place.at);
      alpha[i] = load_if(place.active, p.alpha + place.coefficient, 0.0f);
    }
    gate[i] = load_if(place.active && p.gate != nullptr, p.gate + place.coefficient, 1.0f);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const Place<kLanes> place(i, p.N * p.H, p.H, p.D, p.stride);
    float y[kVec];
    unpack8(raw_y[i], y);
    if constexpr (kXsa) {
      float v[kVec];
      unpack8(raw_v[i], v);
      const float square = fmaxf(warp_sum<kLanes>(dot(v, v)), kLeastSquare);
      const float along = tanhf(alpha[i]) * warp_sum<kLanes>(dot(y, v)) / square;
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] -= along * v[j];
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) y[j] *= gate[i];
    if (place.active) store8(p.out + place.at, y);
  }
}

template <int kLanes, bool kXsa>
__global__ void __launch_bounds__(kThreads) head_gate_backward_kernel(const HeadGateBackward<bf16> p) {
  uint4 raw_dout[kHeads], raw_y[kHeads], raw_v[kHeads];
  float gate[kHeads], alpha[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const Place<kLanes> place(i, p.N * p.H, p.H, p.D, p.stride);
    raw_dout[i] = load_if(place.active, p.dout + place.at);
    raw_y[i] = load_if(place.active, p.y + place.at);
    if constexpr (kXsa) {
      raw_v[i] = load_if(place.active, p.v + place.at);
      alpha[i] = load_if(place.active, p.alpha + place.coefficient, 0.0f);
    }
    gate[i] = load_if(place.active && p.gate != nullptr, p.gate + place.coefficient, 1.0f);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const Place<kLanes> place(i, p.N * p.H, p.H, p.D, p.stride);
    float dz[kVec], y[kVec];
    unpack8(raw_dout[i], dz);
    unpack8(raw_y[i], y);
    float dgate = warp_sum<kLanes>(dot(dz, y));
    if constexpr (kXsa) {
      float v[kVec], dv[kVec];
      unpack8(raw_v[i], v);
      const float norm = warp_sum<kLanes>(dot(v, v));
      const float y_v = warp_sum<kLanes>(dot(y, v)), dout_v = warp_sum<kLanes>(dot(dz, v));
      const float square = fmaxf(norm, kLeastSquare), tau = tanhf(alpha[i]);
      const float y_share = y_v / square, dz_share = gate[i] * dout_v / square;
      const float own = norm > kLeastSquare ? 2 * y_share * dz_share : 0.0f;
      dgate -= tau * y_share * dout_v;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        dz[j] *= gate[i];
        dv[j] = -tau * (y_share * dz[j] + dz_share * y[j] - own * v[j]);
        dz[j] -= tau * dz_share * v[j];
      }
      if (place.active) store8(p.dv + place.at, dv);
      if (place.active && place.first_lane) p.dalpha[place.coefficient] = bf16(-(1 - tau * tau) * y_share * gate[i] * dout_v);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) dz[j] *= gate[i];
    }
    if (place.active) store8(p.dy + place.at, dz);
    if (place.active && place.first_lane && p.gate != nullptr) p.dgate[place.coefficient] = bf16(dgate);
  }
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls launch(lanes) with the smallest group that holds a head.
template <class Launch>
void dispatch_width(int D, const Launch& launch) {
  if (D <= 64) return launch(Constant<8>{});
  if (D <= 128) return launch(Constant<16>{});
  return launch(Constant<32>{});
}

template <class Args>
void check(const char* op, const Args& args) {
  require(args.D > 0 && args.D % kVec == 0 && args.D <= kMaxHeadWidth, op, ": D = ", args.D, " must be a multiple of 8 up to ",
          kMaxHeadWidth);
  // Whole blocks of rows are counted in 32 bits.
  require(args.N > 0 && args.H > 0 && args.N <= (std::numeric_limits<int32_t>::max() - kHeads * kThreads) / args.H, op,
          ": N = ", args.N, " tokens of H = ", args.H, " heads: at least one and less than 2^31 in all");
  require(args.alpha != nullptr || args.gate != nullptr, op, ": neither alpha nor gate");
  require(args.alpha == nullptr || args.v != nullptr, op, ": alpha without v");
  require(args.stride >= args.H, op, ": coefficients of H = ", args.H, " heads with a stride of ", args.stride);
  require_aligned16(op, "y", args.y);
  require_aligned16(op, "v", args.v);
}

template <int kLanes>
unsigned head_grid(int64_t rows, const char* op) {
  return grid_size(ceil_div(rows, kHeads * Place<kLanes>::kGroups), op);
}

}  // namespace

void head_gate_forward(const HeadGateForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "head_gate_forward";
  check(kOp, args);
  require_aligned16(kOp, "out", args.out);
  dispatch_width(args.D, [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    const auto kernel = args.alpha ? head_gate_forward_kernel<kLanes, true> : head_gate_forward_kernel<kLanes, false>;
    kernel<<<head_grid<kLanes>(args.N * args.H, kOp), kThreads, 0, exec.stream>>>(args);
  });
  check_launch(kOp, ": N = ", args.N, ", H = ", args.H, ", D = ", args.D);
}

void head_gate_backward(const HeadGateBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "head_gate_backward";
  check(kOp, args);
  require(args.alpha == nullptr || (args.dv != nullptr && args.dalpha != nullptr), kOp, ": alpha without dv or dalpha");
  require(args.gate == nullptr || args.dgate != nullptr, kOp, ": gate without dgate");
  require_aligned16(kOp, "dout", args.dout);
  require_aligned16(kOp, "dy", args.dy);
  require_aligned16(kOp, "dv", args.dv);
  dispatch_width(args.D, [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    const auto kernel = args.alpha ? head_gate_backward_kernel<kLanes, true> : head_gate_backward_kernel<kLanes, false>;
    kernel<<<head_grid<kLanes>(args.N * args.H, kOp), kThreads, 0, exec.stream>>>(args);
  });
  check_launch(kOp, ": N = ", args.N, ", H = ", args.H, ", D = ", args.D);
}

}  // namespace speedrun::kernels

// RMS and layer norm: out = (inp − mean) · rstd · gain + shift over the C channels of a row; rms has mean = 0. Backward, with
// x̂ = (inp − mean)·rstd and d = dout·gain:
//   dinp = rstd · (d − x̂·mean_C(d·x̂) − [layer] mean_C(d)) + dinp_add;   dgain += Σ_N dout·x̂;   dshift += Σ_N dout
// Layout    row-major (N, C), 16-byte accesses: C % 8 == 0, pointers 16-byte aligned.
// Work      a group of 32 threads (C <= 1024) or 256 threads (C <= 8192) keeps a row in registers: it is read once. Backward: a
//           block walks a fixed range of rows and keeps its columns' sums in registers; a second kernel adds the blocks' sums.
// Traffic   forward 4 bytes an element, backward 6 (8 with dinp_add); statistics 4 or 8 bytes a row. N = 49,152, C = 768:
//           forward 151 MB.
// Numerics  two passes over the registers in FP32 (mean, then squared deviations), one rounding at the store. Sums in an order
//           that depends on (N, C) alone: bitwise reproducible, on any GPU.
#include <cuda_runtime.h>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_parts.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;

enum class ColumnSums : int { none, gain, gain_and_shift };

// A block is kThreads / kLanes groups; each group of kLanes threads works on one row, kVecs vectors of 8 channels a thread.
template <int kLanes>
__device__ __forceinline__ float row_sum(float value) {
  if constexpr (kLanes == kWarpSize) {
    return warp_sum(value);
  } else {
    static_assert(kLanes == kThreads);
    __shared__ float partials[kThreads / kWarpSize];
    return block_sum<kThreads>(value, partials);
  }
}

template <int kLanes, int kVecs>
__global__ void __launch_bounds__(kThreads) norm_forward_kernel(const NormForward<bf16> p) {
  constexpr int kRows = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  if (row >= p.N) return;  // whole groups leave together
  const int num_vecs = p.C / kVec;
  const bf16* inp = p.inp + row * p.C;
  bf16* out = p.out + row * p.C;

  uint4 raw[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = lane + i * kLanes;
    raw[i] = vec < num_vecs ? load16(inp + vec * kVec) : uint4{0, 0, 0, 0};
  }

  float mean = 0;
  if (p.kind == Norm::layer) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float x[kVec];
      unpack8(raw[i], x);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum += x[j];
    }
    mean = row_sum<kLanes>(sum) / p.C;
  }
  float sum_squares = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (lane + i * kLanes >= num_vecs) continue;
    float x[kVec];
    unpack8(raw[i], x);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum_squares += (x[j] - mean) * (x[j] - mean);
  }
  const float rstd = 1.0f / sqrtf(row_sum<kLanes>(sum_squares) / p.C + static_cast<float>(p.eps));

#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = lane + i * kLanes;
    if (vec >= num_vecs) continue;
    float x[kVec];
    unpack8(raw[i], x);
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] = (x[j] - mean) * rstd;
    if (p.gain != nullptr) {
      float gain[kVec];
      load8(p.gain + vec * kVec, gain);
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[j] *= gain[j];
    }
    if (p.shift != nullptr) {
      float shift[kVec];
      load8(p.shift + vec * kVec, shift);
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[j] += shift[j];
    }
    store8(out + vec * kVec, x);
  }
  if (lane == 0) {
    p.rstd[row] = rstd;
    if (p.mean != nullptr) p.mean[row] = mean;
  }
}

// sums (kVecs·8 columns a thread) of the block's groups, added in the order of the groups, -> partial (C).
template <int kLanes, int kVecs>
__device__ __forceinline__ void store_block_sums(float* partial, const float (&sums)[kVecs][kVec], int num_vecs) {
  constexpr int kRows = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  if constexpr (kRows == 1) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = lane + i * kLanes;
      if (vec < num_vecs) store8(partial + vec * kVec, sums[i]);
    }
  } else {
    constexpr int kColumns = kVecs * kLanes * kVec;
    __shared__ __align__(16) float shared[kRows][kColumns];
    __syncthreads();  // the previous sums have been read
#pragma unroll
    for (int i = 0; i < kVecs; ++i) store8(&shared[group][(lane + i * kLanes) * kVec], sums[i]);
    __syncthreads();
    for (int column = threadIdx.x; column < num_vecs * kVec; column += kThreads) {
      float sum = shared[0][column];
#pragma unroll
      for (int g = 1; g < kRows; ++g) sum += shared[g][column];
      partial[column] = sum;
    }
  }
}

// Blocks per multiprocessor that the registers must allow: enough loads in flight to saturate the memory.
template <int kVecs, ColumnSums kSums>
constexpr int kBackwardBlocks = kVecs == 4 && kSums == ColumnSums::gain_and_shift ? 1 : 2;

template <int kLanes, int kVecs, ColumnSums kSums>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<kVecs, kSums>)
    norm_backward_kernel(const NormBackward<bf16> p, int64_t part_rows) {
  constexpr int kRows = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int num_vecs = p.C / kVec;
  const int64_t begin = blockIdx.x * part_rows;
  const int64_t end = min(begin + part_rows, p.N);
  float dgain[kVecs][kVec] = {}, dshift[kVecs][kVec] = {};

  // Every group of a block goes through the same number of rows only if it is the whole block, so only then may row_sum
  // synchronise.
  for (int64_t row = begin + threadIdx.x / kLanes; row < end; row += kRows) {
    const int64_t offset = row * p.C;
    uint4 raw_inp[kVecs], raw_dout[kVecs], raw_add[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = lane + i * kLanes;
      raw_inp[i] = vec < num_vecs ? load16(p.inp + offset + vec * kVec) : uint4{0, 0, 0, 0};
      raw_dout[i] = vec < num_vecs ? load16(p.dout + offset + vec * kVec) : uint4{0, 0, 0, 0};
      raw_add[i] = vec < num_vecs && p.dinp_add != nullptr ? load16(p.dinp_add + offset + vec * kVec) : uint4{0, 0, 0, 0};
    }
    const float mean = p.kind == Norm::layer ? p.mean[row] : 0.0f;
    const float rstd = p.rstd[row];

    // Channels beyond C have dout = 0 and add nothing to any sum.
    float sum_d = 0, sum_d_xhat = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = lane + i * kLanes;
      float x[kVec], d[kVec];
      unpack8(raw_inp[i], x);
      unpack8(raw_dout[i], d);
      float gain[kVec] = {1, 1, 1, 1, 1, 1, 1, 1};
      if (p.gain != nullptr && vec < num_vecs) load8(p.gain + vec * kVec, gain);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float xhat = (x[j] - mean) * rstd;
        if constexpr (kSums != ColumnSums::none) dgain[i][j] += d[j] * xhat;
        if constexpr (kSums == ColumnSums::gain_and_shift) dshift[i][j] += d[j];
        const float scaled = d[j] * gain[j];
        sum_d += scaled;
        sum_d_xhat += scaled * xhat;
      }
    }
    const float mean_d = p.kind == Norm::layer ? row_sum<kLanes>(sum_d) / p.C : 0.0f;
    const float mean_d_xhat = row_sum<kLanes>(sum_d_xhat) / p.C;

#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = lane + i * kLanes;
      if (vec >= num_vecs) continue;
      float x[kVec], d[kVec];
      unpack8(raw_inp[i], x);
      unpack8(raw_dout[i], d);
      if (p.gain != nullptr) {
        float gain[kVec];
        load8(p.gain + vec * kVec, gain);
#pragma unroll
        for (int j = 0; j < kVec; ++j) d[j] *= gain[j];
      }
      float add[kVec];
      unpack8(raw_add[i], add);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float xhat = (x[j] - mean) * rstd;
        x[j] = rstd * (d[j] - mean_d - xhat * mean_d_xhat) + add[j];
      }
      store8(p.dinp + offset + vec * kVec, x);
    }
  }

  // scratch: (parts, C) of dgain, then (parts, C) of dshift.
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * p.C;
  if constexpr (kSums != ColumnSums::none) store_block_sums<kLanes, kVecs>(p.scratch + slot, dgain, num_vecs);
  if constexpr (kSums == ColumnSums::gain_and_shift) {
    store_block_sums<kLanes, kVecs>(p.scratch + static_cast<int64_t>(gridDim.x) * p.C + slot, dshift, num_vecs);
  }
}

// sum (C) += Σ_parts partial (parts, C): 32 columns a block; row y of the block adds parts y, y + 32, …, then the 32 rows are added
// in order.
constexpr int kColumnsPerBlock = 32;
constexpr int kPartRows = 32;
__global__ void __launch_bounds__(kColumnsPerBlock* kPartRows)
    add_parts_kernel(float* sum, const float* partial, int parts, int C) {
  __shared__ float shared[kPartRows][kColumnsPerBlock];
  const int column = blockIdx.x * kColumnsPerBlock + threadIdx.x;
  float total = 0;
  if (column < C) {
#pragma unroll 4
    for (int part = threadIdx.y; part < parts; part += kPartRows) total += partial[static_cast<int64_t>(part) * C + column];
  }
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && column < C) {
    total = shared[0][threadIdx.x];
#pragma unroll
    for (int y = 1; y < kPartRows; ++y) total += shared[y][threadIdx.x];
    sum[column] += total;
  }
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls launch(lanes, vectors) with the smallest group that holds a row of C channels.
template <class Launch>
void dispatch_channels(int C, const Launch& launch) {
  if (C <= 256) return launch(Constant<32>{}, Constant<1>{});
  if (C <= 512) return launch(Constant<32>{}, Constant<2>{});
  if (C <= 768) return launch(Constant<32>{}, Constant<3>{});
  if (C <= 1024) return launch(Constant<32>{}, Constant<4>{});
  if (C <= 2048) return launch(Constant<256>{}, Constant<1>{});
  if (C <= 4096) return launch(Constant<256>{}, Constant<2>{});
  return launch(Constant<256>{}, Constant<4>{});
}

constexpr int kMaxChannels = 8192;

void check_shape(const char* op, int64_t N, int C) {
  require(N > 0 && C > 0 && C % kVec == 0 && C <= kMaxChannels, op, ": N = ", N, ", C = ", C, "; C must be a multiple of 8 up to ",
          kMaxChannels);
}

}  // namespace

void norm_forward(const NormForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "norm_forward";
  check_shape(kOp, args.N, args.C);
  require_aligned16(kOp, "inp", args.inp);
  require_aligned16(kOp, "out", args.out);
  require_aligned16(kOp, "gain", args.gain);
  require_aligned16(kOp, "shift", args.shift);
  dispatch_channels(args.C, [&](auto lanes, auto vecs) {
    constexpr int kLanes = decltype(lanes)::value, kVecs = decltype(vecs)::value;
    norm_forward_kernel<kLanes, kVecs><<<grid_size(ceil_div(args.N, kThreads / kLanes), kOp), kThreads, 0, exec.stream>>>(args);
  });
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C);
}

void norm_backward(const NormBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "norm_backward";
  check_shape(kOp, args.N, args.C);
  require_aligned16(kOp, "inp", args.inp);
  require_aligned16(kOp, "dout", args.dout);
  require_aligned16(kOp, "dinp", args.dinp);
  require_aligned16(kOp, "dinp_add", args.dinp_add);
  require_aligned16(kOp, "gain", args.gain);
  require_aligned16(kOp, "scratch", args.scratch);
  require(args.kind == Norm::rms || args.mean != nullptr, kOp, ": layer norm needs the saved mean");
  require(args.dgain != nullptr || args.dshift == nullptr, kOp, ": dshift without dgain");
  const int64_t parts = norm_backward_parts(args.N);
  const ColumnSums sums = args.dshift != nullptr  ? ColumnSums::gain_and_shift
                          : args.dgain != nullptr ? ColumnSums::gain
                                                  : ColumnSums::none;
  require(sums == ColumnSums::none || args.scratch != nullptr, kOp, ": dgain needs scratch");
  dispatch_channels(args.C, [&](auto lanes, auto vecs) {
    constexpr int kLanes = decltype(lanes)::value, kVecs = decltype(vecs)::value;
    const auto launch = [&](auto kernel) {
      kernel<<<grid_size(parts, kOp), kThreads, 0, exec.stream>>>(args, norm_backward_part_rows(args.N));
    };
    if (sums == ColumnSums::none) launch(norm_backward_kernel<kLanes, kVecs, ColumnSums::none>);
    if (sums == ColumnSums::gain) launch(norm_backward_kernel<kLanes, kVecs, ColumnSums::gain>);
    if (sums == ColumnSums::gain_and_shift) launch(norm_backward_kernel<kLanes, kVecs, ColumnSums::gain_and_shift>);
  });
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C);
  const dim3 block(kColumnsPerBlock, kPartRows);
  const unsigned grid = grid_size(ceil_div(args.C, kColumnsPerBlock), kOp);
  if (args.dgain != nullptr)
    add_parts_kernel<<<grid, block, 0, exec.stream>>>(args.dgain, args.scratch, static_cast<int>(parts), args.C);
  if (args.dshift != nullptr) {
    add_parts_kernel<<<grid, block, 0, exec.stream>>>(args.dshift, args.scratch + parts * args.C, static_cast<int>(parts), args.C);
  }
  check_launch(kOp, ": adding column sums, C = ", args.C);
}

}  // namespace speedrun::kernels

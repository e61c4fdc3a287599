// Snapshots of masters, their average, the sums over differences of snapshots, and the jump (extrapolation.h has the formulas).
// Layout    pieces of parameters anywhere in BF16 values and low halves; snapshots and averages flat FP32 in device memory or in
//           pinned host memory. Groups of 8 elements (sums: 4) go in 16-byte accesses where all pointers of a piece allow it, what
//           is left one by one.
// Work      kSnapshotParts blocks a piece, interleaved groups. Sums: every thread keeps all of them (k = 8: 29) in registers, a
//           block adds its threads' and writes one partial a sum; then one block a sum adds the partials. The plan is the work of
//           one thread: at most 7 x 7 numbers.
// Traffic   bytes an element with full masters: snapshot 4 + 4, average 8 + 4, sums 4k, jump 4k + 4 (+ 4 with a result). k = 4,
//           84.9 M elements: sums 1.36 GB, jump with result 2.04 GB.
// Numerics  differences, products and sums in FP64; fixed order: bitwise reproducible, on any GPU. Average and jump in FP32 with
//           fused multiply-adds: the reference's bits.
#include <cuda_runtime.h>

#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/base/master_vec.cuh"
#include "kernels/extrapolation/extrapolation.h"
#include "kernels/extrapolation/extrapolation_parts.h"
#include "kernels/extrapolation/extrapolation_plan.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kSumVec = 4;      // floats in 16 bytes
constexpr int kJumpBlocks = 2;  // a multiprocessor; aiming for more, the compiler spills registers at k = 6

__device__ __forceinline__ bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// This block's piece, and this thread's place in the piece.
__device__ __forceinline__ int64_t piece_index() { return blockIdx.x / kSnapshotParts; }
__device__ __forceinline__ int64_t piece_thread() { return (blockIdx.x % kSnapshotParts) * kThreads + threadIdx.x; }
constexpr int64_t kPieceThreads = int64_t{kSnapshotParts} * kThreads;

// whole(i) for groups of Vec elements from i on, single(i) for the others: all of them without `vectors`.
template <int Vec, class Whole, class Single>
__device__ __forceinline__ void for_piece(int64_t count, bool vectors, const Whole& whole, const Single& single) {
  const int64_t vector_end = vectors ? count / Vec * Vec : 0;
  for (int64_t i = piece_thread() * Vec; i < vector_end; i += kPieceThreads * Vec) whole(i);
  for (int64_t i = vector_end + piece_thread(); i < count; i += kPieceThreads) single(i);
}

__device__ __forceinline__ bool aligned16(const WeightRef<bf16>& weight) {
  return aligned16(weight.value) && aligned16(weight.low);
}

__device__ __forceinline__ float load_master(const WeightRef<bf16>& weight, int64_t i) {
  return join_master(weight.value[i], weight.low != nullptr ? weight.low[i] : uint16_t{0}, weight.split);
}

__device__ __forceinline__ void store_master(const WeightRef<bf16>& weight, int64_t i, float master) {
  bf16 value;
  uint16_t low;
  split_master(master, weight.split, value, low);
  weight.value[i] = value;
  if (weight.low != nullptr) weight.low[i] = low;
}

// What a master is once it is stored.
__device__ __forceinline__ float stored_master(float master, MasterSplit split) {
  bf16 value;
  uint16_t low;
  split_master(master, split, value, low);
  return join_master(value, low, split);
}

__device__ __forceinline__ void copy_masters(const SnapshotPiece<bf16>& piece, float* snapshot) {
  float* to = snapshot + piece.offset;
  for_piece<kVec>(
      piece.count, aligned16(piece.weight) && aligned16(to),
      [&](int64_t i) {
        float masters[kVec];
        load_masters8(piece.weight, i, masters);
        store8(to + i, masters);
      },
      [&](int64_t i) { to[i] = load_master(piece.weight, i); });
}

__global__ void __launch_bounds__(kThreads) take_snapshot_kernel(const TakeSnapshot<bf16> p) {
  copy_masters(p.pieces[piece_index()], p.snapshot);
}

__global__ void __launch_bounds__(kThreads) average_weights_kernel(const AverageWeights<bf16> p) {
  const SnapshotPiece<bf16> piece = p.pieces[piece_index()];
  float* average = p.average + piece.offset;
  for_piece<kVec>(
      piece.count, aligned16(piece.weight) && aligned16(average),
      [&](int64_t i) {
        float masters[kVec], values[kVec];
        load_masters8(piece.weight, i, masters);
        load8(average + i, values);
#pragma unroll
        for (int j = 0; j < kVec; ++j) values[j] = averaged(values[j], masters[j], p.share);
        store8(average + i, values);
      },
      [&](int64_t i) { average[i] = averaged(average[i], load_master(piece.weight, i), p.share); });
}

// The snapshots at a piece's first element.
template <int k>
struct PieceSnapshots {
  const float* x[k];
  bool aligned = true;

  __device__ __forceinline__ PieceSnapshots(const float* const (&snapshots)[kMaxSnapshots], int64_t offset) {
#pragma unroll
    for (int j = 0; j < k; ++j) {
      x[j] = snapshots[j] + offset;
      aligned = aligned && aligned16(x[j]);
    }
  }
};

template <int k>
constexpr int kNumSums = k*(k - 1) / 2 + 1;

// One element's terms; x oldest first.
template <int k>
__device__ __forceinline__ void add_products(const float (&x)[k], double (&sums)[kNumSums<k>]) {
  double u[k - 1];
#pragma unroll
  for (int j = 0; j < k - 1; ++j) u[j] = static_cast<double>(x[j + 1]) - static_cast<double>(x[j]);
  int s = 0;
#pragma unroll
  for (int row = 0; row < k - 1; ++row) {
#pragma unroll
    for (int column = row; column < k - 1; ++column, ++s) sums[s] = fma(u[row], u[column], sums[s]);
  }
  const double newest = x[k - 1];
  sums[s] = fma(newest, newest, sums[s]);
}

// partials (kNumSums, gridDim.x)
template <int k>
__global__ void __launch_bounds__(kThreads) snapshot_sums_kernel(const SnapshotSums<bf16> p) {
  constexpr int kSums = kNumSums<k>;
  __shared__ double warp_sums[kWarps][kSums];
  const SnapshotPiece<bf16> piece = p.pieces[piece_index()];
  const PieceSnapshots<k> from(p.snapshots, piece.offset);
  double sums[kSums] = {};
  for_piece<kSumVec>(
      piece.counted ? piece.count : 0, from.aligned,
      [&](int64_t i) {
        float4 raw[k];
#pragma unroll
        for (int j = 0; j < k; ++j) raw[j] = __ldcs(reinterpret_cast<const float4*>(from.x[j] + i));
        float x[kSumVec][k];
#pragma unroll
        for (int j = 0; j < k; ++j) x[0][j] = raw[j].x, x[1][j] = raw[j].y, x[2][j] = raw[j].z, x[3][j] = raw[j].w;
#pragma unroll
        for (int lane = 0; lane < kSumVec; ++lane) add_products<k>(x[lane], sums);
      },
      [&](int64_t i) {
        float x[k];
#pragma unroll
        for (int j = 0; j < k; ++j) x[j] = from.x[j][i];
        add_products<k>(x, sums);
      });

#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const double sum = warp_sum(sums[s]);
    if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize][s] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= kSums) return;
  double sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp][threadIdx.x];
  p.scratch[static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x] = sum;
}

// Block s: sums[s] = Σ partials[s].
__global__ void __launch_bounds__(kThreads) add_partials_kernel(double* sums, const double* partials, int64_t num_partials) {
  __shared__ double block_partials[kWarps];
  const double* from = partials + blockIdx.x * num_partials;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < num_partials; i += kThreads) sum += from[i];
  sum = block_sum<kThreads>(sum, block_partials);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void plan_jump_kernel(const JumpPlan p) { *p.report = make_jump_report(p, p.sums, p.verdict->skip != 0); }

template <int k>
__global__ void __launch_bounds__(kThreads, kJumpBlocks) jump_weights_kernel(const JumpWeights<bf16> p) {
  const SnapshotPiece<bf16> piece = p.pieces[piece_index()];
  if (k > 1 && p.report->refusal != JumpRefusal::none) {
    if (p.result != nullptr) copy_masters(piece, p.result);
    return;
  }
  float weights[k] = {};
#pragma unroll
  for (int j = 0; j < k - 1; ++j) weights[j] = static_cast<float>(p.report->weights[j]);

  const PieceSnapshots<k> from(p.snapshots, piece.offset);
  float* result = p.result == nullptr ? nullptr : p.result + piece.offset;  // may be one of the snapshots: read, then write
  const bool has_result = result != nullptr;
  for_piece<kVec>(
      piece.count, from.aligned && aligned16(piece.weight) && aligned16(result),
      [&](int64_t i) {
        float x[kVec][k], masters[kVec];
#pragma unroll
        for (int j = 0; j < k; ++j) {
          float values[kVec];
          load8(from.x[j] + i, values);
#pragma unroll
          for (int lane = 0; lane < kVec; ++lane) x[lane][j] = values[lane];
        }
#pragma unroll
        for (int lane = 0; lane < kVec; ++lane) masters[lane] = jumped(x[lane], weights, k);
        store_masters8(piece.weight, i, masters);
        if (!has_result) return;
#pragma unroll
        for (int lane = 0; lane < kVec; ++lane) masters[lane] = stored_master(masters[lane], piece.weight.split);
        store8(result + i, masters);
      },
      [&](int64_t i) {
        float x[k];
#pragma unroll
        for (int j = 0; j < k; ++j) x[j] = from.x[j][i];
        const float master = jumped(x, weights, k);
        store_master(piece.weight, i, master);
        if (has_result) result[i] = stored_master(master, piece.weight.split);
      });
}

unsigned piece_grid(int64_t num_pieces, const char* op) { return grid_size(num_pieces * kSnapshotParts, op); }

template <int k>
void launch_sums(const SnapshotSums<bf16>& args, const CudaExec& exec, unsigned grid) {
  snapshot_sums_kernel<k><<<grid, kThreads, 0, exec.stream>>>(args);
}

template <int k>
void launch_jump(const JumpWeights<bf16>& args, const CudaExec& exec, unsigned grid) {
  jump_weights_kernel<k><<<grid, kThreads, 0, exec.stream>>>(args);
}

void require_snapshots(const char* op, const float* const (&snapshots)[kMaxSnapshots], int k, int least) {
  require(k >= least && k <= kMaxSnapshots, op, ": k = ", k, " (", least, " to ", kMaxSnapshots, ")");
  for (int j = 0; j < k; ++j) require(snapshots[j] != nullptr, op, ": snapshot ", j, " is null");
}

}  // namespace

void take_snapshot(const TakeSnapshot<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "take_snapshot";
  if (args.num_pieces == 0) return;
  require(args.pieces != nullptr && args.snapshot != nullptr, kOp, ": null pointer");
  take_snapshot_kernel<<<piece_grid(args.num_pieces, kOp), kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": ", args.num_pieces, " pieces");
}

void average_weights(const AverageWeights<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "average_weights";
  if (args.num_pieces == 0) return;
  require(args.pieces != nullptr && args.average != nullptr, kOp, ": null pointer");
  average_weights_kernel<<<piece_grid(args.num_pieces, kOp), kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": ", args.num_pieces, " pieces");
}

void snapshot_sums(const SnapshotSums<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "snapshot_sums";
  using Launch = void (*)(const SnapshotSums<bf16>&, const CudaExec&, unsigned);
  constexpr Launch kLaunches[] = {launch_sums<2>, launch_sums<3>, launch_sums<4>, launch_sums<5>,
                                  launch_sums<6>, launch_sums<7>, launch_sums<8>};
  require(args.k >= 2 && args.k <= kMaxSnapshots, kOp, ": k = ", args.k, " (2 to ", kMaxSnapshots, ")");
  require(args.sums != nullptr, kOp, ": sums is null");
  if (args.num_pieces > 0) {  // a rank without a piece still has sums: zeros
    require_snapshots(kOp, args.snapshots, args.k, 2);
    require(args.pieces != nullptr && args.scratch != nullptr, kOp, ": null pointer");
    kLaunches[args.k - 2](args, exec, piece_grid(args.num_pieces, kOp));
    check_launch(kOp, ": ", args.num_pieces, " pieces, k = ", args.k);
  }
  const unsigned num_sums = static_cast<unsigned>(args.k * (args.k - 1) / 2 + 1);
  add_partials_kernel<<<num_sums, kThreads, 0, exec.stream>>>(args.sums, args.scratch, args.num_pieces * kSnapshotParts);
  check_launch(kOp, ": ", num_sums, " sums");
}

void plan_jump(const JumpPlan& args, const CudaExec& exec) {
  constexpr const char* kOp = "plan_jump";
  require(args.k >= 2 && args.k <= kMaxSnapshots, kOp, ": k = ", args.k, " (2 to ", kMaxSnapshots, ")");
  require(args.sums != nullptr && args.verdict != nullptr && args.report != nullptr, kOp, ": null pointer");
  plan_jump_kernel<<<1, 1, 0, exec.stream>>>(args);
  check_launch(kOp, ": k = ", args.k);
}

void jump_weights(const JumpWeights<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "jump_weights";
  using Launch = void (*)(const JumpWeights<bf16>&, const CudaExec&, unsigned);
  constexpr Launch kLaunches[] = {launch_jump<1>, launch_jump<2>, launch_jump<3>, launch_jump<4>,
                                  launch_jump<5>, launch_jump<6>, launch_jump<7>, launch_jump<8>};
  if (args.num_pieces == 0) return;
  require_snapshots(kOp, args.snapshots, args.k, 1);
  require(args.pieces != nullptr && (args.report != nullptr || args.k == 1), kOp, ": null pointer");
  kLaunches[args.k - 1](args, exec, piece_grid(args.num_pieces, kOp));
  check_launch(kOp, ": ", args.num_pieces, " pieces, k = ", args.k);
}

}  // namespace speedrun::kernels

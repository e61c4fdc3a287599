// Touched rows of a table, packed by owner, and the sum of what an owner receives.
// Layout    table (V, C) row-major FP32; packs (W, K, C) with (W, K) row indices, ascending, then −1.
// Work      a warp per slot of a pack. Sum: the warp whose slot is the first of a row, in the order of the ranks, adds that row
//           of all ranks; each lane looks the row up in one rank's list. Warps of other slots are done at once.
// Traffic   pack reads and writes the touched rows; sum reads the received rows and writes each row once. Lists are read again
//           and again and stay in L2.
// Numerics  FP32 sums in the order of the ranks, without atomics.
#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/sparse_rows/sparse_rows.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kFloats = 4;  // of one access
constexpr unsigned kAllLanes = 0xffffffffu;

// First k in [0, count) with list[k] >= row, else count; as unsigned numbers, so that −1 stands behind every row.
__device__ __forceinline__ int64_t lower_bound(const int32_t* list, int64_t count, uint32_t row) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (static_cast<uint32_t>(list[middle]) < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Block (tile, owner): kWarps slots of the owner's pack.
__global__ void __launch_bounds__(kThreads) sparse_rows_pack_kernel(const SparseRowsPack<bf16> p, int64_t tiles) {
  __shared__ int64_t bounds[2];  // in rows, of the owner's
  const int owner = static_cast<int>(blockIdx.x / tiles);
  if (threadIdx.x < 2) {
    const int64_t first_row = sparse_rows_begin(p.V, p.W, owner + static_cast<int>(threadIdx.x));
    bounds[threadIdx.x] = lower_bound(p.rows, *p.num_rows, static_cast<uint32_t>(first_row));
  }
  __syncthreads();
  const int64_t k = blockIdx.x % tiles * kWarps + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (k >= p.K) return;
  const int64_t slot = owner * p.K + k, source = bounds[0] + k;
  const int32_t row = source < bounds[1] ? p.rows[source] : -1;
  if (lane == 0) p.index[slot] = row;
  if (row < 0) return;
  const bool overflows = k == p.K - 1 && source + 1 < bounds[1];
  const float nan = __int_as_float(0x7fc00000);
#pragma unroll 4
  for (int c = lane * kFloats; c < p.C; c += kWarpSize * kFloats) {
    const float4 values = *reinterpret_cast<const float4*>(p.table + int64_t{row} * p.C + c);
    *reinterpret_cast<float4*>(p.values + slot * p.C + c) = overflows ? float4{nan, nan, nan, nan} : values;
  }
}

// Slots (32 ranks from first_rank on) that hold `row`: bit l of the result and, in lane l, the slot, for rank first_rank + l.
__device__ __forceinline__ unsigned find_senders(const SparseRowsSum<bf16>& p, int first_rank, int32_t row, int64_t& slot) {
  const int rank = first_rank + static_cast<int>(threadIdx.x % kWarpSize);
  bool found = false;
  if (rank < p.W) {
    const int32_t* list = p.index + rank * p.K;
    const int64_t k = lower_bound(list, p.K, static_cast<uint32_t>(row));
    found = k < p.K && list[k] == row;
    slot = rank * p.K + k;
  }
  return __ballot_sync(kAllLanes, found);
}

__global__ void __launch_bounds__(kThreads) sparse_rows_sum_kernel(const SparseRowsSum<bf16> p) {
  const int64_t own_slot = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (own_slot >= p.W * p.K) return;
  const int32_t row = p.index[own_slot];
  if (row < 0) return;
  const int lane = threadIdx.x % kWarpSize, own_rank = static_cast<int>(own_slot / p.K);
  float* sum_row = p.table + int64_t{row} * p.C;
  for (int first_rank = 0; first_rank < p.W; first_rank += kWarpSize) {
    int64_t slot = 0;
    const unsigned senders = find_senders(p, first_rank, row, slot);
    if (senders == 0) continue;
    // Another rank's slot of this row comes first: its warp does the work.
    if (first_rank + kWarpSize <= own_rank || (first_rank <= own_rank && first_rank + __ffs(senders) - 1 != own_rank)) return;
    const bool continues = own_rank < first_rank;  // the row already holds the sum of ranks below
    for (int base = 0; base < p.C; base += kWarpSize * kFloats) {
      const int c = base + lane * kFloats;
      const bool inside = c < p.C;
      float4 sum{};
      if (continues && inside) sum = *reinterpret_cast<const float4*>(sum_row + c);
      bool first = !continues;
      for (unsigned left = senders; left != 0; left &= left - 1) {
        const int64_t from = __shfl_sync(kAllLanes, slot, __ffs(left) - 1);
        if (!inside) continue;
        const float4 values = *reinterpret_cast<const float4*>(p.values + from * p.C + c);
        sum = first ? values : float4{sum.x + values.x, sum.y + values.y, sum.z + values.z, sum.w + values.w};
        first = false;
      }
      if (inside) *reinterpret_cast<float4*>(sum_row + c) = sum;
    }
  }
}

template <class Args>
void check(const char* op, const Args& args) {
  require(args.K > 0 && args.W > 0 && args.C > 0 && args.C % kFloats == 0, op, ": K = ", args.K, ", W = ", args.W, ", C = ", args.C,
          "; C must be a multiple of ", kFloats);
  require_aligned16(op, "table", args.table);
  require_aligned16(op, "values", args.values);
}

}  // namespace

void sparse_rows_pack(const SparseRowsPack<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "sparse_rows_pack";
  check(kOp, args);
  require(args.V > 0 && args.V <= 0x7fffffff, kOp, ": V = ", args.V);
  const int64_t tiles = ceil_div(args.K, kWarps);
  sparse_rows_pack_kernel<<<grid_size(tiles * args.W, kOp), kThreads, 0, exec.stream>>>(args, tiles);
  check_launch(kOp, ": V = ", args.V, ", K = ", args.K, ", W = ", args.W, ", C = ", args.C);
}

void sparse_rows_sum(const SparseRowsSum<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "sparse_rows_sum";
  check(kOp, args);
  sparse_rows_sum_kernel<<<grid_size(ceil_div(args.W * args.K, kWarps), kOp), kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": K = ", args.K, ", W = ", args.W, ", C = ", args.C);
}

}  // namespace speedrun::kernels

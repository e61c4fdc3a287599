// Loss and E5M2 gradient of a chunk of logits, the gradient in both layouts:
//   loss[t] = Σ_j w_j·(lse − z[c_j]),   grad8 = e5m2(slope·(S·softmax − Σ w_j·onehot(c_j)) · 448/grad_bound),   grad8_t = grad8ᵀ
// Layout    logits, grad8 (rows, V), grad8_t (V, rows); rows and V multiples of 16, 16-byte aligned pointers.
// Work      A row's sum is needed before its first gradient, and grad8_t wants many rows at once: 16 rows are 1.6 MB at V = 50,304.
//           A cluster of 16 blocks holds them in shared memory, each block all 16 rows of a sixteenth of the columns (98 KB, so
//           that two blocks share an SM and one computes while the other waits for memory). A warp takes a row of the block's
//           part: reads it, sums it, stores it as h (below); the blocks exchange 16 sums through distributed shared memory; then a
//           thread takes tiles of 16 rows and 4 columns: converts, stores words of grad8, turns the tile by byte permutes and
//           stores 16 bytes of each column of grad8_t. The other half of such a 32-byte sector comes from the next cluster, which
//           runs at the same time: L2 puts them together. That is why logits and grad8 pass through L2 marked as read or written
//           once.
// Traffic   reads N·V·2 bytes, writes N·V twice: the least there is for both layouts. Per 16,384 tokens 3.3 GB, 0.8 ms at 4.2 TB/s.
// Numerics  FP32 in units of log2, order of sums fixed. Between the passes an element is h = slope·2^z in BF16, so that the second
//           pass is one multiplication and the special-function unit, as narrow a place as memory, is used once per element: 2.5
//           operations of it. BF16's rounding before E5M2's moves about one element in sixty to E5M2's other neighbour, and only
//           those within 2^−9 of the middle. Soft-caps that do not bound z get the softmax itself as h, in a pass over shared
//           memory.
#include "kernels/base/launch.cuh"
#include "kernels/fp8/fp8_convert.cuh"
#include "kernels/head/head_fp8_cuda.h"
#include "kernels/head/head_row.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kRows = kFp8ClusterRows, kCluster = kFp8Cluster;
constexpr int kThreads = kRows * kWarpSize;  // a warp per row
constexpr int kBlocksPerSm = 2;
constexpr int kBatch = 4;        // 16-byte loads in flight per thread
constexpr int kTileColumns = 4;  // of a thread's tile
constexpr int kTilesPerVector = kVec / kTileColumns;
static_assert(kRows == 16 && kCluster <= kWarpSize);

struct RowLossFp8 {
  float* loss;         // (rows)
  const bf16* logits;  // (rows, V)
  e5m2* grad8;         // (rows, V)
  e5m2* grad8_t;       // (V, rows)
  Fp8Scale* grad_scale8;
  const float* grad_scale;
  LossTerms terms;
  int64_t first;  // token of row 0
  int64_t rows;
  int V;
  float softcap_value;
  float bound_scale;  // grad_bound/448
  float units;        // 448/grad_bound
  bool count;
};

// rows[i] holds columns 0 … 3 of row i, lowest byte first; columns[i] then holds rows 0 … 3 of column i.
__device__ __forceinline__ void transpose4x4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), high01 = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t low23 = __byte_perm(rows[2], rows[3], 0x5140), high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

// E5M2's largest number is kE5m2Max; half of its smallest one, 2⁻¹⁶, is a tie that goes to 0.
__device__ __forceinline__ bool is_saturated_e5m2(float value) { return fabsf(value) > kE5m2Max; }
__device__ __forceinline__ bool is_flushed_e5m2(float value) { return value != 0 && fabsf(value) <= 0x1p-17f; }

template <Softcap kCap>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) row_loss_fp8(const RowLossFp8 p) {
  extern __shared__ uint4 slab[];     // (kRows, fp8_block_vectors) of 8 columns
  __shared__ float4 partials[kRows];  // of a row in this block: maximum, sum, Σ w·z of the terms here
  __shared__ float row_scale[kRows];  // h times it is the gradient in units of its scale
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int rank = static_cast<int>(ptx::cluster_ctarank());
  const int64_t first_row = int64_t{blockIdx.x / kCluster} * kRows, row_idx = first_row + warp;
  const int stride = fp8_block_vectors(p.V), begin = rank * stride;  // in vectors
  const int num_vectors = max(0, min(stride, p.V / kVec - begin));
  const bf16* const row = p.logits + row_idx * p.V;
  const bf16* const part = row + begin * kVec;
  uint4* const slab_row = slab + warp * stride;
  const int target = lane < kTermSlots ? p.terms.target(p.first + row_idx, lane) : -1;

  // This block's part of log2 Σ 2^z over the row. Bounded: h = slope·2^z at once.
  RunningSum<kCap> running;
  for (int base = lane; base < num_vectors; base += kWarpSize * kBatch) {
    uint4 raw[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kWarpSize < num_vectors) raw[j] = load16_streaming(part + (base + j * kWarpSize) * kVec);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kWarpSize >= num_vectors) break;
      float x[kVec];
      Capped capped[kVec];
      unpack8(raw[j], x);
      cap8<kCap>(x, p.softcap_value, capped);
      if constexpr (kBounded<kCap>) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float power = ptx::ex2_approx_ftz(capped[i].z);
          running.sum += power;
          x[i] = capped[i].slope * power;
        }
        slab_row[base + j * kWarpSize] = pack8(x);
      } else {
        running.add(capped);
        slab_row[base + j * kWarpSize] = raw[j];
      }
    }
  }
  // A lane per term. Its logit is read again, by the block that holds the column.
  const Term term = lane < kTermSlots ? loss_term(p.terms, target, lane) : Term{};
  const int column_here = term.column - begin * kVec;
  const bool here = column_here >= 0 && column_here < num_vectors * kVec;
  const Capped target_logit = here ? cap<kCap>(static_cast<float>(row[term.column]), p.softcap_value) : Capped{};
  const float part_max = kBounded<kCap> ? 0.0f : warp_max(running.max);
  const float part_sum = warp_sum(running.sum * ptx::ex2_approx_ftz(running.max - part_max));
  const float part_target = warp_sum(here ? term.weight * target_logit.z : 0.0f);
  if (lane == 0) partials[warp] = {part_max, part_sum, part_target, 0.0f};
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();

  // The row's sums, a lane per block.
  const float4 other = lane < kCluster ? ptx::ld_shared_cluster_f32x4(ptx::mapa(ptx::shared_address(&partials[warp]), lane))
                                       : float4{-FLT_MAX, 0.0f, 0.0f, 0.0f};
  ptx::barrier_cluster_arrive();  // a block may leave once all have read its partials
  const float max = kBounded<kCap> ? 0.0f : warp_max(other.x);
  const float sum = warp_sum(kBounded<kCap> ? other.y : other.y * ptx::ex2_approx_ftz(other.x - max));
  const float log_sum = max + log2f(sum);
  const float target_sum = warp_sum(other.z), weight_sum = warp_sum(term.weight);
  const float softmax_weight = warp_sum(term.softmax_weight);  // S
  if (rank == 0 && lane == 0) p.loss[row_idx] = (weight_sum * log_sum - target_sum) * kLn2;
  if (blockIdx.x == 0 && threadIdx.x == 0) p.grad_scale8->scale = p.bound_scale * *p.grad_scale;

  // The other soft-caps' h = slope·softmax, each lane where it read.
  const float shift = kBounded<kCap> ? 0.0f : log_sum, norm = kBounded<kCap> ? sum : 1.0f;
  if constexpr (!kBounded<kCap>) {
    for (int vector = lane; vector < num_vectors; vector += kWarpSize) {
      float x[kVec];
      Capped capped[kVec];
      unpack8(slab_row[vector], x);
      cap8<kCap>(x, p.softcap_value, capped);
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[i] = capped[i].slope * ptx::ex2_approx_ftz(capped[i].z - shift);
      slab_row[vector] = pack8(x);
    }
  }
  // Target columns: S·softmax − W in the same units, that is (2^z − W/S·norm)·slope; equal columns are written as equal values.
  float weight = 0;
#pragma unroll
  for (int i = 0; i < kTermSlots; ++i) {
    const int column = __shfl_sync(0xffffffffu, term.column, i);
    const float other_weight = __shfl_sync(0xffffffffu, term.weight, i);
    if (column == term.column) weight += other_weight;
  }
  __syncwarp();
  if (here && softmax_weight != 0) {
    const float power = ptx::ex2_approx_ftz(target_logit.z - shift);
    reinterpret_cast<bf16*>(slab_row)[column_here] = bf16(target_logit.slope * (power - weight / softmax_weight * norm));
  }
  if (lane == 0) row_scale[warp] = softmax_weight * p.units / norm;
  __syncthreads();

  uint32_t saturated = 0, flushed = 0;
  const uint2* const tiles = reinterpret_cast<const uint2*>(slab);
  for (int tile = threadIdx.x; tile < num_vectors * kTilesPerVector; tile += kThreads) {
    const int64_t column = begin * kVec + tile * kTileColumns;
    uint32_t codes[kRows / 4][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint2 raw = tiles[r * stride * kTilesPerVector + tile];
      const float2 low = unpack_bf16x2(raw.x), high = unpack_bf16x2(raw.y);
      const float scale = row_scale[r];
      const float x[kTileColumns] = {low.x * scale, low.y * scale, high.x * scale, high.y * scale};
      codes[r / 4][r % 4] = to_fp8x4<e5m2>(x[0], x[1], x[2], x[3]);
      __stcs(reinterpret_cast<uint32_t*>(p.grad8 + (first_row + r) * p.V + column), codes[r / 4][r % 4]);
      if (p.count) {
#pragma unroll
        for (int i = 0; i < kTileColumns; ++i) saturated += is_saturated_e5m2(x[i]), flushed += is_flushed_e5m2(x[i]);
      }
    }
    uint32_t turned[kRows / 4][kTileColumns];
#pragma unroll
    for (int q = 0; q < kRows / 4; ++q) transpose4x4(codes[q], turned[q]);
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) {
      store16(p.grad8_t + (column + i) * p.rows + first_row, uint4{turned[0][i], turned[1][i], turned[2][i], turned[3][i]});
    }
  }
  if (p.count) {
    saturated = __reduce_add_sync(0xffffffffu, saturated);
    flushed = __reduce_add_sync(0xffffffffu, flushed);
    if (lane == 0 && saturated != 0) atomicAdd(&p.grad_scale8->saturated, saturated);
    if (lane == 0 && flushed != 0) atomicAdd(&p.grad_scale8->flushed, flushed);
  }
  ptx::barrier_cluster_wait();
}

template <Softcap kCap>
void launch(const RowLossFp8& args, const CudaExec& exec) {
  const int slab_bytes = static_cast<int>(fp8_block_bytes(args.V));
  const auto kernel = row_loss_fp8<kCap>;
  allow_dynamic_smem(kernel, slab_bytes, "head");
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "head: clusters of ", kCluster);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_size(args.rows / kRows * kCluster, "head"));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(slab_bytes);
  config.stream = exec.stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, args), "head: FP8 loss of ", args.rows, " rows, V = ", args.V);
}

}  // namespace

void head_fp8_loss(const HeadLoss<bf16>& args, const LossTerms& terms, int64_t begin, int64_t count, const CudaExec& exec) {
  const HeadFp8& fp8 = args.fp8;
  const RowLossFp8 rows{.loss = args.loss + begin,
                        .logits = args.logits,
                        .grad8 = fp8.grad8,
                        .grad8_t = fp8.grad8_t,
                        .grad_scale8 = fp8.grad_scale8,
                        .grad_scale = args.grad_scale,
                        .terms = terms,
                        .first = begin,
                        .rows = count,
                        .V = args.V,
                        .softcap_value = static_cast<float>(args.softcap_value),
                        .bound_scale = static_cast<float>(fp8.grad_bound / kE4m3Max),
                        .units = static_cast<float>(kE4m3Max / fp8.grad_bound),
                        .count = fp8.count};
  dispatch_softcap(args.softcap, [&](auto softcap) { launch<softcap()>(rows, exec); });
}

}  // namespace speedrun::kernels

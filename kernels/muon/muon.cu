// Muon on a batch of equally shaped matrices; m = min, n = max of (rows, cols).
//   momentum    M ← μM + (1−μ)G, X = bf16(U) as (m, n), partial sums of X²;   scale  X ← X / (norm_margin·‖X‖ + eps)
//   iterations times, batched products: A = XXᵀ, B = bA + cA², X ← aX + BX
//   statistics  (normuon) sums c of X² down the columns of X; v ← β2·v + (1−β2)·c/m; Σc and
//               Σc/max(v, 1e-10) = Σ(X·r)² of 64 columns
//   apply       muon: W ← W − decay·W − lr·s·X(ᵀ);   normuon: V = X·scale of its column,
//               W ← W − [V·W >= 0]·decay·s·W − lr·s·V(ᵀ)
// Layout    matrices row-major, rows and cols multiples of 8, 16-byte aligned. x[0], x[1] in turn hold X; gram[0] = A, gram[1]
//           = B.
// Work      element-wise passes in tiles of 64 × 64, one block a tile (momentum: kMuonNormParts blocks a matrix, each a fixed
//           set of tiles; statistics: one block a column of tiles). Transposed matrices go through shared memory, so that both
//           sides are read and written along their rows.
// Traffic   bytes an element: momentum 14, scale 4, statistics 2, apply 10 with a full master; a product reads and writes its
//           operands once, mostly from L2.
// Numerics  FP32 sums in a fixed order; A, B and X are stored in BF16, normuon's column scales are rounded to it, V = X·scale
//           is not; masters are joined and split exactly. Bitwise reproducible.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/base/master_vec.cuh"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/muon/muon.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;
constexpr int kTilePad = 2;  // an odd number of 4-byte words a row: columns fall into different banks
constexpr int kTileVecs = kTile / kVec;
constexpr int kPasses = kTile * kTileVecs / kThreads;  // vectors of a tile a thread handles

using TransposeTile = bf16[kTile][kTile + kTilePad];

struct Shape {
  int rows, cols, tiles_across, tiles;  // tiles of 64 × 64 of one matrix
  int sums;                             // muon_sums: elements of its part of `sums`
};

// The thread's vector number `pass` of a tile: 8 neighbouring columns of one row, counted inside the tile.
struct TileVec {
  int row, col;
  __device__ explicit TileVec(int pass) {
    const int index = pass * kThreads + static_cast<int>(threadIdx.x);
    row = index / kTileVecs;
    col = index % kTileVecs * kVec;
  }
};

__device__ __forceinline__ void put_row(TransposeTile& tile, TileVec at, const float (&values)[kVec]) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) tile[at.row][at.col + j] = bf16(values[j]);
}

// Eight values down a column of the tile, as a vector along a row of the transpose; at is a place in the transposed tile.
__device__ __forceinline__ uint4 take_column(const TransposeTile& tile, TileVec at) {
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    words[j] = static_cast<uint32_t>(tile[at.col + 2 * j][at.row].bits) |
               (static_cast<uint32_t>(tile[at.col + 2 * j + 1][at.row].bits) << 16);
  }
  return {words[0], words[1], words[2], words[3]};
}

struct MomentumArgs {
  const MuonMatrix<bf16>* matrices;
  bf16* x;      // (batch, m, n)
  float* sums;  // (batch, shape.sums)
  const StepVerdict* verdict;
  Shape shape;
  bool nesterov;
};

template <bool kTranspose>
__global__ void __launch_bounds__(kThreads) momentum_kernel(const MomentumArgs p) {
  __shared__ float partials[kThreads / kWarpSize];
  __shared__ TransposeTile tile;
  if (p.verdict->skip != 0) return;
  const Shape shape = p.shape;
  const int64_t matrix_idx = blockIdx.x / kMuonNormParts;
  const int part = blockIdx.x % kMuonNormParts;
  const MuonMatrix<bf16> matrix = p.matrices[matrix_idx];
  bf16* x = p.x + matrix_idx * shape.rows * shape.cols;
  const float momentum = matrix.step->momentum, fresh = 1.0f - momentum, grad_scale = p.verdict->grad_scale;

  float sum_squares = 0;
  for (int tile_idx = part; tile_idx < shape.tiles; tile_idx += kMuonNormParts) {
    const int row0 = tile_idx / shape.tiles_across * kTile, col0 = tile_idx % shape.tiles_across * kTile;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const TileVec at(pass);
      const int row = row0 + at.row, col = col0 + at.col;
      if (row >= shape.rows || col >= shape.cols) continue;
      const int64_t offset = static_cast<int64_t>(row) * shape.cols + col;
      float g[kVec], m[kVec], u[kVec];
      load8(matrix.grad + offset, g);
      load8(matrix.momentum + offset, m);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float fresh_grad = fresh * (g[j] * grad_scale);
        m[j] = momentum * m[j] + fresh_grad;
        u[j] = p.nesterov ? fresh_grad + momentum * m[j] : m[j];
        const float stored = static_cast<float>(bf16(u[j]));
        sum_squares += stored * stored;
      }
      store8(matrix.momentum + offset, m);
      if constexpr (kTranspose) {
        put_row(tile, at, u);
      } else {
        store8(x + offset, u);
      }
    }
    if constexpr (kTranspose) {
      __syncthreads();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const TileVec at(pass);  // of the transposed tile: row = the matrix's column
        if (col0 + at.row >= shape.cols || row0 + at.col >= shape.rows) continue;
        store16(x + static_cast<int64_t>(col0 + at.row) * shape.rows + row0 + at.col, take_column(tile, at));
      }
      __syncthreads();
    }
  }
  sum_squares = block_sum<kThreads>(sum_squares, partials);
  if (threadIdx.x == 0) p.sums[matrix_idx * shape.sums + part] = sum_squares;
}

struct ScaleArgs {
  bf16* x;            // (batch, elements)
  const float* sums;  // (batch, num_sums)
  const StepVerdict* verdict;
  int64_t elements;      // of a matrix
  int blocks, num_sums;  // of a matrix
  float norm_margin, eps;
};

__global__ void __launch_bounds__(kThreads) scale_kernel(const ScaleArgs p) {
  if (p.verdict->skip != 0) return;
  const int64_t matrix_idx = blockIdx.x / p.blocks;
  const float* parts = p.sums + matrix_idx * p.num_sums;
  const int lane = threadIdx.x % kWarpSize;
  const float norm = sqrtf(warp_sum(parts[lane] + parts[lane + kWarpSize]));
  static_assert(kMuonNormParts == 2 * kWarpSize);
  const float denominator = p.norm_margin * norm + p.eps;
  const float factor = denominator > 0 ? 1.0f / denominator : 0.0f;

  const int64_t element = (static_cast<int64_t>(blockIdx.x % p.blocks) * kThreads + threadIdx.x) * kVec;
  if (element >= p.elements) return;
  bf16* x = p.x + matrix_idx * p.elements + element;
  float values[kVec];
  load8(x, values);
#pragma unroll
  for (int j = 0; j < kVec; ++j) values[j] *= factor;
  store8(x, values);
}

// normuon: bound below v and the norm after scaling
constexpr float kSmallest = 1e-10f;

struct StatisticsArgs {
  const MuonMatrix<bf16>* matrices;
  const bf16* x;  // (batch, m, n)
  float* sums;    // (batch, num_sums): Σ X² of each tile, then Σ (X·r)² of each
  const StepVerdict* verdict;
  int m, n, tiles, num_sums;
  float beta2, one_minus_beta2;
};

__global__ void __launch_bounds__(kThreads) statistics_kernel(const StatisticsArgs p) {
  constexpr int kColumnVecs = kMuonStatColumns / kVec, kRows = kThreads / kColumnVecs;
  __shared__ float partials[kRows][kMuonStatColumns];
  if (p.verdict->skip != 0) return;
  const int64_t matrix_idx = blockIdx.x / p.tiles;
  const int tile = blockIdx.x % p.tiles, first = tile * kMuonStatColumns;
  const int column = threadIdx.x % kColumnVecs * kVec, first_row = threadIdx.x / kColumnVecs;

  float squares[kVec] = {};
  if (first + column < p.n) {
    const bf16* x = p.x + matrix_idx * p.m * p.n + first + column;
#pragma unroll 8
    for (int row = first_row; row < p.m; row += kRows) {
      float values[kVec];
      load8(x + static_cast<int64_t>(row) * p.n, values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) squares[j] += values[j] * values[j];
    }
  }
  store8(&partials[first_row][column], squares);
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;

  float sum = 0, scaled = 0;
#pragma unroll
  for (int half = 0; half < kMuonStatColumns / kWarpSize; ++half) {
    const int offset = half * kWarpSize + threadIdx.x;
    if (first + offset >= p.n) continue;
    float total = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) total += partials[row][offset];
    float* second = p.matrices[matrix_idx].second + first + offset;
    const float v = p.beta2 * *second + p.one_minus_beta2 * (total / static_cast<float>(p.m));
    *second = v;
    sum += total;
    scaled += total / fmaxf(v, kSmallest);
  }
  sum = warp_sum(sum);
  scaled = warp_sum(scaled);
  if (threadIdx.x == 0) {
    float* sums = p.sums + matrix_idx * p.num_sums;
    sums[tile] = sum;
    sums[p.tiles + tile] = scaled;
  }
}

struct ApplyArgs {
  const MuonMatrix<bf16>* matrices;
  const bf16* x;      // (batch, m, n)
  const float* sums;  // (batch, shape.sums) of the statistics
  const StepVerdict* verdict;
  Shape shape;
  int stat_tiles;
  float aspect;  // s = √max(1, rows/cols)
};

// ‖X‖ / max(‖X·r‖, 1e-10), on every lane of a warp
__device__ __forceinline__ float norm_ratio(const float* sums, int tiles) {
  float squares = 0, scaled = 0;
  for (int tile = threadIdx.x % kWarpSize; tile < tiles; tile += kWarpSize) {
    squares += sums[tile];
    scaled += sums[tiles + tile];
  }
  return sqrtf(warp_sum(squares)) / fmaxf(sqrtf(warp_sum(scaled)), kSmallest);
}

__device__ __forceinline__ float column_scale(float second, float ratio) {
  return static_cast<float>(bf16(ratio / sqrtf(fmaxf(second, kSmallest))));
}

struct ApplyStep {
  float decay, step_size, ratio;
};

// 8 neighbouring weights. second: of the first one's column of X; if transposed they share it, else their columns are neighbours.
template <bool kTranspose, MuonForm kForm>
__device__ __forceinline__ void apply_vec(const WeightRef<bf16>& weight, int64_t offset, uint4 raw_x, const float* second,
                                          const ApplyStep& step) {
  float x[kVec];
  unpack8(raw_x, x);
  float w[kVec];
  load_masters8(weight, offset, w);
  if constexpr (kForm == MuonForm::normuon) {
    float scale[kVec];
    if constexpr (kTranspose) {
      scale[0] = column_scale(*second, step.ratio);
#pragma unroll
      for (int j = 1; j < kVec; ++j) scale[j] = scale[0];
    } else {
      load8(second, scale);
#pragma unroll
      for (int j = 0; j < kVec; ++j) scale[j] = column_scale(scale[j], step.ratio);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float value = x[j] * scale[j];
      const float decayed = value * w[j] >= 0 ? w[j] - step.decay * w[j] : w[j];
      w[j] = decayed - step.step_size * value;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVec; ++j) w[j] = (w[j] - step.decay * w[j]) - step.step_size * x[j];
  }
  store_masters8(weight, offset, w);
}

template <bool kTranspose, MuonForm kForm>
__global__ void __launch_bounds__(kThreads) apply_kernel(const ApplyArgs p) {
  __shared__ TransposeTile tile;
  if (p.verdict->skip != 0) return;
  const Shape shape = p.shape;
  const int64_t matrix_idx = blockIdx.x / shape.tiles;
  const int tile_idx = blockIdx.x % shape.tiles;
  const int row0 = tile_idx / shape.tiles_across * kTile, col0 = tile_idx % shape.tiles_across * kTile;
  const MuonMatrix<bf16> matrix = p.matrices[matrix_idx];
  const bf16* x = p.x + matrix_idx * shape.rows * shape.cols;
  ApplyStep step{.decay = matrix.decays ? matrix.step->decay : 0.0f, .step_size = matrix.step->lr * p.aspect, .ratio = 1};
  if constexpr (kForm == MuonForm::normuon) {
    step.decay *= p.aspect;
    step.ratio = norm_ratio(p.sums + matrix_idx * shape.sums, p.stat_tiles);
  }

  if constexpr (kTranspose) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const TileVec at(pass);  // of x's tile: row = the matrix's column
      if (col0 + at.row >= shape.cols || row0 + at.col >= shape.rows) continue;
      float values[kVec];
      load8(x + static_cast<int64_t>(col0 + at.row) * shape.rows + row0 + at.col, values);
      put_row(tile, at, values);
    }
    __syncthreads();
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const TileVec at(pass);
    const int row = row0 + at.row, col = col0 + at.col;
    if (row >= shape.rows || col >= shape.cols) continue;
    const int64_t offset = static_cast<int64_t>(row) * shape.cols + col;
    if constexpr (kTranspose) {
      apply_vec<true, kForm>(matrix.weight, offset, take_column(tile, at), matrix.second + row, step);
    } else {
      apply_vec<false, kForm>(matrix.weight, offset, load16(x + offset), matrix.second + col, step);
    }
  }
}

void newton_schulz(const Muon<bf16>& args, const CudaExec& exec) {
  const int64_t m = std::min(args.rows, args.cols), n = std::max(args.rows, args.cols);
  bf16* a = args.gram;
  bf16* b = args.gram + args.batch * m * m;
  bf16* x = args.x;
  bf16* next = args.x + args.batch * m * n;
  for (int i = 0; i < args.iterations; ++i) {
    const MuonCoefficients& k = args.coefficients[i];
    gemm(GemmCuda{.d = a,
                  .a = x,
                  .b = x,
                  .M = m,
                  .N = m,
                  .K = n,
                  .transpose_b = true,
                  .batch = args.batch,
                  .stride_a = m * n,
                  .stride_b = m * n,
                  .stride_d = m * m},
         exec);
    gemm(GemmCuda{.d = b,
                  .a = a,
                  .b = a,
                  .c = a,
                  .M = m,
                  .N = m,
                  .K = m,
                  .alpha = static_cast<float>(k.c),
                  .beta = static_cast<float>(k.b),
                  .batch = args.batch,
                  .stride_a = m * m,
                  .stride_b = m * m,
                  .stride_c = m * m,
                  .stride_d = m * m},
         exec);
    gemm(GemmCuda{.d = next,
                  .a = b,
                  .b = x,
                  .c = x,
                  .M = m,
                  .N = n,
                  .K = m,
                  .alpha = 1,
                  .beta = static_cast<float>(k.a),
                  .batch = args.batch,
                  .stride_a = m * m,
                  .stride_b = m * n,
                  .stride_c = m * n,
                  .stride_d = m * n},
         exec);
    std::swap(x, next);
  }
}

void check_args(const Muon<bf16>& args) {
  constexpr const char* kOp = "muon_update";
  require(args.batch > 0 && args.rows > 0 && args.cols > 0 && args.rows % kVec == 0 && args.cols % kVec == 0, kOp, ": ", args.batch,
          " matrices of ", args.rows, " x ", args.cols, "; both sides must be multiples of 8");
  require(args.iterations >= 0 && (args.iterations == 0 || args.coefficients != nullptr), kOp, ": ", args.iterations,
          " iterations without coefficients");
  require(args.matrices != nullptr && args.sums != nullptr && args.verdict != nullptr, kOp, ": null pointer");
  require_aligned16(kOp, "x", args.x);
  require_aligned16(kOp, "gram", args.gram);
}

}  // namespace

void muon_update(const Muon<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "muon_update";
  check_args(args);
  const bool normuon = args.form == MuonForm::normuon, transposes = muon_transposes(args.form, args.rows, args.cols);
  const int64_t elements = static_cast<int64_t>(args.rows) * args.cols;
  const int tiles_across = static_cast<int>(ceil_div(args.cols, kTile));
  const Shape shape{.rows = args.rows,
                    .cols = args.cols,
                    .tiles_across = tiles_across,
                    .tiles = static_cast<int>(ceil_div(args.rows, kTile)) * tiles_across,
                    .sums = muon_sums(args.rows, args.cols)};

  const MomentumArgs momentum{.matrices = args.matrices,
                              .x = args.x,
                              .sums = args.sums,
                              .verdict = args.verdict,
                              .shape = shape,
                              .nesterov = args.nesterov};
  const auto momentum_launch = transposes ? momentum_kernel<true> : momentum_kernel<false>;
  momentum_launch<<<grid_size(static_cast<int64_t>(args.batch) * kMuonNormParts, kOp), kThreads, 0, exec.stream>>>(momentum);
  check_launch(kOp, ": momentum, ", args.batch, " x ", args.rows, " x ", args.cols);

  const int scale_blocks = static_cast<int>(ceil_div(elements, int64_t{kThreads} * kVec));
  const ScaleArgs scale{.x = args.x,
                        .sums = args.sums,
                        .verdict = args.verdict,
                        .elements = elements,
                        .blocks = scale_blocks,
                        .num_sums = shape.sums,
                        .norm_margin = static_cast<float>(args.norm_margin),
                        .eps = static_cast<float>(args.eps)};
  scale_kernel<<<grid_size(static_cast<int64_t>(args.batch) * scale_blocks, kOp), kThreads, 0, exec.stream>>>(scale);
  check_launch(kOp, ": scale, ", args.batch, " x ", args.rows, " x ", args.cols);

  newton_schulz(args, exec);

  const bf16* x = args.x + args.iterations % 2 * args.batch * elements;
  const int stat_tiles = muon_stat_tiles(args.rows, args.cols);
  if (normuon) {
    const StatisticsArgs statistics{.matrices = args.matrices,
                                    .x = x,
                                    .sums = args.sums,
                                    .verdict = args.verdict,
                                    .m = std::min(args.rows, args.cols),
                                    .n = std::max(args.rows, args.cols),
                                    .tiles = stat_tiles,
                                    .num_sums = shape.sums,
                                    .beta2 = static_cast<float>(args.beta2),
                                    .one_minus_beta2 = static_cast<float>(1 - args.beta2)};
    statistics_kernel<<<grid_size(static_cast<int64_t>(args.batch) * stat_tiles, kOp), kThreads, 0, exec.stream>>>(statistics);
    check_launch(kOp, ": statistics, ", args.batch, " x ", args.rows, " x ", args.cols);
  }

  const ApplyArgs apply{.matrices = args.matrices,
                        .x = x,
                        .sums = args.sums,
                        .verdict = args.verdict,
                        .shape = shape,
                        .stat_tiles = stat_tiles,
                        .aspect = std::sqrt(std::max(1.0f, static_cast<float>(args.rows) / static_cast<float>(args.cols)))};
  const auto apply_launch = normuon ? (transposes ? apply_kernel<true, MuonForm::normuon> : apply_kernel<false, MuonForm::normuon>)
                                    : (transposes ? apply_kernel<true, MuonForm::muon> : apply_kernel<false, MuonForm::muon>);
  apply_launch<<<grid_size(static_cast<int64_t>(args.batch) * shape.tiles, kOp), kThreads, 0, exec.stream>>>(apply);
  check_launch(kOp, ": apply, ", args.batch, " x ", args.rows, " x ", args.cols);
}

}  // namespace speedrun::kernels

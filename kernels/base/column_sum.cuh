#pragma once
// sum (C) += Σ_rows of a bf16 matrix (N, C), in two launches with the cut into parts of column_sum.h.
// Layout    row-major, C % 8 == 0, 16-byte aligned rows.
// Work      partials: a block owns 128 columns of one part; 16 threads across (8 columns each), 16 rows at a time. Then one
//           thread a column.
// Traffic   reads 2·N·C bytes; partials (at most 64·C floats) are written and read once.
// Numerics  FP32; rows by thread row, thread rows in ascending order, parts in ascending order: bitwise reproducible, on any
//           device. The row source is a functor, so that an element-wise backward pass can make its values, store them and have
//           them summed in one pass.
#include "kernels/base/column_sum.h"
#include "kernels/base/column_sum_cuda.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"

namespace speedrun::kernels {

inline constexpr int kColumnSumLanes = 16, kColumnSumRows = 16;
inline constexpr int kColumnSumTile = kColumnSumLanes * kVec;  // columns of a block

// source(index, values): the 8 values at element `index` of the matrix.
template <class Source>
__global__ void __launch_bounds__(kColumnSumLanes* kColumnSumRows)
    column_sum_partials(float* __restrict__ partials, Source source, int64_t N, int64_t C, int64_t rows_per_part,
                        int column_tiles) {
  const int64_t part = blockIdx.x / column_tiles;
  const int lane = threadIdx.x % kColumnSumLanes, row = threadIdx.x / kColumnSumLanes;
  const int64_t column = int64_t{blockIdx.x % column_tiles} * kColumnSumTile + lane * kVec;
  const int64_t end = min(N, (part + 1) * rows_per_part);

  float sums[kVec] = {};
  if (column < C) {
#pragma unroll 4
    for (int64_t n = part * rows_per_part + row; n < end; n += kColumnSumRows) {
      float values[kVec];
      source(n * C + column, values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[i] += values[i];
    }
  }
  if (partials == nullptr) return;  // the pass is wanted for what the source stores

  __shared__ float tile[kColumnSumRows][kColumnSumTile];
#pragma unroll
  for (int i = 0; i < kVec; ++i) tile[row][lane * kVec + i] = sums[i];
  __syncthreads();
  if (threadIdx.x >= kColumnSumTile) return;
  const int64_t out_column = int64_t{blockIdx.x % column_tiles} * kColumnSumTile + threadIdx.x;
  if (out_column >= C) return;
  float total = tile[0][threadIdx.x];
#pragma unroll
  for (int r = 1; r < kColumnSumRows; ++r) total += tile[r][threadIdx.x];
  partials[part * C + out_column] = total;
}

// sum (C) += partials (parts, C).
void add_column_partials(float* sum, const float* partials, int64_t parts, int64_t C, const CudaExec& exec);

// sum (C) += Σ_n source(n, ·); scratch holds column_sum_parts(N)·C floats. sum null: only runs the source over every element.
template <class Source>
void column_sum_of(float* sum, float* scratch, Source source, int64_t N, int64_t C, const CudaExec& exec, const char* op) {
  require(N > 0 && C > 0 && C % kVec == 0, op, ": sums over ", N, " rows of ", C,
          " columns: both positive, columns a multiple of 8");
  require(sum == nullptr || scratch != nullptr, op, ": a bias gradient needs scratch");
  const int64_t parts = column_sum_parts(N), rows_per_part = ceil_div(N, parts), column_tiles = ceil_div(C, kColumnSumTile);
  // The last parts are empty if rows_per_part was rounded up far; they write zeros.
  column_sum_partials<<<grid_size(parts * column_tiles, op), kColumnSumLanes * kColumnSumRows, 0, exec.stream>>>(
      sum ? scratch : nullptr, source, N, C, rows_per_part, static_cast<int>(column_tiles));
  check_launch(op, ": column sums of ", N, " x ", C);
  if (sum) add_column_partials(sum, scratch, parts, C, exec);
}

}  // namespace speedrun::kernels

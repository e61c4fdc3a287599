#pragma once
// A tile of 128 x 64 values on its way from BF16 to FP8 in both layouts, by a block of 256 threads: a thread converts 4 rows of 8
// columns, turns 4 x 4 bytes in registers and passes words of four rows through shared memory, swizzled so that neither side has
// bank conflicts; both copies leave in pieces of 64 and 128 bytes. Rows and columns of the matrix are multiples of 16 (rows with
// the turned copy alone), so that a piece is all inside or all outside.
#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/fp8/fp8_tally.cuh"

namespace speedrun::kernels {

inline constexpr int kFp8TileThreads = 256, kFp8TileRows = 128, kFp8TileCols = 64;
inline constexpr int kFp8TurnedWords = kFp8TileCols * kFp8TileRows / 4;

__host__ __device__ inline int64_t fp8_tiles(int64_t rows, int64_t cols) {
  return ceil_div(rows, kFp8TileRows) * ceil_div(cols, kFp8TileCols);
}

// Where a thread's 4 x 8 piece of a tile lies in a matrix of (rows, cols).
struct Fp8Piece {
  int64_t rows, cols;
  int64_t tile_row, tile_col, row, col;
  int row_group, col_group;  // of 4 rows, of 8 columns
  bool inside;

  __device__ Fp8Piece(int64_t matrix_rows, int64_t matrix_cols, int64_t tile) : rows(matrix_rows), cols(matrix_cols) {
    const int64_t across = ceil_div(cols, kFp8TileCols);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    tile_row = tile / across * kFp8TileRows, tile_col = tile % across * kFp8TileCols;
    row_group = 4 * warp + lane / 8, col_group = lane % 8;
    row = tile_row + 4 * row_group, col = tile_col + 8 * col_group;
    inside = row < rows && col < cols;
  }
  __device__ int64_t at(int i) const { return (row + i) * cols + col; }  // of the piece's row i
  // Word (four rows) of a column in shared memory: the 16-byte chunks of a column change places with its group of 8 columns.
  __device__ static int turned_word(int column, int group) {
    return column * (kFp8TileRows / 4) + ((group / 4 ^ (column / 8 & 7)) * 4 | group % 4);
  }
};

// Row i of the result is column i of the 4 x 4 bytes, lowest byte first.
__device__ __forceinline__ void transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362);
  const uint32_t low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410), w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410), w[3] = __byte_perm(high01, high23, 0x7632);
}

// A piece that is inside to `out` (rows, cols) and to shared memory for store_turned; either may be null.
template <class Fp8, bool kCount>
__device__ __forceinline__ void convert_piece(const Fp8Piece& piece, const uint4 (&raw)[4], Fp8* out, uint32_t* turned,
                                              float inverse_scale, Fp8Tally<kCount>& tally) {
  uint32_t left[4], right[4];  // columns 0-3 and 4-7 of the four rows
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    tally.see(raw[i]);
    const uint2 codes = tally.template convert<Fp8>(raw[i], inverse_scale);
    if (out) *reinterpret_cast<uint2*>(out + piece.at(i)) = codes;
    left[i] = codes.x, right[i] = codes.y;
  }
  if (!turned) return;
  transpose_bytes(left);
  transpose_bytes(right);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    turned[Fp8Piece::turned_word(8 * piece.col_group + j, piece.row_group)] = left[j];
    turned[Fp8Piece::turned_word(8 * piece.col_group + 4 + j, piece.row_group)] = right[j];
  }
}

// By the whole block after a barrier: the tile's turned copy to out_t (cols, rows).
template <class Fp8>
__device__ __forceinline__ void store_turned(const Fp8Piece& piece, const uint32_t* turned, Fp8* out_t) {
  constexpr int kChunks = kFp8TileRows / 16;  // of a column
#pragma unroll
  for (int i = threadIdx.x; i < kFp8TileCols * kChunks; i += kFp8TileThreads) {
    const int col = i / kChunks, chunk = i % kChunks;
    const int64_t out_row = piece.tile_col + col, out_col = piece.tile_row + 16 * chunk;
    if (out_row < piece.cols && out_col < piece.rows) {
      const uint32_t* words = &turned[Fp8Piece::turned_word(col, 4 * chunk)];
      store16(out_t + out_row * piece.rows + out_col, *reinterpret_cast<const uint4*>(words));
    }
  }
}

// The first scale of a delayed one that is not known, by one block of kThreads: from the maximum of load(0), …, load(vectors − 1).
template <class Fp8, int kThreads, class Load>
__device__ __forceinline__ void start_scale(Fp8Scale* scale, int64_t vectors, double margin, const Load& load) {
  __shared__ uint32_t amax;
  if (scale->scale != 0) return;
  if (threadIdx.x == 0) amax = 0;
  __syncthreads();
  Fp8Tally<false> tally;
#pragma unroll 4
  for (int64_t vector = threadIdx.x; vector < vectors; vector += kThreads) tally.see(load(vector));
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, tally.largest());
  if (threadIdx.x % kWarpSize == 0) atomicMax(&amax, of_warp);
  __syncthreads();
  if (threadIdx.x == 0) scale->scale = current_scale(amax, Fp8Range<Fp8>::largest, margin);
}

}  // namespace speedrun::kernels

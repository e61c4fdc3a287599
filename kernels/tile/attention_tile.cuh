#pragma once
// Tile code shared by the attention kernels. A warp owns 16·kRowTiles rows of a row operand (queries or keys) and works on kChunk
// columns (keys or queries) at a time:
//   scores (rows × chunk) = R · Cᵀ      R and C are (·, D) in shared memory
//   result (rows × D)    += W · C       W = weights computed from scores, which as mma accumulators already have the lanes that
//                                       mma's left operand wants: they never leave their registers
// Tiles in shared memory are (rows, D) bf16; the 16-byte piece p of row r lies at piece p ^ (r % 8), so that the 8 rows that an
// ldmatrix reads at one p touch all 32 banks.
#include <cmath>
#include <type_traits>

#include "kernels/base/cuda_vec.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/ex2.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/mma.cuh"

namespace speedrun::kernels {

inline constexpr float kLog2e = 1.4426950408889634f;

template <int D>
inline constexpr int kRowBytes = 2 * D;

// Byte offset of 16-byte piece `piece` of row `row` in a shared tile.
template <int D>
__device__ __forceinline__ int tile_offset(int row, int piece) {
  return row * kRowBytes<D> + ((piece ^ (row & 7)) << 4);
}

// What a lane adds to a tile's address for ldmatrix. Steps of 16 along D are `^ (step << 5)`, steps of 16 rows `+ 16·kRowBytes`.
// Left operand (rows × D), or right operand (columns × D, transposed: D is the product's column): matrices (rows 0-7, 8-15) ×
// (pieces 0, 1).
template <int D>
__device__ __forceinline__ int lane_offset_rows_first(int lane) {
  return tile_offset<D>(lane & 15, lane >> 4);
}
// Right operand of the scores (columns × D, D is summed over): b0, b1 of columns 0-7, then of 8-15.
template <int D>
__device__ __forceinline__ int lane_offset_pieces_first(int lane) {
  return tile_offset<D>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

// Which keys a query sees.
struct Visibility {
  const int32_t* doc_start;  // (N)
  int window;                // N when there is no limit
  int num_tokens;

  __device__ __forceinline__ int first_key(int query) const { return max(__ldg(doc_start + query), query - window); }
};

__device__ __forceinline__ Visibility make_visibility(const int32_t* doc_start, int64_t window, int64_t num_tokens) {
  const int64_t limit = window > 0 && window < num_tokens ? window : num_tokens;
  return {doc_start, static_cast<int>(limit), static_cast<int>(num_tokens)};
}

// Starts copying rows first … first + kRows − 1 of one head into a shared tile. Rows past `last` repeat it: finite numbers that
// masks and guarded stores leave without effect.
template <int D, int kRows, int kThreads>
__device__ __forceinline__ void load_tile_async(uint32_t tile, const bf16* head, int64_t stride, int first, int last) {
  constexpr int kPieces = D / 8;
  constexpr int kRowsPerPass = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRowsPerPass % 8 == 0 && kRows % kRowsPerPass == 0);
  const int piece = threadIdx.x % kPieces;
  const int row_in_pass = threadIdx.x / kPieces;
  const uint32_t target = tile + tile_offset<D>(row_in_pass, piece);
#pragma unroll
  for (int pass_row = 0; pass_row < kRows; pass_row += kRowsPerPass) {
    const int row = min(first + pass_row + row_in_pass, last);
    ptx::cp_async_cg_16(target + pass_row * kRowBytes<D>, head + row * stride + piece * kVec);
  }
}

// The warp's rows of a row operand, as left operands of mma.
template <int D, int kRowTiles, bool kInRegisters>
class RowOperand {
 public:
  // `rows`: shared address of the warp's first row; the tile has arrived.
  __device__ __forceinline__ RowOperand(uint32_t rows, int lane) : address_(rows + lane_offset_rows_first<D>(lane)) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load(step, fragments_[step]);
    }
  }

  __device__ __forceinline__ void fragment(int step, uint32_t (&a)[kRowTiles][4]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = fragments_[step][m][i];
      }
    } else {
      load(step, a);
    }
  }

 private:
  static constexpr int kSteps = D / 16;

  __device__ __forceinline__ void load(int step, uint32_t (&a)[kRowTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(a[m], (address_ ^ (step << 5)) + m * 16 * kRowBytes<D>);
  }

  uint32_t address_;
  uint32_t fragments_[kInRegisters ? kSteps : 1][kRowTiles][4];
};

template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void clear(float (&accumulators)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) accumulators[m][n][i] = 0;
    }
  }
}

// scores = rows · columnsᵀ. `columns`: address of the chunk's first column + lane_offset_pieces_first.
template <int D, int kRowTiles, int kChunk, bool kInRegisters>
__device__ __forceinline__ void multiply_scores(float (&scores)[kRowTiles][kChunk / 8][4],
                                                const RowOperand<D, kRowTiles, kInRegisters>& rows, uint32_t columns) {
  clear(scores);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t a[kRowTiles][4];
    rows.fragment(step, a);
#pragma unroll
    for (int n = 0; n < kChunk / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, (columns ^ (step << 5)) + n * 16 * kRowBytes<D>);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16_bf16(scores[m][2 * n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16_bf16(scores[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Sets scores of keys that their query does not see to −inf. Rows are queries warp_query …, columns are keys key …
template <int kRowTiles, int kChunk>
__device__ __forceinline__ void hide_keys(float (&scores)[kRowTiles][kChunk / 8][4], const Visibility& visibility, int warp_query,
                                          int key, int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Reading the first key again costs less than registers for it would. One unsigned comparison checks both ends: a key before
      // the first wraps around to a large number.
      const int query = min(warp_query + 16 * m + 8 * half + lane / 4, visibility.num_tokens - 1);
      const int first_key = visibility.first_key(query);
      const unsigned span = static_cast<unsigned>(query - first_key);
      const unsigned offset = static_cast<unsigned>(key + 2 * (lane % 4) - first_key);
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        if (offset + 8 * n > span) scores[m][n][2 * half] = -INFINITY;
        if (offset + 8 * n + 1 > span) scores[m][n][2 * half + 1] = -INFINITY;
      }
    }
  }
}

// Rounds scores to BF16 left operands: mma's accumulator lanes are its left operand's.
template <int kRowTiles, int kChunk>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[kRowTiles][kChunk / 16][4],
                                             const float (&scores)[kRowTiles][kChunk / 8][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      weights[m][n / 2][n % 2 * 2] = pack_bf16x2(scores[m][n][0], scores[m][n][1]);
      weights[m][n / 2][n % 2 * 2 + 1] = pack_bf16x2(scores[m][n][2], scores[m][n][3]);
    }
  }
}

// result += weights · columns. `columns`: address of the chunk's first column + lane_offset_rows_first.
template <int D, int kRowTiles, int kChunk>
__device__ __forceinline__ void accumulate(float (&result)[kRowTiles][D / 8][4],
                                           const uint32_t (&weights)[kRowTiles][kChunk / 16][4], uint32_t columns) {
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, (columns ^ (n << 5)) + step * 16 * kRowBytes<D>);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16_bf16(result[m][2 * n], weights[m][step], b[0], b[1]);
        ptx::mma_m16n8k16_bf16(result[m][2 * n + 1], weights[m][step], b[2], b[3]);
      }
    }
  }
}

// Writes result · factor (one for every row of the lane, or one for all) to rows first … of one head, up to `end`, 16 bytes a lane,
// by way of `tile`: the warp's own rows of a shared tile that no other warp reads.
template <int D, int kRowTiles, class Factor>
__device__ __forceinline__ void store_rows(bf16* head, int64_t stride, int first, int end,
                                           const float (&result)[kRowTiles][D / 8][4], const Factor& factor, uint8_t* tile,
                                           int lane) {
  constexpr int kPieces = D / 8;
  constexpr int kRowsPerPass = kWarpSize / kPieces;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + 8 * half + lane / 4;
      float row_factor;
      if constexpr (std::is_array_v<Factor>) {
        row_factor = factor[m][half];
      } else {
        row_factor = factor;
      }
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        const uint32_t pair = pack_bf16x2(result[m][n][2 * half] * row_factor, result[m][n][2 * half + 1] * row_factor);
        *reinterpret_cast<uint32_t*>(tile + tile_offset<D>(row, n) + 4 * (lane % 4)) = pair;
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int pass_row = 0; pass_row < 16 * kRowTiles; pass_row += kRowsPerPass) {
    const int row = pass_row + lane / kPieces, piece = lane % kPieces;
    if (first + row < end) store16(head + (first + row) * stride + piece * kVec, load16(tile + tile_offset<D>(row, piece)));
  }
}

}  // namespace speedrun::kernels

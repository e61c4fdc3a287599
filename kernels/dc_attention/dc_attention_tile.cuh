#pragma once
// Tile code shared by the kernels of dynamically composable attention, over that of kernels/tile/attention_tile.cuh. A block owns
// 64 rows (queries, or keys in the pass for dk and dv), a warp 16 of them, and the rows of a warp meet at most 16 + window columns
// (keys, or queries): few enough to hold all of A or dA of a warp in registers. Columns come in chunks of 32.
#include <algorithm>

#include "kernels/base/launch.cuh"
#include "kernels/dc_attention/dc_attention.h"
#include "kernels/dc_attention/dc_attention_band.h"
#include "kernels/tile/attention_tile.cuh"

namespace speedrun::kernels {

inline constexpr int kDcThreads = 128, kDcRows = 64;
inline constexpr float kDcEps = 1e-6f;  // of the normalisation of w1

template <int kHeadSize, int kNumChunks>
struct DcTile {
  static constexpr int D = kHeadSize;
  static constexpr int kChunks = kNumChunks;
  static constexpr int kBand = kChunks * kDcChunk;  // columns that a warp's rows meet
  static constexpr int kMaxWindow = kBand - kDcWarpRows;
  static constexpr int kColumns = kBand + kDcRows - kDcWarpRows;  // columns that a block's rows meet
  static constexpr int kSmemBytes = (kDcRows + kColumns) * kRowBytes<D>;
  // Scores of all chunks stay in registers beside A or dA where they fit; else they are made again.
  static constexpr bool kKeepScores = kChunks == kDcNarrowChunks;
  static constexpr int kKeptChunks = kKeepScores ? kChunks : 1;
  // Blocks meant to share an SM: they cap the registers of a thread at 65,536 / (128 · blocks). Wide tiles fill shared memory and
  // registers alone.
  static constexpr int kForwardBlocks = kKeepScores ? 2 : 1;
  static constexpr int kMixBlocks = kKeepScores ? 3 : 1;
  static constexpr int kGradBlocks = kKeepScores ? 3 : 2;
};

using ChunkScores = float[1][kDcChunk / 8][4];
using ChunkWeights = uint32_t[1][kDcChunk / 16][4];

// Hides from the compiler that x is the same at every use: what follows from it is made where it is used, instead of being kept
// over a loop in registers that A or a gradient needs.
template <class T>
__device__ __forceinline__ T fresh(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <int kChunks>
__device__ __forceinline__ void clear_chunks(float (&chunks)[kChunks][1][kDcChunk / 8][4]) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) clear(chunks[chunk]);
}

// The shared memory of a block: (64, D) rows and (kColumns, D) columns of one head.
template <class Tile>
class DcSharedTile {
 public:
  static constexpr int D = Tile::D;

  __device__ __forceinline__ explicit DcSharedTile(uint8_t* smem)
      : rows_(smem), columns_(ptx::shared_address(smem + kDcRows * kRowBytes<D>)) {}

  // Rows first_row … and columns first_column … of two tensors (N, H, D); tokens before `lowest` and past `last` repeat those:
  // finite numbers that masks and guarded stores leave without effect. Every thread is done with the former contents when the
  // copies start.
  __device__ __forceinline__ void load(const bf16* row_head, int first_row, const bf16* column_head, int first_column, int lowest,
                                       int last, int64_t stride) const {
    __syncthreads();
    copy_async<kDcRows>(ptx::shared_address(rows_), row_head, first_row, lowest, last, stride);
    copy_async<Tile::kColumns>(columns_, column_head, first_column, lowest, last, stride);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

  // The warp's rows, which no other warp reads.
  __device__ __forceinline__ uint8_t* warp_rows(int warp) const { return rows_ + warp * kDcWarpRows * kRowBytes<D>; }
  // Address of the first column that the warp's rows meet.
  __device__ __forceinline__ uint32_t warp_columns(int warp) const { return columns_ + warp * kDcWarpRows * kRowBytes<D>; }

 private:
  template <int kRows>
  static __device__ __forceinline__ void copy_async(uint32_t tile, const bf16* head, int first, int lowest, int last,
                                                    int64_t stride) {
    constexpr int kPieces = D / 8, kRowsPerPass = kDcThreads / kPieces;
    static_assert(kRowsPerPass % 8 == 0 && kRows % kRowsPerPass == 0);
    const int piece = threadIdx.x % kPieces, row_in_pass = threadIdx.x / kPieces;
    const uint32_t target = tile + tile_offset<D>(row_in_pass, piece);
#pragma unroll 1  // unrolled, its addresses would be kept from head to head in registers that A needs
    for (int pass_row = 0; pass_row < kRows; pass_row += kRowsPerPass) {
      const int token = min(max(first + pass_row + row_in_pass, lowest), last);
      ptx::cp_async_cg_16(target + pass_row * kRowBytes<D>, head + token * stride + piece * kVec);
    }
  }

  uint8_t* rows_;
  uint32_t columns_;
};

// A block of queries: first_query … first_query + 63.
template <class Tile>
class DcQueries {
 public:
  static constexpr int D = Tile::D;

  __device__ __forceinline__ DcQueries(uint8_t* smem, int first_query, const Visibility& visibility, int H)
      : tile_(smem),
        visibility_(visibility),
        stride_(static_cast<int64_t>(H) * D),
        first_query_(first_query),
        warp_(threadIdx.x / kWarpSize),
        lane_(threadIdx.x % kWarpSize),
        lowest_key_(visibility.first_key(first_query)),
        warp_first_(min(warp_query(), last_token())),
        warp_last_(min(warp_query() + kDcWarpRows - 1, last_token())),
        warp_first_key_(visibility.first_key(warp_first_)),
        warp_full_key_(visibility.first_key(warp_last_)) {}

  __device__ __forceinline__ int lane() const { return lane_; }
  __device__ __forceinline__ int last_token() const { return visibility_.num_tokens - 1; }
  __device__ __forceinline__ int warp_query() const { return first_query_ + warp_ * kDcWarpRows; }
  // The lane's rows are 8·half + lane / 4 of the warp. Queries past the end repeat the last one and are not stored.
  __device__ __forceinline__ int query(int half) const { return warp_query() + 8 * half + lane_ / 4; }
  __device__ __forceinline__ int token(int half) const { return min(query(half), last_token()); }
  // One lane of four stores what a row has once.
  __device__ __forceinline__ bool stores(int half) const { return lane_ % 4 == 0 && query(half) <= last_token(); }
  __device__ __forceinline__ int first_key(int chunk) const { return warp_query() - Tile::kMaxWindow + chunk * kDcChunk; }
  // Whether a query of the warp sees a key of the chunk.
  __device__ __forceinline__ bool sees(int chunk) const {
    return first_key(chunk) <= warp_last_ && first_key(chunk) + kDcChunk > warp_first_key_;
  }

  // Loads one head of a tensor at the queries and of another at their keys.
  __device__ __forceinline__ void load(const bf16* at_queries, const bf16* at_keys) const {
    tile_.load(at_queries, first_query_, at_keys, first_query_ - Tile::kMaxWindow, lowest_key_, last_token(), stride_);
  }

  // Products of the loaded queries' and keys' rows.
  __device__ __forceinline__ void multiply(ChunkScores& products, int chunk) const {
    const RowOperand<D, 1, false> rows(fresh(ptx::shared_address(tile_.warp_rows(warp_))), lane_);
    const uint32_t columns = tile_.warp_columns(warp_) + lane_offset_pieces_first<D>(lane_) + chunk * kDcChunk * kRowBytes<D>;
    multiply_scores<D, 1, kDcChunk>(products, rows, columns);
  }
  // The same with −inf where the query does not see the key.
  __device__ __forceinline__ void scores(ChunkScores& scores, int chunk) const {
    multiply(scores, chunk);
    const int key = first_key(chunk);
    if (key < warp_full_key_ || key + kDcChunk - 1 > warp_first_)
      hide_keys<1, kDcChunk>(scores, visibility_, warp_query(), key, lane_);
  }
  // result (queries, D) += weights · the loaded keys' rows
  __device__ __forceinline__ void accumulate_keys(float (&result)[1][D / 8][4], const ChunkWeights& weights, int chunk) const {
    const uint32_t columns = tile_.warp_columns(warp_) + lane_offset_rows_first<D>(lane_) + chunk * kDcChunk * kRowBytes<D>;
    accumulate<D, 1, kDcChunk>(result, weights, columns);
  }
  __device__ __forceinline__ uint8_t* warp_rows() const { return tile_.warp_rows(warp_); }

 private:
  DcSharedTile<Tile> tile_;
  Visibility visibility_;
  int64_t stride_;
  int first_query_, warp_, lane_;
  int lowest_key_;                      // first key that the block sees
  int warp_first_, warp_last_;          // the warp's queries
  int warp_first_key_, warp_full_key_;  // first key that one of them sees; first key that no document start or window hides
};

// 1 / √(mean_h w1_h² + eps) of a token.
__device__ __forceinline__ float inverse_rms(const bf16* w1, int H) {
  float squares = 0;
  for (int head = 0; head < H; ++head) {
    const float w = static_cast<float>(w1[head]);
    squares = fmaf(w, w, squares);
  }
  return rsqrtf(squares / static_cast<float>(H) + kDcEps);
}

// Copies rows first … of one head into the warp's rows of a shared tile.
template <int D>
__device__ __forceinline__ void copy_rows(uint8_t* tile, const bf16* head, int64_t stride, int first, int last, int lane) {
  constexpr int kPieces = D / 8, kRowsPerPass = kWarpSize / kPieces, kPasses = kDcWarpRows / kRowsPerPass;
  uint4 values[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsPerPass + lane / kPieces;
    values[pass] = load16(head + min(first + row, last) * stride + lane % kPieces * kVec);
  }
  __syncwarp();  // the other lanes have read what lay there
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass)
    store16(tile + tile_offset<D>(pass * kRowsPerPass + lane / kPieces, lane % kPieces), values[pass]);
}

// Writes (the warp's rows of the shared tile) + result · factor to rows first … of one head, rounded once.
template <int D>
__device__ __forceinline__ void add_and_store_rows(bf16* head, int64_t stride, int first, int last,
                                                   const float (&result)[1][D / 8][4], const float (&factor)[2], uint8_t* tile,
                                                   int lane) {
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      auto* const pair = reinterpret_cast<uint32_t*>(tile + tile_offset<D>(8 * half + lane / 4, n) + 4 * (lane % 4));
      const float2 before = unpack_bf16x2(*pair);
      *pair = pack_bf16x2(fmaf(result[0][n][2 * half], factor[half], before.x),
                          fmaf(result[0][n][2 * half + 1], factor[half], before.y));
    }
  }
  __syncwarp();
  constexpr int kPieces = D / 8, kRowsPerPass = kWarpSize / kPieces;
#pragma unroll
  for (int pass_row = 0; pass_row < kDcWarpRows; pass_row += kRowsPerPass) {
    const int row = pass_row + lane / kPieces, piece = lane % kPieces;
    if (first + row <= last) store16(head + (first + row) * stride + piece * kVec, load16(tile + tile_offset<D>(row, piece)));
  }
}

// What the launchers check. `tensors`: the (N, H, D) planes of the call.
template <class Args>
void check_dc_attention(const char* op, const Args& args, std::initializer_list<const bf16*> tensors) {
  require(args.D == 64 || args.D == 128, op, ": head size D must be 64 or 128 on CUDA, got ", args.D);
  require(args.H > 0 && args.H <= 16, op, ": number of heads H must be between 1 and 16 on CUDA, got ", args.H);
  // Half of int's range: tile arithmetic may step past N, and doc_start is 32 bits wide.
  require(args.N > 0 && args.N <= 0x3fffffff, op, ": N must be between 1 and 2^30 - 1, got ", args.N);
  require(args.window >= 0 && args.window <= kDcMaxWindow, op, ": window must be between 0 and ", kDcMaxWindow, " on CUDA, got ",
          args.window);
  require(args.stride >= args.H, op, ": row stride of w1 and w2 must be at least H = ", args.H, ", got ", args.stride);
  require(args.scale > 0, op, ": scale must be positive, got ", args.scale);
  for (const bf16* tensor : tensors)
    require(tensor != nullptr && reinterpret_cast<uintptr_t>(tensor) % 16 == 0, op,
            ": tensors must be aligned to 16 bytes, got address ", static_cast<const void*>(tensor));
}

// launch(DcTile) with the narrowest tile that holds the window.
template <class Args, class Launch>
void with_dc_tile(const Args& args, const Launch& launch) {
  const bool narrow = dc_chunks(args.window) == kDcNarrowChunks;
  if (args.D == 64) {
    narrow ? launch(DcTile<64, kDcNarrowChunks>{}) : launch(DcTile<64, kDcWideChunks>{});
  } else {
    narrow ? launch(DcTile<128, kDcNarrowChunks>{}) : launch(DcTile<128, kDcWideChunks>{});
  }
}

}  // namespace speedrun::kernels

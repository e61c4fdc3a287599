#pragma once
// Tile choices of the attention kernels, all in one place.

namespace speedrun::kernels {

// A block owns rows (queries in forward and dQ, keys in dK/dV) and walks over the columns they meet (keys, or queries).
struct AttentionTile {
  int num_warps;
  int row_tiles;           // 16-row mma tiles of a warp: 2 use every column operand loaded from shared memory twice
  int columns;             // columns in a stage of shared memory; two stages
  int chunk;               // columns whose scores a warp has in registers; also the grain at which a warp skips unseen columns
  int min_blocks;          // blocks meant to share an SM; caps the registers of a thread at 65,536 / (min_blocks · threads)
  bool rows_in_registers;  // keep the row operands of the score products in registers instead of reloading them for every chunk

  constexpr int threads() const { return 32 * num_warps; }
  constexpr int rows() const { return num_warps * warp_rows(); }
  constexpr int warp_rows() const { return 16 * row_tiles; }
};

// Output accumulators take 4·row_tiles·D/8 registers of a thread, twice that in dK/dV, scores 4·row_tiles·chunk/8 (twice in
// backward).
template <int D>
inline constexpr AttentionTile kForwardTile;
template <int D>
inline constexpr AttentionTile kQueryGradTile;
template <int D>
inline constexpr AttentionTile kKeyValueGradTile;

template <>
inline constexpr AttentionTile kForwardTile<64>{
    .num_warps = 4, .row_tiles = 2, .columns = 64, .chunk = 64, .min_blocks = 2, .rows_in_registers = true};
template <>
inline constexpr AttentionTile kForwardTile<128>{
    .num_warps = 4, .row_tiles = 2, .columns = 64, .chunk = 32, .min_blocks = 2, .rows_in_registers = false};

template <>
inline constexpr AttentionTile kQueryGradTile<64>{
    .num_warps = 4, .row_tiles = 2, .columns = 64, .chunk = 32, .min_blocks = 2, .rows_in_registers = true};
// 64 columns would take 128 KB: one block of 4 warps on an SM.
template <>
inline constexpr AttentionTile kQueryGradTile<128>{
    .num_warps = 4, .row_tiles = 2, .columns = 32, .chunk = 32, .min_blocks = 2, .rows_in_registers = false};

template <>
inline constexpr AttentionTile kKeyValueGradTile<64>{
    .num_warps = 4, .row_tiles = 2, .columns = 64, .chunk = 32, .min_blocks = 2, .rows_in_registers = false};
// dK and dV of 32 rows would be 256 registers. 8 warps rather than 4: 128 keys share one read of the queries from L2.
template <>
inline constexpr AttentionTile kKeyValueGradTile<128>{
    .num_warps = 8, .row_tiles = 1, .columns = 64, .chunk = 64, .min_blocks = 1, .rows_in_registers = false};

}  // namespace speedrun::kernels

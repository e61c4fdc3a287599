// FP8 copies of weights and activations, and their scales.   out = e4m3(x · (1 / scale)),   out_t = outᵀ,   amax = max |x|
// Layout    row-major BF16 in, E4M3 out; 16-byte accesses: cols % 16 == 0 (rows % 16 == 0 with out_t), pointers 16-byte aligned.
// Work      with a transposed copy, and for tables of weights: a block makes a tile of 128 x 64. A thread converts 4 rows of 8
// columns,
//           turns 4 x 4 bytes in registers and passes words of four rows through shared memory, swizzled so that neither side has
//           bank conflicts; both copies leave in pieces of 64 and 128 bytes. One launch for a whole table. Without: a flat kernel,
//           64 elements a thread.
// Traffic   2 bytes an element in, 1 out for each copy; `current` reads them once more for the maximum, first.
//           22 matrices of 3072 x 768 with both copies: 208 MB.
// Numerics  FP32 between load and conversion; maxima as bits with atomicMax: bitwise reproducible.
#include <cuda_runtime.h>

#include "kernels/base/aligned.h"
#include "kernels/base/launch.cuh"
#include "kernels/fp8/fp8.h"
#include "kernels/fp8/fp8_tally.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 128, kTileCols = 64;
constexpr int kFlatVecs = 8;  // 16-byte loads of a thread of the flat kernels
constexpr int64_t kFlatElements = int64_t{kThreads} * kFlatVecs * kVec;
constexpr int kMaxItems = 128;  // of one launch

struct Matrix {
  e4m3* out;
  e4m3* out_t;
  const bf16* inp;
  int64_t rows, cols;
};

__host__ __device__ int64_t num_tiles(int64_t rows, int64_t cols) { return ceil_div(rows, kTileRows) * ceil_div(cols, kTileCols); }

// Where a thread's 4 x 8 piece of a tile lies. Rows and columns are multiples of 16, so a piece is all inside or all outside.
struct Piece {
  int64_t tile_row, tile_col, row, col;
  int row_group, col_group;  // of 4 rows, of 8 columns
  bool inside;

  __device__ Piece(const Matrix& m, int64_t tile) {
    const int64_t across = ceil_div(m.cols, kTileCols);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    tile_row = tile / across * kTileRows, tile_col = tile % across * kTileCols;
    row_group = 4 * warp + lane / 8, col_group = lane % 8;
    row = tile_row + 4 * row_group, col = tile_col + 8 * col_group;
    inside = row < m.rows && col < m.cols;
  }
};

template <bool kCount>
__device__ __forceinline__ void see_tile(const Matrix& m, int64_t tile, Fp8Tally<kCount>& tally) {
  const Piece piece(m, tile);
  if (!piece.inside) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) tally.see(load16(m.inp + (piece.row + i) * m.cols + piece.col));
}

// Row i of the result is column i of the 4 x 4 bytes, lowest byte first.
__device__ __forceinline__ void transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362);
  const uint32_t low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410), w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410), w[3] = __byte_perm(high01, high23, 0x7632);
}

// Word (four rows) of a column in shared memory: the 16-byte chunks of a column change places with its group of 8 columns.
__device__ __forceinline__ int turned_word(int col, int row_group) {
  return col * (kTileRows / 4) + ((row_group / 4 ^ (col / 8 & 7)) * 4 | row_group % 4);
}

// Every thread of the block calls it, once.
template <bool kCount>
__device__ __forceinline__ void convert_tile(const Matrix& m, int64_t tile, float inverse_scale, Fp8Tally<kCount>& tally) {
  __shared__ __align__(16) uint32_t turned[kTileCols * kTileRows / 4];
  const Piece piece(m, tile);
  if (piece.inside) {
    uint4 raw[4];
    uint32_t left[4], right[4];  // columns 0-3 and 4-7 of the four rows
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = load16(m.inp + (piece.row + i) * m.cols + piece.col);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tally.see(raw[i]);
      const uint2 codes = tally.convert(raw[i], inverse_scale);
      if (m.out) *reinterpret_cast<uint2*>(m.out + (piece.row + i) * m.cols + piece.col) = codes;
      left[i] = codes.x, right[i] = codes.y;
    }
    if (m.out_t) {
      transpose_bytes(left);
      transpose_bytes(right);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        turned[turned_word(8 * piece.col_group + j, piece.row_group)] = left[j];
        turned[turned_word(8 * piece.col_group + 4 + j, piece.row_group)] = right[j];
      }
    }
  }
  if (!m.out_t) return;
  __syncthreads();
  constexpr int kChunks = kTileRows / 16;  // of a column
#pragma unroll
  for (int i = threadIdx.x; i < kTileCols * kChunks; i += kThreads) {
    const int col = i / kChunks, chunk = i % kChunks;
    const int64_t out_row = piece.tile_col + col, out_col = piece.tile_row + 16 * chunk;
    if (out_row < m.cols && out_col < m.rows)
      store16(m.out_t + out_row * m.rows + out_col, *reinterpret_cast<const uint4*>(&turned[turned_word(col, 4 * chunk)]));
  }
}

// First block of every item.
struct ItemBlocks {
  int begin[kMaxItems + 1];
  int count;

  __device__ int item_of(int block) const {
    int low = 0, high = count;  // begin[low] <= block < begin[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (block < begin[middle] ? high : low) = middle;
    }
    return low;
  }
};

struct WeightTable {
  const Fp8WeightItem<bf16>* items;
  const StepVerdict* verdict;
  Fp8Scaling scaling;

  __device__ bool skip() const { return verdict != nullptr && verdict->skip != 0; }
};

__device__ Matrix matrix_of(const Fp8WeightItem<bf16>& item) { return {item.out, item.out_t, item.weight, item.rows, item.cols}; }

__global__ void __launch_bounds__(kMaxItems) reset_maxima_kernel(const WeightTable p, int count) {
  if (p.skip() || static_cast<int>(threadIdx.x) >= count) return;
  p.items[threadIdx.x].scale->amax = 0;
}

__global__ void __launch_bounds__(kThreads) weight_maxima_kernel(const WeightTable p, const ItemBlocks blocks) {
  if (p.skip()) return;
  const int index = blocks.item_of(blockIdx.x);
  const Fp8WeightItem<bf16> item = p.items[index];
  Fp8Tally<false> tally;
  see_tile(matrix_of(item), blockIdx.x - blocks.begin[index], tally);
  tally.deliver<kThreads>(item.scale, true);
}

template <bool kCount>
__global__ void __launch_bounds__(kThreads) convert_weights_kernel(const WeightTable p, const ItemBlocks blocks) {
  if (p.skip()) return;
  const int index = blocks.item_of(blockIdx.x);
  const Fp8WeightItem<bf16> item = p.items[index];
  const bool current = p.scaling == Fp8Scaling::current;
  const float scale = current ? current_scale(item.scale->amax) : item.scale->scale;
  const int tile = blockIdx.x - blocks.begin[index];
  // Other blocks make the same number from the maximum themselves.
  if (current && tile == 0 && threadIdx.x == 0) item.scale->scale = scale;
  Fp8Tally<kCount> tally;
  convert_tile(matrix_of(item), tile, 1.0f / scale, tally);
  tally.template deliver<kThreads>(item.scale, p.scaling == Fp8Scaling::delayed);
}

template <bool kCount>
__global__ void __launch_bounds__(kThreads) convert_both_kernel(const Matrix m, Fp8Scale* scale, Fp8Scaling scaling) {
  const bool current = scaling == Fp8Scaling::current;
  const float value = current ? current_scale(scale->amax) : scale->scale;
  if (current && blockIdx.x == 0 && threadIdx.x == 0) scale->scale = value;
  Fp8Tally<kCount> tally;
  convert_tile(m, blockIdx.x, 1.0f / value, tally);
  tally.template deliver<kThreads>(scale, scaling == Fp8Scaling::delayed);
}

__global__ void __launch_bounds__(kThreads) maximum_kernel(const bf16* inp, Fp8Scale* scale, int64_t vectors) {
  const int64_t first = int64_t{blockIdx.x} * kFlatVecs * kThreads + threadIdx.x;
  Fp8Tally<false> tally;
#pragma unroll
  for (int i = 0; i < kFlatVecs; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < vectors) tally.see(load16(inp + vector * kVec));
  }
  tally.deliver<kThreads>(scale, true);
}

// A thread takes pairs of neighbouring vectors: 32 bytes in, 16 out.
template <bool kCount>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(e4m3* out, const bf16* inp, Fp8Scale* scale, int64_t pairs, Fp8Scaling scaling) {
  constexpr int kPairs = kFlatVecs / 2;
  const bool current = scaling == Fp8Scaling::current;
  const float value = current ? current_scale(scale->amax) : scale->scale;
  if (current && blockIdx.x == 0 && threadIdx.x == 0) scale->scale = value;
  const float inverse_scale = 1.0f / value;
  const int64_t first = int64_t{blockIdx.x} * kPairs * kThreads + threadIdx.x;
  Fp8Tally<kCount> tally;
  uint4 raw[kPairs][2] = {};
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t pair = first + i * kThreads;
    if (pair >= pairs) continue;
    raw[i][0] = load16(inp + pair * 2 * kVec);
    raw[i][1] = load16(inp + pair * 2 * kVec + kVec);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t pair = first + i * kThreads;
    if (pair >= pairs) continue;
    tally.see(raw[i][0]);
    tally.see(raw[i][1]);
    const uint2 low = tally.convert(raw[i][0], inverse_scale), high = tally.convert(raw[i][1], inverse_scale);
    store16(out + pair * 2 * kVec, {low.x, low.y, high.x, high.y});
  }
  tally.template deliver<kThreads>(scale, scaling == Fp8Scaling::delayed);
}

__global__ void __launch_bounds__(kThreads) next_scales_kernel(const Fp8NextScales p) {
  __shared__ int first_bad;
  if (threadIdx.x == 0) first_bad = p.num_scales;
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_scales; i += kThreads) {
    const uint32_t amax = p.scales[i].amax;
    if (finite_maximum(amax)) {
      p.scales[i].scale = delayed_scale(amax, p.margin);
    } else {
      atomicMin(&first_bad, i);
    }
    p.scales[i].amax = 0;
  }
  __syncthreads();
  if (threadIdx.x != 0 || p.verdict == nullptr || first_bad == p.num_scales || p.verdict->skip != 0) return;
  p.verdict->skip = 1;
  p.verdict->bad_parameter = -2 - first_bad;
}

void require_matrix(const char* op, const Matrix& m, const Fp8Scale* scale) {
  require(m.rows > 0 && m.cols > 0 && m.cols % 16 == 0 && (m.out_t == nullptr || m.rows % 16 == 0), op, ": (", m.rows, ", ", m.cols,
          "): columns must be a multiple of 16, and rows too where a transposed copy is made");
  require(m.inp != nullptr && scale != nullptr && (m.out != nullptr || m.out_t != nullptr), op, ": an operand is null");
  require_aligned16(op, "out", m.out);
  require_aligned16(op, "out_t", m.out_t);
  require_aligned16(op, "inp", m.inp);
  require_aligned16(op, "scale", scale);
}

// Items [first, first + count).
void convert_weights(const Fp8Weights<bf16>& args, int first, int count, const CudaExec& exec) {
  const WeightTable table{.items = args.items + first, .verdict = args.verdict, .scaling = args.scaling};
  ItemBlocks blocks{.begin = {}, .count = count};
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const Fp8WeightItem<bf16>& item = args.host_items[first + i];
    const Matrix m{item.out, item.out_t, item.weight, item.rows, item.cols};
    require_matrix("fp8 weights", m, item.scale);
    require(m.rows % 16 == 0, "fp8 weights: (", m.rows, ", ", m.cols, "): rows must be a multiple of 16");
    total += num_tiles(m.rows, m.cols);
    grid_size(total, "fp8 weights");
    blocks.begin[i + 1] = static_cast<int>(total);
  }
  const unsigned grid = grid_size(total, "fp8 weights");
  if (args.scaling == Fp8Scaling::current) {
    reset_maxima_kernel<<<1, kMaxItems, 0, exec.stream>>>(table, count);
    weight_maxima_kernel<<<grid, kThreads, 0, exec.stream>>>(table, blocks);
  }
  if (args.count) {
    convert_weights_kernel<true><<<grid, kThreads, 0, exec.stream>>>(table, blocks);
  } else {
    convert_weights_kernel<false><<<grid, kThreads, 0, exec.stream>>>(table, blocks);
  }
  check_launch("fp8 weights: ", count, " matrices in ", total, " tiles");
}

}  // namespace

void fp8_weights(const Fp8Weights<bf16>& args, const CudaExec& exec) {
  for (int first = 0; first < args.num_items; first += kMaxItems)
    convert_weights(args, first, min(kMaxItems, args.num_items - first), exec);
}

void fp8_quantize(const Fp8Quantize<bf16>& args, const CudaExec& exec) {
  const Matrix m{args.out, args.out_t, args.inp, args.rows, args.cols};
  require_matrix("fp8 quantize", m, args.scale);
  require(m.out != nullptr, "fp8 quantize: out is null");
  const int64_t elements = m.rows * m.cols;
  const unsigned flat_grid = grid_size(ceil_div(elements, kFlatElements), "fp8 quantize");
  if (args.scaling == Fp8Scaling::current) {
    cuda_check(cudaMemsetAsync(&args.scale->amax, 0, sizeof args.scale->amax, exec.stream), "fp8 quantize: clearing the maximum");
    maximum_kernel<<<flat_grid, kThreads, 0, exec.stream>>>(m.inp, args.scale, elements / kVec);
  }
  if (m.out_t != nullptr) {
    const unsigned grid = grid_size(num_tiles(m.rows, m.cols), "fp8 quantize");
    if (args.count) {
      convert_both_kernel<true><<<grid, kThreads, 0, exec.stream>>>(m, args.scale, args.scaling);
    } else {
      convert_both_kernel<false><<<grid, kThreads, 0, exec.stream>>>(m, args.scale, args.scaling);
    }
  } else {
    const int64_t pairs = elements / (2 * kVec);
    if (args.count) {
      convert_kernel<true><<<flat_grid, kThreads, 0, exec.stream>>>(m.out, m.inp, args.scale, pairs, args.scaling);
    } else {
      convert_kernel<false><<<flat_grid, kThreads, 0, exec.stream>>>(m.out, m.inp, args.scale, pairs, args.scaling);
    }
  }
  check_launch("fp8 quantize of (", m.rows, ", ", m.cols, ")");
}

void fp8_next_scales(const Fp8NextScales& args, const CudaExec& exec) {
  if (args.num_scales <= 0) return;
  next_scales_kernel<<<1, kThreads, 0, exec.stream>>>(args);
  check_launch("fp8 next scales of ", args.num_scales);
}

}  // namespace speedrun::kernels

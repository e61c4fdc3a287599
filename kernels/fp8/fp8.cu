// FP8 copies of weights, activations and gradients, and their scales.   out = fp8(x · (1 / scale)),   out_t = outᵀ,   amax = max
// |x| Layout    row-major BF16 in, FP8 out; 16-byte accesses: cols % 16 == 0 (rows % 16 == 0 with out_t), pointers 16-byte aligned.
// Work      with a transposed copy, and for tables of weights: a block makes a tile of 128 x 64 (fp8_tile.cuh). One launch for a
//           whole table. Without: a flat kernel, 64 elements a thread.
// Traffic   2 bytes an element in, 1 out for each copy; `current` reads them once more for the maximum, first.
//           22 matrices of 3072 x 768 with both copies: 208 MB.
// Numerics  FP32 between load and conversion; maxima as bits with atomicMax: bitwise reproducible.
#include <cuda_runtime.h>

#include "kernels/base/aligned.h"
#include "kernels/base/launch.cuh"
#include "kernels/fp8/fp8.h"
#include "kernels/fp8/fp8_tile.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = kFp8TileThreads, kStartThreads = 1024;
constexpr int kFlatVecs = 8;  // 16-byte loads of a thread of the flat kernels
constexpr int64_t kFlatElements = int64_t{kThreads} * kFlatVecs * kVec;
constexpr int kMaxItems = 128;  // of one launch

template <class Fp8>
struct Matrix {
  Fp8* out;
  Fp8* out_t;
  const bf16* inp;
  int64_t rows, cols;
};

template <bool kCount>
__device__ __forceinline__ void see_tile(const Matrix<e4m3>& m, int64_t tile, Fp8Tally<kCount>& tally) {
  const Fp8Piece piece(m.rows, m.cols, tile);
  if (!piece.inside) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) tally.see(load16(m.inp + piece.at(i)));
}

// Every thread of the block calls it, once.
template <class Fp8, bool kCount>
__device__ __forceinline__ void convert_tile(const Matrix<Fp8>& m, int64_t tile, float inverse_scale, Fp8Tally<kCount>& tally) {
  __shared__ __align__(16) uint32_t turned[kFp8TurnedWords];
  const Fp8Piece piece(m.rows, m.cols, tile);
  if (piece.inside) {
    uint4 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = load16(m.inp + piece.at(i));
    convert_piece(piece, raw, m.out, m.out_t ? turned : nullptr, inverse_scale, tally);
  }
  if (!m.out_t) return;
  __syncthreads();
  store_turned(piece, turned, m.out_t);
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

__device__ Matrix<e4m3> matrix_of(const Fp8WeightItem<bf16>& item) {
  return {item.out, item.out_t, item.weight, item.rows, item.cols};
}

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
  const float scale = current ? current_scale(item.scale->amax, kE4m3Max) : item.scale->scale;
  const int tile = blockIdx.x - blocks.begin[index];
  // Other blocks make the same number from the maximum themselves.
  if (current && tile == 0 && threadIdx.x == 0) item.scale->scale = scale;
  Fp8Tally<kCount> tally;
  convert_tile(matrix_of(item), tile, 1.0f / scale, tally);
  tally.template deliver<kThreads>(item.scale, p.scaling == Fp8Scaling::delayed);
}

template <class Fp8, bool kCount>
__global__ void __launch_bounds__(kThreads) convert_both_kernel(const Matrix<Fp8> m, Fp8Scale* scale, Fp8Scaling scaling) {
  const bool current = scaling == Fp8Scaling::current;
  const float value = current ? current_scale(scale->amax, Fp8Range<Fp8>::largest) : scale->scale;
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

// One block, which finds nothing to do but in the first step.
template <class Fp8>
__global__ void __launch_bounds__(kStartThreads)
    start_scale_kernel(const bf16* inp, Fp8Scale* scale, int64_t vectors, double margin) {
  start_scale<Fp8, kStartThreads>(scale, vectors, margin, [&](int64_t vector) { return load16(inp + vector * kVec); });
}

// A thread takes pairs of neighbouring vectors: 32 bytes in, 16 out.
template <class Fp8, bool kCount>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(Fp8* out, const bf16* inp, Fp8Scale* scale, int64_t pairs, Fp8Scaling scaling) {
  constexpr int kPairs = kFlatVecs / 2;
  const bool current = scaling == Fp8Scaling::current;
  const float value = current ? current_scale(scale->amax, Fp8Range<Fp8>::largest) : scale->scale;
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
    const uint2 low = tally.template convert<Fp8>(raw[i][0], inverse_scale),
                high = tally.template convert<Fp8>(raw[i][1], inverse_scale);
    store16(out + pair * 2 * kVec, {low.x, low.y, high.x, high.y});
  }
  tally.template deliver<kThreads>(scale, scaling == Fp8Scaling::delayed);
}

__global__ void __launch_bounds__(kThreads) next_scales_kernel(const Fp8NextScales p) {
  __shared__ int first_bad;
  if (threadIdx.x == 0) first_bad = p.num_scales;
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_scales; i += kThreads) {
    const NextScale next = next_scale(p.scales[i], p.margin, p.largest, p.forget_zeros);
    if (next.bad) atomicMin(&first_bad, i);
    p.scales[i].scale = next.scale;
    p.scales[i].amax = 0;
  }
  __syncthreads();
  if (threadIdx.x != 0 || p.verdict == nullptr || first_bad == p.num_scales || p.verdict->skip != 0) return;
  p.verdict->skip = 1;
  p.verdict->bad_parameter = -2 - first_bad;
}

template <class Fp8>
void require_matrix(const char* op, const Matrix<Fp8>& m, const Fp8Scale* scale) {
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
    const Matrix<e4m3> m{item.out, item.out_t, item.weight, item.rows, item.cols};
    require_matrix("fp8 weights", m, item.scale);
    require(m.rows % 16 == 0, "fp8 weights: (", m.rows, ", ", m.cols, "): rows must be a multiple of 16");
    total += fp8_tiles(m.rows, m.cols);
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

template <class Fp8>
void quantize(const Fp8Quantize<bf16, Fp8>& args, const CudaExec& exec) {
  const Matrix<Fp8> m{args.out, args.out_t, args.inp, args.rows, args.cols};
  require_matrix("fp8 quantize", m, args.scale);
  const int64_t elements = m.rows * m.cols;
  const unsigned flat_grid = grid_size(ceil_div(elements, kFlatElements), "fp8 quantize");
  if (args.scaling == Fp8Scaling::current) {
    cuda_check(cudaMemsetAsync(&args.scale->amax, 0, sizeof args.scale->amax, exec.stream), "fp8 quantize: clearing the maximum");
    maximum_kernel<<<flat_grid, kThreads, 0, exec.stream>>>(m.inp, args.scale, elements / kVec);
  } else if (args.scaling == Fp8Scaling::delayed && args.start_margin != 0) {
    start_scale_kernel<Fp8><<<1, kStartThreads, 0, exec.stream>>>(m.inp, args.scale, elements / kVec, args.start_margin);
  }
  if (m.out_t != nullptr) {
    const unsigned grid = grid_size(fp8_tiles(m.rows, m.cols), "fp8 quantize");
    auto* kernel = args.count ? convert_both_kernel<Fp8, true> : convert_both_kernel<Fp8, false>;
    kernel<<<grid, kThreads, 0, exec.stream>>>(m, args.scale, args.scaling);
  } else {
    auto* kernel = args.count ? convert_kernel<Fp8, true> : convert_kernel<Fp8, false>;
    kernel<<<flat_grid, kThreads, 0, exec.stream>>>(m.out, m.inp, args.scale, elements / (2 * kVec), args.scaling);
  }
  check_launch("fp8 quantize of (", m.rows, ", ", m.cols, ")");
}

}  // namespace

void fp8_weights(const Fp8Weights<bf16>& args, const CudaExec& exec) {
  for (int first = 0; first < args.num_items; first += kMaxItems)
    convert_weights(args, first, min(kMaxItems, args.num_items - first), exec);
}

void fp8_quantize(const Fp8Quantize<bf16, e4m3>& args, const CudaExec& exec) { quantize(args, exec); }
void fp8_quantize(const Fp8Quantize<bf16, e5m2>& args, const CudaExec& exec) { quantize(args, exec); }

void fp8_next_scales(const Fp8NextScales& args, const CudaExec& exec) {
  if (args.num_scales <= 0) return;
  next_scales_kernel<<<1, kThreads, 0, exec.stream>>>(args);
  check_launch("fp8 next scales of ", args.num_scales);
}

}  // namespace speedrun::kernels

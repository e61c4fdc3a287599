// C = alpha · op(A) · op(B) + beta · C on the CPU, the classic three levels:
//   task         a tile of C (at most kTileM x kTileN), any thread; walks through K in blocks of kBlockK
//   packing      the tile's strips of A and B are copied to panels of MR rows / NR columns, k-major, zero-padded: unit stride, any
//   transpose micro-kernel MR x NR accumulators in registers; each step reads NR/lanes vectors of B and broadcasts MR elements of A
// Numerics: every element is a sum over k in ascending order within a block of kBlockK, blocks in ascending order, whatever the
// tile it is in and the thread that made it: the cut into tiles may follow the number of threads and the bits do not.
#include "kernels/gemm/gemm_ref.h"

#include <algorithm>
#include <vector>

#include "kernels/base/host_parallel.h"
#include "kernels/base/simd.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kBlockK = 256;
constexpr int64_t kTileM = 256, kTileN = 512;

// Registers: MR·NV accumulators + NV vectors of B + one broadcast, of 32 (AVX-512) or 16 (AVX2, SSE2).
template <int W>
constexpr int kPanelRows = W == 64 ? 8 : 4;
constexpr int kPanelVectors = 3;

// Copies op(X)(first … first+count, 0 … depth) to panels of P rows: panel[k·P + i]; rows beyond count are 0. `along` is the
// distance between the rows of op(X), `across` the distance in k; one of them is 1.
template <class T, int P>
SPEEDRUN_ALWAYS_INLINE void pack(T* __restrict out, const T* __restrict x, int64_t count, int64_t depth, int64_t along,
                                 int64_t across) {
  using Quad = Simd<T, 16>;
  constexpr int kQ = Quad::kLanes;
  static_assert(P % kQ == 0);
  for (int64_t first = 0; first < count; first += P, out += P * depth) {
    const T* panel = x + first * along;
    if (count - first < P) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t i = 0; i < P; ++i) out[k * P + i] = first + i < count ? panel[i * along + k * across] : T{0};
      }
    } else if (along == 1) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int i = 0; i < P; i += kQ) Quad::store(out + k * P + i, Quad::load(panel + k * across + i));
      }
    } else {
      const int64_t whole = depth - depth % kQ;
      for (int i = 0; i < P; i += kQ) {
        for (int64_t k = 0; k < whole; k += kQ) {
          typename Quad::Vec row[kQ], column[kQ];
          for (int j = 0; j < kQ; ++j) row[j] = Quad::load(panel + (i + j) * along + k);
          if constexpr (kQ == 4) {
            const auto low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5),
                       high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
            const auto low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5),
                       high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
            column[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
            column[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
            column[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
            column[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
          } else {
            column[0] = __builtin_shufflevector(row[0], row[1], 0, 2);
            column[1] = __builtin_shufflevector(row[0], row[1], 1, 3);
          }
          for (int j = 0; j < kQ; ++j) Quad::store(out + (k + j) * P + i, column[j]);
        }
        for (int64_t k = whole; k < depth; ++k) {
          for (int j = 0; j < kQ; ++j) out[k * P + i + j] = panel[(i + j) * along + k];
        }
      }
    }
  }
}

// c (MR, NR) = alpha · a-panel · b-panel + beta · c
template <class T, int W>
SPEEDRUN_ALWAYS_INLINE void micro_kernel(T* __restrict c, int64_t ldc, const T* __restrict a, const T* __restrict b, int64_t depth,
                                         T alpha, T beta) {
  using S = Simd<T, W>;
  constexpr int kMr = kPanelRows<W>, kNv = kPanelVectors;
  typename S::Vec sum[kMr][kNv] = {};
  for (int64_t k = 0; k < depth; ++k) {
    typename S::Vec row[kNv];
#pragma GCC unroll 4
    for (int v = 0; v < kNv; ++v) row[v] = S::load(b + v * S::kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kMr; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kNv; ++v) sum[i][v] += a[i] * row[v];
    }
    a += kMr;
    b += kNv * S::kLanes;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kMr; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kNv; ++v) {
      T* out = c + i * ldc + v * S::kLanes;
      typename S::Vec value = alpha * sum[i][v];
      if (beta != 0) value += beta * S::load(out);
      S::store(out, value);
    }
  }
}

// Pointers of one tile's block of K, already at its corner.
template <class T>
struct Block {
  T* c;
  const T* a;
  const T* b;
  T* packed_a;
  T* packed_b;
  int64_t rows, columns, depth;
  int64_t ldc, along_a, across_a, along_b, across_b;
  T alpha, beta;
};

template <class T>
struct BlockKernel {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(const Block<T>* block) {
    constexpr int kMr = kPanelRows<W>, kNr = kPanelVectors * Simd<T, W>::kLanes;
    const Block<T> t = *block;
    pack<T, kMr>(t.packed_a, t.a, t.rows, t.depth, t.along_a, t.across_a);
    pack<T, kNr>(t.packed_b, t.b, t.columns, t.depth, t.along_b, t.across_b);
    for (int64_t j = 0; j < t.columns; j += kNr) {
      for (int64_t i = 0; i < t.rows; i += kMr) {
        const T* a = t.packed_a + i * t.depth;
        const T* b = t.packed_b + j * t.depth;
        T* c = t.c + i * t.ldc + j;
        const int64_t rows = std::min<int64_t>(kMr, t.rows - i), columns = std::min<int64_t>(kNr, t.columns - j);
        if (rows == kMr && columns == kNr) {
          micro_kernel<T, W>(c, t.ldc, a, b, t.depth, t.alpha, t.beta);
        } else {
          T border[kMr * kNr] = {};
          for (int64_t r = 0; t.beta != 0 && r < rows; ++r) std::copy(c + r * t.ldc, c + r * t.ldc + columns, border + r * kNr);
          micro_kernel<T, W>(border, kNr, a, b, t.depth, t.alpha, t.beta);
          for (int64_t r = 0; r < rows; ++r) std::copy(border + r * kNr, border + r * kNr + columns, c + r * t.ldc);
        }
      }
    }
  }
};

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A thread's packing buffers, kept from call to call.
template <class T>
struct Panels {
  std::vector<T> a, b;
  void reserve(int64_t rows, int64_t columns, int64_t depth) {
    constexpr int64_t kPadding = 64;  // at least MR and NR of every instruction set
    const size_t a_size = static_cast<size_t>(round_up(rows, kPadding) * depth),
                 b_size = static_cast<size_t>((columns + kPadding) * depth);
    if (a.size() < a_size) a.resize(a_size);
    if (b.size() < b_size) b.resize(b_size);
  }
};

template <class T>
void tile(const GemmRef<T>& g, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  static thread_local Panels<T> panels;
  panels.reserve(rows, columns, std::min(g.K, kBlockK));
  const int64_t along_a = g.transpose_a ? 1 : g.lda, across_a = g.transpose_a ? g.lda : 1;
  const int64_t along_b = g.transpose_b ? g.ldb : 1, across_b = g.transpose_b ? 1 : g.ldb;
  for (int64_t k = 0; k < g.K; k += kBlockK) {
    const Block<T> block{.c = g.c + row * g.ldc + column,
                         .a = g.a + row * along_a + k * across_a,
                         .b = g.b + column * along_b + k * across_b,
                         .packed_a = panels.a.data(),
                         .packed_b = panels.b.data(),
                         .rows = rows,
                         .columns = columns,
                         .depth = std::min(kBlockK, g.K - k),
                         .ldc = g.ldc,
                         .along_a = along_a,
                         .across_a = across_a,
                         .along_b = along_b,
                         .across_b = across_b,
                         .alpha = g.alpha,
                         .beta = k == 0 ? g.beta : T{1}};
    simd_dispatch<BlockKernel<T>>(&block);
  }
}

// C = beta · C, what is left of a product over nothing.
template <class T>
void scale(const GemmRef<T>& g) {
  for (int64_t i = 0; i < g.M; ++i) {
    for (int64_t j = 0; j < g.N; ++j) g.c[i * g.ldc + j] = g.beta == 0 ? T{0} : g.beta * g.c[i * g.ldc + j];
  }
}

}  // namespace

template <class T>
void gemm_ref(const GemmRef<T>& g, const HostExec& exec) {
  if (g.M <= 0 || g.N <= 0) return;
  if (g.K <= 0) return scale(g);
  // Smaller tiles only where large ones would leave threads without work.
  const int64_t wanted = exec.pool == nullptr ? 1 : 2 * exec.pool->num_threads();
  int64_t tile_m = std::min(kTileM, round_up(g.M, 8)), tile_n = std::min(kTileN, round_up(g.N, 48));
  auto tiles = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  while (tiles(g.M, tile_m) * tiles(g.N, tile_n) < wanted && (tile_m > 64 || tile_n > 96)) {
    int64_t& longer = tile_m >= tile_n ? tile_m : tile_n;
    longer = round_up(longer / 2, &longer == &tile_m ? 8 : 48);
  }
  const int64_t across = tiles(g.N, tile_n);
  parallel(exec, tiles(g.M, tile_m) * across, [&](int64_t index) {
    const int64_t row = index / across * tile_m, column = index % across * tile_n;
    tile(g, row, std::min(tile_m, g.M - row), column, std::min(tile_n, g.N - column));
  });
}

template void gemm_ref(const GemmRef<float>&, const HostExec&);
template void gemm_ref(const GemmRef<double>&, const HostExec&);

}  // namespace speedrun::kernels

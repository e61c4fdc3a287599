// Token embedding: out[t] = wte[tokens[t]] (+ wpe[t mod row_tokens]); dwte[token] += Σ_{t: tokens[t] = token} dout[t], dwpe
// likewise.
// Layout    row-major; 16-byte accesses: C % 8 == 0, pointers 16-byte aligned.
// Work      forward: one warp per token. Backward: a stable radix sort of (token, position); then fixed chunks of the sorted
//           list, one thread per 8 channels walks a chunk. The run of a token that lies inside one chunk is added to its row of
//           dwte by that chunk alone. A run that crosses chunk borders leaves one partial sum per chunk; a third kernel adds
//           them in the order of the chunks, so frequent tokens are summed by many blocks. dwpe: one thread per position and 8
//           channels adds the rows in order.
// Traffic   forward 4 bytes an element (6 with wpe, mostly from L2); backward 2 bytes an element + 8 an element of the touched
//           rows of dwte (+ 2 an element for dwpe).
// Numerics  FP32 sums in an order that depends on tokens alone: bitwise reproducible, on any GPU. No atomics.
#include <cuda_runtime.h>

#include <cub/device/device_radix_sort.cuh>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/embedding/embedding.h"
#include "kernels/embedding/embedding_scratch.h"

namespace speedrun::kernels {
namespace {

constexpr int kForwardThreads = 256;
constexpr int kMaxThreads = 256;  // of one tile of channels in backward
constexpr int kAhead = 8;         // rows of dout in flight per thread

__global__ void __launch_bounds__(kForwardThreads) embedding_forward_kernel(const EmbeddingForward<bf16> p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * (kForwardThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (t >= p.N) return;
  const bf16* token_row = p.wte + static_cast<int64_t>(p.tokens[t]) * p.C;
  const bf16* position_row = p.wpe != nullptr ? p.wpe + t % p.row_tokens * p.C : nullptr;
  bf16* out = p.out + t * p.C;
#pragma unroll 4
  for (int c = lane * kVec; c < p.C; c += kWarpSize * kVec) {
    uint4 raw = load16(token_row + c);
    if (position_row != nullptr) {
      float token[kVec], position[kVec];
      unpack8(raw, token);
      load8(position_row + c, position);
#pragma unroll
      for (int j = 0; j < kVec; ++j) token[j] += position[j];
      raw = pack8(token);
    }
    store16(out + c, raw);
  }
}

__global__ void __launch_bounds__(kForwardThreads) fill_positions_kernel(int32_t* positions, int64_t N) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kForwardThreads + threadIdx.x;
  if (t < N) positions[t] = static_cast<int32_t>(t);
}

struct RunSums {
  float* dwte;               // (V, C) +=
  float* head;               // (chunks, C) sum of the run that continues from the chunk before
  float* tail;               // (chunks, C) sum of the run that begins in the chunk and continues in the next
  const bf16* dout;          // (N, C)
  const uint32_t* tokens;    // (N) sorted
  const int32_t* positions;  // (N) of the sorted tokens
  int64_t N;
  int C;
  int tiles;  // blocks over the channels of a chunk
};

__device__ __forceinline__ void add8(float* row, const float (&sum)[kVec]) {
  float old[kVec];
  load8(row, old);
#pragma unroll
  for (int j = 0; j < kVec; ++j) old[j] += sum[j];
  store8(row, old);
}

__global__ void __launch_bounds__(kMaxThreads) run_sums_kernel(const RunSums p) {
  __shared__ uint32_t tokens[kEmbeddingChunk];
  __shared__ int32_t positions[kEmbeddingChunk];
  const int64_t chunk = blockIdx.x / p.tiles;
  const int64_t begin = chunk * kEmbeddingChunk;
  const int count = static_cast<int>(min(static_cast<int64_t>(kEmbeddingChunk), p.N - begin));
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    tokens[i] = p.tokens[begin + i];
    positions[i] = p.positions[begin + i];
  }
  __syncthreads();
  const int c = (blockIdx.x % p.tiles * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVec;
  if (c >= p.C) return;
  const bool from_before = begin > 0 && p.tokens[begin - 1] == tokens[0];
  const bool into_next = begin + count < p.N && p.tokens[begin + count] == tokens[count - 1];

  float sum[kVec] = {};
  bool first_run = true;
  for (int base = 0; base < count; base += kAhead) {
    uint4 raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i < count) raw[i] = load16_streaming(p.dout + static_cast<int64_t>(positions[base + i]) * p.C + c);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int entry = base + i;
      if (entry >= count) break;
      float row[kVec];
      unpack8(raw[i], row);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[j] += row[j];
      const bool last = entry + 1 == count;
      if (!last && tokens[entry + 1] == tokens[entry]) continue;
      // The run ends here: where its sum goes is the same for every thread of the block.
      if (first_run && from_before) {
        store8(p.head + chunk * p.C + c, sum);
      } else if (last && into_next) {
        store8(p.tail + chunk * p.C + c, sum);
      } else {
        add8(p.dwte + static_cast<int64_t>(tokens[entry]) * p.C + c, sum);
      }
      first_run = false;
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[j] = 0;
    }
  }
}

// Adds up the runs that cross chunk borders; the chunk in which a run begins does it.
__global__ void __launch_bounds__(kMaxThreads) crossing_runs_kernel(const RunSums p) {
  const int64_t chunk = blockIdx.x / p.tiles;
  const int64_t border = (chunk + 1) * kEmbeddingChunk;
  if (border >= p.N) return;
  const uint32_t token = p.tokens[border - 1];
  if (p.tokens[border] != token) return;
  const int64_t begin = border - kEmbeddingChunk;
  if (begin > 0 && p.tokens[begin - 1] == token) return;  // the run began in an earlier chunk

  // First sorted index beyond the run.
  int64_t low = border + 1, high = p.N;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (p.tokens[middle] == token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int64_t last_chunk = (low - 1) / kEmbeddingChunk;
  const int c = (blockIdx.x % p.tiles * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVec;
  if (c >= p.C) return;
  float sum[kVec];
  load8(p.tail + chunk * p.C + c, sum);
#pragma unroll 8
  for (int64_t k = chunk + 1; k <= last_chunk; ++k) {
    float head[kVec];
    load8(p.head + k * p.C + c, head);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] += head[j];
  }
  add8(p.dwte + static_cast<int64_t>(token) * p.C + c, sum);
}

__global__ void __launch_bounds__(kForwardThreads)
    position_sums_kernel(float* dwpe, const bf16* dout, int64_t rows, int64_t row_elements) {
  const int64_t element = (static_cast<int64_t>(blockIdx.x) * kForwardThreads + threadIdx.x) * kVec;
  if (element >= row_elements) return;
  float sum[kVec] = {};
#pragma unroll 8
  for (int64_t row = 0; row < rows; ++row) {
    float values[kVec];
    unpack8(load16_streaming(dout + row * row_elements + element), values);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] += values[j];
  }
  add8(dwpe + element, sum);
}

int bits_for(int V) {
  int bits = 1;
  while (bits < 31 && (int64_t{1} << bits) < V) ++bits;
  return bits;
}

void check_rows(const char* op, int64_t N, int C, int64_t row_tokens) {
  require(N > 0 && N <= 0x7fffffff && C > 0 && C % kVec == 0 && row_tokens > 0 && N % row_tokens == 0, op, ": N = ", N, ", C = ", C,
          ", row_tokens = ", row_tokens, "; C must be a multiple of 8, N of row_tokens");
}

}  // namespace

void embedding_forward(const EmbeddingForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "embedding_forward";
  check_rows(kOp, args.N, args.C, args.row_tokens);
  require_aligned16(kOp, "out", args.out);
  require_aligned16(kOp, "wte", args.wte);
  require_aligned16(kOp, "wpe", args.wpe);
  embedding_forward_kernel<<<grid_size(ceil_div(args.N, kForwardThreads / kWarpSize), kOp), kForwardThreads, 0, exec.stream>>>(
      args);
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C);
}

void embedding_backward(const EmbeddingBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "embedding_backward";
  check_rows(kOp, args.N, args.C, args.row_tokens);
  require(args.V > 0, kOp, ": V = ", args.V);
  require_aligned16(kOp, "dwte", args.dwte);
  require_aligned16(kOp, "dwpe", args.dwpe);
  require_aligned16(kOp, "dout", args.dout);
  require(args.scratch != nullptr && reinterpret_cast<uintptr_t>(args.scratch) % kEmbeddingScratchAlign == 0, kOp,
          ": scratch must be 256-byte aligned, is at ", args.scratch);
  const EmbeddingScratch layout(args.N, args.C);
  std::byte* scratch = static_cast<std::byte*>(args.scratch);
  const auto tokens = reinterpret_cast<uint32_t*>(scratch + layout.tokens);
  const auto positions_in = reinterpret_cast<int32_t*>(scratch + layout.positions_in);
  const auto positions = reinterpret_cast<int32_t*>(scratch + layout.positions);

  fill_positions_kernel<<<grid_size(ceil_div(args.N, kForwardThreads), kOp), kForwardThreads, 0, exec.stream>>>(positions_in,
                                                                                                                args.N);
  check_launch(kOp, ": positions, N = ", args.N);
  const auto tokens_in = reinterpret_cast<const uint32_t*>(args.tokens);
  const int num_items = static_cast<int>(args.N), end_bit = bits_for(args.V);
  size_t sort_bytes = 0;
  cuda_check(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, tokens_in, tokens, positions_in, positions, num_items, 0, end_bit,
                                             exec.stream),
             kOp, ": size of the sort of ", args.N, " tokens");
  require(sort_bytes <= layout.sort_bytes, kOp, ": the sort of ", args.N, " tokens needs ", sort_bytes, " bytes, planned ",
          layout.sort_bytes);
  cuda_check(cub::DeviceRadixSort::SortPairs(scratch + layout.sort, sort_bytes, tokens_in, tokens, positions_in, positions,
                                             num_items, 0, end_bit, exec.stream),
             kOp, ": sorting ", args.N, " tokens");

  const int vecs = args.C / kVec;
  const int threads = static_cast<int>(min(static_cast<int64_t>(kMaxThreads), ceil_div(vecs, kWarpSize) * kWarpSize));
  const int tiles = static_cast<int>(ceil_div(vecs, threads));
  const RunSums runs{.dwte = args.dwte,
                     .head = reinterpret_cast<float*>(scratch + layout.head),
                     .tail = reinterpret_cast<float*>(scratch + layout.tail),
                     .dout = args.dout,
                     .tokens = tokens,
                     .positions = positions,
                     .N = args.N,
                     .C = args.C,
                     .tiles = tiles};
  const unsigned grid = grid_size(ceil_div(args.N, kEmbeddingChunk) * tiles, kOp);
  run_sums_kernel<<<grid, threads, 0, exec.stream>>>(runs);
  check_launch(kOp, ": run sums, N = ", args.N, ", C = ", args.C);
  crossing_runs_kernel<<<grid, threads, 0, exec.stream>>>(runs);
  check_launch(kOp, ": crossing runs, N = ", args.N, ", C = ", args.C);

  if (args.dwpe == nullptr) return;
  const int64_t row_elements = args.row_tokens * args.C;
  position_sums_kernel<<<grid_size(ceil_div(row_elements / kVec, kForwardThreads), kOp), kForwardThreads, 0, exec.stream>>>(
      args.dwpe, args.dout, args.N / args.row_tokens, row_elements);
  check_launch(kOp, ": position sums, row_tokens = ", args.row_tokens, ", C = ", args.C);
}

}  // namespace speedrun::kernels

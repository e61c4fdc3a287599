// Hashed bigram embedding with signs: out[t] = table[index[t]]·sign[sign_row[t]]; dtable[index[t]] += dout[t]·sign[sign_row[t]].
//
// Layout    row-major; 16-byte accesses: C % 8 == 0, pointers 16-byte aligned.
//
// Work      one warp a token; every lane computes the token's rows. Backward: dout times the signs, then embedding_backward with
// the indices as tokens.
//
// Traffic   forward 4 bytes an element (the table of signs, 12.6 MB at 8,192 x 768, mostly from L2); backward 4 for the signs and
// embedding_backward's.
//
// Numerics  products with ±1 are exact; sums as in embedding_backward, in an order that depends on the indices alone.
#include <cuda_runtime.h>

#include "kernels/base/aligned.h"
#include "kernels/base/cuda_vec.cuh"
#include "kernels/base/launch.cuh"
#include "kernels/embedding/bigram.h"
#include "kernels/embedding/bigram_hash.h"
#include "kernels/embedding/embedding.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

__device__ __forceinline__ uint4 times_signs(uint4 raw, const bf16* sign) {
  float x[kVec], s[kVec];
  unpack8(raw, x);
  load8(sign, s);
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] *= s[j];
  return pack8(x);
}

__global__ void __launch_bounds__(kThreads) bigram_forward_kernel(const BigramForward<bf16> p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (t >= p.N) return;
  const BigramRows picked = bigram_rows(p.tokens, t, t % p.row_tokens, p.rows, p.sign != nullptr ? p.sign_rows : 0);
  if (lane == 0) {
    p.index[t] = picked.index;
    if (p.sign_row != nullptr) p.sign_row[t] = picked.sign_row;
  }
  const bf16* row = p.table + static_cast<int64_t>(picked.index) * p.C;
  const bf16* sign = p.sign != nullptr ? p.sign + static_cast<int64_t>(picked.sign_row) * p.C : nullptr;
  bf16* out = p.out + t * p.C;
#pragma unroll 4
  for (int c = lane * kVec; c < p.C; c += kWarpSize * kVec) {
    const uint4 raw = load16(row + c);
    store16(out + c, sign != nullptr ? times_signs(raw, sign + c) : raw);
  }
}

__global__ void __launch_bounds__(kThreads) signed_dout_kernel(const BigramBackward<bf16> p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (t >= p.N) return;
  const bf16* sign = p.sign + static_cast<int64_t>(p.sign_row[t]) * p.C;
  const int64_t row = t * p.C;
#pragma unroll 4
  for (int c = lane * kVec; c < p.C; c += kWarpSize * kVec) {
    store16(p.signed_dout + row + c, times_signs(load16(p.dout + row + c), sign + c));
  }
}

void check_shape(const char* op, int64_t N, int64_t row_tokens, int C, int rows) {
  require(N > 0 && C > 0 && C % kVec == 0 && row_tokens > 0 && N % row_tokens == 0, op, ": N = ", N, ", C = ", C,
          ", row_tokens = ", row_tokens, "; C must be a multiple of 8, N of row_tokens");
  require(rows >= 2, op, ": a table of ", rows, " rows, expected at least 2");
}

}  // namespace

void bigram_forward(const BigramForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "bigram_forward";
  check_shape(kOp, args.N, args.row_tokens, args.C, args.rows);
  require(args.sign == nullptr || args.sign_rows > 0, kOp, ": a table of ", args.sign_rows, " rows of signs");
  require_aligned16(kOp, "out", args.out);
  require_aligned16(kOp, "table", args.table);
  require_aligned16(kOp, "sign", args.sign);
  bigram_forward_kernel<<<grid_size(ceil_div(args.N, kWarps), kOp), kThreads, 0, exec.stream>>>(args);
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C);
}

void bigram_backward(const BigramBackward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "bigram_backward";
  check_shape(kOp, args.N, args.row_tokens, args.C, args.rows);
  if (args.sign != nullptr) {
    require(args.sign_row != nullptr && args.signed_dout != nullptr, kOp, ": signs need sign_row and signed_dout");
    require_aligned16(kOp, "dout", args.dout);
    require_aligned16(kOp, "signed_dout", args.signed_dout);
    require_aligned16(kOp, "sign", args.sign);
    signed_dout_kernel<<<grid_size(ceil_div(args.N, kWarps), kOp), kThreads, 0, exec.stream>>>(args);
    check_launch(kOp, ": signs, N = ", args.N, ", C = ", args.C);
  }
  embedding_backward(EmbeddingBackward<bf16>{.dwte = args.dtable,
                                             .dwpe = nullptr,
                                             .dout = args.sign != nullptr ? args.signed_dout : args.dout,
                                             .tokens = args.index,
                                             .scratch = args.scratch,
                                             .N = args.N,
                                             .row_tokens = args.row_tokens,
                                             .C = args.C,
                                             .V = args.rows},
                     exec);
}

}  // namespace speedrun::kernels

// E5M2 gradient of a chunk of logits in both layouts, from the logits and what row_loss (head_loss.cu) found out about each
// row:
//   grad8 = e5m2(slope·(S·softmax − Σ w_j·onehot(c_j)) · 448/grad_bound),   grad8_t = grad8ᵀ
// Layout    logits, grad8 (rows, V), grad8_t (V, rows); rows and V multiples of 16, 16-byte aligned pointers.
// Work      A block takes 128 rows of 128 columns. A thread has 16 rows of 4 columns: it reads 8 bytes of each row, converts,
//           stores words of grad8, turns its codes by byte permutes and stores 16 bytes of each column of grad8_t. The other
//           half of a warp has the next 16 rows of the same columns, so that what a warp stores are whole sectors of 32 bytes
//           of grad8_t, and of 64 bytes of grad8. The few target columns are written again at the end, by the threads that find
//           them.
// Traffic   reads N·V·2 bytes, writes N·V twice; row_loss reads N·V·2 before. Per 16,384 tokens 3.3 and 1.65 GB, 0.8 and 0.4 ms
//           at 4.2 TB/s. A logit is read twice, and its soft-cap computed twice, 2.5 operations of the special-function unit
//           each time (0.56 ms): blocks need nothing of each other, so that memory always has work, which is worth more than
//           the bytes.
// Numerics  FP32 in units of log2. S·softmax in units of the gradient's scale is one power of 2: 2^(z + shift), where the row's
//           shift = log2(S·448/grad_bound) − log2 Σ 2^z.
#include "kernels/base/launch.cuh"
#include "kernels/fp8/fp8_tile.cuh"
#include "kernels/head/head_fp8_cuda.h"
#include "kernels/head/head_row.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 2;
constexpr int kRows = 16, kColumns = 4;  // of a thread
constexpr int kLanesAcross = 16, kLanesDown = kWarpSize / kLanesAcross;
constexpr int kWarpsAcross = 2, kWarpsDown = kThreads / kWarpSize / kWarpsAcross;
constexpr int kBlockColumns = kWarpsAcross * kLanesAcross * kColumns, kBlockRows = kWarpsDown * kLanesDown * kRows;
static_assert(kBlockColumns == 128 && kBlockRows == 128);

struct GradientCodes {
  const bf16* logits;  // (rows, V)
  const float* shift;  // (rows)
  e5m2* grad8;         // (rows, V)
  e5m2* grad8_t;       // (V, rows)
  Fp8Scale* grad_scale8;
  const float* grad_scale;
  LossTerms terms;
  int64_t first;  // token of row 0
  int64_t rows;
  int V;
  float softcap_value;
  float bound_scale;  // grad_bound/448
  float units;        // 448/grad_bound
  bool count;
};

// Not fp8_scale.h's: this scale is no maximum's, which rounding could put a hair above the largest number.
__device__ __forceinline__ uint32_t is_saturated_e5m2(float value) { return fabsf(value) > kE5m2Max; }
__device__ __forceinline__ uint32_t is_flushed_e5m2(float value) { return is_flushed<e5m2>(value, value); }

// Not contracted, so that it is the same number wherever it is computed.
__device__ __forceinline__ float softmax_part(const Capped& logit, float shift) {
  return __fmul_rn(logit.slope, ptx::ex2_approx_ftz(__fadd_rn(logit.z, shift)));
}

template <Softcap kCap>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) gradient_codes(const GradientCodes p) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t blocks_across = ceil_div(p.V, kBlockColumns);
  const int64_t block_row = int64_t{blockIdx.x} / blocks_across * kBlockRows;
  const int block_column = static_cast<int>(blockIdx.x % blocks_across) * kBlockColumns;
  const int64_t row = block_row + (warp / kWarpsAcross * kLanesDown + lane / kLanesAcross) * kRows;
  const int column = block_column + (warp % kWarpsAcross * kLanesAcross + lane % kLanesAcross) * kColumns;
  if (blockIdx.x == 0 && threadIdx.x == 0) p.grad_scale8->scale = p.bound_scale * *p.grad_scale;

  Fp8Tally<true> tally;
  if (row < p.rows && column < p.V) {
    const bf16* const logits = p.logits + row * p.V + column;
    e5m2* const grad8 = p.grad8 + row * p.V + column;
    uint32_t codes[kRows / 4][4];
#pragma unroll
    for (int quad = 0; quad < kRows / 4; ++quad) {
      const float4 shifts = *reinterpret_cast<const float4*>(p.shift + row + 4 * quad);
      const float shift[4] = {shifts.x, shifts.y, shifts.z, shifts.w};
      uint2 raw[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) raw[r] = __ldcs(reinterpret_cast<const uint2*>(logits + int64_t{4 * quad + r} * p.V));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 low = unpack_bf16x2(raw[r].x), high = unpack_bf16x2(raw[r].y);
        Capped capped[kColumns];
        cap_pair<kCap>(low.x, low.y, p.softcap_value, capped[0], capped[1]);
        cap_pair<kCap>(high.x, high.y, p.softcap_value, capped[2], capped[3]);
        float x[kColumns];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) x[i] = softmax_part(capped[i], shift[r]);
        codes[quad][r] = to_fp8x4<e5m2>(x[0], x[1], x[2], x[3]);
        __stcs(reinterpret_cast<uint32_t*>(grad8 + int64_t{4 * quad + r} * p.V), codes[quad][r]);
        if (p.count) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) tally.saturated += is_saturated_e5m2(x[i]), tally.flushed += is_flushed_e5m2(x[i]);
        }
      }
    }
#pragma unroll
    for (int quad = 0; quad < kRows / 4; ++quad) transpose_bytes(codes[quad]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      store16_streaming(p.grad8_t + int64_t{column + i} * p.rows + row, {codes[0][i], codes[1][i], codes[2][i], codes[3][i]});
    }
  }
  __syncthreads();  // the softmax's part of the target columns is written before it is replaced; equal columns by equal values

  // Target columns of this block: S·softmax − W.
  for (int i = threadIdx.x; i < kBlockRows * kTermSlots; i += kThreads) {
    const int64_t term_row = block_row + i / kTermSlots, token = p.first + term_row;
    const int slot = i % kTermSlots;
    if (term_row >= p.rows) break;
    const Term term = loss_term(p.terms, p.terms.target(token, slot), slot);
    if (term.column < block_column || term.column >= block_column + kBlockColumns) continue;
    float weight = 0;
    bool counted = false;  // by an earlier term of this column
#pragma unroll
    for (int other = 0; other < kTermSlots; ++other) {
      const Term same = loss_term(p.terms, p.terms.target(token, other), other);
      if (same.column != term.column) continue;
      weight += same.weight;
      counted |= other < slot;
    }
    const int64_t at = term_row * p.V + term.column;
    const Capped logit = cap<kCap>(static_cast<float>(p.logits[at]), p.softcap_value);
    const float softmax = softmax_part(logit, p.shift[term_row]), x = softmax - weight * p.units * logit.slope;
    const e5m2 code{static_cast<uint8_t>(to_fp8x2<e5m2>(x, 0.0f) & 0xff)};
    p.grad8[at] = code;
    p.grad8_t[int64_t{term.column} * p.rows + term_row] = code;
    if (p.count && !counted) {
      tally.saturated += is_saturated_e5m2(x) - is_saturated_e5m2(softmax);
      tally.flushed += is_flushed_e5m2(x) - is_flushed_e5m2(softmax);
    }
  }
  if (p.count) tally.deliver<kThreads>(p.grad_scale8, false);
}

}  // namespace

void head_fp8_codes(const HeadLoss<bf16>& args, const LossTerms& terms, int64_t begin, int64_t count, const CudaExec& exec) {
  const HeadFp8& fp8 = args.fp8;
  const GradientCodes codes{.logits = args.logits,
                            .shift = fp8.row_shift,
                            .grad8 = fp8.grad8,
                            .grad8_t = fp8.grad8_t,
                            .grad_scale8 = fp8.grad_scale8,
                            .grad_scale = args.grad_scale,
                            .terms = terms,
                            .first = begin,
                            .rows = count,
                            .V = args.V,
                            .softcap_value = static_cast<float>(args.softcap_value),
                            .bound_scale = static_cast<float>(fp8.grad_bound / kE4m3Max),
                            .units = gradient_units(fp8),
                            .count = fp8.count};
  const unsigned grid = grid_size(ceil_div(count, kBlockRows) * ceil_div(args.V, kBlockColumns), "head");
  dispatch_softcap(args.softcap, [&](auto softcap) { gradient_codes<softcap()><<<grid, kThreads, 0, exec.stream>>>(codes); });
  check_launch("head: FP8 gradient of ", count, " rows, V = ", args.V);
}

}  // namespace speedrun::kernels

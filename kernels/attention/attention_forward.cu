// Attention forward: out[t] = Σ_s softmax_s(scale · q[t]·k[s]) v[s] over the keys s that t sees; lse[t] = log Σ_s exp(scale ·
// q[t]·k[s]).
// Layout    q, k, v (N, H, D) bf16 with one row stride; out (N, H·D); lse (H, N) float.
// Work      one block per 128 queries of a head, one warp per 32. The block walks over the keys from the first one its first
//           query sees to its last query, 64 at a time through two stages of shared memory filled by cp.async. A warp skips
//           keys that none of its queries sees and masks only where it has to. Scores and weights stay in registers. Late tiles
//           start first: in a row or document they are the heavy ones, so the light ones fill the end of the grid; the heads of
//           a tile run together.
// Traffic   reads q once, k and v once per query tile that sees them (from L2: neighbouring tiles run together), writes out and
//           lse once.
// Numerics  scores, softmax and sums in FP32, weights rounded to BF16 for the second product. Online softmax in base 2 whose
//           maximum lags: a row's sums are rescaled only when its maximum has grown by more than 2^8 over the one in use, which
//           costs FP32 and BF16 no precision and happens once or twice per row. Sums run in a fixed order: the same bits every
//           run.
// Tuning    attention_tuning.h.
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_check.h"
#include "kernels/attention/attention_tuning.h"
#include "kernels/base/launch.cuh"
#include "kernels/tile/attention_tile.cuh"

namespace speedrun::kernels {
namespace {

// exp2(score − reference) stays below 2^kMaxLag while the reference maximum lags behind the true one.
constexpr float kMaxLag = 8;

// Running softmax of the rows whose scores a lane holds: rows 16m + 8·half + lane / 4 of the warp.
template <int kRowTiles>
struct OnlineSoftmax {
  float reference[kRowTiles][2];  // maximum in use, in units of q·k; −inf: no key seen yet
  float sum[kRowTiles][2];        // Σ weights over this lane's columns
};

// Turns scores (−inf: unseen) into weights and brings sums and outputs to the same reference.
template <int kRowTiles, int kColumnTiles, int kOutTiles>
__device__ __forceinline__ void update_softmax(OnlineSoftmax<kRowTiles>& softmax, float (&scores)[kRowTiles][kColumnTiles][4],
                                               float (&out)[kRowTiles][kOutTiles][4], float scale_log2e) {
  float maximum[kRowTiles][2];
  bool raise = false;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float value = softmax.reference[m][half];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) value = fmaxf(value, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      maximum[m][half] = warp_max<4>(value);
      raise |= (maximum[m][half] - softmax.reference[m][half]) * scale_log2e > kMaxLag;  // false for −inf − −inf
    }
  }

  if (__any_sync(0xffffffffu, raise)) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = maximum[m][half] == -INFINITY ? 0 : (softmax.reference[m][half] - maximum[m][half]) * scale_log2e;
        const float factor = ptx::ex2_approx_ftz(shift);
        softmax.reference[m][half] = maximum[m][half];
        softmax.sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          out[m][n][2 * half] *= factor;
          out[m][n][2 * half + 1] *= factor;
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = softmax.reference[m][half] == -INFINITY ? 0 : softmax.reference[m][half] * scale_log2e;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[m][n][i] = ptx::ex2_approx_ftz(fmaf(scores[m][n][i], scale_log2e, -reference));
          softmax.sum[m][half] += scores[m][n][i];
        }
      }
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kForwardTile<D>.threads(), kForwardTile<D>.min_blocks)
    attention_forward_kernel(const __grid_constant__ AttentionForward<bf16> args, float scale) {
  constexpr AttentionTile kTile = kForwardTile<D>;
  constexpr int kRowTiles = kTile.row_tiles;
  constexpr int kStageBytes = 2 * kTile.columns * kRowBytes<D>;
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* const query_tile = smem;                                                 // (rows, D)
  const uint32_t stages = ptx::shared_address(smem + kTile.rows() * kRowBytes<D>);  // 2 × {k, v} × (columns, D)

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int num_tokens = static_cast<int>(args.N), last_token = num_tokens - 1;
  const int head = blockIdx.x % args.H;
  const int first_query = static_cast<int>((gridDim.x - 1 - blockIdx.x) / args.H) * kTile.rows();
  const Visibility visibility = make_visibility(args.doc_start, args.window, args.N);
  const bf16* const q = args.q + head * D;
  const bf16* const k = args.k + head * D;
  const bf16* const v = args.v + head * D;

  // The keys of the block, and the copies that all of them wait for.
  const int first_key = visibility.first_key(first_query);
  const int end_key = min(first_query + kTile.rows(), num_tokens);
  auto load_stage = [&](int key, int stage) {
    const uint32_t target = stages + stage * kStageBytes;
    load_tile_async<D, kTile.columns, kTile.threads()>(target, k, args.stride, key, last_token);
    load_tile_async<D, kTile.columns, kTile.threads()>(target + kStageBytes / 2, v, args.stride, key, last_token);
  };
  load_tile_async<D, kTile.rows(), kTile.threads()>(ptx::shared_address(query_tile), q, args.stride, first_query, last_token);
  load_stage(first_key, 0);
  ptx::cp_async_commit_group();

  // The warp's queries; those past the end repeat the last one and are not stored.
  const int warp_query = first_query + warp * kTile.warp_rows();
  const int warp_first = min(warp_query, last_token), warp_last = min(warp_query + kTile.warp_rows() - 1, last_token);
  const int warp_first_key = visibility.first_key(warp_first), warp_full_key = visibility.first_key(warp_last);

  float out[kRowTiles][D / 8][4];
  clear(out);
  OnlineSoftmax<kRowTiles> softmax;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.reference[m][half] = -INFINITY;
      softmax.sum[m][half] = 0;
    }
  }

  ptx::cp_async_wait_group<0>();
  __syncthreads();
  uint8_t* const warp_tile = query_tile + warp * kTile.warp_rows() * kRowBytes<D>;
  const RowOperand<D, kRowTiles, kTile.rows_in_registers> queries(ptx::shared_address(warp_tile), lane);
  const uint32_t lane_keys = stages + lane_offset_pieces_first<D>(lane);
  const uint32_t lane_values = stages + kStageBytes / 2 + lane_offset_rows_first<D>(lane);

  int stage = 0;
  for (int tile_key = first_key; tile_key < end_key; tile_key += kTile.columns) {
    // The other stage was read before the last barrier.
    if (tile_key + kTile.columns < end_key) load_stage(tile_key + kTile.columns, stage ^ 1);
    ptx::cp_async_commit_group();

#pragma unroll 1
    for (int column = 0; column < kTile.columns; column += kTile.chunk) {
      const int key = tile_key + column, last_key = key + kTile.chunk - 1;
      if (key > warp_last || last_key < warp_first_key) continue;
      const uint32_t chunk_offset = stage * kStageBytes + column * kRowBytes<D>;

      float scores[kRowTiles][kTile.chunk / 8][4];
      multiply_scores<D, kRowTiles, kTile.chunk>(scores, queries, lane_keys + chunk_offset);

      if (key < warp_full_key || last_key > warp_first)
        hide_keys<kRowTiles, kTile.chunk>(scores, visibility, warp_query, key, lane);
      update_softmax(softmax, scores, out, scale * kLog2e);

      uint32_t weights[kRowTiles][kTile.chunk / 16][4];
      pack_weights<kRowTiles, kTile.chunk>(weights, scores);
      accumulate<D, kRowTiles, kTile.chunk>(out, weights, lane_values + chunk_offset);
    }

    ptx::cp_async_wait_group<0>();
    __syncthreads();
    stage ^= 1;
  }

  // Divide by the sums.
  float inverse[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_sum<4>(softmax.sum[m][half]);
      inverse[m][half] = 1 / sum;
      const int query = warp_query + 16 * m + 8 * half + lane / 4;
      if (lane % 4 == 0 && query < num_tokens) args.lse[head * args.N + query] = softmax.reference[m][half] * scale + logf(sum);
    }
  }
  store_rows<D, kRowTiles>(args.out + head * D, static_cast<int64_t>(args.H) * D, warp_query, num_tokens, out, inverse, warp_tile,
                           lane);
}

template <int D>
void launch_forward(const AttentionForward<bf16>& args, const CudaExec& exec) {
  constexpr AttentionTile kTile = kForwardTile<D>;
  constexpr int kSmemBytes = (kTile.rows() + 4 * kTile.columns) * kRowBytes<D>;
  const auto kernel = attention_forward_kernel<D>;
  allow_dynamic_smem(kernel, kSmemBytes, "attention forward");
  const unsigned grid = grid_size(ceil_div(args.N, kTile.rows()) * args.H, "attention forward");
  kernel<<<grid, kTile.threads(), kSmemBytes, exec.stream>>>(args, static_cast<float>(args.scale));
  check_launch("attention forward, N ", args.N, ", H ", args.H, ", D ", args.D);
}

}  // namespace

void attention_forward(const AttentionForward<bf16>& args, const CudaExec& exec) {
  check_attention("attention forward", args, {args.q, args.k, args.v, args.out});
  args.D == 64 ? launch_forward<64>(args, exec) : launch_forward<128>(args, exec);
}

}  // namespace speedrun::kernels

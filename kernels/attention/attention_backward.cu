// Attention backward. With P = exp(scale·q·k − lse), dP = dout·v, delta[t] = Σ_d dout[t]·out[t] and dS = P·(dP − delta):
//   dq[t] = scale · Σ_s dS[t, s] k[s]     dk[s] = scale · Σ_t dS[t, s] q[t]     dv[s] = Σ_t P[t, s] dout[t]
// Layout    q, k, v, dq, dk, dv (N, H, D) bf16 with one row stride; out, dout (N, H·D); lse, delta (H, N) float.
// Work      two passes, each owning what it sums, so nothing is added in device memory: no atomics, no scratch but delta, the
//           same bits every run. Both recompute P and dP (7 products of 2·D FLOPs per pair instead of 5); a single pass would
//           have to add FP32 parts of dq from every key tile in a fixed order, which serialises blocks and moves 4·D bytes per
//           query and key tile.
//           dQ: one block per 128 queries of a head; walks over the keys they see; computes delta first.
//           dK, dV: one block per 128 keys of a head; walks over the queries that see them: from the first key to the last
//           query t with first_key(t) <= last key, found by a search in doc_start. Works on Sᵀ = K·Qᵀ and dPᵀ = V·doutᵀ, so
//           that P and dS are left operands of dV += Pᵀ·dout and dK += dSᵀ·Q without leaving their registers.
//           A warp skips chunks in which nothing is visible to its rows and masks only where it has to. dQ starts late tiles
//           first, dK/dV early ones: the heavy tiles of a document. The heads of a tile run together.
// Traffic   each pass reads its rows once and the columns once per tile that meets them (from L2), and writes its gradients
//           once.
// Numerics  scores, P and dP in FP32; P and dS rounded to BF16 for the second products; scale applied to the FP32 sums.
// Tuning    attention_tuning.h.
#include <climits>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_check.h"
#include "kernels/attention/attention_tuning.h"
#include "kernels/base/launch.cuh"
#include "kernels/tile/attention_tile.cuh"

namespace speedrun::kernels {
namespace {

template <int D>
__global__ void __launch_bounds__(kQueryGradTile<D>.threads(), kQueryGradTile<D>.min_blocks)
    attention_query_grad_kernel(const __grid_constant__ AttentionBackward<bf16> args, float scale) {
  constexpr AttentionTile kTile = kQueryGradTile<D>;
  constexpr int kRowTiles = kTile.row_tiles;
  constexpr int kTileBytes = kTile.rows() * kRowBytes<D>;
  constexpr int kStageBytes = 2 * kTile.columns * kRowBytes<D>;
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* const query_tile = smem;                                    // (rows, D)
  uint8_t* const dout_tile = smem + kTileBytes;                        // (rows, D)
  const uint32_t stages = ptx::shared_address(smem + 2 * kTileBytes);  // 2 × {k, v} × (columns, D)

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int num_tokens = static_cast<int>(args.N), last_token = num_tokens - 1;
  const int head = blockIdx.x % args.H;
  const int first_query = static_cast<int>((gridDim.x - 1 - blockIdx.x) / args.H) * kTile.rows();
  const Visibility visibility = make_visibility(args.doc_start, args.window, args.N);
  const int64_t out_stride = static_cast<int64_t>(args.H) * D;
  const bf16* const k = args.k + head * D;
  const bf16* const v = args.v + head * D;

  const int first_key = visibility.first_key(first_query);
  const int end_key = min(first_query + kTile.rows(), num_tokens);
  auto load_stage = [&](int key, int stage) {
    const uint32_t target = stages + stage * kStageBytes;
    load_tile_async<D, kTile.columns, kTile.threads()>(target, k, args.stride, key, last_token);
    load_tile_async<D, kTile.columns, kTile.threads()>(target + kStageBytes / 2, v, args.stride, key, last_token);
  };
  load_tile_async<D, kTile.rows(), kTile.threads()>(ptx::shared_address(query_tile), args.q + head * D, args.stride, first_query,
                                                    last_token);
  load_tile_async<D, kTile.rows(), kTile.threads()>(ptx::shared_address(dout_tile), args.dout + head * D, out_stride, first_query,
                                                    last_token);
  load_stage(first_key, 0);
  ptx::cp_async_commit_group();

  // The warp's queries; those past the end repeat the last one and are not stored.
  const int warp_row = warp * kTile.warp_rows();
  const int warp_query = first_query + warp_row;
  const int warp_first = min(warp_query, last_token), warp_last = min(warp_query + kTile.warp_rows() - 1, last_token);
  const int warp_first_key = visibility.first_key(warp_first), warp_full_key = visibility.first_key(warp_last);
  float lse_log2[kRowTiles][2], delta[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse_log2[m][half] = args.lse[head * args.N + min(warp_query + 16 * m + 8 * half + lane / 4, last_token)] * kLog2e;
    }
  }

  // out is read here and nowhere else: straight into registers, while the copies are under way.
  constexpr int kPieces = D / 8;
  constexpr int kRowsPerPass = kWarpSize / kPieces;
  constexpr int kPasses = kTile.warp_rows() / kRowsPerPass;
  uint4 out[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int query = min(warp_query + pass * kRowsPerPass + lane / kPieces, last_token);
    out[pass] = load16_streaming(args.out + query * out_stride + head * D + lane % kPieces * kVec);
  }

  ptx::cp_async_wait_group<0>();
  __syncthreads();

  // delta, kPieces lanes to a row; then from the lane that has row r of a pass to the lanes that hold its scores.
  uint8_t* const warp_dout = dout_tile + warp_row * kRowBytes<D>;
  float row_delta[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsPerPass + lane / kPieces;
    float a[kVec], b[kVec];
    unpack8(out[pass], a);
    unpack8(load16(warp_dout + tile_offset<D>(row, lane % kPieces)), b);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum = fmaf(a[i], b[i], sum);
    row_delta[pass] = warp_sum<kPieces>(sum);
    if (lane % kPieces == 0 && warp_query + row < num_tokens) args.delta[head * args.N + warp_query + row] = row_delta[pass];
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      delta[m][half] = 0;
      const int row_in_eight = lane / 4;
#pragma unroll
      for (int pass = 0; pass < 8 / kRowsPerPass; ++pass) {
        const float value =
            __shfl_sync(0xffffffffu, row_delta[(16 * m + 8 * half) / kRowsPerPass + pass], row_in_eight % kRowsPerPass * kPieces);
        if (row_in_eight / kRowsPerPass == pass) delta[m][half] = value;
      }
    }
  }

  uint8_t* const warp_tile = query_tile + warp_row * kRowBytes<D>;
  const RowOperand<D, kRowTiles, kTile.rows_in_registers> queries(ptx::shared_address(warp_tile), lane);
  const RowOperand<D, kRowTiles, false> douts(ptx::shared_address(warp_dout), lane);
  const uint32_t lane_columns = stages + lane_offset_pieces_first<D>(lane);
  const uint32_t lane_keys = stages + lane_offset_rows_first<D>(lane);
  float dq[kRowTiles][D / 8][4];
  clear(dq);

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

      float scores[kRowTiles][kTile.chunk / 8][4], dweights[kRowTiles][kTile.chunk / 8][4];
      multiply_scores<D, kRowTiles, kTile.chunk>(scores, queries, lane_columns + chunk_offset);
      multiply_scores<D, kRowTiles, kTile.chunk>(dweights, douts, lane_columns + kStageBytes / 2 + chunk_offset);
      if (key < warp_full_key || last_key > warp_first)
        hide_keys<kRowTiles, kTile.chunk>(scores, visibility, warp_query, key, lane);

#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kTile.chunk / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float weight = ptx::ex2_approx_ftz(fmaf(scores[m][n][i], scale * kLog2e, -lse_log2[m][i / 2]));
            scores[m][n][i] = weight * (dweights[m][n][i] - delta[m][i / 2]);
          }
        }
      }
      uint32_t dscores[kRowTiles][kTile.chunk / 16][4];
      pack_weights<kRowTiles, kTile.chunk>(dscores, scores);
      accumulate<D, kRowTiles, kTile.chunk>(dq, dscores, lane_keys + chunk_offset);
    }

    ptx::cp_async_wait_group<0>();
    __syncthreads();
    stage ^= 1;
  }

  store_rows<D, kRowTiles>(args.dq + head * D, args.stride, warp_query, num_tokens, dq, scale, warp_tile, lane);
}

// The first query after `last_key` that does not see it, or N: first_key(query) never decreases, so every later one does not
// either. All lanes of the warp take part: 32 probes a step.
__device__ __forceinline__ int end_of_queries(const Visibility& visibility, int last_key, int lane) {
  int low = last_key + 1;  // everything before sees last_key
  int high = visibility.num_tokens;
  if (visibility.window < high - low) high = low + visibility.window;  // queries from last_key + window + 1 on do not
  while (low < high) {
    const int step = (high - low + kWarpSize - 1) / kWarpSize;
    const int probe = low + (lane + 1) * step - 1;  // last query of the lane's part
    const bool unseen = probe >= high || __ldg(visibility.doc_start + probe) > last_key;
    const unsigned parts = __ballot_sync(0xffffffffu, unseen);
    const int part = parts == 0 ? kWarpSize : __ffs(parts) - 1;
    // The answer is in that part, its last query included.
    const int part_low = low + part * step;
    high = min(high, part_low + step - 1);
    low = min(part_low, high);
  }
  return high;
}

// What the queries of a stage bring along.
template <int kColumns>
struct QueryStage {
  float lse[kColumns];
  float delta[kColumns];
  int doc_start[kColumns];
};

template <int D>
constexpr int key_value_grad_smem_bytes() {
  constexpr AttentionTile kTile = kKeyValueGradTile<D>;
  return (2 * kTile.rows() + 4 * kTile.columns) * kRowBytes<D> + 2 * static_cast<int>(sizeof(QueryStage<kTile.columns>));
}

template <int D>
__global__ void __launch_bounds__(kKeyValueGradTile<D>.threads(), kKeyValueGradTile<D>.min_blocks)
    attention_key_value_grad_kernel(const __grid_constant__ AttentionBackward<bf16> args, float scale) {
  constexpr AttentionTile kTile = kKeyValueGradTile<D>;
  constexpr int kRowTiles = kTile.row_tiles;
  constexpr int kTileBytes = kTile.rows() * kRowBytes<D>;
  constexpr int kStageBytes = 2 * kTile.columns * kRowBytes<D>;
  static_assert(kTile.columns <= kTile.threads());
  extern __shared__ __align__(1024) uint8_t smem[];
  uint8_t* const key_tile = smem;                                      // (rows, D)
  uint8_t* const value_tile = smem + kTileBytes;                       // (rows, D)
  const uint32_t stages = ptx::shared_address(smem + 2 * kTileBytes);  // 2 × {q, dout} × (columns, D)
  auto* const query_stages = reinterpret_cast<QueryStage<kTile.columns>*>(smem + 2 * kTileBytes + 2 * kStageBytes);  // 2

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int num_tokens = static_cast<int>(args.N), last_token = num_tokens - 1;
  const int head = blockIdx.x % args.H;
  const int first_key = static_cast<int>(blockIdx.x / args.H) * kTile.rows();
  const Visibility visibility = make_visibility(args.doc_start, args.window, args.N);
  const int64_t out_stride = static_cast<int64_t>(args.H) * D;
  const bf16* const q = args.q + head * D;
  const bf16* const dout = args.dout + head * D;
  const float* const lse = args.lse + head * args.N;
  const float* const delta = args.delta + head * args.N;

  auto load_stage = [&](int query, int stage) {
    const uint32_t target = stages + stage * kStageBytes;
    load_tile_async<D, kTile.columns, kTile.threads()>(target, q, args.stride, query, last_token);
    load_tile_async<D, kTile.columns, kTile.threads()>(target + kStageBytes / 2, dout, out_stride, query, last_token);
    if (threadIdx.x < kTile.columns) {
      const int token = min(query + static_cast<int>(threadIdx.x), last_token);
      QueryStage<kTile.columns>& columns = query_stages[stage];
      ptx::cp_async_ca_4(ptx::shared_address(&columns.lse[threadIdx.x]), lse + token);
      ptx::cp_async_ca_4(ptx::shared_address(&columns.delta[threadIdx.x]), delta + token);
      ptx::cp_async_ca_4(ptx::shared_address(&columns.doc_start[threadIdx.x]), args.doc_start + token);
    }
  };
  load_tile_async<D, kTile.rows(), kTile.threads()>(ptx::shared_address(key_tile), args.k + head * D, args.stride, first_key,
                                                    last_token);
  load_tile_async<D, kTile.rows(), kTile.threads()>(ptx::shared_address(value_tile), args.v + head * D, args.stride, first_key,
                                                    last_token);
  load_stage(first_key, 0);
  ptx::cp_async_commit_group();

  const int end_query = end_of_queries(visibility, min(first_key + kTile.rows() - 1, last_token), lane);
  const int warp_row = warp * kTile.warp_rows();
  const int warp_first = first_key + warp_row, warp_last = warp_first + kTile.warp_rows() - 1;

  ptx::cp_async_wait_group<0>();
  __syncthreads();
  uint8_t* const warp_keys = key_tile + warp_row * kRowBytes<D>;
  uint8_t* const warp_values = value_tile + warp_row * kRowBytes<D>;
  const RowOperand<D, kRowTiles, kTile.rows_in_registers> keys(ptx::shared_address(warp_keys), lane);
  const RowOperand<D, kRowTiles, kTile.rows_in_registers> values(ptx::shared_address(warp_values), lane);
  const uint32_t lane_columns = stages + lane_offset_pieces_first<D>(lane);
  const uint32_t lane_queries = stages + lane_offset_rows_first<D>(lane);
  float dk[kRowTiles][D / 8][4], dv[kRowTiles][D / 8][4];
  clear(dk);
  clear(dv);

  int stage = 0;
  for (int tile_query = first_key; tile_query < end_query; tile_query += kTile.columns) {
    // The other stage was read before the last barrier.
    if (tile_query + kTile.columns < end_query) load_stage(tile_query + kTile.columns, stage ^ 1);
    ptx::cp_async_commit_group();
    const QueryStage<kTile.columns>& columns = query_stages[stage];
    // Queries past the end see no key.
    auto query_first_key = [&](int query) {
      const int first = max(columns.doc_start[query - tile_query], query - visibility.window);
      return query < num_tokens ? first : INT_MAX;
    };

#pragma unroll 1
    for (int column = 0; column < kTile.columns; column += kTile.chunk) {
      const int query = tile_query + column, last_query = query + kTile.chunk - 1;
      if (last_query < warp_first || query_first_key(query) > warp_last) continue;
      const uint32_t chunk_offset = stage * kStageBytes + column * kRowBytes<D>;

      // Transposed: rows are keys, columns are queries.
      float scores[kRowTiles][kTile.chunk / 8][4], dweights[kRowTiles][kTile.chunk / 8][4];
      multiply_scores<D, kRowTiles, kTile.chunk>(scores, keys, lane_columns + chunk_offset);
      multiply_scores<D, kRowTiles, kTile.chunk>(dweights, values, lane_columns + kStageBytes / 2 + chunk_offset);

      if (query < warp_last || query_first_key(last_query) > warp_first) {
#pragma unroll
        for (int n = 0; n < kTile.chunk / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column_query = query + 8 * n + 2 * (lane % 4) + i % 2;
            const int column_first_key = query_first_key(column_query);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              const int key = warp_first + 16 * m + 8 * (i / 2) + lane / 4;
              if (key < column_first_key || key > column_query) scores[m][n][i] = -INFINITY;
            }
          }
        }
      }

#pragma unroll
      for (int n = 0; n < kTile.chunk / 8; ++n) {
        const int pair = column + 8 * n + 2 * (lane % 4);
        const float2 lse_pair = *reinterpret_cast<const float2*>(&columns.lse[pair]);
        const float2 delta_pair = *reinterpret_cast<const float2*>(&columns.delta[pair]);
        const float lse_log2[2] = {lse_pair.x * kLog2e, lse_pair.y * kLog2e};
        const float deltas[2] = {delta_pair.x, delta_pair.y};
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[m][n][i] = ptx::ex2_approx_ftz(fmaf(scores[m][n][i], scale * kLog2e, -lse_log2[i % 2]));
            dweights[m][n][i] = scores[m][n][i] * (dweights[m][n][i] - deltas[i % 2]);
          }
        }
      }

      uint32_t operand[kRowTiles][kTile.chunk / 16][4];
      pack_weights<kRowTiles, kTile.chunk>(operand, scores);
      accumulate<D, kRowTiles, kTile.chunk>(dv, operand, lane_queries + kStageBytes / 2 + chunk_offset);
      pack_weights<kRowTiles, kTile.chunk>(operand, dweights);
      accumulate<D, kRowTiles, kTile.chunk>(dk, operand, lane_queries + chunk_offset);
    }

    ptx::cp_async_wait_group<0>();
    __syncthreads();
    stage ^= 1;
  }

  store_rows<D, kRowTiles>(args.dk + head * D, args.stride, warp_first, num_tokens, dk, scale, warp_keys, lane);
  store_rows<D, kRowTiles>(args.dv + head * D, args.stride, warp_first, num_tokens, dv, 1, warp_values, lane);
}

template <int D>
void launch_backward(const AttentionBackward<bf16>& args, const CudaExec& exec) {
  const float scale = static_cast<float>(args.scale);
  constexpr AttentionTile kQueryTile = kQueryGradTile<D>;
  constexpr int kQuerySmemBytes = (2 * kQueryTile.rows() + 4 * kQueryTile.columns) * kRowBytes<D>;
  const auto query_kernel = attention_query_grad_kernel<D>;
  allow_dynamic_smem(query_kernel, kQuerySmemBytes, "attention backward dQ");
  const unsigned query_grid = grid_size(ceil_div(args.N, kQueryTile.rows()) * args.H, "attention backward dQ");
  query_kernel<<<query_grid, kQueryTile.threads(), kQuerySmemBytes, exec.stream>>>(args, scale);
  check_launch("attention backward dQ, N ", args.N, ", H ", args.H, ", D ", args.D);

  constexpr AttentionTile kKeyTile = kKeyValueGradTile<D>;
  constexpr int kKeySmemBytes = key_value_grad_smem_bytes<D>();
  const auto key_kernel = attention_key_value_grad_kernel<D>;
  allow_dynamic_smem(key_kernel, kKeySmemBytes, "attention backward dK, dV");
  const unsigned key_grid = grid_size(ceil_div(args.N, kKeyTile.rows()) * args.H, "attention backward dK, dV");
  key_kernel<<<key_grid, kKeyTile.threads(), kKeySmemBytes, exec.stream>>>(args, scale);
  check_launch("attention backward dK, dV, N ", args.N, ", H ", args.H, ", D ", args.D);
}

}  // namespace

void attention_backward(const AttentionBackward<bf16>& args, const CudaExec& exec) {
  check_attention("attention backward", args, {args.dq, args.dk, args.dv, args.dout, args.out, args.q, args.k, args.v});
  args.D == 64 ? launch_backward<64>(args, exec) : launch_backward<128>(args, exec);
}

}  // namespace speedrun::kernels

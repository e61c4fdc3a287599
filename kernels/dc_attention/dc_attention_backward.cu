// Dynamically composable attention, backward. With E_h(t,s) = dout_h(t)·v_h(s) and u = w1 / √(mean_h w1² + eps):
//   dA = Σ_h w2_h · E_h      dw2_h = Σ_s A · E_h      du_h = Σ_s dA · p_h      dS_h = p_h · u_h · (dA − du_h)
//   dq_h(t) += scale · Σ_s dS_h k_h(s)     dk_h(s) += scale · Σ_t dS_h q_h(t)     dv_h(s) += Σ_t A · w2_h(t) · dout_h(t)
//   dw1_h = (du_h − u_h · mean_h(u_h · du_h)) / √(mean_h w1² + eps)
// Layout    planes (N, H, D) bf16; w1, w2, dw1, dw2 bf16 columns of matrices; lse (H, N) float. Scratch: dA (N, kBand) float, A (N,
//           kBand) bf16, u and du (H, N) float. Row t of A and dA holds key s at column s mod kBand, so that each query owns one
//           row whatever its first key.
// Work      four kernels, each owning what it sums: no atomics, the same bits every run. Blocks of 64 rows, one warp per 16; chunks
//           of 32 columns that no row of a warp meets are skipped.
//           dA, dw2: one block per 64 queries, the heads one after the other: A from q·k, then dA and dw2 from dout·v; a warp holds
//             A, then dA, of its queries in registers and writes them to scratch.
//           dq: one block per 64 queries and head: du, then dq. With A, dA and du known, heads are independent.
//           dk, dv: one block per 64 keys and head, over the queries that may see them; transposed (rows are keys), so that A·w2
//             and dS are left operands: dv from dout, then dk from q.
//           dw1: one thread per token.
// Traffic   reads q three times, dout twice, old dq, dk, dv once, writes dq, dk, dv; columns of a tile (64 + window) / 64 times
//           that, from L2: neighbouring blocks run together. A and dA: 6·kBand bytes a token, written once, read by every head.
// Numerics  scores, dA, du in FP32; A, A·w2 and dS rounded to BF16 for their products; gradients added in FP32 to what was there
//           and rounded once.
#include <climits>

#include "kernels/dc_attention/dc_attention_tile.cuh"

namespace speedrun::kernels {
namespace {

constexpr const char* kOp = "dc_attention backward";

// The parts of the scratch memory.
struct DcScratch {
  float* dmixed;  // (N, kBand) dA
  float* u;       // (H, N)
  float* du;      // (H, N)
  bf16* mixed;    // (N, kBand) A
};

DcScratch split_scratch(void* scratch, int64_t N, int H, int64_t band) {
  auto* const dmixed = static_cast<float*>(scratch);
  float* const u = dmixed + N * band;
  float* const du = u + H * N;
  return {dmixed, u, du, reinterpret_cast<bf16*>(du + H * N)};
}

template <class Tile>
__device__ __forceinline__ int band_column(int token) {
  return (token + Tile::kBand) % Tile::kBand;  // tokens before the first one are never further away than kBand
}

// body(half, n, offset) for the lane's pairs of keys in a chunk of A or dA: those of row half of the eight keys n lie at offset and
// offset + 1 of (N, kBand). Rows past the end have none.
template <class Tile, class Body>
__device__ __forceinline__ void for_band_pairs(const DcQueries<Tile>& queries, int chunk, const Body& body) {
  const int first_column = fresh(band_column<Tile>(queries.first_key(chunk)));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (queries.query(half) > queries.last_token()) continue;
    const int64_t row = static_cast<int64_t>(queries.query(half)) * Tile::kBand + 2 * (queries.lane() % 4);
#pragma unroll
    for (int n = 0; n < kDcChunk / 8; ++n) {
      const int column = first_column + 8 * n;  // first_column is a multiple of 16: eight keys never wrap
      body(half, n, row + (column < Tile::kBand ? column : column - Tile::kBand));
    }
  }
}

// scores <- p = e^(scale·score − lse)
__device__ __forceinline__ void make_probabilities(ChunkScores& scores, float scale_log2e, const float (&lse_log2)[2]) {
#pragma unroll
  for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[0][n][i] = ptx::ex2_approx_ftz(fmaf(scores[0][n][i], scale_log2e, -lse_log2[i / 2]));
  }
}

template <class Tile>
__global__ void __launch_bounds__(kDcThreads, Tile::kMixBlocks)
    dc_attention_mix_kernel(const __grid_constant__ DcAttentionBackward<bf16> args, const DcScratch scratch, float scale) {
  constexpr int D = Tile::D, kChunks = Tile::kChunks;
  extern __shared__ __align__(1024) uint8_t smem[];
  const Visibility visibility{args.doc_start, static_cast<int>(args.window), static_cast<int>(args.N)};
  const DcQueries<Tile> queries(smem, static_cast<int>(blockIdx.x) * kDcRows, visibility, args.H);

  // A
  float inverse[2], mixed[kChunks][1][kDcChunk / 8][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) inverse[half] = inverse_rms(args.w1 + queries.token(half) * args.stride, args.H);
  clear_chunks(mixed);
#pragma unroll 1
  for (int head = 0; head < args.H; ++head) {
    float lse_log2[2], u[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse_log2[half] = args.lse[head * args.N + queries.token(half)] * kLog2e;
      u[half] = static_cast<float>(args.w1[queries.token(half) * args.stride + head]) * inverse[half];
      if (queries.stores(half)) scratch.u[head * args.N + queries.query(half)] = u[half];
    }
    queries.load(args.q + head * D, args.k + head * D);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!queries.sees(chunk)) continue;
      ChunkScores p;
      queries.scores(p, chunk);
      make_probabilities(p, scale * kLog2e, lse_log2);
#pragma unroll
      for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mixed[chunk][0][n][i] = fmaf(u[i / 2], p[0][n][i], mixed[chunk][0][n][i]);
      }
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    ChunkWeights weights;
    pack_weights<1, kDcChunk>(weights, mixed[chunk]);
    for_band_pairs(queries, chunk, [&](int half, int n, int64_t offset) {
      *reinterpret_cast<uint32_t*>(scratch.mixed + offset) = weights[0][n / 2][n % 2 * 2 + half];
    });
  }

  // dA and dw2. A comes back from scratch to the lane that wrote it. Pairs that do not see each other have A = 0 here and p = 0
  // in the other kernels: their dA is a finite number without effect.
  float dmixed[kChunks][1][kDcChunk / 8][4];
  clear_chunks(dmixed);
#pragma unroll 1
  for (int head = 0; head < args.H; ++head) {
    float w2[2], dw2[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) w2[half] = static_cast<float>(args.w2[queries.token(half) * args.stride + head]);
    queries.load(args.dout + head * D, args.v + head * D);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!queries.sees(chunk)) continue;
      ChunkScores products;
      queries.multiply(products, chunk);
      for_band_pairs(queries, chunk, [&](int half, int n, int64_t offset) {
        const float2 a = unpack_bf16x2(*reinterpret_cast<const uint32_t*>(scratch.mixed + offset));
        dw2[half] = fmaf(a.x, products[0][n][2 * half], fmaf(a.y, products[0][n][2 * half + 1], dw2[half]));
      });
#pragma unroll
      for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dmixed[chunk][0][n][i] = fmaf(w2[i / 2], products[0][n][i], dmixed[chunk][0][n][i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_sum<4>(dw2[half]);
      if (queries.stores(half)) args.dw2[queries.query(half) * args.stride + head] = bf16(sum);
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    for_band_pairs(queries, chunk, [&](int half, int n, int64_t offset) {
      *reinterpret_cast<float2*>(scratch.dmixed + offset) = {dmixed[chunk][0][n][2 * half], dmixed[chunk][0][n][2 * half + 1]};
    });
  }
}

template <class Tile>
__global__ void __launch_bounds__(kDcThreads, Tile::kGradBlocks)
    dc_attention_query_grad_kernel(const __grid_constant__ DcAttentionBackward<bf16> args, const DcScratch scratch, float scale) {
  constexpr int D = Tile::D, kChunks = Tile::kChunks;
  extern __shared__ __align__(1024) uint8_t smem[];
  const Visibility visibility{args.doc_start, static_cast<int>(args.window), static_cast<int>(args.N)};
  const DcQueries<Tile> queries(smem, static_cast<int>(blockIdx.x / args.H) * kDcRows, visibility, args.H);
  const int head = static_cast<int>(blockIdx.x % args.H);

  queries.load(args.q + head * D, args.k + head * D);
  float lse_log2[2], u[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    lse_log2[half] = args.lse[head * args.N + queries.token(half)] * kLog2e;
    u[half] = scratch.u[head * args.N + queries.token(half)];
  }
  // p and dA of a chunk; twice, since all of a row's p and dq at once take more registers than three blocks on an SM leave.
  auto make_chunk = [&](ChunkScores& p, ChunkScores& dmixed, int chunk) {
    clear(dmixed);
    for_band_pairs(queries, chunk, [&](int half, int n, int64_t offset) {
      const float2 pair = *reinterpret_cast<const float2*>(scratch.dmixed + offset);
      dmixed[0][n][2 * half] = pair.x;
      dmixed[0][n][2 * half + 1] = pair.y;
    });
    queries.scores(p, chunk);
    make_probabilities(p, scale * kLog2e, lse_log2);
  };

  float du[2] = {0, 0};
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (!queries.sees(chunk)) continue;
    ChunkScores p, dmixed;
    make_chunk(p, dmixed, chunk);
#pragma unroll
    for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) du[i / 2] = fmaf(p[0][n][i], dmixed[0][n][i], du[i / 2]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    du[half] = warp_sum<4>(du[half]);
    if (queries.stores(half)) scratch.du[head * args.N + queries.query(half)] = du[half];
  }

  float dq[1][D / 8][4];
  clear(dq);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (!queries.sees(chunk)) continue;
    ChunkScores p, dmixed;
    make_chunk(p, dmixed, chunk);
#pragma unroll
    for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[0][n][i] *= u[i / 2] * (dmixed[0][n][i] - du[i / 2]);
    }
    ChunkWeights dscores;
    pack_weights<1, kDcChunk>(dscores, p);
    queries.accumulate_keys(dq, dscores, chunk);
  }
  const int64_t row_stride = static_cast<int64_t>(args.H) * D;
  copy_rows<D>(queries.warp_rows(), args.dq + head * D, row_stride, queries.warp_query(), queries.last_token(), queries.lane());
  const float factor[2] = {scale, scale};
  add_and_store_rows<D>(args.dq + head * D, row_stride, queries.warp_query(), queries.last_token(), dq, factor, queries.warp_rows(),
                        queries.lane());
}

// dw1 from u and du, one thread a token.
__global__ void dc_attention_mixing_grad_kernel(const __grid_constant__ DcAttentionBackward<bf16> args, const DcScratch scratch) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kDcThreads + threadIdx.x;
  if (token >= args.N) return;
  float mean = 0;  // of u_h · du_h
  for (int head = 0; head < args.H; ++head) mean = fmaf(scratch.u[head * args.N + token], scratch.du[head * args.N + token], mean);
  mean /= static_cast<float>(args.H);
  const float inverse = inverse_rms(args.w1 + token * args.stride, args.H);
  for (int head = 0; head < args.H; ++head) {
    const float u = scratch.u[head * args.N + token], du = scratch.du[head * args.N + token];
    args.dw1[token * args.stride + head] = bf16(inverse * (du - u * mean));
  }
}

// What a block of keys needs to know of the queries that may see it.
template <class Tile>
struct QueryColumns {
  float lse_log2[Tile::kColumns];  // inf past the end: p = 0
  float u[Tile::kColumns];
  float w2[Tile::kColumns];  // 0 past the end
  float du[Tile::kColumns];
  int first_key[Tile::kColumns];  // INT_MAX past the end
};

template <class Tile>
constexpr int kKeyGradSmemBytes = Tile::kSmemBytes + static_cast<int>(sizeof(QueryColumns<Tile>));

template <class Tile>
__global__ void __launch_bounds__(kDcThreads, Tile::kGradBlocks)
    dc_attention_key_grad_kernel(const __grid_constant__ DcAttentionBackward<bf16> args, const DcScratch scratch, float scale) {
  constexpr int D = Tile::D, kChunks = Tile::kChunks;
  extern __shared__ __align__(1024) uint8_t smem[];
  auto& columns = *reinterpret_cast<QueryColumns<Tile>*>(smem + Tile::kSmemBytes);
  const DcSharedTile<Tile> tile(smem);
  const Visibility visibility{args.doc_start, static_cast<int>(args.window), static_cast<int>(args.N)};
  const int warp = threadIdx.x / kWarpSize;
  int lane = threadIdx.x % kWarpSize;
  const int last_token = visibility.num_tokens - 1;
  const int head = static_cast<int>(blockIdx.x % args.H);
  const int first_key = static_cast<int>(blockIdx.x / args.H) * kDcRows;  // and the first query that may see a key
  const int warp_key = first_key + warp * kDcWarpRows;                    // and the first query of the warp
  const int64_t row_stride = static_cast<int64_t>(args.H) * D;
  const int64_t plane = head * D;

  for (int column = static_cast<int>(threadIdx.x); column < Tile::kColumns; column += kDcThreads) {
    const int query = first_key + column, token = min(query, last_token);
    const bool exists = query <= last_token;
    columns.lse_log2[column] = exists ? args.lse[head * args.N + token] * kLog2e : INFINITY;
    columns.u[column] = scratch.u[head * args.N + token];
    columns.w2[column] = exists ? static_cast<float>(args.w2[token * args.stride + head]) : 0.0f;
    columns.du[column] = scratch.du[head * args.N + token];
    columns.first_key[column] = exists ? visibility.first_key(token) : INT_MAX;
  }
  // The old dv at the keys, dout at the queries.
  tile.load(args.dv + plane, first_key, args.dout + plane, first_key, first_key, last_token, row_stride);

  const uint32_t lane_columns = tile.warp_columns(warp) + lane_offset_pieces_first<D>(lane);
  const uint32_t lane_queries = tile.warp_columns(warp) + lane_offset_rows_first<D>(lane);
  auto sees = [&](int chunk) { return columns.first_key[warp * kDcWarpRows + chunk * kDcChunk] < warp_key + kDcWarpRows; };
  // Column (of the block) of the lane's element i of the eight queries n of a chunk.
  auto column_of = [&](int chunk, int n, int i) { return warp * kDcWarpRows + chunk * kDcChunk + 8 * n + 2 * (lane % 4) + i % 2; };
  const int band_columns[2] = {band_column<Tile>(warp_key + lane / 4), band_column<Tile>(warp_key + 8 + lane / 4)};
  const float* const dmixed_rows = scratch.dmixed + static_cast<int64_t>(first_key) * Tile::kBand;
  const bf16* const mixed_rows = scratch.mixed + static_cast<int64_t>(first_key) * Tile::kBand;
  auto band_index = [&](int column, int i) { return min(column, last_token - first_key) * Tile::kBand + band_columns[i / 2]; };

  float result[1][D / 8][4];  // dv, then dk
  clear(result);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (!sees(chunk)) continue;
    float values[1][kDcChunk / 8][4];
#pragma unroll
    for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = column_of(chunk, n, i);
        values[0][n][i] = static_cast<float>(mixed_rows[band_index(column, i)]) * columns.w2[column];
      }
    }
    ChunkWeights weights;
    pack_weights<1, kDcChunk>(weights, values);
    accumulate<D, 1, kDcChunk>(result, weights, lane_queries + chunk * kDcChunk * kRowBytes<D>);
  }
  const float one[2] = {1, 1};
  add_and_store_rows<D>(args.dv + plane, row_stride, warp_key, last_token, result, one, tile.warp_rows(warp), lane);

  lane = fresh(lane);
  tile.load(args.k + plane, first_key, args.q + plane, first_key, first_key, last_token, row_stride);
  clear(result);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (!sees(chunk)) continue;
    float dmixed[kDcChunk / 8][4];
#pragma unroll
    for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dmixed[n][i] = dmixed_rows[band_index(column_of(chunk, n, i), i)];
    }
    const RowOperand<D, 1, false> keys(fresh(ptx::shared_address(tile.warp_rows(warp))), lane);
    ChunkScores scores;  // transposed: rows are keys, columns are queries
    multiply_scores<D, 1, kDcChunk>(scores, keys, lane_columns + chunk * kDcChunk * kRowBytes<D>);
#pragma unroll
    for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = column_of(chunk, n, i), key = warp_key + 8 * (i / 2) + lane / 4;
        const bool visible = key >= columns.first_key[column] && key <= first_key + column;
        const float score = visible ? scores[0][n][i] : -INFINITY;
        const float p = ptx::ex2_approx_ftz(fmaf(score, scale * kLog2e, -columns.lse_log2[column]));
        scores[0][n][i] = p * columns.u[column] * (dmixed[n][i] - columns.du[column]);
      }
    }
    ChunkWeights dscores;
    pack_weights<1, kDcChunk>(dscores, scores);
    accumulate<D, 1, kDcChunk>(result, dscores, lane_queries + chunk * kDcChunk * kRowBytes<D>);
  }
  copy_rows<D>(tile.warp_rows(warp), args.dk + plane, row_stride, warp_key, last_token, lane);
  const float factor[2] = {scale, scale};
  add_and_store_rows<D>(args.dk + plane, row_stride, warp_key, last_token, result, factor, tile.warp_rows(warp), lane);
}

}  // namespace

void dc_attention_backward(const DcAttentionBackward<bf16>& args, const CudaExec& exec) {
  check_dc_attention(kOp, args, {args.dq, args.dk, args.dv, args.dout, args.q, args.k, args.v});
  require(reinterpret_cast<uintptr_t>(args.scratch) % 256 == 0 && args.scratch != nullptr, kOp,
          ": scratch must be 256-byte aligned, is at ", args.scratch);
  const float scale = static_cast<float>(args.scale);
  with_dc_tile(args, [&]<class Tile>(Tile) {
    const DcScratch scratch = split_scratch(args.scratch, args.N, args.H, Tile::kBand);
    const int64_t tiles = ceil_div(args.N, kDcRows);
    auto launch = [&](const char* part, auto kernel, int64_t blocks, int smem_bytes, const auto&... kernel_args) {
      if (smem_bytes > 0) allow_dynamic_smem(kernel, smem_bytes, kOp);
      kernel<<<grid_size(blocks, kOp), kDcThreads, smem_bytes, exec.stream>>>(args, scratch, kernel_args...);
      check_launch(kOp, ", ", part, ", N ", args.N, ", H ", args.H, ", D ", args.D, ", window ", args.window);
    };
    launch("dA and dw2", dc_attention_mix_kernel<Tile>, tiles, Tile::kSmemBytes, scale);
    launch("dq", dc_attention_query_grad_kernel<Tile>, tiles * args.H, Tile::kSmemBytes, scale);
    launch("dk and dv", dc_attention_key_grad_kernel<Tile>, tiles * args.H, kKeyGradSmemBytes<Tile>, scale);
    launch("dw1", dc_attention_mixing_grad_kernel, ceil_div(args.N, kDcThreads), 0);
  });
}

}  // namespace speedrun::kernels

// Dynamically composable attention, forward: A(t,s) = Σ_h u_h(t) · p_h(t,s), out_h(t) = y_h(t) + w2_h(t) · Σ_s A(t,s) · v_h(s).
// Layout    q, k, v, y, out (N, H, D) bf16; w1, w2 bf16 columns of a matrix; lse (H, N) float.
// Work      one block per 64 queries, one warp per 16, all heads one after the other. First pass over the heads: q and the keys of
//           the block arrive in shared memory, a warp makes all scores of its queries (16 × 128 for windows up to 112) and their
//           softmax, and adds u · p to A in its registers. Second pass: v and y arrive, A · v_h, and y_h + w2_h · that is written.
//           Chunks of 32 keys that no query of the warp sees are skipped. Blocks on an SM hide each other's loads.
// Traffic   reads q and y once, k and v (64 + window) / 64 times (from L2: neighbouring blocks run together), writes out and lse.
// Numerics  scores, softmax and A in FP32, A rounded to BF16 for its products with v, the sum with y in FP32 and rounded once. Sums
//           run in a fixed order: the same bits every run.
#include "kernels/dc_attention/dc_attention_tile.cuh"

namespace speedrun::kernels {
namespace {

// Running softmax of a lane's columns in its two rows.
struct LaneSoftmax {
  float largest[2] = {-INFINITY, -INFINITY};  // in units of q·k
  float sum[2] = {0, 0};

  __device__ __forceinline__ void add(const ChunkScores& scores, float scale_log2e) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = largest[half];
#pragma unroll
      for (int n = 0; n < kDcChunk / 8; ++n) top = fmaxf(top, fmaxf(scores[0][n][2 * half], scores[0][n][2 * half + 1]));
      const float reference = top == -INFINITY ? 0 : top;
      sum[half] *= ptx::ex2_approx_ftz((largest[half] - reference) * scale_log2e);
#pragma unroll
      for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) sum[half] += ptx::ex2_approx_ftz((scores[0][n][i] - reference) * scale_log2e);
      }
      largest[half] = top;
    }
  }

  // log Σ e^(scale·score) of a row over the four lanes that share it.
  __device__ __forceinline__ float lse(int half, float scale) const {
    const float top = warp_max<4>(largest[half]);
    return top * scale + logf(warp_sum<4>(sum[half] * ptx::ex2_approx_ftz((largest[half] - top) * scale * kLog2e)));
  }
};

template <class Tile>
__global__ void __launch_bounds__(kDcThreads, Tile::kForwardBlocks)
    dc_attention_forward_kernel(const __grid_constant__ DcAttentionForward<bf16> args, float scale) {
  constexpr int D = Tile::D, kChunks = Tile::kChunks;
  extern __shared__ __align__(1024) uint8_t smem[];
  const Visibility visibility{args.doc_start, static_cast<int>(args.window), static_cast<int>(args.N)};
  const DcQueries<Tile> queries(smem, static_cast<int>(blockIdx.x) * kDcRows, visibility, args.H);
  const int lane = queries.lane();

  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) inverse[half] = inverse_rms(args.w1 + queries.token(half) * args.stride, args.H);

  float mixed[kChunks][1][kDcChunk / 8][4];  // A
  clear_chunks(mixed);
#pragma unroll 1
  for (int head = 0; head < args.H; ++head) {
    queries.load(args.q + head * D, args.k + head * D);
    float scores[Tile::kKeptChunks][1][kDcChunk / 8][4];
    LaneSoftmax softmax;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!queries.sees(chunk)) continue;
      ChunkScores& chunk_scores = scores[Tile::kKeepScores ? chunk : 0];
      queries.scores(chunk_scores, chunk);
      softmax.add(chunk_scores, scale * kLog2e);
    }

    float lse_log2[2], u[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = softmax.lse(half, scale);
      if (queries.stores(half)) args.lse[head * args.N + queries.query(half)] = lse;
      lse_log2[half] = lse * kLog2e;
      u[half] = static_cast<float>(args.w1[queries.token(half) * args.stride + head]) * inverse[half];
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!queries.sees(chunk)) continue;
      ChunkScores& chunk_scores = scores[Tile::kKeepScores ? chunk : 0];
      if constexpr (!Tile::kKeepScores) queries.scores(chunk_scores, chunk);
#pragma unroll
      for (int n = 0; n < kDcChunk / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = ptx::ex2_approx_ftz(fmaf(chunk_scores[0][n][i], scale * kLog2e, -lse_log2[i / 2]));
          mixed[chunk][0][n][i] = fmaf(u[i / 2], p, mixed[chunk][0][n][i]);
        }
      }
    }
  }

  uint32_t weights[kChunks][1][kDcChunk / 16][4];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) pack_weights<1, kDcChunk>(weights[chunk], mixed[chunk]);
#pragma unroll 1
  for (int head = 0; head < args.H; ++head) {
    queries.load(args.y + head * D, args.v + head * D);
    float values[1][D / 8][4];
    clear(values);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (queries.sees(chunk)) queries.accumulate_keys(values, weights[chunk], chunk);
    }
    float w2[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) w2[half] = static_cast<float>(args.w2[queries.token(half) * args.stride + head]);
    add_and_store_rows<D>(args.out + head * D, static_cast<int64_t>(args.H) * D, queries.warp_query(), queries.last_token(), values,
                          w2, queries.warp_rows(), lane);
  }
}

}  // namespace

void dc_attention_forward(const DcAttentionForward<bf16>& args, const CudaExec& exec) {
  constexpr const char* kOp = "dc_attention forward";
  check_dc_attention(kOp, args, {args.q, args.k, args.v, args.y, args.out});
  require(args.out != args.y, kOp, ": out must not be y");
  with_dc_tile(args, [&]<class Tile>(Tile) {
    const auto kernel = dc_attention_forward_kernel<Tile>;
    allow_dynamic_smem(kernel, Tile::kSmemBytes, kOp);
    kernel<<<grid_size(ceil_div(args.N, kDcRows), kOp), kDcThreads, Tile::kSmemBytes, exec.stream>>>(
        args, static_cast<float>(args.scale));
    check_launch(kOp, ", N ", args.N, ", H ", args.H, ", D ", args.D, ", window ", args.window);
  });
}

}  // namespace speedrun::kernels

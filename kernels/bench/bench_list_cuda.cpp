#include "kernels/bench/bench.h"

namespace speedrun::kernels {

std::span<const Bench> benches() {
  static constexpr Bench kBenches[] = {
      {"adamw", "AdamW with every kind of weight and state", bench_adamw},
      {"attention", "attention, forward and backward", bench_attention},
      {"embedding", "token embedding, forward and backward", bench_embedding},
      {"gemm", "matrix products of the projections; --tune searches algorithms", bench_gemm},
      {"grad_stats", "loss sum, gradient norm and verdict", bench_grad_stats},
      {"head", "output projection and cross-entropy", bench_head},
      {"linear", "projection with residual, forward and backward", bench_linear},
      {"mlp", "the MLP, forward and backward", bench_mlp},
      {"muon", "Muon on the matrices of 12 layers", bench_muon},
      {"norm", "RMS and layer norm, forward and backward", bench_norm},
      {"qkv", "query, key and value projection, forward and backward", bench_qkv},
  };
  return kBenches;
}

}  // namespace speedrun::kernels

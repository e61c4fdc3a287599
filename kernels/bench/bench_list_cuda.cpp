#include "kernels/bench/bench.h"

namespace speedrun::kernels {

std::span<const Bench> benches() {
  static constexpr Bench kBenches[] = {
      {"adamw", "AdamW with every kind of weight and state", bench_adamw},
      {"attention", "attention, forward and backward", bench_attention},
      {"bigram", "hashed bigram embedding with signs, forward and backward", bench_bigram},
      {"dc_attention", "dynamically composable attention, forward and backward", bench_dc_attention},
      {"embedding", "token embedding, forward and backward", bench_embedding},
      {"extrapolation", "weight extrapolation: snapshots, their sums, the jump", bench_extrapolation},
      {"fp8", "FP8 copies of weights and activations", bench_fp8},
      {"gate_net", "nets that make coefficients per token, forward and backward", bench_gate_net},
      {"gemm", "matrix products of the projections; --tune searches algorithms", bench_gemm},
      {"grad_stats", "loss sum, gradient norm and verdict", bench_grad_stats},
      {"head", "output projection and cross-entropy", bench_head},
      {"head_gate", "gates and XSA on attention's output, forward and backward", bench_head_gate},
      {"linear", "projection with residual, forward and backward", bench_linear},
      {"mlp", "the MLP, forward and backward", bench_mlp},
      {"muon", "Muon on the matrices of 12 layers, NorMuon on the Main Track's", bench_muon},
      {"norm", "RMS and layer norm, forward and backward", bench_norm},
      {"qkv", "query, key and value projection, forward and backward", bench_qkv},
      {"relu2_mlp", "the Main Track's MLP in BF16 and three ways of FP8, stage by stage", bench_relu2_mlp},
      {"scaled_weight", "weights times a learned scalar, forward and backward", bench_scaled_weight},
      {"smear", "a gated part of the token before, forward and backward", bench_smear},
      {"sparse_rows", "touched rows of a table: pack for the exchange between ranks, and sum", bench_sparse_rows},
      {"split_qkv", "queries, keys and values in planes, forward and backward", bench_split_qkv},
      {"stream_mix", "weighted sums of the residual stream, forward and backward", bench_stream_mix},
      {"value_gate", "gates of value embeddings, forward and backward", bench_value_gate},
  };
  return kBenches;
}

}  // namespace speedrun::kernels

#pragma once
// Finding the algorithms of gemm_tuning.h on the GPU at hand.
#include <iosfwd>
#include <vector>

#include "kernels/gemm/gemm_plan.h"

namespace speedrun::kernels {

// The products of GPT-2 124M training (C = 768, F = 3072, V = 50,304): every layer forward, input and weight gradient, at
// micro-batches of 16,384 to 262,144 tokens, the head's chunks, Muon's batches, and the Main Track's MLP and FP8 products. `tokens`
// restricts the micro-batches; empty: all.
std::vector<GemmKey> production_gemms(const std::vector<int64_t>& tokens = {});

// 2·M·N·K·batch
double gemm_flops(const GemmKey& key);

// Operands with random contents for a product, several sets in rotation so that they do not stay in L2.
class GemmOperands {
 public:
  explicit GemmOperands(const GemmKey& key);
  ~GemmOperands();
  GemmOperands(const GemmOperands&) = delete;
  GemmOperands& operator=(const GemmOperands&) = delete;
  const GemmCuda& next();  // the following set

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Times every algorithm the heuristic offers for each product that has no row yet (fixed order of sums), the best ones again and
// longer, and prints rows ready to be pasted into gemm_tuning.h, each with its time, rate and the time of the heuristic's first
// answer.
void tune_gemms(const std::vector<GemmKey>& products, const CudaExec& exec, std::ostream& out);

}  // namespace speedrun::kernels

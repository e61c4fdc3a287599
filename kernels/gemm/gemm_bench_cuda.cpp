#include <ostream>

#include "kernels/bench/bench.h"
#include "kernels/gemm/gemm_tune.h"

namespace speedrun::kernels {

// The production products at a micro-batch of 32,768 tokens as the trainer runs them; with `tune` the search over all of them
// instead.
void bench_gemm(const BenchOptions& options, std::ostream& out) {
  if (options.tune) return tune_gemms(production_gemms(), options.exec, out);
  constexpr int64_t kTokens = 32768;
  for (const GemmKey& key : production_gemms({kTokens})) {
    auto operands = std::make_shared<GemmOperands>(key);
    const CudaExec exec = options.exec;
    // One case a table: the operands of all of them together would not fit a smaller card.
    bench_table("gemm " + describe_gemm(key),
                {{.name = "cuBLASLt", .run = [operands, exec] { gemm(operands->next(), exec); }, .flops = gemm_flops(key)}},
                options.exec, options.seconds, out);
  }
  for (const std::string& shape : options.exec.gemm->untuned()) out << "not tuned: " << shape << '\n';
}

}  // namespace speedrun::kernels

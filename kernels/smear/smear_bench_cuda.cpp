#include "kernels/bench/bench.h"
#include "kernels/smear/smear.h"

namespace speedrun::kernels {

void bench_smear(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t kN = 49'152;
  constexpr int kC = 768, kG = 12;
  constexpr double kElements = double{kN} * kC;
  const BenchBuffer inp = BenchBuffer::normal_bf16(kN * kC), dout = BenchBuffer::normal_bf16(kN * kC);
  const BenchBuffer result = BenchBuffer::zeroed(kN * kC * sizeof(bf16));
  const BenchBuffer gate_weight = BenchBuffer::normal_bf16(kG), lambda = BenchBuffer::normal_bf16(1);
  const BenchBuffer dgate_weight = BenchBuffer::zeroed(kG * sizeof(float)), dlambda = BenchBuffer::zeroed(sizeof(float));
  const BenchBuffer scratch = BenchBuffer::zeroed(static_cast<size_t>(smear_scratch(kN)) * sizeof(float));
  const SmearForward<bf16> forward{.out = result.as<bf16>(),
                                   .inp = inp.as<bf16>(),
                                   .gate_weight = gate_weight.as<bf16>(),
                                   .lambda = lambda.as<bf16>(),
                                   .N = kN,
                                   .row_tokens = kN,
                                   .C = kC,
                                   .G = kG};
  const SmearBackward<bf16> backward{.dinp = result.as<bf16>(),
                                     .dgate_weight = dgate_weight.as<float>(),
                                     .dlambda = dlambda.as<float>(),
                                     .dout = dout.as<bf16>(),
                                     .inp = inp.as<bf16>(),
                                     .gate_weight = gate_weight.as<bf16>(),
                                     .lambda = lambda.as<bf16>(),
                                     .scratch = scratch.as<float>(),
                                     .N = kN,
                                     .row_tokens = kN,
                                     .C = kC,
                                     .G = kG};
  bench_table("smear, 49152 x 768 bf16",
              {bench_copy(kN * kC * sizeof(bf16), exec),
               {"forward", [&] { smear_forward(forward, exec); }, 0, 4 * kElements},
               {"backward", [&] { smear_backward(backward, exec); }, 0, 6 * kElements}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/linear/linear.h"

namespace speedrun::kernels {

// GPT-2 124M's attention output (768 -> 768) with bias and residual.
void bench_linear(const BenchOptions& options, std::ostream& out) {
  constexpr int64_t kN = 32768;
  constexpr int kK = 768, kO = 768;
  const BenchBuffer inp = BenchBuffer::normal_bf16(kN * kK), weight = BenchBuffer::normal_bf16(int64_t{kK} * kO, 0.02),
                    bias = BenchBuffer::normal_bf16(kO), residual = BenchBuffer::normal_bf16(kN * kO),
                    output = BenchBuffer::normal_bf16(kN * kO), dinp = BenchBuffer::normal_bf16(kN * kK),
                    dweight = BenchBuffer::zeroed(sizeof(float) * kK * kO), dbias = BenchBuffer::zeroed(sizeof(float) * kO),
                    scratch = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(bias_grad_scratch(kN, kO)));
  const CudaExec& exec = options.exec;
  const double flops = 2.0 * kN * kK * kO;
  const auto forward = [&] {
    linear_forward({.out = output.as<bf16>(),
                    .inp = inp.as<bf16>(),
                    .weight = weight.as<bf16>(),
                    .bias = bias.as<bf16>(),
                    .residual = residual.as<bf16>(),
                    .N = kN,
                    .K = kK,
                    .O = kO},
                   exec);
  };
  const auto backward = [&](float* bias_grad) {
    linear_backward({.dinp = dinp.as<bf16>(),
                     .dweight = dweight.as<float>(),
                     .dbias = bias_grad,
                     .dout = residual.as<bf16>(),
                     .inp = inp.as<bf16>(),
                     .weight = weight.as<bf16>(),
                     .scratch = scratch.as<float>(),
                     .N = kN,
                     .K = kK,
                     .O = kO},
                    exec);
  };
  bench_table("linear, N = 32768, 768 -> 768",
              {{.name = "forward", .run = forward, .flops = flops},
               {.name = "backward without bias", .run = [&] { backward(nullptr); }, .flops = 2 * flops},
               {.name = "backward", .run = [&] { backward(dbias.as<float>()); }, .flops = 2 * flops}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

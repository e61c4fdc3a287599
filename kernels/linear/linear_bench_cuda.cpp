#include <memory>

#include "kernels/bench/bench_projection_fp8.h"
#include "kernels/linear/linear.h"

namespace speedrun::kernels {

// GPT-2 124M's attention output (768 -> 768) with bias and residual; the Main Track's without, also in FP8.
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
  const BenchProjectionFp8 delayed({.N = kN, .K = kK, .O = kO}, Fp8Scaling::delayed);
  const auto forward = [&](bool additions, const ProjectionFp8& fp8) {
    linear_forward({.out = output.as<bf16>(),
                    .inp = inp.as<bf16>(),
                    .weight = weight.as<bf16>(),
                    .bias = additions ? bias.as<bf16>() : nullptr,
                    .residual = additions ? residual.as<bf16>() : nullptr,
                    .N = kN,
                    .K = kK,
                    .O = kO,
                    .fp8 = fp8},
                   exec);
  };
  const auto backward = [&](float* bias_grad, const ProjectionFp8& fp8) {
    linear_backward({.dinp = dinp.as<bf16>(),
                     .dweight = dweight.as<float>(),
                     .dbias = bias_grad,
                     .dout = residual.as<bf16>(),
                     .inp = inp.as<bf16>(),
                     .weight = weight.as<bf16>(),
                     .scratch = scratch.as<float>(),
                     .N = kN,
                     .K = kK,
                     .O = kO,
                     .fp8 = fp8},
                    exec);
  };
  bench_table("linear, N = 32768, 768 -> 768",
              {{.name = "forward", .run = [&] { forward(true, {}); }, .flops = flops},
               {.name = "forward without bias and residual", .run = [&] { forward(false, {}); }, .flops = flops},
               {.name = "the same, FP8, delayed", .run = [&] { forward(false, delayed.args()); }, .flops = flops},
               {.name = "backward", .run = [&] { backward(dbias.as<float>(), {}); }, .flops = 2 * flops},
               {.name = "backward without bias", .run = [&] { backward(nullptr, {}); }, .flops = 2 * flops},
               {.name = "the same, FP8, delayed", .run = [&] { backward(nullptr, delayed.args()); }, .flops = 2 * flops}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

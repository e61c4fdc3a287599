#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/linear/linear.h"
#include "kernels/mlp/mlp.h"

namespace speedrun::kernels {

// GPT-2 124M's MLP with biases, both activations; then the Main Track's.
void bench_mlp(const BenchOptions& options, std::ostream& out) {
  constexpr int64_t kN = 32768;
  constexpr int kC = 768, kF = 3072;
  const auto weights = [] { return BenchBuffer::normal_bf16(int64_t{kC} * kF, 0.02); };
  const auto sums = [](int64_t count) { return BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(count)); };
  const BenchBuffer inp = BenchBuffer::normal_bf16(kN * kC), dout = BenchBuffer::normal_bf16(kN * kC),
                    output = BenchBuffer::normal_bf16(kN * kC), dinp = BenchBuffer::normal_bf16(kN * kC),
                    pre = BenchBuffer::normal_bf16(kN * kF), post = BenchBuffer::normal_bf16(kN * kF),
                    dhidden = BenchBuffer::normal_bf16(kN * kF), up = weights(), down = weights(),
                    up_bias = BenchBuffer::normal_bf16(kF), down_bias = BenchBuffer::normal_bf16(kC), dup = sums(int64_t{kC} * kF),
                    ddown = sums(int64_t{kC} * kF), dup_bias = sums(kF), ddown_bias = sums(kC),
                    scratch = sums(bias_grad_scratch(kN, kF));
  const CudaExec& exec = options.exec;
  const double flops = 4.0 * kN * kC * kF;
  for (const Activation activation : {Activation::gelu, Activation::relu2}) {
    const bool gelu = activation == Activation::gelu;
    const MlpForward<bf16> forward{.out = output.as<bf16>(),
                                   .post = post.as<bf16>(),
                                   .pre = gelu ? pre.as<bf16>() : nullptr,
                                   .inp = inp.as<bf16>(),
                                   .residual = dout.as<bf16>(),
                                   .up_weight = up.as<bf16>(),
                                   .up_bias = up_bias.as<bf16>(),
                                   .down_weight = down.as<bf16>(),
                                   .down_bias = down_bias.as<bf16>(),
                                   .N = kN,
                                   .C = kC,
                                   .F = kF,
                                   .activation = activation};
    const MlpBackward<bf16> backward{.dinp = dinp.as<bf16>(),
                                     .dup_weight = dup.as<float>(),
                                     .dup_bias = dup_bias.as<float>(),
                                     .ddown_weight = ddown.as<float>(),
                                     .ddown_bias = ddown_bias.as<float>(),
                                     .dhidden = dhidden.as<bf16>(),
                                     .dout = dout.as<bf16>(),
                                     .inp = inp.as<bf16>(),
                                     .pre = gelu ? pre.as<bf16>() : nullptr,
                                     .post = post.as<bf16>(),
                                     .up_weight = up.as<bf16>(),
                                     .down_weight = down.as<bf16>(),
                                     .scratch = scratch.as<float>(),
                                     .N = kN,
                                     .C = kC,
                                     .F = kF,
                                     .activation = activation};
    bench_table(std::string("mlp, N = 32768, C = 768, F = 3072, ") + (gelu ? "gelu" : "relu2"),
                {{.name = "forward", .run = [&] { mlp_forward(forward, exec); }, .flops = flops},
                 {.name = "backward", .run = [&] { mlp_backward(backward, exec); }, .flops = 2 * flops}},
                exec, options.seconds, out);
  }
  bench_relu2_mlp(options, out);
}

}  // namespace speedrun::kernels

#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/head/head_loss.h"
#include "kernels/linear/linear.h"

namespace speedrun::kernels {

// GPT-2's head on one chunk of tokens: each soft-cap, loss alone and with gradients. With K = 8 the products shrink to a hundredth
// and what is left is the loss kernel (and the bias gradient).
void bench_head(const BenchOptions& options, std::ostream& out) {
  constexpr int64_t kN = 16384;
  constexpr int kV = 50304;
  const CudaExec& exec = options.exec;
  const std::vector<float> scale{1.0f / static_cast<float>(kN)};
  std::vector<int32_t> host_targets(kN);
  for (size_t i = 0; i < host_targets.size(); ++i) host_targets[i] = static_cast<int32_t>(i * 7919 % kV);
  const BenchBuffer logits = BenchBuffer::normal_bf16(kN * kV), bias = BenchBuffer::normal_bf16(kV),
                    loss = BenchBuffer::zeroed(sizeof(float) * kN), dbias = BenchBuffer::zeroed(sizeof(float) * kV),
                    scratch = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(bias_grad_scratch(kN, kV))),
                    targets = BenchBuffer::copy_of(host_targets.data(), sizeof(int32_t) * kN),
                    grad_scale = BenchBuffer::copy_of(scale.data(), sizeof(float));
  for (const int C : {768, 8}) {
    const BenchBuffer inp = BenchBuffer::normal_bf16(kN * C), weight = BenchBuffer::normal_bf16(int64_t{kV} * C, 0.05),
                      dinp = BenchBuffer::normal_bf16(kN * C),
                      dweight = BenchBuffer::zeroed(sizeof(float) * kV * static_cast<size_t>(C));
    const auto run = [&](Softcap softcap, bool gradients, bool bias_grad) {
      head_loss({.loss = loss.as<float>(),
                 .dinp = gradients ? dinp.as<bf16>() : nullptr,
                 .dweight = gradients ? dweight.as<float>() : nullptr,
                 .dbias = bias_grad ? dbias.as<float>() : nullptr,
                 .inp = inp.as<bf16>(),
                 .weight = weight.as<bf16>(),
                 .bias = bias.as<bf16>(),
                 .targets = targets.as<int32_t>(),
                 .grad_scale = grad_scale.as<float>(),
                 .logits = logits.as<bf16>(),
                 .scratch = scratch.as<float>(),
                 .N = kN,
                 .chunk = kN,
                 .C = C,
                 .V = kV,
                 .softcap = softcap,
                 .softcap_value = 15},
                exec);
    };
    const double flops = 2.0 * kN * C * kV, logit_bytes = 2.0 * kN * kV;
    const auto with_gradients = [&](const char* name, Softcap softcap, bool bias_grad) {
      return BenchCase{.name = name,
                       .run = [&run, softcap, bias_grad] { run(softcap, true, bias_grad); },
                       .flops = 3 * flops,
                       .bytes = (bias_grad ? 6 : 5) * logit_bytes};
    };
    bench_table("head, N = 16384, V = 50304, C = " + std::to_string(C),
                {{.name = "loss", .run = [&] { run(Softcap::none, false, false); }, .flops = flops, .bytes = 2 * logit_bytes},
                 with_gradients("gradients", Softcap::none, false),
                 with_gradients("gradients and bias", Softcap::none, true),
                 with_gradients("rational soft-cap", Softcap::rational, true),
                 with_gradients("sigmoid soft-cap", Softcap::sigmoid, true)},
                exec, options.seconds, out);
  }
}

}  // namespace speedrun::kernels

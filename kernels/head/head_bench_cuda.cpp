#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/head/head_loss.h"
#include "kernels/linear/linear.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kN = 16384;
constexpr int kV = 50304;

std::vector<int32_t> bench_targets() {
  std::vector<int32_t> targets(kN);
  for (size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<int32_t>(i * 7919 % kV);
  return targets;
}

// The Main Track's head, three terms and prefix, in BF16 and in FP8. With K = 16 the loss kernels are what is left.
void bench_terms(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  const float scale = 1.0f / static_cast<float>(kN);
  const LossWeights<bf16> term_weights{.next = {1, 0.5f, 0.25f}, .prefix = 0.25f};
  const Fp8Scale host_scales[] = {{.scale = 100.0f / 448}, {.scale = 1.6f / 448}, {}};  // inputs, weights, gradient
  const std::vector<int32_t> host_targets = bench_targets();
  std::vector<int32_t> host_prefix(kV);
  for (int v = 0; v < kV; ++v) host_prefix[static_cast<size_t>(v)] = v % 4 == 0 ? -1 : v / 2;
  const BenchBuffer logits = BenchBuffer::normal_bf16(kN * kV), loss = BenchBuffer::zeroed(sizeof(float) * kN),
                    grad8 = BenchBuffer::zeroed(kN * kV), grad8_t = BenchBuffer::zeroed(kN * kV),
                    row_shift = BenchBuffer::zeroed(sizeof(float) * kN),
                    targets = BenchBuffer::copy_of(host_targets.data(), sizeof(int32_t) * kN),
                    prefix = BenchBuffer::copy_of(host_prefix.data(), sizeof(int32_t) * kV),
                    loss_weights = BenchBuffer::copy_of(&term_weights, sizeof(term_weights)),
                    scales = BenchBuffer::copy_of(host_scales, sizeof(host_scales)),
                    grad_scale = BenchBuffer::copy_of(&scale, sizeof(scale));
  Fp8Scale* const inp_scale = scales.as<Fp8Scale>();
  for (const int C : {768, 16}) {
    const size_t weight_codes = static_cast<size_t>(kV) * static_cast<size_t>(C), inp_codes = static_cast<size_t>(kN * C);
    const BenchBuffer inp = BenchBuffer::normal_bf16(kN * C), weight = BenchBuffer::normal_bf16(int64_t{kV} * C, 0.05),
                      dinp = BenchBuffer::normal_bf16(kN * C), dweight = BenchBuffer::zeroed(sizeof(float) * weight_codes),
                      weight8 = BenchBuffer::zeroed(weight_codes), weight8_t = BenchBuffer::zeroed(weight_codes),
                      inp8 = BenchBuffer::zeroed(inp_codes), inp8_t = BenchBuffer::zeroed(inp_codes);
    const HeadFp8 fp8{.weight8 = weight8.as<e4m3>(),
                      .weight8_t = weight8_t.as<e4m3>(),
                      .weight_scale = inp_scale + 1,
                      .inp8 = inp8.as<e4m3>(),
                      .inp8_t = inp8_t.as<e4m3>(),
                      .inp_scale = inp_scale,
                      .grad8 = grad8.as<e5m2>(),
                      .grad8_t = grad8_t.as<e5m2>(),
                      .row_shift = row_shift.as<float>(),
                      .grad_scale8 = inp_scale + 2};
    fp8_quantize({.out = weight8.as<e4m3>(),
                  .out_t = weight8_t.as<e4m3>(),
                  .inp = weight.as<bf16>(),
                  .scale = inp_scale + 1,
                  .rows = kV,
                  .cols = C,
                  .scaling = Fp8Scaling::fixed,
                  .count = false},
                 exec);
    const auto run = [&](const HeadFp8& how, bool gradients) {
      head_loss({.loss = loss.as<float>(),
                 .dinp = gradients ? dinp.as<bf16>() : nullptr,
                 .dweight = gradients ? dweight.as<float>() : nullptr,
                 .dbias = nullptr,
                 .inp = inp.as<bf16>(),
                 .weight = weight.as<bf16>(),
                 .bias = nullptr,
                 .targets = targets.as<int32_t>(),
                 .loss_weights = loss_weights.as<LossWeights<bf16>>(),
                 .loss_terms = kMaxLossTerms,
                 .prefix = prefix.as<int32_t>(),
                 .row_tokens = kN,
                 .grad_scale = grad_scale.as<float>(),
                 .logits = logits.as<bf16>(),
                 .scratch = nullptr,
                 .N = kN,
                 .chunk = kN,
                 .C = C,
                 .V = kV,
                 .softcap = Softcap::sigmoid,
                 .softcap_value = 0,
                 .fp8 = how},
                exec);
    };
    // BF16: logits written, read, gradients written, read twice. FP8: gradients of one byte, written and read in two layouts.
    const double flops = 2.0 * kN * C * kV, logit_bytes = 2.0 * kN * kV;
    std::vector<BenchCase> cases{
        {.name = "BF16 loss", .run = [&] { run({}, false); }, .flops = flops, .bytes = 2 * logit_bytes},
        {.name = "BF16 gradients", .run = [&] { run({}, true); }, .flops = 3 * flops, .bytes = 5 * logit_bytes}};
    if (exec.compute_capability == 90)
      cases.push_back({.name = "FP8 gradients", .run = [&] { run(fp8, true); }, .flops = 3 * flops, .bytes = 4 * logit_bytes});
    bench_table("head, 3 terms and prefix, N = 16384, V = 50304, C = " + std::to_string(C), cases, exec, options.seconds, out);
  }
}

}  // namespace

// GPT-2's head on one chunk of tokens: each soft-cap, loss alone and with gradients. With K = 8 the products shrink to a hundredth
// and what is left is the loss kernel (and the bias gradient).
void bench_head(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  const std::vector<float> scale{1.0f / static_cast<float>(kN)};
  const std::vector<int32_t> host_targets = bench_targets();
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
  bench_terms(options, out);
}

}  // namespace speedrun::kernels

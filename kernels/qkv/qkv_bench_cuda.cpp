#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/linear/linear.h"
#include "kernels/qkv/qkv.h"

namespace speedrun::kernels {

// GPT-2 124M's widths with 6 heads of 128: the product alone, and with norm and rotary.
void bench_qkv(const BenchOptions& options, std::ostream& out) {
  constexpr int64_t kN = 32768, kRowTokens = 1024;
  constexpr int kC = 768, kH = 6, kD = kC / kH;
  const BenchBuffer inp = BenchBuffer::normal_bf16(kN * kC), weight = BenchBuffer::normal_bf16(int64_t{3} * kC * kC, 0.02),
                    bias = BenchBuffer::normal_bf16(3 * kC), qkv = BenchBuffer::normal_bf16(kN * 3 * kC),
                    dqkv = BenchBuffer::normal_bf16(kN * 3 * kC), dinp = BenchBuffer::normal_bf16(kN * kC),
                    rstd = BenchBuffer::normal_f32(kN * 2 * kH, 0.1), cos = BenchBuffer::normal_f32(kRowTokens * kD / 2, 0.3),
                    sin = BenchBuffer::normal_f32(kRowTokens * kD / 2, 0.3),
                    dweight = BenchBuffer::zeroed(sizeof(float) * 3 * kC * kC), dbias = BenchBuffer::zeroed(sizeof(float) * 3 * kC),
                    scratch = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(bias_grad_scratch(kN, 3 * kC)));
  const CudaExec& exec = options.exec;
  const double flops = 2.0 * kN * kC * 3 * kC;
  QkvForward<bf16> forward{.qkv = qkv.as<bf16>(),
                           .qk_rstd = rstd.as<float>(),
                           .inp = inp.as<bf16>(),
                           .weight = weight.as<bf16>(),
                           .bias = bias.as<bf16>(),
                           .rotary_cos = cos.as<float>(),
                           .rotary_sin = sin.as<float>(),
                           .N = kN,
                           .row_tokens = kRowTokens,
                           .C = kC,
                           .H = kH,
                           .eps = 1e-6};
  QkvForward<bf16> plain_forward = forward;
  plain_forward.qk_rstd = nullptr, plain_forward.rotary_cos = nullptr, plain_forward.rotary_sin = nullptr;
  QkvBackward<bf16> backward{.dinp = dinp.as<bf16>(),
                             .dweight = dweight.as<float>(),
                             .dbias = dbias.as<float>(),
                             .dqkv = dqkv.as<bf16>(),
                             .qkv = qkv.as<bf16>(),
                             .qk_rstd = rstd.as<float>(),
                             .inp = inp.as<bf16>(),
                             .weight = weight.as<bf16>(),
                             .rotary_cos = cos.as<float>(),
                             .rotary_sin = sin.as<float>(),
                             .scratch = scratch.as<float>(),
                             .N = kN,
                             .row_tokens = kRowTokens,
                             .C = kC,
                             .H = kH};
  QkvBackward<bf16> plain_backward = backward;
  plain_backward.qk_rstd = nullptr, plain_backward.rotary_cos = nullptr, plain_backward.rotary_sin = nullptr;
  bench_table("qkv, N = 32768, C = 768, 6 heads of 128",
              {{.name = "forward, product alone", .run = [&] { qkv_forward(plain_forward, exec); }, .flops = flops},
               {.name = "forward, norm and rotary", .run = [&] { qkv_forward(forward, exec); }, .flops = flops},
               {.name = "backward, products and bias", .run = [&] { qkv_backward(plain_backward, exec); }, .flops = 2 * flops},
               {.name = "backward, norm and rotary", .run = [&] { qkv_backward(backward, exec); }, .flops = 2 * flops}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

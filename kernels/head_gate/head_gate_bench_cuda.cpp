#include "kernels/bench/bench.h"
#include "kernels/head_gate/head_gate.h"

namespace speedrun::kernels {

void bench_head_gate(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t kN = 49'152;
  constexpr int kH = 6, kD = 128;
  constexpr int64_t kElements = kN * kH * kD;
  constexpr double kBytes = 2.0 * kElements;
  const auto plane = [] { return BenchBuffer::normal_bf16(kElements); };
  const auto coefficients = [] { return BenchBuffer::normal_bf16(kN * kH); };
  const BenchBuffer result = plane(), y = plane(), v = plane(), dout = plane(), dy = plane(), dv = plane(), alpha = coefficients(),
                    gate = coefficients(), dalpha = coefficients(), dgate = coefficients();
  const auto forward = [&](bool xsa, bool gated) {
    return HeadGateForward<bf16>{.out = result.as<bf16>(),
                                 .y = y.as<bf16>(),
                                 .v = xsa ? v.as<bf16>() : nullptr,
                                 .alpha = xsa ? alpha.as<bf16>() : nullptr,
                                 .gate = gated ? gate.as<bf16>() : nullptr,
                                 .stride = kH,
                                 .N = kN,
                                 .H = kH,
                                 .D = kD};
  };
  const auto backward = [&](bool xsa, bool gated) {
    return HeadGateBackward<bf16>{.dy = dy.as<bf16>(),
                                  .dv = xsa ? dv.as<bf16>() : nullptr,
                                  .dalpha = xsa ? dalpha.as<bf16>() : nullptr,
                                  .dgate = gated ? dgate.as<bf16>() : nullptr,
                                  .dout = dout.as<bf16>(),
                                  .y = y.as<bf16>(),
                                  .v = xsa ? v.as<bf16>() : nullptr,
                                  .alpha = xsa ? alpha.as<bf16>() : nullptr,
                                  .gate = gated ? gate.as<bf16>() : nullptr,
                                  .stride = kH,
                                  .N = kN,
                                  .H = kH,
                                  .D = kD};
  };
  bench_table("head_gate, 49152 tokens, 6 heads of 128",
              {bench_copy(kElements * sizeof(bf16), exec),
               {"forward, XSA", [&] { head_gate_forward(forward(true, false), exec); }, 0, 3 * kBytes},
               {"forward, gate", [&] { head_gate_forward(forward(false, true), exec); }, 0, 2 * kBytes},
               {"forward, both", [&] { head_gate_forward(forward(true, true), exec); }, 0, 3 * kBytes},
               {"backward, XSA", [&] { head_gate_backward(backward(true, false), exec); }, 0, 6 * kBytes},
               {"backward, gate", [&] { head_gate_backward(backward(false, true), exec); }, 0, 3 * kBytes},
               {"backward, both", [&] { head_gate_backward(backward(true, true), exec); }, 0, 6 * kBytes}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

#include "kernels/bench/bench.h"
#include "kernels/value_gate/value_gate.h"

namespace speedrun::kernels {

// Of a row only the sector with its first channels is read: bytes count sectors.
void bench_value_gate(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t kN = 49'152;
  constexpr int kC = 768, kH = 6, kP = 6;
  constexpr double kSectors = 2.0 * 32 * kN, kGates = 2.0 * kH * kN;
  const BenchBuffer inp = BenchBuffer::normal_bf16(kN * kC), embed = BenchBuffer::normal_bf16(kN * kC),
                    dinp = BenchBuffer::normal_bf16(kN * kC), dembed = BenchBuffer::normal_bf16(kN * kC),
                    weight = BenchBuffer::normal_bf16(kH * 2 * kP), gate = BenchBuffer::normal_bf16(kN * kH),
                    dgate = BenchBuffer::normal_bf16(kN * kH), dweight = BenchBuffer::zeroed(sizeof(float) * kH * 2 * kP),
                    scratch = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(value_gate_scratch(kN, kH, kP)));
  const ValueGateForward<bf16> forward{.gate = gate.as<bf16>(),
                                       .inp = inp.as<bf16>(),
                                       .embed = embed.as<bf16>(),
                                       .weight = weight.as<bf16>(),
                                       .N = kN,
                                       .C = kC,
                                       .H = kH,
                                       .P = kP};
  const ValueGateBackward<bf16> backward{.dinp = dinp.as<bf16>(),
                                         .dembed = dembed.as<bf16>(),
                                         .dweight = dweight.as<float>(),
                                         .dgate = dgate.as<bf16>(),
                                         .gate = gate.as<bf16>(),
                                         .inp = inp.as<bf16>(),
                                         .embed = embed.as<bf16>(),
                                         .weight = weight.as<bf16>(),
                                         .scratch = scratch.as<float>(),
                                         .N = kN,
                                         .C = kC,
                                         .H = kH,
                                         .P = kP};
  bench_table("value_gate, 49152 tokens, 6 heads, 6 + 6 channels of 768",
              {{"forward", [&] { value_gate_forward(forward, exec); }, 0, kSectors + kGates},
               {"backward", [&] { value_gate_backward(backward, exec); }, 0, 3 * kSectors + 2 * kGates}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

#include "kernels/bench/bench.h"
#include "kernels/gate_net/gate_net.h"

namespace speedrun::kernels {

// The Main Track's largest nets on the tokens of a step of its last stage.
void bench_gate_net(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t N = 393'216;
  constexpr int C = 768, G = 64, kMostOutputs = 41;
  const BenchBuffer inp = BenchBuffer::normal_bf16(N * C), dinp = BenchBuffer::normal_bf16(N * C),
                    w1 = BenchBuffer::normal_bf16(G * C, 0.03), w2 = BenchBuffer::normal_bf16(kMostOutputs * G, 0.1),
                    bias = BenchBuffer::normal_bf16(kMostOutputs), scale = BenchBuffer::normal_bf16(1),
                    dout = BenchBuffer::normal_bf16(N * kMostOutputs, 0.01);
  const BenchBuffer hidden = BenchBuffer::normal_bf16(N * G), dhidden = BenchBuffer::zeroed(N * G * sizeof(bf16)),
                    result = BenchBuffer::zeroed(N * kMostOutputs * sizeof(bf16));
  const BenchBuffer dw1 = BenchBuffer::zeroed(G * C * sizeof(float)), dw2 = BenchBuffer::zeroed(kMostOutputs * G * sizeof(float)),
                    dbias = BenchBuffer::zeroed(kMostOutputs * sizeof(float)), dscale = BenchBuffer::zeroed(sizeof(float));
  const BenchBuffer scratch = BenchBuffer::zeroed(static_cast<size_t>(gate_net_scratch(N, G, kMostOutputs)) * sizeof(float));

  const auto forward = [&](int outputs) {
    gate_net_forward(GateNetForward<bf16>{.out = result.as<bf16>(),
                                          .hidden = hidden.as<bf16>(),
                                          .inp = inp.as<bf16>(),
                                          .w1 = w1.as<bf16>(),
                                          .w2 = w2.as<bf16>(),
                                          .bias = bias.as<bf16>(),
                                          .scale = scale.as<bf16>(),
                                          .constant_scale = 0,
                                          .N = N,
                                          .C = C,
                                          .G = G,
                                          .O = outputs},
                     exec);
  };
  // Written, not added to: repeated sums would grow without bound.
  const auto backward = [&](int outputs) {
    gate_net_backward(GateNetBackward<bf16>{.dinp = dinp.as<bf16>(),
                                            .accumulate = false,
                                            .dw1 = dw1.as<float>(),
                                            .dw2 = dw2.as<float>(),
                                            .dbias = dbias.as<float>(),
                                            .dscale = dscale.as<float>(),
                                            .dhidden = dhidden.as<bf16>(),
                                            .dout = dout.as<bf16>(),
                                            .hidden = hidden.as<bf16>(),
                                            .inp = inp.as<bf16>(),
                                            .w1 = w1.as<bf16>(),
                                            .w2 = w2.as<bf16>(),
                                            .bias = bias.as<bf16>(),
                                            .scale = scale.as<bf16>(),
                                            .constant_scale = 0,
                                            .scratch = scratch.as<float>(),
                                            .N = N,
                                            .C = C,
                                            .G = G,
                                            .O = outputs},
                      exec);
  };
  const auto forward_case = [&](int outputs) {
    const double n = N;
    return BenchCase{"forward, " + std::to_string(outputs) + " outputs", [=, &forward] { forward(outputs); },
                     2 * n * G * (C + outputs), 2 * n * (C + 2 * G + outputs)};
  };
  const auto backward_case = [&](int outputs) {
    const double n = N;
    return BenchCase{"backward, " + std::to_string(outputs) + " outputs", [=, &backward] { backward(outputs); },
                     4 * n * G * (C + outputs), 2 * n * (2 * C + 4 * G + outputs)};
  };
  bench_table("gate net, 393216 tokens, 768 to 64 to outputs",
              {bench_copy(N * C * sizeof(bf16), exec), forward_case(kMostOutputs), forward_case(14), backward_case(kMostOutputs),
               backward_case(14)},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

#include "kernels/bench/bench.h"
#include "kernels/norm/norm.h"

namespace speedrun::kernels {

void bench_norm(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t N = 49'152;
  constexpr int C = 768;
  constexpr double kElements = double{N} * C, kEps = 1e-5;
  const BenchBuffer inp = BenchBuffer::normal_bf16(N * C), dout = BenchBuffer::normal_bf16(N * C),
                    add = BenchBuffer::normal_bf16(N * C);
  const BenchBuffer gain = BenchBuffer::normal_bf16(C), shift = BenchBuffer::normal_bf16(C);
  const BenchBuffer result = BenchBuffer::zeroed(N * C * sizeof(bf16));
  const BenchBuffer mean = BenchBuffer::zeroed(N * sizeof(float)), rstd = BenchBuffer::zeroed(N * sizeof(float));
  const BenchBuffer dgain = BenchBuffer::zeroed(C * sizeof(float)), dshift = BenchBuffer::zeroed(C * sizeof(float));
  const BenchBuffer scratch = BenchBuffer::zeroed(static_cast<size_t>(norm_backward_scratch(N, C)) * sizeof(float));

  auto forward = [&](Norm kind) {
    return NormForward<bf16>{.out = result.as<bf16>(),
                             .mean = kind == Norm::layer ? mean.as<float>() : nullptr,
                             .rstd = rstd.as<float>(),
                             .inp = inp.as<bf16>(),
                             .gain = gain.as<bf16>(),
                             .shift = kind == Norm::layer ? shift.as<bf16>() : nullptr,
                             .N = N,
                             .C = C,
                             .eps = kEps,
                             .kind = kind};
  };
  auto backward = [&](Norm kind) {
    return NormBackward<bf16>{.dinp = result.as<bf16>(),
                              .dinp_add = add.as<bf16>(),
                              .dgain = dgain.as<float>(),
                              .dshift = kind == Norm::layer ? dshift.as<float>() : nullptr,
                              .dout = dout.as<bf16>(),
                              .inp = inp.as<bf16>(),
                              .mean = kind == Norm::layer ? mean.as<float>() : nullptr,
                              .rstd = rstd.as<float>(),
                              .gain = gain.as<bf16>(),
                              .scratch = scratch.as<float>(),
                              .N = N,
                              .C = C,
                              .kind = kind};
  };
  NormBackward<bf16> gain_free = backward(Norm::rms);
  gain_free.gain = nullptr;
  gain_free.dgain = nullptr;
  bench_table("norm, 49152 x 768 bf16",
              {bench_copy(N * C * sizeof(bf16), exec),
               {"rms forward", [&] { norm_forward(forward(Norm::rms), exec); }, 0, 4 * kElements},
               {"layer forward", [&] { norm_forward(forward(Norm::layer), exec); }, 0, 4 * kElements},
               {"rms backward + residual", [&] { norm_backward(backward(Norm::rms), exec); }, 0, 8 * kElements},
               {"rms backward + residual, no gain", [&] { norm_backward(gain_free, exec); }, 0, 8 * kElements},
               {"layer backward + residual", [&] { norm_backward(backward(Norm::layer), exec); }, 0, 8 * kElements}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

#include "kernels/adamw/adamw.h"
#include "kernels/bench/bench.h"

namespace speedrun::kernels {

void bench_adamw(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t n = int64_t{50'304} * 768;
  const BenchBuffer weight = BenchBuffer::normal_bf16(n, 0.02), low = BenchBuffer::normal_bf16(n),
                    grad = BenchBuffer::normal_f32(n, 0.001);
  const BenchBuffer m = BenchBuffer::zeroed(n * sizeof(float)), v = BenchBuffer::zeroed(n * sizeof(float));
  const AdamStep step_values{.lr = 1e-4f, .decay = 1e-5f, .correction1 = 0.1f, .correction2 = 0.05f};
  const StepVerdict verdict_values;
  const BenchBuffer step = BenchBuffer::copy_of(&step_values, sizeof step_values);
  const BenchBuffer verdict = BenchBuffer::copy_of(&verdict_values, sizeof verdict_values);

  auto run = [&](MasterSplit split, bool bf16_state, AdamForm form = AdamForm::adamw) {
    return [&, split, bf16_state, form] {
      uint16_t* low_half = split == MasterSplit::none ? nullptr : low.as<uint16_t>();
      adamw_update(AdamW<bf16>{.weight = {.value = weight.as<bf16>(), .low = low_half, .split = split},
                               .m = m.as<void>(),
                               .v = v.as<void>(),
                               .bf16_state = bf16_state,
                               .grad = grad.as<float>(),
                               .step = step.as<AdamStep>(),
                               .verdict = verdict.as<StepVerdict>(),
                               .n = n,
                               .beta1 = 0.9,
                               .beta2 = 0.95,
                               .eps = 1e-8,
                               .form = form},
                   exec);
    };
  };
  bench_table("adamw, 50304 x 768 parameters",
              {bench_copy(n * sizeof(float), exec),
               {"split master, FP32 state", run(MasterSplit::nearest, false), 0, 28.0 * n},
               {"no master, FP32 state", run(MasterSplit::none, false), 0, 24.0 * n},
               {"no master, FP32 state, cautious", run(MasterSplit::none, false, AdamForm::cautious), 0, 24.0 * n},
               {"no master, BF16 state", run(MasterSplit::none, true), 0, 16.0 * n}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

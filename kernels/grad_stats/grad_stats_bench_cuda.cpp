#include "kernels/bench/bench.h"
#include "kernels/grad_stats/grad_stats.h"

namespace speedrun::kernels {

void bench_grad_stats(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  // The parameters of a 12-layer model of width 768.
  std::vector<GradSegment> host_segments;
  int64_t total = 0;
  auto add = [&](int64_t count) {
    host_segments.push_back({.offset = total, .count = count});
    total += count;
  };
  add(int64_t{50'304} * 768);
  add(1024 * 768);
  for (int layer = 0; layer < 12; ++layer) {
    for (const int64_t count : {768, 768, 2304 * 768, 2304, 768 * 768, 768, 768, 768, 3072 * 768, 3072, 3072 * 768, 768})
      add(count);
  }
  const int num_segments = static_cast<int>(host_segments.size());
  constexpr int64_t kTokens = 524'288;
  const BenchBuffer segments = BenchBuffer::copy_of(host_segments.data(), host_segments.size() * sizeof(GradSegment));
  const BenchBuffer grads = BenchBuffer::normal_f32(total, 0.01), loss = BenchBuffer::normal_f32(kTokens);
  const BenchBuffer sums = BenchBuffer::zeroed(host_segments.size() * sizeof(double));
  const BenchBuffer scratch = BenchBuffer::zeroed(static_cast<size_t>(grad_verdict_scratch(num_segments)) * sizeof(double));
  const BenchBuffer verdict = BenchBuffer::zeroed(sizeof(StepVerdict));
  const GradVerdict<bf16> args{.verdict = verdict.as<StepVerdict>(),
                               .sums = sums.as<double>(),
                               .scratch = scratch.as<double>(),
                               .grads = grads.as<float>(),
                               .segments = segments.as<GradSegment>(),
                               .num_segments = num_segments,
                               .grad_clip = 1};
  const LossSum<bf16> loss_args{.verdict = verdict.as<StepVerdict>(), .loss = loss.as<float>(), .N = kTokens};
  bench_table("grad_stats, GPT-2 124M",
              {bench_copy(static_cast<size_t>(total) * sizeof(float), exec),
               {"sums and verdict", [&] { grad_sums(args, exec), grad_verdict(args, exec); }, 0, 4.0 * static_cast<double>(total)},
               {"loss sum, 524288 tokens", [&] { loss_sum(loss_args, exec); }, 0, 4.0 * kTokens}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

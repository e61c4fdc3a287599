#include <cmath>
#include <vector>

#include "kernels/base/host_parallel.h"
#include "kernels/grad_stats/grad_stats.h"
#include "kernels/grad_stats/grad_stats_scratch.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kElements = 4096;  // of one task

// Eight running sums that are added at the end: a fixed order that vectorises.
template <class A>
double sum_of_squares(const A* values, int64_t count) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane)
      sums[lane] += static_cast<double>(values[i + lane]) * static_cast<double>(values[i + lane]);
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// Nothing that was found before is overwritten.
void find_bad(StepVerdict& verdict, const double* sums, int num_segments) {
  if (verdict.skip != 0) return;
  int bad = -1;
  bool found = !std::isfinite(verdict.loss_sum);
  for (int p = 0; !found && p < num_segments; ++p) {
    found = !std::isfinite(sums[p]);
    bad = p;
  }
  if (!found) return;
  verdict.skip = 1;
  verdict.bad_parameter = bad;
}

}  // namespace

int64_t grad_verdict_scratch(int num_segments) { return kGradSumParts * num_segments; }

template <class T>
void loss_sum(const LossSum<T>& a, const HostExec& exec) {
  std::vector<double> partial(static_cast<size_t>((a.N + kElements - 1) / kElements));
  parallel_ranges(exec, a.N, kElements, [&](int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t t = begin; t < end; ++t) sum += static_cast<double>(a.loss[t]);
    partial[static_cast<size_t>(begin / kElements)] = sum;
  });
  for (const double sum : partial) a.verdict->loss_sum += sum;
}

template <class T>
void grad_sums(const GradVerdict<T>& a, const HostExec& exec) {
  parallel(exec, kGradSumParts * a.num_segments, [&](int64_t index) {
    GradSegment segment = a.segments[index / kGradSumParts];
    if ((a.groups >> segment.group & 1u) == 0) segment.count = 0;
    const int64_t part_size = (segment.count + kGradSumParts - 1) / kGradSumParts,
                  begin = std::min(segment.count, index % kGradSumParts * part_size);
    a.scratch[index] = sum_of_squares(a.grads + segment.offset + begin, std::min(segment.count, begin + part_size) - begin);
  });
  for (int p = 0; p < a.num_segments; ++p) {
    a.sums[p] = 0;
    for (int64_t part = 0; part < kGradSumParts; ++part) a.sums[p] += a.scratch[p * kGradSumParts + part];
  }
}

template <class T>
void grad_verdict(const GradVerdict<T>& a, const HostExec& /*exec*/) {
  double total = 0;
  for (int p = 0; p < a.num_segments; ++p) total += a.sums[p];
  StepVerdict& verdict = *a.verdict;
  find_bad(verdict, a.sums, a.num_segments);
  const double norm = std::sqrt(total);
  verdict.grad_norm = static_cast<float>(norm);
  verdict.grad_scale = a.grad_clip > 0 && norm > a.grad_clip ? static_cast<float>(a.grad_clip / norm) : 1.0f;
}

template void loss_sum(const LossSum<float>&, const HostExec&);
template void loss_sum(const LossSum<double>&, const HostExec&);
template void grad_sums(const GradVerdict<float>&, const HostExec&);
template void grad_sums(const GradVerdict<double>&, const HostExec&);
template void grad_verdict(const GradVerdict<float>&, const HostExec&);
template void grad_verdict(const GradVerdict<double>&, const HostExec&);

}  // namespace speedrun::kernels

#pragma once
// A sequence of snapshots and what tests do with it.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/extrapolation/extrapolation.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/random.h"

namespace speedrun::kernels {

using testing::Random;
using testing::to_double;
using Method = ExtrapolationMethod;

inline constexpr Method kSolving[] = {Method::rre, Method::rre_suffix, Method::mpe, Method::anderson};
inline constexpr Method kAll[] = {Method::rre, Method::rre_suffix, Method::mpe, Method::anderson, Method::linear, Method::fixed};

inline JumpPlan plan_of(Method method) {
  return {.method = method,
          .k = 0,
          .regularization = 1e-6,
          .damping = 1,
          .max_jump = 0,
          .sums = nullptr,
          .verdict = nullptr,
          .report = nullptr};
}

inline double norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

inline std::vector<double> difference(const std::vector<double>& x, const std::vector<double>& y) {
  std::vector<double> u(x.size());
  for (size_t i = 0; i < x.size(); ++i) u[i] = x[i] - y[i];
  return u;
}

// Snapshots x[0], x[1], … of one vector; the weights are where the newest one is.
template <class T>
struct Sequence {
  std::vector<std::vector<T>> x;
  std::vector<T> weights;
  std::vector<SnapshotPiece<T>> pieces;
  StepVerdict verdict;

  explicit Sequence(std::vector<std::vector<T>> snapshots) : x(std::move(snapshots)), weights(x.back()) {
    cut({static_cast<int64_t>(weights.size())});
  }
  Sequence(const Sequence& other) : x(other.x), weights(other.weights), pieces(other.pieces), verdict(other.verdict) {
    for (SnapshotPiece<T>& piece : pieces) piece.weight.value = weights.data() + piece.offset;
  }
  int k() const { return static_cast<int>(x.size()); }
  int64_t num_pieces() const { return static_cast<int64_t>(pieces.size()); }

  void cut(const std::vector<int64_t>& counts) {
    pieces.clear();
    int64_t offset = 0;
    for (const int64_t count : counts) {
      pieces.push_back({.weight = {.value = weights.data() + offset}, .offset = offset, .count = count});
      offset += count;
    }
    ASSERT_EQ(offset, static_cast<int64_t>(weights.size()));
  }

  std::vector<double> sums(const HostExec& exec = {}) const {
    std::vector<double> scratch = std::vector<double>(static_cast<size_t>(snapshot_sums_scratch(num_pieces(), k())), std::nan(""));
    std::vector<double> values(static_cast<size_t>(k() * (k() - 1) / 2 + 1), std::nan(""));
    SnapshotSums<T> args{.pieces = pieces.data(),
                         .num_pieces = num_pieces(),
                         .snapshots = {},
                         .k = k(),
                         .scratch = scratch.data(),
                         .sums = values.data()};
    for (int j = 0; j < k(); ++j) args.snapshots[j] = x[static_cast<size_t>(j)].data();
    snapshot_sums(args, exec);
    return values;
  }

  JumpReport report(JumpPlan plan, const HostExec& exec = {}) const {
    const std::vector<double> values = sums(exec);
    JumpReport made;
    plan.k = k();
    plan.sums = values.data();
    plan.verdict = &verdict;
    plan.report = &made;
    plan_jump(plan, exec);
    return made;
  }

  void apply(const JumpReport* report, Acc<T>* result, const HostExec& exec = {}) {
    JumpWeights<T> args{
        .pieces = pieces.data(), .num_pieces = num_pieces(), .snapshots = {}, .k = k(), .report = report, .result = result};
    for (int j = 0; j < k(); ++j) args.snapshots[j] = x[static_cast<size_t>(j)].data();
    jump_weights(args, exec);
  }

  JumpReport jump(const JumpPlan& plan, const HostExec& exec = {}) {
    const JumpReport made = report(plan, exec);
    apply(&made, nullptr, exec);
    return made;
  }

  std::vector<double> newest() const { return to_double(x.back()); }
};

template <class T>
Sequence<T> random_sequence(int k, int64_t count, Random& random, double step = 0.01) {
  std::vector<std::vector<T>> x = {random.normal_vector<T>(count)};
  while (static_cast<int>(x.size()) < k) {
    std::vector<T> next = x.back();
    for (T& value : next) value += static_cast<T>(step * random.normal());
    x.push_back(next);
  }
  return Sequence<T>(x);
}

}  // namespace speedrun::kernels

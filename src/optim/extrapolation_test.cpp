// Weight extrapolation over a small parameter table against plain loops over lists of snapshots that are kept here.
#include "src/optim/extrapolation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>

#include "fmt/format.h"
#include "src/dist/collective_checks_test.h"
#include "src/optim/optimizer.h"
#include "src/optim/schedule.h"
#include "src/optim/sharding.h"
#include "src/optim/test_extrapolation.h"

namespace speedrun {
namespace {

using Kind = ExtrapolationKind;
using Vector = std::vector<double>;

constexpr Kind kHistoryMethods[] = {Kind::rre, Kind::rre_suffix, Kind::mpe, Kind::anderson, Kind::linear};

// Matrices of several pieces and of a part of one, tables, a vector that does not fill its alignment, and one that nobody trains.
std::vector<ParameterSpec> table(int64_t vocabulary = 100) {
  std::vector<ParameterSpec> specs;
  const auto add = [&](const char* name, std::vector<int64_t> shape, ParameterGroup group) -> ParameterSpec& {
    return specs.emplace_back(ParameterSpec{.name = name, .shape = std::move(shape), .group = group});
  };
  add("wte", {vocabulary, 32}, ParameterGroup::embedding);
  add("h.0.qkv", {192, 64}, ParameterGroup::matrix).matrices = 3;
  add("h.0.out", {64, 64}, ParameterGroup::matrix);
  add("h.0.gain", {37}, ParameterGroup::vector);
  add("h.0.up", {640, 64}, ParameterGroup::matrix);
  add("h.0.down", {64, 16}, ParameterGroup::down);
  add("sign", {8, 64}, ParameterGroup::bigram).frozen = true;
  add("head.weight", {40, 32}, ParameterGroup::head);
  return specs;
}

// Uniform from -1 to 1, by a multiplication and what it mixes up: a test draws some 10^7 of them.
double draw(int seed, int parameter, int64_t element) {
  uint64_t mixed = static_cast<uint64_t>(element) + (static_cast<uint64_t>(parameter) << 32) + (static_cast<uint64_t>(seed) << 48);
  for (int round = 0; round < 2; ++round) mixed = (mixed ^ (mixed >> 29)) * 0x9e3779b97f4a7c15;
  return static_cast<double>(mixed >> 11) * 0x1p-52 - 1;
}

// A table with its extrapolation in memory of its own. Weights move as `move` says, not by gradients.
template <class T>
struct Instance {
  explicit Instance(const Config& with, std::vector<ParameterSpec> specs = table(), Sharding sharding = {},
                    Communicator* communicator = nullptr)
      : config(with),
        device(make_cpu_device(1)),
        parameters(std::move(specs), true, std::move(sharding)),
        extrapolation(config, *device, parameters, communicator) {
    parameters.plan(plan);
    extrapolation.plan(plan);
    plan.add("step", &verdict, 1);
    arena = std::make_unique<Arena>(*device, plan);
    extrapolation.prepare(verdict);
    extrapolation.warm_up();
    *verdict = {};
    for (int p = 0; p < parameters.size(); ++p) {
      for (int64_t i = 0; i < parameters.spec(p).count(); ++i) parameters.value(p)[i] = static_cast<T>(draw(1, p, i));
    }
  }

  // An update: towards a point, with noise.
  void move(int completed) {
    for (int p = 0; p < parameters.size(); ++p) {
      if (parameters.spec(p).frozen) continue;
      for (int64_t i = 0; i < parameters.spec(p).count(); ++i) {
        T& x = parameters.value(p)[i];
        const double to = draw(2, p, i) - static_cast<double>(x);
        x += static_cast<T>((0.01 + 0.01 * static_cast<double>(i % 7)) * to + 0.005 * draw(100 + completed, p, i));
      }
    }
  }
  // As the engine does it; true if there was a jump.
  bool step(int completed) {
    extrapolation.before_update(completed - 1);
    move(completed);
    before = chosen();
    before_others = others();
    return extrapolation.after_update(completed, &report);
  }

  // Values of the parameters that take part, one behind the other, and of those that do not.
  Vector chosen() { return values(true); }
  Vector others() { return values(false); }
  Vector values(bool chosen) {
    const std::vector<int>& indices = extrapolation.parameters();
    Vector all;
    for (int p = 0; p < parameters.size(); ++p) {
      if (chosen == (std::find(indices.begin(), indices.end(), p) != indices.end()))
        all.insert(all.end(), parameters.value(p), parameters.value(p) + parameters.spec(p).count());
    }
    return all;
  }

  Config config;
  std::unique_ptr<Device> device;
  Parameters<T> parameters;
  MemoryPlan plan;
  Extrapolation<T> extrapolation;
  std::unique_ptr<Arena> arena;
  kernels::StepVerdict* verdict = nullptr;
  kernels::JumpReport report;
  Vector before, before_others;  // weights between the last update and what came after it
};

double largest_difference(const Vector& a, const Vector& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    largest = std::max(largest, std::isfinite(a[i]) ? std::abs(a[i] - b[i]) : INFINITY);
  return largest;
}

double dot(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

Vector difference(const Vector& a, const Vector& b) {
  Vector result(a.size());
  for (size_t i = 0; i < a.size(); ++i) result[i] = a[i] - b[i];
  return result;
}

// The list that a history is, and where it jumps to.
class ListedHistory {
 public:
  explicit ListedHistory(const Config& config) : keys_(config.extrapolation), last_(extrapolation_span(config).last) {}

  // True if a jump is due.
  bool push(int completed, const Vector& weights) {
    if (completed < keys_.start || completed > last_ || completed % keys_.snapshot_every != 0) return false;
    list.push_back(weights);
    if (static_cast<int>(list.size()) > keys_.history) list.pop_front();
    return completed % keys_.every == 0 && static_cast<int>(list.size()) == keys_.history;
  }

  Vector target() const {
    std::vector<Vector> u;
    for (size_t j = 0; j + 1 < list.size(); ++j) u.push_back(difference(list[j + 1], list[j]));
    std::vector<double> sums;
    for (size_t i = 0; i < u.size(); ++i) {
      for (size_t j = i; j < u.size(); ++j) sums.push_back(dot(u[i], u[j]));
    }
    sums.push_back(dot(list.back(), list.back()));
    using Method = kernels::ExtrapolationMethod;
    const std::map<Kind, Method> methods = {{Kind::rre, Method::rre},
                                            {Kind::rre_suffix, Method::rre_suffix},
                                            {Kind::mpe, Method::mpe},
                                            {Kind::anderson, Method::anderson},
                                            {Kind::linear, Method::linear}};
    const kernels::StepVerdict verdict;
    kernels::JumpReport report;
    kernels::plan_jump({.method = methods.at(keys_.method),
                        .k = static_cast<int>(list.size()),
                        .regularization = keys_.regularization,
                        .damping = keys_.damping,
                        .max_jump = keys_.max_jump,
                        .horizon = keys_.horizon / keys_.snapshot_every,
                        .mixing = keys_.mixing,
                        .sums = sums.data(),
                        .verdict = &verdict,
                        .report = &report},
                       kernels::HostExec{});
    EXPECT_EQ(report.refusal, kernels::JumpRefusal::none);
    Vector x = list.back();
    for (size_t j = 0; j < u.size(); ++j) {
      for (size_t i = 0; i < x.size(); ++i) x[i] -= report.weights[j] * u[j][i];
    }
    return x;
  }

  std::deque<Vector> list;

 private:
  Config::Extrapolation keys_;
  int last_;
};

// Section by section what the record's program does at n = m · 5 with four snapshots, by elimination without a pivot.
Vector target_of_34(const std::deque<Vector>& x) {
  const Vector u[3] = {difference(x[1], x[0]), difference(x[2], x[1]), difference(x[3], x[2])};
  double g[3][3], c[3] = {1, 1, 1};
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) g[i][j] = dot(u[i], u[j]);
  }
  const double ridge = 1e-6 * (g[0][0] + g[1][1] + g[2][2]) / 3 + 1e-10;
  for (int i = 0; i < 3; ++i) g[i][i] += ridge;
  for (int column = 0; column < 3; ++column) {
    for (int row = 0; row < 3; ++row) {
      if (row == column) continue;
      const double factor = g[row][column] / g[column][column];
      for (int j = 0; j < 3; ++j) g[row][j] -= factor * g[column][j];
      c[row] -= factor * c[column];
    }
  }
  for (int i = 0; i < 3; ++i) c[i] /= g[i][i];
  const double sum = c[0] + c[1] + c[2], gamma[3] = {1, (c[1] + c[2]) / sum, c[2] / sum};
  Vector delta(x[3].size());
  for (size_t i = 0; i < delta.size(); ++i) delta[i] = -0.875 * (gamma[0] * u[0][i] + gamma[1] * u[1][i] + gamma[2] * u[2][i]);
  const double ratio = std::sqrt(dot(delta, delta)) / std::sqrt(dot(x[3], x[3]));
  Vector result = x[3];
  for (size_t i = 0; i < delta.size(); ++i) result[i] += delta[i] * (ratio > 0.001 ? 0.001 / ratio : 1);
  return result;
}

template <class T>
class ExtrapolationOf : public ::testing::Test {
 protected:
  // Of weights of order 1: a few roundings of T.
  static constexpr double kTolerance = std::is_same_v<T, double> ? 1e-11 : 1e-6;
};
using NumberTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(ExtrapolationOf, NumberTypes);

// Everything after the update n = 2820 + …, with the whole bookkeeping of the record done by hand.
TYPED_TEST(ExtrapolationOf, IsTheRecordsOverlay) {
  Instance<TypeParam> run(config_of_34());
  std::deque<Vector> history;
  int jumps = 0;
  for (int n = 2818; n <= 2928; ++n) {
    const bool jumped = run.step(n);
    if (n < 2820 || n > 2925) {
      ASSERT_FALSE(jumped) << n;
      continue;
    }
    EXPECT_EQ(run.others(), run.before_others) << n;
    history.push_back(run.before);
    if (history.size() > 4) history.pop_front();
    ASSERT_EQ(jumped, n % 5 == 0 && history.size() == 4) << n;
    if (!jumped) continue;
    ++jumps;
    const Vector target = target_of_34(history);
    EXPECT_LT(largest_difference(run.chosen(), target), TestFixture::kTolerance) << n;
    EXPECT_GT(largest_difference(target, run.before), 100 * TestFixture::kTolerance) << "the jump is too small for the test";
    EXPECT_EQ(run.report.refusal, kernels::JumpRefusal::none);
    EXPECT_EQ(run.report.capped_jump, 0.001);
    EXPECT_GT(run.report.jump, 0.001);
    history = {run.chosen()};
  }
  EXPECT_EQ(jumps, 21);
}

TYPED_TEST(ExtrapolationOf, JumpsFromTheListWithEveryMethodAndInterval) {
  for (const Kind method : kHistoryMethods) {
    for (const auto& [history, interval, every] : {std::tuple(3, 1, 5), {5, 2, 4}, {4, 1, 1}}) {
      Config config = config_of(method);
      config.extrapolation.start = 3;
      config.extrapolation.history = history;
      config.extrapolation.snapshot_every = interval;
      config.extrapolation.every = every;
      config.extrapolation.damping = 0.6;
      config.extrapolation.horizon = 2;
      config.extrapolation.mixing = 0.7;
      config.extrapolation.regularization = 0.01;  // rounding of a float must not decide the coefficients
      Instance<TypeParam> run(config);
      ListedHistory listed(config);
      int jumps = 0;
      for (int n = 1; n <= 22; ++n) {
        const bool jumped = run.step(n);
        ASSERT_EQ(listed.push(n, run.before), jumped) << n;
        if (!jumped) continue;
        ++jumps;
        EXPECT_LT(largest_difference(run.chosen(), listed.target()), 10 * TestFixture::kTolerance)
            << "method " << static_cast<int>(method) << ", n " << n;
        listed.list = {run.chosen()};
      }
      EXPECT_GT(jumps, 1);
    }
  }
}

TYPED_TEST(ExtrapolationOf, ReadoutShowsTheJumpAndLeavesTheBits) {
  for (const Kind method : {Kind::rre_suffix, Kind::ema}) {
    Config config = config_of(method);
    config.extrapolation.apply = ExtrapolationApply::readout;
    config.extrapolation.blend = 0.6;
    Instance<TypeParam> run(config), untouched(config);
    ListedHistory listed(config);
    int seen = 0;
    listed.push(0, run.chosen());
    for (int n = 1; n <= 20; ++n) {
      ASSERT_FALSE(run.step(n)) << "a read-out is no jump";
      untouched.step(n);
      const bool due = listed.push(n, run.before);
      kernels::JumpReport report;
      ASSERT_EQ(run.extrapolation.begin_readout(n, &report), method == Kind::ema || due) << n;
      if (method == Kind::ema || due) {
        ++seen;
        EXPECT_GT(report.jump, 0);
        EXPECT_NE(run.chosen(), run.before);
        EXPECT_EQ(run.others(), run.before_others);
        if (method == Kind::rre_suffix) {
          EXPECT_LT(largest_difference(run.chosen(), listed.target()), TestFixture::kTolerance) << n;
        }
        run.extrapolation.end_readout();
      }
      ASSERT_EQ(run.chosen(), untouched.chosen()) << n;
    }
    EXPECT_GE(seen, 4);
  }
}

TYPED_TEST(ExtrapolationOf, AveragesArePlainLoops) {
  for (const Kind method : {Kind::ema, Kind::average}) {
    Config config = config_of(method);
    config.extrapolation.start = 4;
    config.extrapolation.stop = 17;
    config.extrapolation.ema_updates = 5;
    config.extrapolation.snapshot_every = method == Kind::average ? 3 : 1;
    config.extrapolation.blend = 0.6;
    config.extrapolation.max_jump = 1e-9;  // of the other methods
    config.extrapolation.damping = 0;
    Instance<TypeParam> run(config);
    Vector average;
    int taken = 0;
    for (int n = 1; n <= 20; ++n) {
      ASSERT_EQ(run.step(n), n == 17) << n;
      if (n >= 4 && n <= 17 && (method == Kind::ema || n % 3 == 0)) {
        ++taken;
        if (taken == 1) average = run.before;
        for (size_t i = 0; i < average.size(); ++i) average[i] += (run.before[i] - average[i]) / (method == Kind::ema ? 5 : taken);
      }
      if (n != 17) {
        EXPECT_EQ(run.chosen(), run.before) << n;
        continue;
      }
      Vector blended = run.before;
      for (size_t i = 0; i < blended.size(); ++i) blended[i] = 0.4 * blended[i] + 0.6 * average[i];
      EXPECT_LT(largest_difference(run.chosen(), blended), 4 * TestFixture::kTolerance);
      EXPECT_GT(largest_difference(run.before, blended), 0.01);
    }
    EXPECT_EQ(taken, method == Kind::ema ? 14 : 4);
  }
}

TYPED_TEST(ExtrapolationOf, TheFilterSaysWhoTakesPart) {
  const std::map<ExtrapolatedParameters, std::set<std::string>> expected = {
      {ExtrapolatedParameters::matrices, {"h.0.qkv", "h.0.out", "h.0.up", "h.0.down"}},
      {ExtrapolatedParameters::all, {"wte", "h.0.qkv", "h.0.out", "h.0.gain", "h.0.up", "h.0.down", "head.weight"}},
      {ExtrapolatedParameters::all_but_tables, {"h.0.qkv", "h.0.out", "h.0.gain", "h.0.up", "h.0.down"}}};
  for (const auto& [which, names] : expected) {
    Config config = config_of(Kind::linear);
    config.extrapolation.parameters = which;
    Instance<TypeParam> run(config);
    std::set<std::string> chosen;
    for (const int p : run.extrapolation.parameters()) chosen.insert(run.parameters.spec(p).name);
    EXPECT_EQ(chosen, names);
    for (int n = 1; n < 5; ++n) EXPECT_FALSE(run.step(n));
    EXPECT_TRUE(run.step(5));
    EXPECT_EQ(run.others(), run.before_others);
    size_t same = 0;
    const Vector after = run.chosen();
    for (size_t i = 0; i < after.size(); ++i) same += after[i] == run.before[i];
    EXPECT_LT(same, after.size() / 100) << "every tensor moves";
  }
}

TYPED_TEST(ExtrapolationOf, HostMemoryHasTheSameBits) {
  for (const Kind method : {Kind::rre, Kind::average}) {
    Config config = config_of(method);
    config.extrapolation.stop = 20;
    Instance<TypeParam> on_device(config);
    config.extrapolation.host_memory = true;
    Instance<TypeParam> on_host(config);
    const size_t snapshot = on_device.chosen().size() * sizeof(Acc<TypeParam>);
    EXPECT_GE(on_device.plan.total_bytes(), on_host.plan.total_bytes() + (method == Kind::rre ? 4 : 2) * snapshot);
    for (int n = 1; n <= 20; ++n) EXPECT_EQ(on_device.step(n), on_host.step(n));
    EXPECT_EQ(on_device.chosen(), on_host.chosen());
    EXPECT_EQ(on_device.extrapolation.state().size(), on_host.extrapolation.state().size());
  }
}

TYPED_TEST(ExtrapolationOf, ARefusedJumpLeavesTheWeightsAndEmptiesTheHistory) {
  Instance<TypeParam> run(config_of(Kind::rre));
  run.extrapolation.before_update(0);
  const Vector still = run.chosen();
  for (int n = 1; n <= 9; ++n) {  // nobody moves
    const bool jumped = run.extrapolation.after_update(n, &run.report);
    EXPECT_EQ(jumped, n == 5);
  }
  EXPECT_EQ(run.report.refusal, kernels::JumpRefusal::no_change);
  EXPECT_EQ(run.chosen(), still);
  EXPECT_TRUE(run.step(10));
  EXPECT_EQ(run.report.refusal, kernels::JumpRefusal::none);
  EXPECT_NE(run.chosen(), run.before);
  for (int n = 11; n <= 14; ++n) run.step(n);
  run.verdict->skip = 1;  // a step that was not finite
  EXPECT_TRUE(run.step(15));
  EXPECT_EQ(run.report.refusal, kernels::JumpRefusal::not_finite);
  EXPECT_EQ(run.chosen(), run.before);
  run.verdict->skip = 0;
  run.parameters.value("h.0.out")[3] = std::numeric_limits<TypeParam>::quiet_NaN();
  for (int n = 16; n <= 19; ++n) run.step(n);
  EXPECT_TRUE(run.step(20));
  EXPECT_EQ(run.report.refusal, kernels::JumpRefusal::not_finite);
  EXPECT_EQ(std::memcmp(run.chosen().data(), run.before.data(), run.before.size() * sizeof(double)), 0);
}

// Saved in the middle of a history, and just after a jump.
TYPED_TEST(ExtrapolationOf, StateInAnotherInstanceGoesOnWithTheSameBits) {
  for (const Kind method : {Kind::rre_suffix, Kind::ema, Kind::average}) {
    Config config = config_of(method);
    config.extrapolation.start = 3;
    config.extrapolation.stop = 20;
    for (const int saved_at : {5, 10, 13}) {
      Instance<TypeParam> whole(config), first(config), second(config);
      first.extrapolation.restore(1);
      whole.extrapolation.restore(1);
      for (int n = 2; n <= 20; ++n) whole.step(n);
      for (int n = 2; n <= saved_at; ++n) first.step(n);
      const std::vector<StateTensor> from = first.extrapolation.state(), to = second.extrapolation.state();
      ASSERT_EQ(from.size(), to.size());
      ASSERT_EQ(from.size(), 4u * (method == Kind::rre_suffix ? 4 : 1)) << "four matrices";
      for (size_t i = 0; i < from.size(); ++i) {
        EXPECT_EQ(from[i].name, to[i].name);
        std::memcpy(to[i].data, from[i].data, static_cast<size_t>(from[i].count) * sizeof(Acc<TypeParam>));
      }
      EXPECT_EQ(from[0].name, method == Kind::rre_suffix ? "extrapolation.snapshot.0/h.0.qkv" : "extrapolation.average/h.0.qkv");
      second.extrapolation.restore(first.extrapolation.begin());
      for (int p = 0; p < first.parameters.size(); ++p)
        std::copy_n(first.parameters.value(p), first.parameters.spec(p).count(), second.parameters.value(p));
      for (int n = saved_at + 1; n <= 20; ++n) second.step(n);
      EXPECT_EQ(second.chosen(), whole.chosen()) << "method " << static_cast<int>(method) << ", saved at " << saved_at;
    }
  }
}

// A branch from where the history begins is the run that never stopped.
TYPED_TEST(ExtrapolationOf, ABranchBeginsWithTheWeightsItGets) {
  for (const Kind method : {Kind::rre_suffix, Kind::linear, Kind::ema, Kind::average}) {
    Config config = config_of(method);
    config.extrapolation.start = 12;
    config.extrapolation.stop = 31;
    Instance<TypeParam> whole(config), branch(config);
    for (int n = 1; n <= 31; ++n) whole.step(n);
    for (int n = 1; n <= 12; ++n) branch.move(n);
    branch.extrapolation.restore(12);
    for (int n = 13; n <= 31; ++n) branch.step(n);
    EXPECT_EQ(branch.chosen(), whole.chosen()) << static_cast<int>(method);
  }
}

TYPED_TEST(ExtrapolationOf, MomentumIsResetByAJumpAndNotByARefusal) {
  Config config = config_of(Kind::rre);
  Instance<TypeParam> run(config);
  Optimizer<TypeParam> optimizer(config, *run.device, run.parameters);
  MemoryPlan plan;
  optimizer.plan(plan);
  const Arena arena(*run.device, plan);
  const auto reset = [&](kernels::JumpRefusal refusal) {
    for (const StateTensor& tensor : optimizer.state())
      std::fill_n(static_cast<Acc<TypeParam>*>(tensor.data), tensor.count, Acc<TypeParam>(1));
    const kernels::JumpReport report{.refusal = refusal};
    optimizer.reset_momentum(run.extrapolation.parameters(), &report);
    std::set<std::string> zeroed;
    for (const StateTensor& tensor : optimizer.state()) {
      const auto* values = static_cast<const Acc<TypeParam>*>(tensor.data);
      const auto zeros = std::count(values, values + tensor.count, Acc<TypeParam>(0));
      EXPECT_TRUE(zeros == 0 || zeros == tensor.count) << tensor.name;
      if (zeros > 0) zeroed.insert(tensor.name);
    }
    return zeroed;
  };
  EXPECT_EQ(reset(kernels::JumpRefusal::none), (std::set<std::string>{"muon.momentum/h.0.qkv", "muon.momentum/h.0.out",
                                                                      "muon.momentum/h.0.up", "muon.momentum/h.0.down"}));
  EXPECT_TRUE(reset(kernels::JumpRefusal::singular).empty());
}

TEST(Extrapolation, TheLogSaysWhatItIs) {
  Config config = config_of_34();
  EXPECT_EQ(Instance<float>(config).extrapolation.describe(),
            "rre_suffix, updates 2820 to 2925, a jump every 5 updates from 2825 on; 4 parameters; 4 snapshots of 58368 elements of "
            "FP32 in device "
            "memory, 0.00 GB");
  config.schedule.scale = 0.01;
  EXPECT_EQ(Instance<float>(config).extrapolation.describe().find("rre_suffix, updates 28 to 29, a jump every 5 updates: too few"),
            0u);
  config.schedule.scale = 1;
  config.extrapolation.method = Kind::ema;
  config.extrapolation.apply = ExtrapolationApply::readout;
  config.extrapolation.host_memory = true;
  EXPECT_EQ(Instance<float>(config).extrapolation.describe(),
            "ema, updates 2820 to 2925, for validations alone; 4 parameters; average and copy of 58368 elements of FP32 in host "
            "memory, 0.00 GB");
}

class ExtrapolationOfRanks : public ::testing::TestWithParam<int> {};

// Each rank remembers its part, and all have the weights of one rank: to rounding, and among themselves bit for bit.
TEST_P(ExtrapolationOfRanks, JumpLikeOneRank) {
  EXPECT_TRUE(testing::run_ranks(GetParam(), 120, [](Control& control) {
    const std::unique_ptr<Device> device = make_cpu_device(1);
    const std::unique_ptr<Communicator> communicator = make_communicator(control, *device, false);
    const auto require_same = [&](Instance<float>& part, Instance<float>& whole, int n) {
      for (const bool chosen : {true, false}) {
        const Vector mine = part.values(chosen);
        require(largest_difference(mine, whole.values(chosen)) < 1e-6, "after update ", n, " another result than one rank's");
        Vector first = mine;
        communicator->fork();
        communicator->broadcast(first.data(), static_cast<int64_t>(first.size()), CommType::f64, 0);
        communicator->join();
        require(first == mine, "after update ", n, " the ranks' weights differ");
      }
    };
    for (const Kind method : {Kind::rre_suffix, Kind::average}) {
      for (const auto which : {ExtrapolatedParameters::matrices, ExtrapolatedParameters::all}) {
        for (const auto apply : {ExtrapolationApply::weights, ExtrapolationApply::readout}) {
          Config config = config_of(method);
          config.extrapolation.stop = 12;
          config.extrapolation.apply = apply;
          config.extrapolation.parameters = which;
          config.extrapolation.max_jump = 0.001;
          const std::vector<ParameterSpec> specs = table(4100);  // a table that is cut between the ranks
          Instance<float> whole(config, specs);
          Instance<float> part(config, specs, make_sharding(specs, config.optim, control.rank(), control.size()),
                               communicator.get());
          int jumps = 0;
          for (int n = 1; n <= 12; ++n) {
            const bool jumped = part.step(n);
            require(jumped == whole.step(n), "another jump than one rank's after ", n);
            require_same(part, whole, n);
            const bool readout = part.extrapolation.begin_readout(n, &part.report);
            require(readout == whole.extrapolation.begin_readout(n, &whole.report), "another read-out than one rank's after ", n);
            if (readout) {
              require_same(part, whole, n);
              require(part.chosen() != part.before, "the read-out shows nothing");
              part.extrapolation.end_readout();
              whole.extrapolation.end_readout();
              require(part.chosen() == part.before, "the read-out of update ", n, " left something");
            }
            if (!jumped && !readout) continue;
            ++jumps;
            require(std::abs(part.report.jump / whole.report.jump - 1) < 1e-6, "jump ", part.report.jump, ", of one rank ",
                    whole.report.jump);
          }
          require(jumps >= (method == Kind::average && apply == ExtrapolationApply::weights ? 1 : 2), jumps, " jumps");
        }
      }
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, ExtrapolationOfRanks, ::testing::Values(2, 4),
                         [](const auto& test) { return fmt::format("{}", test.param); });

}  // namespace
}  // namespace speedrun

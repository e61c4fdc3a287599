// The optimizers over a small parameter table against formulas written out here, for several steps: groups with settings of their
// own, gradients summed over steps, matrices inside one tensor, clipping, and what a value that is not finite leaves alone.
#include "src/optim/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>

#include "src/core/random.h"
#include "src/optim/test_formulas.h"

namespace speedrun {
namespace {

// One parameter of each group that the tests need: vectors that do not fill the padded rows of the buffer, a tensor of three
// matrices, a tall and a wide matrix. "qkv" and "out" share a shape, so one batch holds four matrices.
std::vector<ParameterSpec> table() {
  const auto spec = [](const char* name, std::vector<int64_t> shape, ParameterGroup group, int matrices = 1) {
    ParameterSpec row;
    row.name = name;
    row.shape = std::move(shape);
    row.group = group;
    row.matrices = matrices;
    return row;
  };
  return {spec("wte", {5, 6}, ParameterGroup::embedding),  spec("gain", {7}, ParameterGroup::vector),
          spec("qkv", {12, 6}, ParameterGroup::matrix, 3), spec("shift", {3}, ParameterGroup::vector),
          spec("out", {4, 6}, ParameterGroup::matrix),     spec("up", {9, 4}, ParameterGroup::matrix),
          spec("down", {4, 9}, ParameterGroup::matrix),    spec("head", {5, 6}, ParameterGroup::head)};
}

Config config_of(OptimizerKind matrices) {
  Config config;
  config.schedule.steps = 20;
  config.schedule.lr.warmup_steps = 4;
  config.schedule.lr.shape = DecayShape::linear;
  config.optim.embedding = {.lr = 0.01, .beta1 = 0.8, .beta2 = 0.9, .weight_decay = 0.1};
  config.optim.vector = {.lr = 0.02, .lr_multiplier = 0.5, .beta1 = 0.7, .beta2 = 0.99, .eps = 1e-6};
  config.optim.head = {.lr = 0.03, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.2, .weight_decay_multiplier = 0.5, .every = 2};
  config.optim.matrix = {.optimizer = matrices, .lr = 0.05, .weight_decay = 0.3};
  config.schedule.momentum.warmup_steps = 3;
  return config;
}

const Config::Group& group_of(const Config& config, const ParameterSpec& spec) { return group_config(config.optim, spec.group); }

// A table with its optimizer in memory of its own, and the device memory that a step reads and writes.
template <class T>
struct Instance {
  explicit Instance(const Config& with, std::vector<ParameterSpec> specs = table())
      : config(with), device(make_cpu_device(2)), parameters(std::move(specs)), optimizer(config, *device, parameters) {
    MemoryPlan plan;
    parameters.plan(plan);
    optimizer.plan(plan);
    plan.add("step", &inputs, 1);
    plan.add("step", &verdict, 1);
    arena = std::make_unique<Arena>(*device, plan);
    optimizer.prepare(inputs, verdict);
    *verdict = {};
    for (int p = 0; p < parameters.size(); ++p) {
      for (int64_t i = 0; i < parameters.spec(p).count(); ++i)
        parameters.value(p)[i] = static_cast<T>(random_normal(1, static_cast<uint64_t>(p), static_cast<uint64_t>(i)));
    }
  }

  // What backward does: adds this step's gradient.
  void add_gradient(int step) {
    for (int p = 0; p < parameters.size(); ++p) {
      const Values gradient = gradient_of(p, step);
      for (size_t i = 0; i < gradient.size(); ++i) parameters.grad(p)[i] += static_cast<Acc<T>>(gradient[i]);
    }
  }
  Values gradient_of(int p, int step) const {
    Values gradient(static_cast<size_t>(parameters.spec(p).count()));
    for (size_t i = 0; i < gradient.size(); ++i)
      gradient[i] = gradient_size * random_normal(100 + static_cast<uint64_t>(step), static_cast<uint64_t>(p), i);
    return gradient;
  }
  void update(int step) {
    const StepValues values = schedule_at(config, step);
    *inputs = Optimizer<T>::inputs_of(config, values, step);
    optimizer.update(Optimizer<T>::update_mask(values));
  }

  Values weight(int p) { return to_values(parameters.value(p), parameters.spec(p).count()); }
  Values grad(int p) { return to_values(parameters.grad(p), parameters.spec(p).count()); }
  Values state(const std::string& name) {
    for (const StateTensor& tensor : optimizer.state()) {
      if (tensor.name == name) return to_values(static_cast<Acc<T>*>(tensor.data), tensor.count);
    }
    ADD_FAILURE() << "no state " << name;
    return {};
  }
  template <class U>
  static Values to_values(const U* data, int64_t count) {
    return Values(data, data + count);
  }

  Config config;
  std::unique_ptr<Device> device;
  Parameters<T> parameters;
  Optimizer<T> optimizer;
  std::unique_ptr<Arena> arena;
  StepInputs<T>* inputs = nullptr;
  kernels::StepVerdict* verdict = nullptr;
  double gradient_size = 1;
};

// The largest difference relative to the largest value.
double distance(const Values& a, const Values& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, largest = 1e-30;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference = std::max(difference, std::isfinite(a[i]) ? std::abs(a[i] - b[i]) : std::numeric_limits<double>::infinity());
    largest = std::max(largest, std::abs(b[i]));
  }
  return difference / largest;
}

template <class T>
class OptimizerOf : public ::testing::Test {
 protected:
  // Learning rates and the clipping factor travel in FP32, so double agrees no further than that.
  static constexpr double kTolerance = std::is_same_v<T, double> ? 2e-6 : 2e-5;
};
using NumberTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(OptimizerOf, NumberTypes);

TYPED_TEST(OptimizerOf, AdamWFollowsItsFormulaInEveryGroup) {
  Instance<TypeParam> run(config_of(OptimizerKind::adamw));
  std::map<int, PlainAdamW> plain;
  std::map<int, Values> weights, sums;
  for (int p = 0; p < run.parameters.size(); ++p) weights[p] = run.weight(p);
  for (int step = 0; step < 7; ++step) {
    run.add_gradient(step);
    run.update(step);
    const double factor = lr_factor(run.config.schedule, step);
    for (int p = 0; p < run.parameters.size(); ++p) {
      const ParameterSpec& spec = run.parameters.spec(p);
      const Config::Group& group = group_of(run.config, spec);
      const Values gradient = run.gradient_of(p, step);
      sums[p].resize(gradient.size());
      for (size_t i = 0; i < gradient.size(); ++i) sums[p][i] += gradient[i];
      if (group.every == 2 && step % 2 == 0) {
        EXPECT_LT(distance(run.grad(p), sums[p]), 1e-6) << spec.name << ": its gradient is not kept in step " << step;
        EXPECT_LT(distance(run.weight(p), weights[p]), this->kTolerance) << spec.name << " moved in step " << step;
        continue;
      }
      plain[p].update(weights[p], sums[p], group, group.lr * group.lr_multiplier * factor,
                      group.weight_decay * group.weight_decay_multiplier);
      EXPECT_LT(distance(run.weight(p), weights[p]), this->kTolerance) << spec.name << " after step " << step;
      EXPECT_LT(distance(run.state("adam.m/" + spec.name), plain[p].m), this->kTolerance) << spec.name << " step " << step;
      EXPECT_LT(distance(run.state("adam.v/" + spec.name), plain[p].v), this->kTolerance) << spec.name << " step " << step;
      EXPECT_EQ(run.grad(p), Values(gradient.size(), 0)) << spec.name << ": its gradient is not zeroed after step " << step;
      sums[p].assign(gradient.size(), 0);
    }
  }
  EXPECT_EQ(plain[7].updates, 3) << "head: updates in steps 1, 3 and 5";
}

TYPED_TEST(OptimizerOf, CautiousAdamFollowsItsFormulaAndSparesWhatNeverDecays) {
  Config config = config_of(OptimizerKind::adam);
  for (Config::Group* group : {&config.optim.embedding, &config.optim.vector, &config.optim.head})
    group->optimizer = OptimizerKind::adam;
  config.optim.embedding.weight_decay = 40;  // the squared rate makes it small
  config.optim.vector.weight_decay = 50;
  config.optim.head.eps = 0.01;
  std::vector<ParameterSpec> specs = table();
  specs[3].decay = false;  // "shift"; "gain" of the same group decays
  Instance<TypeParam> run(config, specs);
  // Where gradients cancel in m, rounding would decide whether a weight decays: each element's keep their sign.
  const auto gradient_of = [&](int p, int step) {
    Values gradient = run.gradient_of(p, step);
    const Values signs = run.gradient_of(p, 0);
    for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = std::copysign(gradient[i], signs[i]);
    return gradient;
  };
  std::map<int, PlainCautiousAdam> plain;
  std::map<int, Values> weights, sums;
  for (int p = 0; p < run.parameters.size(); ++p) weights[p] = run.weight(p);
  for (int step = 0; step < 7; ++step) {
    for (int p = 0; p < run.parameters.size(); ++p) {
      const Values gradient = gradient_of(p, step);
      sums[p].resize(gradient.size());
      for (size_t i = 0; i < gradient.size(); ++i) {
        run.parameters.grad(p)[i] += static_cast<Acc<TypeParam>>(gradient[i]);
        sums[p][i] += gradient[i];
      }
    }
    run.update(step);
    const double factor = lr_factor(run.config.schedule, step);
    for (int p = 0; p < run.parameters.size(); ++p) {
      const ParameterSpec& spec = run.parameters.spec(p);
      const Config::Group& group = group_of(run.config, spec);
      if (group.every == 2 && step % 2 == 0) continue;
      plain[p].update(weights[p], sums[p], group, group.lr * group.lr_multiplier * factor,
                      spec.decay ? group.weight_decay * group.weight_decay_multiplier : 0);
      EXPECT_LT(distance(run.weight(p), weights[p]), this->kTolerance) << spec.name << " after step " << step;
      EXPECT_LT(distance(run.state("adam.m/" + spec.name), plain[p].m), this->kTolerance) << spec.name << " step " << step;
      EXPECT_LT(distance(run.state("adam.v/" + spec.name), plain[p].v), this->kTolerance) << spec.name << " step " << step;
      sums[p].assign(sums[p].size(), 0);
    }
  }
}

TYPED_TEST(OptimizerOf, NorMuonFollowsItsFormulaInTwoGroupsOfOneBatch) {
  Config config = config_of(OptimizerKind::normuon);
  config.optim.matrix.lr_multiplier = 1;
  config.optim.matrix.weight_decay = 1.2;
  config.optim.down = config.optim.matrix;
  config.optim.down.lr_multiplier = 2;
  config.optim.muon.norm_margin = 1.02;
  config.optim.muon.eps = 1e-6;
  std::vector<ParameterSpec> specs = table();
  ParameterSpec twin = specs[5];  // "up", in the other group and thus twice as fast
  twin.name = "twin";
  twin.group = ParameterGroup::down;
  specs.push_back(twin);
  specs[4].decay = false;  // "out" shares its batch with "qkv"
  Instance<TypeParam> run(config, specs);
  std::map<std::pair<int, int>, PlainNorMuon> plain;
  std::map<int, Values> weights;
  for (int p = 0; p < run.parameters.size(); ++p) weights[p] = run.weight(p);
  for (int step = 0; step < 5; ++step) {
    run.add_gradient(step);
    run.update(step);
    for (const char* name : {"qkv", "out", "up", "down", "twin"}) {
      const int p = run.parameters.index(name);
      const ParameterSpec& spec = run.parameters.spec(p);
      const Config::Group& group = group_of(config, spec);
      const int rows = static_cast<int>(spec.shape[0]) / spec.matrices, cols = static_cast<int>(spec.shape[1]);
      const std::ptrdiff_t size = rows * cols;
      const Values gradient = run.gradient_of(p, step);
      Values seconds;
      for (int part = 0; part < spec.matrices; ++part) {
        Values weight(weights[p].begin() + part * size, weights[p].begin() + (part + 1) * size);
        const Values its_gradient(gradient.begin() + part * size, gradient.begin() + (part + 1) * size);
        PlainNorMuon& matrix = plain[{p, part}];
        matrix.update(weight, its_gradient, rows, cols, config.optim.muon, muon_momentum(config, step),
                      group.lr * lr_factor(config.schedule, step), group.lr_multiplier, spec.decay ? group.weight_decay : 0);
        std::copy(weight.begin(), weight.end(), weights[p].begin() + part * size);
        seconds.insert(seconds.end(), matrix.second.begin(), matrix.second.end());
      }
      EXPECT_LT(distance(run.weight(p), weights[p]), 10 * this->kTolerance) << name << " after step " << step;
      EXPECT_LT(distance(run.state("normuon.second/" + spec.name), seconds), 10 * this->kTolerance)
          << name << " after step " << step;
      EXPECT_EQ(run.grad(p), Values(gradient.size(), 0)) << name;
    }
  }
}

TYPED_TEST(OptimizerOf, MuonFollowsItsFormulaOnEveryMatrixOfATensor) {
  for (const bool nesterov : {true, false}) {
    Config config = config_of(OptimizerKind::muon);
    config.optim.muon.nesterov = nesterov;
    config.optim.muon.norm_margin = 1.02;
    config.optim.muon.coefficients = {{2.5, -2.2, 0.7}, {1.875, -1.25, 0.375}};  // the last row serves the other three iterations
    Instance<TypeParam> run(config);
    std::map<std::pair<int, int>, PlainMuon> plain;
    std::map<int, Values> weights;
    for (int p = 0; p < run.parameters.size(); ++p) weights[p] = run.weight(p);
    for (int step = 0; step < 5; ++step) {
      run.add_gradient(step);
      run.update(step);
      for (const char* name : {"qkv", "out", "up", "down"}) {
        const int p = run.parameters.index(name);
        const ParameterSpec& spec = run.parameters.spec(p);
        const int rows = static_cast<int>(spec.shape[0]) / spec.matrices, cols = static_cast<int>(spec.shape[1]);
        const std::ptrdiff_t size = rows * cols;
        const Values gradient = run.gradient_of(p, step);
        for (int part = 0; part < spec.matrices; ++part) {
          Values weight(weights[p].begin() + part * size, weights[p].begin() + (part + 1) * size);
          const Values its_gradient(gradient.begin() + part * size, gradient.begin() + (part + 1) * size);
          plain[{p, part}].update(weight, its_gradient, rows, cols, config.optim.muon, muon_momentum(config, step),
                                  config.optim.matrix.lr * lr_factor(config.schedule, step), config.optim.matrix.weight_decay);
          std::copy(weight.begin(), weight.end(), weights[p].begin() + part * size);
        }
        EXPECT_LT(distance(run.weight(p), weights[p]), 10 * this->kTolerance) << name << " after step " << step;
        EXPECT_EQ(run.grad(p), Values(gradient.size(), 0)) << name;
      }
    }
  }
}

TYPED_TEST(OptimizerOf, MuonScalesTallMatricesUp) {
  // One singular value per direction: what Newton-Schulz makes of (rows, cols) and of its transpose is the same, so their steps
  // differ by √(rows/cols) alone.
  Config config = config_of(OptimizerKind::muon);
  config.optim.matrix.weight_decay = 0;
  Instance<TypeParam> run(config);
  const int up = run.parameters.index("up"), down = run.parameters.index("down");
  const Values gradient = run.gradient_of(up, 0), transposed = transpose(gradient, 9, 4);
  std::copy(gradient.begin(), gradient.end(), run.parameters.grad(up));
  std::copy(transposed.begin(), transposed.end(), run.parameters.grad(down));
  const Values up_before = run.weight(up), down_before = run.weight(down);
  run.update(0);
  Values up_step = run.weight(up), down_step = run.weight(down);
  for (size_t i = 0; i < up_step.size(); ++i) {
    up_step[i] -= up_before[i];
    down_step[i] = (down_step[i] - down_before[i]) * 1.5;  // √(9/4)
  }
  EXPECT_LT(distance(up_step, transpose(down_step, 4, 9)), 1e-4);
}

TYPED_TEST(OptimizerOf, ClippingScalesTheWholeGradientToTheLimit) {
  Config config = config_of(OptimizerKind::adamw);
  config.optim.head.every = 1;
  Instance<TypeParam> free(config);
  free.add_gradient(0);
  double squares = 0;
  for (int p = 0; p < free.parameters.size(); ++p) {
    for (const double g : free.gradient_of(p, 0)) squares += g * g;
  }
  free.update(0);
  EXPECT_NEAR(free.verdict->grad_norm, std::sqrt(squares), 1e-5 * std::sqrt(squares));
  EXPECT_EQ(free.verdict->grad_scale, 1.0f);

  config.train.grad_clip = std::sqrt(squares) / 2;
  Instance<TypeParam> clipped(config);
  clipped.add_gradient(0);
  clipped.update(0);
  EXPECT_NEAR(clipped.verdict->grad_norm, std::sqrt(squares), 1e-5 * std::sqrt(squares));
  EXPECT_NEAR(clipped.verdict->grad_scale, 0.5, 1e-6);
  for (int p = 0; p < free.parameters.size(); ++p) {
    const std::string& name = free.parameters.spec(p).name;
    Values half = free.state("adam.m/" + name), quarter = free.state("adam.v/" + name);
    for (double& m : half) m *= 0.5;
    for (double& v : quarter) v *= 0.25;
    EXPECT_LT(distance(clipped.state("adam.m/" + name), half), 1e-6) << name;
    EXPECT_LT(distance(clipped.state("adam.v/" + name), quarter), 1e-6) << name;
  }

  config.train.grad_clip = std::sqrt(squares) * 1.01;
  Instance<TypeParam> loose(config);
  loose.add_gradient(0);
  loose.update(0);
  for (int p = 0; p < free.parameters.size(); ++p)
    EXPECT_EQ(loose.weight(p), free.weight(p)) << "a norm below the limit was scaled";
}

TYPED_TEST(OptimizerOf, AGradientThatIsNotFiniteLeavesEverythingAndNamesItsParameter) {
  using Number = Acc<TypeParam>;
  for (const Number bad : {std::numeric_limits<Number>::quiet_NaN(), -std::numeric_limits<Number>::infinity()}) {
    Instance<TypeParam> run(config_of(OptimizerKind::muon));
    for (int step = 0; step < 2; ++step) {
      run.add_gradient(step);
      run.update(step);
    }
    std::vector<Values> before;
    const auto everything = [&] {
      std::vector<Values> all;
      for (int p = 0; p < run.parameters.size(); ++p) all.push_back(run.weight(p));
      for (const StateTensor& tensor : run.optimizer.state()) {
        if (!tensor.name.starts_with("grad/")) all.push_back(run.state(tensor.name));
      }
      return all;
    };
    before = everything();
    run.add_gradient(2);
    const int shift = run.parameters.index("shift");
    run.parameters.grad(shift)[2] = bad;
    run.update(2);
    EXPECT_NE(run.verdict->skip, 0u);
    EXPECT_EQ(run.verdict->bad_parameter, shift);
    EXPECT_EQ(everything(), before);
    // Once bad, always bad: the host notices later, and the steps in between must not train on.
    run.add_gradient(3);
    run.update(3);
    EXPECT_EQ(run.verdict->bad_parameter, shift);
    EXPECT_EQ(everything(), before);
  }
}

TYPED_TEST(OptimizerOf, ALossThatIsNotFiniteLeavesEverything) {
  Instance<TypeParam> run(config_of(OptimizerKind::adamw));
  run.add_gradient(0);
  run.verdict->loss_sum = std::numeric_limits<double>::quiet_NaN();
  const Values before = run.weight(0);
  run.update(0);
  EXPECT_NE(run.verdict->skip, 0u);
  EXPECT_EQ(run.verdict->bad_parameter, -1);
  EXPECT_EQ(run.weight(0), before);
}

TYPED_TEST(OptimizerOf, StateListsEveryTensorOnceAndResetZeroesIt) {
  Instance<TypeParam> run(config_of(OptimizerKind::muon));
  for (int step = 0; step < 3; ++step) {  // step 2 leaves gradients of the head behind
    run.add_gradient(step);
    run.update(step);
  }
  std::map<std::string, int64_t> listed;
  for (const StateTensor& tensor : run.optimizer.state()) {
    EXPECT_TRUE(listed.emplace(tensor.name, tensor.count).second) << tensor.name << " twice";
    EXPECT_EQ(tensor.dtype, DTypeOf<Acc<TypeParam>>::value) << tensor.name;
    const Values values = run.state(tensor.name);
    EXPECT_TRUE(std::any_of(values.begin(), values.end(), [](double x) { return x != 0; })) << tensor.name << " is all zero";
  }
  const std::map<std::string, int64_t> expected = {{"adam.m/wte", 30},        {"adam.v/wte", 30},       {"adam.m/gain", 7},
                                                   {"adam.v/gain", 7},        {"adam.m/shift", 3},      {"adam.v/shift", 3},
                                                   {"adam.m/head", 30},       {"adam.v/head", 30},      {"muon.momentum/qkv", 72},
                                                   {"muon.momentum/out", 24}, {"muon.momentum/up", 36}, {"muon.momentum/down", 36},
                                                   {"grad/head", 30}};
  EXPECT_EQ(listed, expected);

  run.add_gradient(3);
  const Values weight = run.weight(2);
  run.optimizer.reset_state();
  EXPECT_EQ(run.weight(2), weight) << "a reset is no business of the weights";
  for (const StateTensor& tensor : run.optimizer.state())
    EXPECT_EQ(run.state(tensor.name), Values(static_cast<size_t>(tensor.count), 0)) << tensor.name;
  for (int p = 0; p < run.parameters.size(); ++p)
    EXPECT_EQ(run.grad(p), Values(static_cast<size_t>(run.parameters.spec(p).count()), 0)) << run.parameters.spec(p).name;
}

TYPED_TEST(OptimizerOf, NorMuonsStateHasAStatisticPerLineOfEveryMatrix) {
  Instance<TypeParam> run(config_of(OptimizerKind::normuon));
  std::map<std::string, int64_t> listed;
  for (const StateTensor& tensor : run.optimizer.state()) listed.emplace(tensor.name, tensor.count);
  EXPECT_EQ(listed.at("normuon.second/qkv"), 18) << "three matrices of 4 x 6: one per column";
  EXPECT_EQ(listed.at("normuon.second/out"), 6);
  EXPECT_EQ(listed.at("normuon.second/up"), 9) << "9 x 4: one per row";
  EXPECT_EQ(listed.at("normuon.second/down"), 9);
  EXPECT_EQ(listed.at("muon.momentum/qkv"), 72);
  EXPECT_EQ(listed.count("adam.m/qkv"), 0u);
}

// Embedding and head as one matrix until the split, every second step, as in the Main Track.
std::vector<ParameterSpec> tied_table() {
  std::vector<ParameterSpec> specs;
  for (const auto& [name, group] : {std::pair{"wte", ParameterGroup::embedding}, {"head.weight", ParameterGroup::head}}) {
    ParameterSpec row;
    row.name = name;
    row.shape = {5, 6};
    row.group = group;
    specs.push_back(row);
  }
  return specs;
}

Config tied_config() {
  Config config;
  config.schedule.steps = 20;
  config.schedule.split_step = 7;
  config.model.tied_until_split = true;
  config.optim.head = {.optimizer = OptimizerKind::adam, .lr = 0.01, .beta1 = 0.5, .beta2 = 0.95, .weight_decay = 5, .every = 2};
  config.optim.embedding = config.optim.head;
  return config;
}

TYPED_TEST(OptimizerOf, TiedEmbeddingWaitsForTheSplitAndGoesOnFromTheHead) {
  Instance<TypeParam> run(tied_config(), tied_table());
  const Values before = run.weight(0);
  for (int step = 0; step <= 7; ++step) {
    for (int64_t i = 0; i < 30; ++i)
      run.parameters.grad(1)[i] += static_cast<Acc<TypeParam>>(run.gradient_of(1, step)[static_cast<size_t>(i)]);
    run.update(step);
    const StepValues values = schedule_at(run.config, step);
    EXPECT_TRUE(values.tied);
    EXPECT_EQ(values.split, step == 7);
    EXPECT_EQ(run.weight(0), before) << "a tied embedding moved in step " << step;
    EXPECT_EQ(run.state("adam.m/wte"), Values(30, 0));
  }
  run.optimizer.split_embedding();
  EXPECT_EQ(run.weight(0), run.weight(1));
  EXPECT_EQ(run.state("adam.m/wte"), run.state("adam.m/head.weight"));
  EXPECT_EQ(run.state("adam.v/wte"), run.state("adam.v/head.weight"));
  EXPECT_NE(run.state("adam.v/wte"), Values(30, 0));

  // With the same gradients and rates the two stay the same from there on: Adam counts the same updates for both.
  for (int step = 8; step < 12; ++step) {
    for (const int p : {0, 1}) {
      for (int64_t i = 0; i < 30; ++i)
        run.parameters.grad(p)[i] += static_cast<Acc<TypeParam>>(run.gradient_of(1, step)[static_cast<size_t>(i)]);
    }
    const Values last = run.weight(0);
    run.update(step);
    EXPECT_EQ(run.weight(0) == last, step % 2 == 0) << "step " << step;
    EXPECT_EQ(run.weight(0), run.weight(1)) << "step " << step;
  }
}

TEST(Optimizer, SplittingWithoutAHeadIsRefusedByName) {
  Instance<float> run(config_of(OptimizerKind::adamw));
  try {
    run.optimizer.split_embedding();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("head.weight"), std::string::npos) << error.what();
  }
}

TYPED_TEST(OptimizerOf, StateCopiedToAnotherRunGoesOnWithTheSameBits) {
  Instance<TypeParam> whole(config_of(OptimizerKind::muon)), resumed(config_of(OptimizerKind::muon));
  for (int step = 0; step < 3; ++step) {
    whole.add_gradient(step);
    whole.update(step);
  }
  for (int p = 0; p < whole.parameters.size(); ++p)
    resumed.parameters.write_master(*resumed.device, p, whole.parameters.read_master(*whole.device, p));
  const auto from = whole.optimizer.state(), to = resumed.optimizer.state();
  ASSERT_EQ(from.size(), to.size());
  for (size_t i = 0; i < from.size(); ++i)
    resumed.device->copy(to[i].data, from[i].data, static_cast<size_t>(from[i].count) * dtype_size(from[i].dtype));
  for (int step = 3; step < 6; ++step) {
    for (Instance<TypeParam>* run : {&whole, &resumed}) {
      run->add_gradient(step);
      run->update(step);
    }
  }
  for (int p = 0; p < whole.parameters.size(); ++p)
    EXPECT_EQ(whole.parameters.read_master(*whole.device, p), resumed.parameters.read_master(*resumed.device, p)) << p;
}

TEST(Optimizer, MuonOnAVectorIsRefusedByName) {
  Config config = config_of(OptimizerKind::adamw);
  config.optim.vector.optimizer = OptimizerKind::muon;
  try {
    Instance<float> run(config);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("gain"), std::string::npos) << error.what();
  }
}

TEST(Optimizer, GradScaleFollowsTheReduction) {
  Config config;
  config.train.batch_tokens = 4096;
  config.train.reduction = ReductionKind::mean;
  EXPECT_EQ(Optimizer<float>::inputs_of(config, schedule_at(config, 0), 0).grad_scale, 1.0f / 4096);
  config.train.reduction = ReductionKind::sum;
  EXPECT_EQ(Optimizer<float>::inputs_of(config, schedule_at(config, 0), 0).grad_scale, 1.0f);
  config.train.reduction = ReductionKind::row_mean;
  config.train.seq_len = 512;
  EXPECT_EQ(Optimizer<float>::inputs_of(config, schedule_at(config, 0), 0).grad_scale, 1.0f / 8) << "8 rows of 512";
  config.data.reader = ReaderKind::documents;
  config.data.document_rows = 4;
  EXPECT_EQ(Optimizer<float>::inputs_of(config, schedule_at(config, 0), 0).grad_scale, 1.0f / 4);
}

TEST(Optimizer, LossWeightsFollowTheStage) {
  Config config;
  config.schedule.stages[0] = {.steps = 10, .mtp_start = {1, 0.5, 0.25}, .mtp_end = {1, 0.5, 0}, .prefix_start = 0.25};
  config.schedule.stages[1] = {.steps = 10};
  const auto weights = [&](int step) { return Optimizer<float>::inputs_of(config, schedule_at(config, step), step).loss_weights; };
  EXPECT_EQ(weights(0).next[2], 0.25f);
  EXPECT_NEAR(weights(4).next[2], 0.15, 1e-6);
  EXPECT_EQ(weights(4).next[1], 0.5f);
  EXPECT_NEAR(weights(4).prefix, 0.15, 1e-6);
  EXPECT_EQ(weights(10).next[0], 1.0f);
  EXPECT_EQ(weights(10).next[1], 0.0f);
  EXPECT_EQ(weights(10).prefix, 0.0f);
}

TEST(Optimizer, TheMaskHasTheGroupsThatAreDue) {
  Config config;
  config.optim.head.every = 2;
  config.optim.embedding.every = 3;
  const auto mask = [&](int step) { return Optimizer<float>::update_mask(schedule_at(config, step)); };
  const uint32_t embedding = 1u << static_cast<int>(ParameterGroup::embedding), head = 1u << static_cast<int>(ParameterGroup::head);
  const uint32_t all = (1u << kNumParameterGroups) - 1;
  EXPECT_EQ(mask(0), all & ~embedding & ~head);
  EXPECT_EQ(mask(1), all & ~embedding);
  EXPECT_EQ(mask(2), all & ~head);
  EXPECT_EQ(mask(5), all);
}

}  // namespace
}  // namespace speedrun

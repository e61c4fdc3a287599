// Weight extrapolation on a GPU against that on the CPU, in lockstep: masters of every form, snapshots in device and in host
// memory, read-outs, state that is copied in and out, first moments.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "src/core/random.h"
#include "src/optim/extrapolation.h"
#include "src/optim/optimizer.h"
#include "src/optim/test_extrapolation.h"

namespace speedrun {
namespace {

using kernels::MasterSplit;
using Masters = std::vector<std::vector<float>>;  // by parameter

std::vector<ParameterSpec> table() {
  std::vector<ParameterSpec> specs;
  const auto add = [&](const char* name, std::vector<int64_t> shape, ParameterGroup group, MasterSplit split) {
    specs.push_back({.name = name, .shape = std::move(shape), .group = group, .split = split});
  };
  add("h.0.qkv", {192, 65}, ParameterGroup::matrix, MasterSplit::nearest);
  add("gain", {37}, ParameterGroup::vector, MasterSplit::nearest);
  add("h.0.up", {640, 128}, ParameterGroup::matrix, MasterSplit::truncated);
  add("h.0.down", {33, 7}, ParameterGroup::down, MasterSplit::none);
  return specs;
}

// On its device, with masters that the test moves.
template <class T>
struct Instance {
  Instance(const Config& config, std::unique_ptr<Device> on)
      : device(std::move(on)),
        parameters(table()),
        extrapolation(config, *device, parameters, nullptr),
        optimizer(config, *device, parameters) {
    MemoryPlan plan;
    parameters.plan(plan);
    extrapolation.plan(plan);
    optimizer.plan(plan);
    plan.add("step", &verdict, 1);
    arena = std::make_unique<Arena>(*device, plan);
    const kernels::StepVerdict none;
    device->copy_in(verdict, &none, sizeof none);
    extrapolation.prepare(verdict);
    extrapolation.warm_up();
    report = HostBuffer<kernels::JumpReport>(*device, 1);
  }
  Masters read() {
    Masters masters;
    for (int p = 0; p < parameters.size(); ++p) masters.push_back(parameters.read_master(*device, p));
    return masters;
  }
  void write(const Masters& masters) {
    for (int p = 0; p < parameters.size(); ++p) parameters.write_master(*device, p, masters[static_cast<size_t>(p)]);
  }
  bool after_update(int n) {
    const bool jumped = extrapolation.after_update(n, report.data());
    device->synchronize();
    return jumped;
  }

  std::unique_ptr<Device> device;
  Parameters<T> parameters;
  Extrapolation<T> extrapolation;
  Optimizer<T> optimizer;
  std::unique_ptr<Arena> arena;
  kernels::StepVerdict* verdict = nullptr;
  HostBuffer<kernels::JumpReport> report;
};

Masters moved(Masters masters, int n) {
  for (size_t p = 0; p < masters.size(); ++p) {
    for (size_t i = 0; i < masters[p].size(); ++i) {
      const auto index = static_cast<uint64_t>(i);
      masters[p][i] =
          n == 0 ? static_cast<float>(random_normal(1, p, index))
                 : masters[p][i] * 0.97f + 0.01f * static_cast<float>(random_normal(10 + static_cast<uint64_t>(n), p, index));
    }
  }
  return masters;
}

double largest_difference(const Masters& a, const Masters& b) {
  double largest = 0;
  for (size_t p = 0; p < a.size(); ++p) {
    for (size_t i = 0; i < a[p].size(); ++i) {
      const double difference = std::abs(double{a[p][i]} - double{b[p][i]});
      largest = std::max(largest, std::isfinite(difference) ? difference : INFINITY);
    }
  }
  return largest;
}

std::vector<std::byte> bytes_of(Device& device, const StateTensor& tensor) {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.count) * dtype_size(tensor.dtype));
  device.copy_out(bytes.data(), tensor.data, bytes.size());
  device.synchronize();
  return bytes;
}

class ExtrapolationOnCuda : public ::testing::TestWithParam<bool> {  // in host memory?
 protected:
  void SetUp() override {
    std::string why;
    if (!cuda_available(&why)) GTEST_SKIP() << "NO GPU: this test checks nothing here (" << why << ")";
  }
  Config config(ExtrapolationKind method, ExtrapolationApply apply) const {
    Config config = config_of(method);
    config.extrapolation.apply = apply;
    config.extrapolation.stop = 20;
    config.extrapolation.blend = 0.6;
    config.extrapolation.max_jump = 0.01;
    config.extrapolation.host_memory = GetParam();
    return config;
  }
  // Of weights of order 1; a value of BF16 alone may round to its neighbour.
  static constexpr double kTolerance = 1e-6, kBf16Step = 0x1p-6;
  static void expect_same(const Masters& cuda, const Masters& cpu, const std::string& at) {
    Masters exact[2] = {cuda, cpu};
    EXPECT_LE(largest_difference({cuda.back()}, {cpu.back()}), kBf16Step) << at;
    for (Masters& masters : exact) masters.pop_back();
    EXPECT_LE(largest_difference(exact[0], exact[1]), kTolerance) << at;
  }
};

TEST_P(ExtrapolationOnCuda, JumpsLikeTheCpu) {
  for (const auto method :
       {ExtrapolationKind::rre, ExtrapolationKind::rre_suffix, ExtrapolationKind::mpe, ExtrapolationKind::anderson,
        ExtrapolationKind::linear, ExtrapolationKind::ema, ExtrapolationKind::average}) {
    const Config keys = config(method, ExtrapolationApply::weights);
    Instance<bf16> cuda(keys, make_cuda_device(0));
    Instance<float> cpu(keys, make_cpu_device(2, true));
    Masters masters = cuda.read();
    int jumps = 0;
    for (int n = 0; n <= 20; ++n) {
      cuda.write(moved(masters, n));
      masters = cuda.read();  // with BF16 alone rounded
      cpu.write(masters);
      const std::string at = "method " + std::to_string(static_cast<int>(method)) + ", n " + std::to_string(n);
      const bool jumped = cuda.after_update(n);
      ASSERT_EQ(jumped, cpu.after_update(n)) << at;
      const Masters after = cuda.read();
      expect_same(after, cpu.read(), at);
      if (!jumped) {
        EXPECT_TRUE(after == masters) << at;
      } else {
        ++jumps;
        EXPECT_EQ(cuda.report[0].refusal, kernels::JumpRefusal::none) << at;
        EXPECT_NEAR(cuda.report[0].jump / cpu.report[0].jump, 1, 1e-5) << at;
        EXPECT_GT(largest_difference(after, masters), 100 * kTolerance) << at;
        EXPECT_TRUE(after[1] == masters[1]) << at << ": the vector takes no part";
      }
      masters = after;
    }
    EXPECT_GE(jumps, 1);
  }
}

TEST_P(ExtrapolationOnCuda, AReadOutLeavesTheBits) {
  for (const auto method : {ExtrapolationKind::rre_suffix, ExtrapolationKind::ema}) {
    Instance<bf16> run(config(method, ExtrapolationApply::readout), make_cuda_device(0));
    Masters masters = run.read();
    int seen = 0;
    for (int n = 0; n <= 20; ++n) {
      run.write(moved(masters, n));
      masters = run.read();
      run.after_update(n);
      kernels::JumpReport report;
      if (!run.extrapolation.begin_readout(n, &report)) continue;
      ++seen;
      EXPECT_EQ(report.refusal, kernels::JumpRefusal::none);
      EXPECT_GT(report.jump, 0);
      EXPECT_FALSE(run.read() == masters) << n;
      run.extrapolation.end_readout();
      EXPECT_TRUE(run.read() == masters) << n;
    }
    EXPECT_GE(seen, 4);
  }
}

// As a checkpoint does it, wherever the snapshots are.
TEST_P(ExtrapolationOnCuda, StateInAnotherInstanceGoesOnWithTheSameBits) {
  const Config keys = config(ExtrapolationKind::rre, ExtrapolationApply::weights);
  Instance<bf16> first(keys, make_cuda_device(0)), second(keys, make_cuda_device(0));
  Masters masters = first.read();
  for (int n = 0; n <= 8; ++n) {
    first.write(moved(masters, n));
    first.after_update(n);
    masters = first.read();
  }
  second.write(masters);
  const std::vector<StateTensor> from = first.extrapolation.state(), to = second.extrapolation.state();
  ASSERT_EQ(from.size(), 4u * 3) << "four snapshots, three matrices";
  for (size_t i = 0; i < from.size(); ++i) {
    const std::vector<std::byte> bytes = bytes_of(*first.device, from[i]);
    second.device->copy_in(to[i].data, bytes.data(), bytes.size());
    EXPECT_EQ(bytes_of(*second.device, to[i]), bytes) << to[i].name;
  }
  for (int n = 9; n <= 10; ++n) {
    masters = moved(masters, n);
    first.write(masters);
    second.write(masters);
    masters = first.read();
    EXPECT_EQ(first.after_update(n), n == 10);
    EXPECT_EQ(second.after_update(n), n == 10);
  }
  EXPECT_TRUE(second.read() == first.read());
  EXPECT_FALSE(second.read() == masters);
}

TEST_P(ExtrapolationOnCuda, MomentumIsResetByAJumpAndNotByARefusal) {
  Config keys = config(ExtrapolationKind::rre, ExtrapolationApply::weights);
  keys.optim.matrix.optimizer = OptimizerKind::adamw;
  keys.optim.matrix.state = StateDType::bf16;
  Instance<bf16> run(keys, make_cuda_device(0));
  const auto zeroed_after = [&] {
    for (const StateTensor& tensor : run.optimizer.state()) {
      const std::vector<std::byte> ones(static_cast<size_t>(tensor.count) * dtype_size(tensor.dtype), std::byte{0x3f});
      run.device->copy_in(tensor.data, ones.data(), ones.size());
      run.device->synchronize();
    }
    run.optimizer.reset_momentum(run.extrapolation.parameters(), run.extrapolation.last_report());
    std::set<std::string> zeroed;
    for (const StateTensor& tensor : run.optimizer.state()) {
      const std::vector<std::byte> bytes = bytes_of(*run.device, tensor);
      const auto zeros = static_cast<size_t>(std::count(bytes.begin(), bytes.end(), std::byte{0}));
      EXPECT_TRUE(zeros == 0 || zeros == bytes.size()) << tensor.name << ": " << zeros << " of " << bytes.size() << " bytes";
      if (zeros > 0) zeroed.insert(tensor.name);
    }
    return zeroed;
  };
  EXPECT_TRUE(zeroed_after().empty()) << "the jump of the warm-up was refused: nothing had moved";
  Masters masters = run.read();
  for (int n = 0; n <= 5; ++n) {
    run.write(masters = moved(masters, n));
    run.after_update(n);
  }
  EXPECT_EQ(run.report[0].refusal, kernels::JumpRefusal::none);
  EXPECT_EQ(zeroed_after(), (std::set<std::string>{"adam.m/h.0.qkv", "adam.m/h.0.up", "muon.momentum/h.0.down"}));
}

INSTANTIATE_TEST_SUITE_P(Memory, ExtrapolationOnCuda, ::testing::Bool(),
                         [](const auto& test) { return std::string(test.param ? "host" : "device"); });

}  // namespace
}  // namespace speedrun

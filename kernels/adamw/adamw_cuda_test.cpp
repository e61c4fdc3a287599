// CUDA AdamW against the reference over several steps, for every kind of master and state.
#include "kernels/adamw/adamw.h"

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::Ulp;
using testing::within_rule;

constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8;
constexpr int kSteps = 5;

AdamStep step_values(int step) {
  return {.lr = 0.01f / static_cast<float>(step),
          .decay = 0.001f,
          .correction1 = static_cast<float>(1 - std::pow(kBeta1, step)),
          .correction2 = static_cast<float>(1 - std::pow(kBeta2, step))};
}

// The FP32 masters of a weight.
std::vector<float> join(const std::vector<bf16>& value, const std::vector<uint16_t>& low, MasterSplit split) {
  std::vector<float> masters(value.size());
  for (size_t i = 0; i < value.size(); ++i)
    masters[i] = join_master(value[i], split == MasterSplit::none ? uint16_t{0} : low[i], split);
  return masters;
}

struct Form {
  AdamForm form = AdamForm::adamw;
  bool decays = true;
};

template <class T>
struct State {
  std::vector<T> weight, m, v;
};

class AdamWCudaTest : public CudaTest {
 protected:
  template <class T>
  State<T> reference(const std::vector<float>& masters, const std::vector<std::vector<float>>& grads, MasterSplit split,
                     bool bf16_state, float grad_scale, Form form, const HostExec& exec) {
    const size_t n = masters.size();
    State<T> state{.weight = {masters.begin(), masters.end()}, .m = std::vector<T>(n), .v = std::vector<T>(n)};
    const StepVerdict verdict{.grad_scale = grad_scale};
    for (int step = 1; step <= kSteps; ++step) {
      const std::vector<float>& floats = grads[static_cast<size_t>(step - 1)];
      const std::vector<T> grad(floats.begin(), floats.end());
      const AdamStep values = step_values(step);
      adamw_update(AdamW<T>{.weight = {.value = state.weight.data(), .low = nullptr, .split = split},
                            .m = state.m.data(),
                            .v = state.v.data(),
                            .bf16_state = bf16_state,
                            .grad = grad.data(),
                            .step = &values,
                            .verdict = &verdict,
                            .n = static_cast<int64_t>(n),
                            .beta1 = kBeta1,
                            .beta2 = kBeta2,
                            .eps = kEps,
                            .form = form.form,
                            .decays = form.decays},
                   exec);
    }
    return state;
  }

  struct Device {
    std::vector<bf16> value;
    std::vector<uint16_t> low;
    std::vector<float> m, v;
  };

  // S: bf16 or float state. skip_from: the verdict says skip from that step on.
  template <class S>
  Device device(const std::vector<float>& masters, const std::vector<std::vector<float>>& grads, MasterSplit split,
                float grad_scale, Form form, Launch launch, int skip_from = kSteps + 1) {
    const int64_t n = static_cast<int64_t>(masters.size());
    std::vector<bf16> values(masters.size());
    std::vector<uint16_t> lows(masters.size());
    for (size_t i = 0; i < masters.size(); ++i) split_master(masters[i], split, values[i], lows[i]);
    auto value = uploaded("weight", values);
    auto low = uploaded("weight's low half", lows);
    auto m = poisoned<S>("m", n), v = poisoned<S>("v", n);
    m.zero();
    v.zero();
    auto grad = poisoned<float>("grad", n);
    auto step_device = poisoned<AdamStep>("step", 1);
    auto verdict = poisoned<StepVerdict>("verdict", 1);
    for (int step = 1; step <= kSteps; ++step) {
      grad.upload(grads[static_cast<size_t>(step - 1)]);
      step_device.upload({step_values(step)});
      verdict.upload({StepVerdict{.skip = step >= skip_from ? 1u : 0u, .grad_scale = grad_scale}});
      run(launch, [&] {
        adamw_update(
            AdamW<bf16>{.weight = {.value = value.get(), .low = split == MasterSplit::none ? nullptr : low.get(), .split = split},
                        .m = m.get(),
                        .v = v.get(),
                        .bf16_state = std::is_same_v<S, bf16>,
                        .grad = grad.get(),
                        .step = step_device.get(),
                        .verdict = verdict.get(),
                        .n = n,
                        .beta1 = kBeta1,
                        .beta2 = kBeta2,
                        .eps = kEps,
                        .form = form.form,
                        .decays = form.decays},
            exec());
      });
    }
    Device result{.value = value.download(), .low = low.download(), .m = {}, .v = {}};
    for (const S x : m.download()) result.m.push_back(static_cast<float>(x));
    for (const S x : v.download()) result.v.push_back(static_cast<float>(x));
    return result;
  }

  template <class S>
  void check(int64_t n, MasterSplit split, Form form = {}) {
    const bool bf16_state = std::is_same_v<S, bf16>;
    SCOPED_TRACE("n=" + std::to_string(n) + " split=" + std::to_string(static_cast<int>(split)) +
                 " bf16_state=" + std::to_string(bf16_state) + " form=" + std::to_string(static_cast<int>(form.form)) +
                 " decays=" + std::to_string(form.decays));
    testing::Random random = testing::test_random();
    std::vector<float> masters = random.normal_vector<float>(n, 0.02);
    if (split == MasterSplit::none) {
      for (float& master : masters) master = static_cast<float>(bf16(master));
    }
    std::vector<std::vector<float>> grads;
    for (int step = 0; step < kSteps; ++step) grads.push_back(random.normal_vector<float>(n, 0.001));
    // Cautious: where an element's gradients cancel in m, rounding would decide whether it decays.
    for (auto& grad : grads) {
      for (size_t i = 0; i < grad.size() && form.form == AdamForm::cautious; ++i) grad[i] = std::copysign(grad[i], grads[0][i]);
    }
    if (n > 1) grads[0][1] = grads[1][1] = 0;  // m = v = 0: only decay, and no 0/0
    const float grad_scale = 0.37f;

    const Device got = device<S>(masters, grads, split, grad_scale, form, Launch::direct);
    const State<double> truth = reference<double>(masters, grads, split, bf16_state, grad_scale, form, truth_exec());
    const State<float> baseline = reference<float>(masters, grads, split, bf16_state, grad_scale, form, baseline_exec());
    // Among few elements the largest may itself be the rest of a cancellation.
    const Ulp exact = n < 64 ? Ulp::accumulated : Ulp::float32;
    const Ulp state_format = bf16_state ? Ulp::bf16 : exact;
    const Ulp weight_format = split == MasterSplit::none ? Ulp::bf16 : bf16_state ? Ulp::accumulated : exact;
    const std::vector<float> got_masters = join(got.value, got.low, split);
    EXPECT_TRUE(within_rule(got.m, truth.m, baseline.m, state_format)) << "m";
    EXPECT_TRUE(within_rule(got.v, truth.v, baseline.v, state_format)) << "v";
    EXPECT_TRUE(within_rule(got_masters, truth.weight, baseline.weight, weight_format)) << "masters";

    // The weight that products use is the master's rounding of that split.
    for (size_t i = 0; i < got.value.size() && split != MasterSplit::none; ++i) {
      bf16 value;
      uint16_t low;
      split_master(got_masters[i], split, value, low);
      ASSERT_EQ(value.bits, got.value[i].bits) << "element " << i;
      ASSERT_EQ(low, got.low[i]) << "element " << i;
    }

    const Device again = device<S>(masters, grads, split, grad_scale, form, Launch::captured);
    EXPECT_TRUE(same_bits(got.value, again.value)) << "weight, second run";
    EXPECT_TRUE(same_bits(got.low, again.low)) << "low half, second run";
    EXPECT_TRUE(same_bits(got.m, again.m)) << "m, second run";
    EXPECT_TRUE(same_bits(got.v, again.v)) << "v, second run";
  }
};

TEST_F(AdamWCudaTest, EveryMasterAndState) {
  for (const MasterSplit split : {MasterSplit::nearest, MasterSplit::truncated, MasterSplit::none}) {
    for (const int64_t n : {1, 7, 8, 1000, 2049, 70'001}) {
      check<float>(n, split);
      check<bf16>(n, split);
    }
  }
}

TEST_F(AdamWCudaTest, CautiousDecay) {
  for (const MasterSplit split : {MasterSplit::nearest, MasterSplit::truncated, MasterSplit::none}) {
    for (const int64_t n : {1, 7, 1000, 70'001}) {
      check<float>(n, split, {.form = AdamForm::cautious});
      check<bf16>(n, split, {.form = AdamForm::cautious});
    }
  }
}

TEST_F(AdamWCudaTest, ParametersThatNeverDecay) {
  for (const AdamForm form : {AdamForm::adamw, AdamForm::cautious}) check<float>(1003, MasterSplit::none, {form, false});
}

TEST_F(AdamWCudaTest, ProductionSize) { check<float>(3072 * 768, MasterSplit::nearest); }

TEST_F(AdamWCudaTest, SkipLeavesEverythingAsItWas) {
  testing::Random random = testing::test_random();
  const int64_t n = 1003;
  const std::vector<float> masters = random.normal_vector<float>(n, 0.02);
  std::vector<std::vector<float>> grads;
  for (int step = 0; step < kSteps; ++step) grads.push_back(random.normal_vector<float>(n, 0.001));
  const Device untouched = device<float>(masters, grads, MasterSplit::nearest, 1.0f, {}, Launch::direct, 1);
  EXPECT_TRUE(same_bits(join(untouched.value, untouched.low, MasterSplit::nearest), masters));
  EXPECT_EQ(untouched.m, std::vector<float>(static_cast<size_t>(n)));

  // Non-finite gradients behind a set flag reach nothing.
  for (std::vector<float>& grad : grads) grad[5] = std::numeric_limits<float>::quiet_NaN();
  const Device with_nan = device<float>(masters, grads, MasterSplit::nearest, 1.0f, {}, Launch::direct, 1);
  EXPECT_TRUE(same_bits(with_nan.value, untouched.value));
  EXPECT_TRUE(same_bits(with_nan.low, untouched.low));
}

TEST_F(AdamWCudaTest, RefusesAMasterWithoutItsLowHalf) {
  auto memory = poisoned<float>("memory", 64);
  auto weight = poisoned<bf16>("weight", 8);
  auto step = poisoned<AdamStep>("step", 1);
  auto verdict = poisoned<StepVerdict>("verdict", 1);
  EXPECT_THROW(adamw_update(AdamW<bf16>{.weight = {.value = weight.get(), .low = nullptr, .split = MasterSplit::nearest},
                                        .m = memory.get(),
                                        .v = memory.get(),
                                        .bf16_state = false,
                                        .grad = memory.get(),
                                        .step = step.get(),
                                        .verdict = verdict.get(),
                                        .n = 8,
                                        .beta1 = kBeta1,
                                        .beta2 = kBeta2,
                                        .eps = kEps},
                            exec()),
               Error);
}

}  // namespace
}  // namespace speedrun::kernels

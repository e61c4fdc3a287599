#include "kernels/fp8/fp8.h"

#include <cmath>
#include <limits>

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> values(const std::vector<e4m3>& codes) {
  std::vector<float> result;
  for (const e4m3 code : codes) result.push_back(to_float(code));
  return result;
}

struct Quantized {
  std::vector<e4m3> out, out_t;
  Fp8Scale scale;
};

Quantized quantize(const std::vector<float>& inp, int64_t rows, int cols, Fp8Scaling scaling, Fp8Scale scale, bool count = false,
                   const HostExec& exec = {}) {
  Quantized result{std::vector<e4m3>(inp.size(), e4m3{0xff}), std::vector<e4m3>(inp.size(), e4m3{0xff}), scale};
  fp8_quantize(Fp8Quantize<float>{result.out.data(), result.out_t.data(), inp.data(), &result.scale, rows, cols, scaling, count},
               exec);
  return result;
}

TEST(Fp8, StoresTheNearestMultipleOfTheScale) {
  Random random = test_random();
  const int64_t rows = 5;
  const int cols = 7;
  const std::vector<float> inp = random.normal_vector<float>(rows * cols, 3);
  float largest = 0;
  for (const float x : inp) largest = std::max(largest, std::abs(x));
  for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
    const Quantized q = quantize(inp, rows, cols, scaling, {.scale = 0.03125f, .amax = 0});
    const double scale = scaling == Fp8Scaling::current ? largest / 448.0 : 0.03125;
    EXPECT_NEAR(q.scale.scale, scale, 1e-7 * scale);
    EXPECT_EQ(std::bit_cast<float>(q.scale.amax), scaling == Fp8Scaling::fixed ? 0 : largest);
    for (int64_t i = 0; i < rows * cols; ++i) {
      const double stored = to_float(q.out[i]), wanted = inp[i] / scale;
      EXPECT_NEAR(stored, wanted, std::abs(wanted) / 16 + 0x1p-10) << i;  // half of a spacing
      EXPECT_EQ(q.out[i].bits, q.out_t[i % cols * rows + i / cols].bits) << i;
    }
    EXPECT_EQ(q.scale.saturated, 0u);
    EXPECT_EQ(q.scale.flushed, 0u);
  }
}

TEST(Fp8, DelayedRaisesTheMaximumAndNeverLowersIt) {
  EXPECT_EQ(std::bit_cast<float>(quantize({-3, 2}, 1, 2, Fp8Scaling::delayed, {.amax = std::bit_cast<uint32_t>(5.0f)}).scale.amax),
            5);
  EXPECT_EQ(std::bit_cast<float>(quantize({-7, 2}, 1, 2, Fp8Scaling::delayed, {.amax = std::bit_cast<uint32_t>(5.0f)}).scale.amax),
            7);
  EXPECT_EQ(std::bit_cast<float>(quantize({-3, 2}, 1, 2, Fp8Scaling::current, {.amax = std::bit_cast<uint32_t>(5.0f)}).scale.amax),
            3);
}

TEST(Fp8, CountsSaturatedAndFlushed) {
  const std::vector<float> inp{448, 460, -500, kInfinity, 0, -0.0f, 0x1p-10f, -0x1p-10f, 0x1.1p-10f, 1};
  const Quantized q = quantize(inp, 2, 5, Fp8Scaling::fixed, {.scale = 1, .saturated = 10, .flushed = 20}, true);
  EXPECT_EQ(values(q.out), (std::vector<float>{448, 448, -448, 448, 0, -0.0f, 0, -0.0f, 0x1p-9f, 1}));
  EXPECT_EQ(q.scale.saturated, 13u);
  EXPECT_EQ(q.scale.flushed, 22u);
  EXPECT_EQ(quantize(inp, 2, 5, Fp8Scaling::fixed, {.scale = 1}).scale.saturated, 0u);
}

TEST(Fp8, CurrentNeverSaturatesItsOwnMaximum) {
  Random random = test_random();
  for (int i = 0; i < 1000; ++i) {
    const std::vector<float> inp = random.normal_vector<float>(4, std::exp2(random.uniform(-20, 20)));
    const Quantized q = quantize(inp, 1, 4, Fp8Scaling::current, {}, true);
    EXPECT_EQ(q.scale.saturated, 0u) << inp[0];
    float largest = 0;
    for (const e4m3 code : q.out) largest = std::max(largest, std::abs(to_float(code)));
    EXPECT_EQ(largest, 448);
  }
}

TEST(Fp8, ZeroAndTinyInputsAreSafe) {
  const Quantized zero = quantize({0, -0.0f, 0}, 1, 3, Fp8Scaling::current, {});
  EXPECT_GT(zero.scale.scale, 0);
  EXPECT_EQ(values(zero.out), (std::vector<float>{0, -0.0f, 0}));
  const float tiny = std::numeric_limits<float>::denorm_min();
  const Quantized subnormal = quantize({tiny, -tiny, 0}, 1, 3, Fp8Scaling::current, {}, true);
  EXPECT_EQ(values(subnormal.out), (std::vector<float>{0, -0.0f, 0}));  // below 1e−12
  EXPECT_EQ(subnormal.scale.flushed, 2u);
}

TEST(Fp8, NotFiniteInputsAreSeen) {
  const Quantized nan = quantize({1, kNan, 2}, 1, 3, Fp8Scaling::delayed, {.scale = 0.5f});
  EXPECT_TRUE(std::isnan(to_float(nan.out[1])));
  EXPECT_EQ(to_float(nan.out[2]), 4);
  EXPECT_TRUE(std::isnan(std::bit_cast<float>(nan.scale.amax)));
  const Quantized infinite = quantize({1, -kInfinity, 2}, 1, 3, Fp8Scaling::delayed, {.scale = 0.5f});
  EXPECT_EQ(to_float(infinite.out[1]), -448);
  EXPECT_EQ(std::bit_cast<float>(infinite.scale.amax), kInfinity);
  for (const float bad : {kNan, kInfinity}) {
    for (const float x : values(quantize({1, bad, 2}, 1, 3, Fp8Scaling::current, {}).out)) EXPECT_TRUE(std::isnan(x));
  }
}

TEST(Fp8, NextScalesFollowTheMaxima) {
  const auto amax = [](float x) { return std::bit_cast<uint32_t>(x); };
  std::vector<Fp8Scale> scales{{.scale = 7, .amax = amax(3)}, {.scale = 7, .amax = 0}, {.scale = 7, .amax = amax(1e30f)}};
  StepVerdict verdict;
  fp8_next_scales({scales.data(), 3, 1.8, &verdict}, HostExec{});
  EXPECT_FLOAT_EQ(scales[0].scale, 3 * 1.8f / 448);
  EXPECT_FLOAT_EQ(scales[1].scale, 1e-12f * 1.8f / 448);
  EXPECT_FLOAT_EQ(scales[2].scale, 1e30f * 1.8f / 448);
  for (const Fp8Scale& scale : scales) EXPECT_EQ(scale.amax, 0u);
  EXPECT_EQ(verdict.skip, 0u);

  scales = {{.scale = 7, .amax = amax(3)}, {.scale = 7, .amax = amax(kInfinity)}, {.scale = 7, .amax = amax(kNan)}};
  const std::vector<Fp8Scale> before = scales;
  fp8_next_scales({scales.data(), 3, 1.8, &verdict}, HostExec{});
  EXPECT_EQ(verdict.skip, 1u);
  EXPECT_EQ(verdict.bad_parameter, -3);
  EXPECT_EQ(scales[1].scale, 7);
  EXPECT_EQ(scales[2].scale, 7);
  verdict.bad_parameter = 4;  // what is set already stays
  scales = before;
  fp8_next_scales({scales.data(), 3, 1.8, &verdict}, HostExec{});
  EXPECT_EQ(verdict.bad_parameter, 4);
}

// Gradients: the other format, its largest number and its smallest.
TEST(Fp8, GradientsAreStoredAsE5m2) {
  Random random = test_random();
  const int64_t rows = 6;
  const int cols = 5;
  const std::vector<float> inp = random.normal_vector<float>(rows * cols, 1e-4);
  float largest = 0;
  for (const float x : inp) largest = std::max(largest, std::abs(x));
  for (const Fp8Scaling scaling : {Fp8Scaling::current, Fp8Scaling::delayed}) {
    std::vector<e5m2> out(inp.size(), e5m2{0xff}), out_t(inp.size(), e5m2{0xff}), only_t(inp.size(), e5m2{0xff});
    Fp8Scale scale{.scale = 0x1p-26f}, again = scale;
    fp8_quantize(Fp8Quantize<float, e5m2>{out.data(), out_t.data(), inp.data(), &scale, rows, cols, scaling, true}, HostExec{});
    fp8_quantize(Fp8Quantize<float, e5m2>{nullptr, only_t.data(), inp.data(), &again, rows, cols, scaling, true}, HostExec{});
    const double expected = scaling == Fp8Scaling::current ? largest / 57344.0 : 0x1p-26;
    EXPECT_NEAR(scale.scale, expected, 1e-7 * expected);
    EXPECT_EQ(std::bit_cast<float>(scale.amax), largest);
    for (int64_t i = 0; i < rows * cols; ++i) {
      const double wanted = inp[i] / expected;
      EXPECT_NEAR(to_float(out[i]), wanted, std::abs(wanted) / 8 + 0x1p-17) << i;
      EXPECT_EQ(out[i].bits, out_t[i % cols * rows + i / cols].bits) << i;
      EXPECT_EQ(out_t[i].bits, only_t[i].bits) << i;
    }
    EXPECT_EQ(scale.saturated, 0u);
  }
  const std::vector<float> edges{57344, 65000, -kInfinity, 0x1p-17f, -0x1p-17f, 0x1.1p-17f, 0};
  std::vector<e5m2> codes(edges.size());
  Fp8Scale scale;
  fp8_quantize(Fp8Quantize<float, e5m2>{codes.data(), nullptr, edges.data(), &scale, 1, 7, Fp8Scaling::fixed, true}, HostExec{});
  std::vector<float> stored;
  for (const e5m2 code : codes) stored.push_back(to_float(code));
  EXPECT_EQ(stored, (std::vector<float>{57344, 57344, -57344, 0, -0.0f, 0x1p-16f, 0}));
  EXPECT_EQ(scale.saturated, 2u);
  EXPECT_EQ(scale.flushed, 2u);
}

// A delayed scale that is not known yet: from the first tensor that is not zero, with a margin.
TEST(Fp8, DelayedScaleStartsFromTheFirstTensor) {
  const auto store = [](const std::vector<float>& values, Fp8Scale& scale, double start_margin = 4) {
    std::vector<e5m2> codes(values.size());
    fp8_quantize(Fp8Quantize<float, e5m2>{.out = codes.data(),
                                          .out_t = nullptr,
                                          .inp = values.data(),
                                          .scale = &scale,
                                          .rows = 1,
                                          .cols = static_cast<int>(values.size()),
                                          .scaling = Fp8Scaling::delayed,
                                          .count = false,
                                          .start_margin = start_margin},
                 HostExec{});
    return to_float(codes[0]) * scale.scale;
  };
  const auto next = [](Fp8Scale& scale, StepVerdict* verdict = nullptr) {
    fp8_next_scales({.scales = &scale, .num_scales = 1, .margin = 2, .verdict = verdict, .largest = kE5m2Max, .forget_zeros = true},
                    HostExec{});
  };
  Fp8Scale scale{.scale = 0};
  EXPECT_EQ(store({0, 0}, scale), 0);
  next(scale);
  EXPECT_EQ(scale.scale, 0) << "zeros say nothing";
  EXPECT_NEAR(store({3e-6f, -7e-6f}, scale), 3e-6f, 4e-7f);
  EXPECT_FLOAT_EQ(scale.scale, 4 * 7e-6f / 57344);
  const float started = scale.scale;
  store({5e-6f, 9e-6f}, scale);  // known now
  EXPECT_EQ(scale.scale, started);
  next(scale);
  EXPECT_FLOAT_EQ(scale.scale, 2 * 9e-6f / 57344);
  EXPECT_EQ(scale.amax, 0u);

  scale = {.scale = 0};
  StepVerdict verdict;
  EXPECT_TRUE(std::isnan(store({1, kNan}, scale)));
  next(scale, &verdict);
  EXPECT_EQ(verdict.skip, 1u);
  EXPECT_EQ(scale.scale, 0) << "starts anew";
  scale = {.scale = 0};
  store({1, 2}, scale, 0);
  EXPECT_EQ(scale.scale, 0) << "not asked for";
}

TEST(Fp8, WeightsAreQuantizedItemByItem) {
  Random random = test_random();
  const std::vector<float> first = random.normal_vector<float>(3 * 5), second = random.normal_vector<float>(2 * 4);
  std::vector<Fp8Scale> scales{{.scale = 0.25f}, {.scale = 0.5f}};
  std::vector<e4m3> out(first.size()), out_t(second.size());
  const std::vector<Fp8WeightItem<float>> items{{out.data(), nullptr, first.data(), &scales[0], 3, 5},
                                                {nullptr, out_t.data(), second.data(), &scales[1], 2, 4}};
  StepVerdict verdict{.skip = 1};
  const Fp8Weights<float> args{items.data(), items.data(), 2, Fp8Scaling::delayed, false, &verdict};
  fp8_weights(args, HostExec{});
  EXPECT_EQ(scales[0].amax, 0u);
  verdict.skip = 0;
  fp8_weights(args, HostExec{});
  const Quantized expected_first = quantize(first, 3, 5, Fp8Scaling::delayed, {.scale = 0.25f}),
                  expected_second = quantize(second, 2, 4, Fp8Scaling::delayed, {.scale = 0.5f});
  EXPECT_EQ(values(out), values(expected_first.out));
  EXPECT_EQ(values(out_t), values(expected_second.out_t));
  EXPECT_EQ(scales[0].amax, expected_first.scale.amax);
  EXPECT_EQ(scales[1].amax, expected_second.scale.amax);
}

TEST(Fp8, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const std::vector<float> inp = random.normal_vector<float>(101 * 24);
  for (const Fp8Scaling scaling : {Fp8Scaling::current, Fp8Scaling::delayed}) {
    check_thread_counts([&](const HostExec& exec) {
      const Quantized q = quantize(inp, 101, 24, scaling, {.scale = 0.004f}, true, exec);
      return Outputs{values(q.out),
                     values(q.out_t),
                     {q.scale.scale, std::bit_cast<float>(q.scale.amax), static_cast<float>(q.scale.saturated),
                      static_cast<float>(q.scale.flushed)}};
    });
  }
}

}  // namespace
}  // namespace speedrun::kernels

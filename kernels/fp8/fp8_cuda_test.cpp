// The kernels against the CPU reference: the same FP32 arithmetic on the same BF16 inputs, so that every code, maximum, scale and
// count is equal to the bit (NaN to NaN).
#include <limits>

#include "kernels/base/error.h"
#include "kernels/fp8/fp8.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/fp8_check.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int64_t rows;
  int cols;
};

std::string name(Fp8Scaling scaling) {
  return scaling == Fp8Scaling::fixed ? "fixed" : scaling == Fp8Scaling::current ? "current" : "delayed";
}

::testing::AssertionResult same_codes(const std::vector<uint8_t>& got, const std::vector<e4m3>& expected) {
  std::vector<e4m3> codes;
  for (const uint8_t code : got) codes.push_back({code});
  return testing::same_codes(codes, expected);
}

class Fp8CudaTest : public testing::CudaTest {
 protected:
  static e4m3* codes(const DeviceBuffer<uint8_t>& buffer) { return reinterpret_cast<e4m3*>(buffer.get()); }

  void check_quantize(const Shape& shape, const std::vector<bf16>& values, bool transposed, Fp8Scaling scaling,
                      const Fp8Scale& start, bool count) {
    SCOPED_TRACE("(" + std::to_string(shape.rows) + ", " + std::to_string(shape.cols) + ") " + name(scaling) +
                 (transposed ? ", transposed" : "") + (count ? ", counted" : ""));
    const auto inp = uploaded("inp", values);
    auto out = poisoned<uint8_t>("out", inp.size()), out_t = poisoned<uint8_t>("out_t", transposed ? inp.size() : 0);
    auto scale = uploaded("scale", std::vector<Fp8Scale>{start});
    const auto launch = [&](Launch how) {
      out.poison();
      out_t.poison();
      scale.upload({start});
      run(how, [&] {
        fp8_quantize(
            {codes(out), transposed ? codes(out_t) : nullptr, inp.get(), scale.get(), shape.rows, shape.cols, scaling, count},
            exec());
      });
      return out.download();
    };
    const std::vector<uint8_t> got = launch(Launch::direct), got_t = out_t.download();
    const Fp8Scale got_scale = scale.download()[0];
    EXPECT_TRUE(testing::same_bits(got, launch(Launch::captured)));

    const std::vector<float> wide = testing::widen<float>(values);
    std::vector<e4m3> expected(values.size()), expected_t(got_t.size());
    Fp8Scale expected_scale = start;
    fp8_quantize(Fp8Quantize<float>{expected.data(), transposed ? expected_t.data() : nullptr, wide.data(), &expected_scale,
                                    shape.rows, shape.cols, scaling, count},
                 truth_exec());
    EXPECT_TRUE(same_codes(got, expected)) << "out";
    EXPECT_TRUE(same_codes(got_t, expected_t)) << "out_t";
    // With a fixed scale the maximum is free.
    Fp8Scale compared = got_scale;
    if (scaling == Fp8Scaling::fixed) compared.amax = expected_scale.amax;
    testing::expect_same_scale(compared, expected_scale);
  }

  // Scales that make some values saturate and some vanish.
  void check_shape(const Shape& shape, bool transposed, Random& random) {
    const std::vector<bf16> values = random.normal_vector<bf16>(shape.rows * shape.cols);
    for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
      check_quantize(shape, values, transposed, scaling, {.scale = 0.0041f}, true);
      check_quantize(shape, values, transposed, scaling, {.scale = 37, .amax = 5}, false);
    }
  }
};

TEST_F(Fp8CudaTest, AnyNumberOfRows) {
  Random random = testing::test_random();
  for (const int64_t rows : {1, 3, 16, 37, 255, 1000}) {
    for (const int cols : {16, 48, 768, 784}) check_shape({rows, cols}, false, random);
  }
}

TEST_F(Fp8CudaTest, TransposedCopies) {
  Random random = testing::test_random();
  for (const int64_t rows : {16, 48, 128, 144, 1008}) {
    for (const int cols : {16, 64, 80, 768}) check_shape({rows, cols}, true, random);
  }
}

TEST_F(Fp8CudaTest, ProductionShapes) {
  Random random = testing::test_random();
  const Shape tokens{16'381, 768}, hidden{1023, 3072}, chunk{16'384, 768};
  check_quantize(tokens, random.uniform_vector<bf16>(tokens.rows * tokens.cols), false, Fp8Scaling::current, {}, false);
  check_quantize(hidden, random.uniform_vector<bf16>(hidden.rows * hidden.cols), false, Fp8Scaling::delayed, {.scale = 0.002f},
                 false);
  check_quantize(chunk, random.uniform_vector<bf16>(chunk.rows * chunk.cols), true, Fp8Scaling::fixed, {.scale = 0.002f}, false);
}

// Every BF16 number, NaN and infinities among them, at a scale of one: the hardware's conversion against ours.
TEST_F(Fp8CudaTest, EveryBf16Number) {
  const Shape shape{256, 256};
  std::vector<bf16> all(65536);
  for (uint32_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
  for (const bool transposed : {false, true}) {
    for (const bool count : {false, true}) {
      check_quantize(shape, all, transposed, Fp8Scaling::fixed, {.scale = 1}, count);
      check_quantize(shape, all, transposed, Fp8Scaling::delayed, {.scale = 1}, count);
      check_quantize(shape, all, transposed, Fp8Scaling::current, {.scale = 1}, count);
    }
  }
}

TEST_F(Fp8CudaTest, ZeroTinyAndNotFiniteInputs) {
  const Shape shape{32, 32};
  const size_t size = 1024;
  const std::vector<bf16> zeros(size, bf16(0.0f)), negative_zeros(size, bf16(-0.0f)), tiny(size, bf16(1e-39f));
  std::vector<bf16> with_nan(size, bf16(1.0f)), with_infinity(size, bf16(1.0f)), last_largest(size, bf16(1.0f));
  with_nan[777] = bf16(kNan);
  with_infinity[1023] = bf16(-kInfinity);
  last_largest[1023] = bf16(-3.0f);
  for (const auto& values : {zeros, negative_zeros, tiny, with_nan, with_infinity, last_largest}) {
    for (const bool transposed : {false, true}) {
      for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed})
        check_quantize(shape, values, transposed, scaling, {.scale = 0.5f}, true);
    }
  }
}

// Gradients: E5M2, either copy or both; every BF16 number, odd shapes and the production shape.
class Fp8GradientCudaTest : public testing::CudaTest {
 protected:
  void check(const Shape& shape, const std::vector<bf16>& values, Fp8Scaling scaling, const Fp8Scale& start, bool count,
             double start_margin = 0) {
    const auto inp = uploaded("inp", values);
    for (const auto& [codes, codes_t] : {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
      SCOPED_TRACE("(" + std::to_string(shape.rows) + ", " + std::to_string(shape.cols) + ") " + name(scaling) +
                   (codes ? ", codes" : "") + (codes_t ? ", turned" : "") + (count ? ", counted" : ""));
      testing::DeviceCopies<e5m2> copies(shape.rows, shape.cols, codes, codes_t, scaling, start, start_margin, count,
                                         exec().stream);
      const auto launch = [&](Launch how) {
        copies.reset();
        run(how, [&] { fp8_copies(copies.args(), static_cast<const bf16*>(inp.get()), shape.rows, shape.cols, exec()); });
        copies.check("gradient", values, truth_exec());
      };
      launch(Launch::direct);
      launch(Launch::captured);
    }
  }
};

TEST_F(Fp8GradientCudaTest, EveryBf16Number) {
  std::vector<bf16> all(65536);
  for (uint32_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
  for (const bool count : {false, true}) {
    for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed})
      check({256, 256}, all, scaling, {.scale = 1}, count);
  }
}

TEST_F(Fp8GradientCudaTest, Shapes) {
  Random random = testing::test_random();
  for (const int64_t rows : {16, 112, 144, 1008}) {
    for (const int cols : {16, 64, 80, 768}) {
      const std::vector<bf16> values = random.normal_vector<bf16>(rows * cols, 1e-3);
      for (const Fp8Scaling scaling : {Fp8Scaling::current, Fp8Scaling::delayed})
        check({rows, cols}, values, scaling, {.scale = 3e-8f}, true);
    }
  }
  const Shape qkv{8208, 2304};
  check(qkv, random.uniform_vector<bf16>(qkv.rows * qkv.cols, 1e-4), Fp8Scaling::delayed, {.scale = 4e-9f}, false);
}

TEST_F(Fp8GradientCudaTest, StartsFromTheFirstTensor) {
  Random random = testing::test_random();
  const Shape shape{272, 144};
  std::vector<bf16> values = random.normal_vector<bf16>(shape.rows * shape.cols, 1e-6), zeros(values.size(), bf16(0.0f));
  check(shape, values, Fp8Scaling::delayed, {.scale = 0}, true, 4);
  check(shape, values, Fp8Scaling::delayed, {.scale = 2e-11f}, true, 4);
  check(shape, zeros, Fp8Scaling::delayed, {.scale = 0}, true, 4);
  values.back() = bf16(5.0f);
  check(shape, values, Fp8Scaling::delayed, {.scale = 0}, false, 4);
  values[777] = bf16(kNan);
  check(shape, values, Fp8Scaling::delayed, {.scale = 0}, false, 4);
}

struct ItemCase {
  int rows, cols;
  bool plain = true, transposed = true;
};

class Fp8WeightsCudaTest : public Fp8CudaTest {
 protected:
  void check(const std::vector<ItemCase>& cases, Fp8Scaling scaling, bool count, bool skip = false) {
    SCOPED_TRACE(std::to_string(cases.size()) + " items, " + name(scaling) + (count ? ", counted" : "") +
                 (skip ? ", skipped" : ""));
    Random random = testing::test_random();
    struct Item {
      std::vector<bf16> values;
      DeviceBuffer<bf16> weight;
      DeviceBuffer<uint8_t> out, out_t;
    };
    std::vector<Item> items;
    std::vector<Fp8Scale> start(cases.size());
    for (size_t i = 0; i < cases.size(); ++i) {
      const ItemCase& c = cases[i];
      const int64_t size = int64_t{c.rows} * c.cols;
      std::vector<bf16> values = random.uniform_vector<bf16>(size, random.uniform(0.1, 2));
      auto weight = uploaded("weight", values);
      items.push_back({std::move(values), std::move(weight), poisoned<uint8_t>("out", c.plain ? size : 0),
                       poisoned<uint8_t>("out_t", c.transposed ? size : 0)});
      start[i] = {.scale = static_cast<float>(random.uniform(0.001, 0.01)), .amax = static_cast<uint32_t>(i)};
    }
    auto scales = uploaded("scales", start);
    std::vector<Fp8WeightItem<bf16>> table;
    for (size_t i = 0; i < cases.size(); ++i) {
      const ItemCase& c = cases[i];
      table.push_back({c.plain ? codes(items[i].out) : nullptr, c.transposed ? codes(items[i].out_t) : nullptr,
                       items[i].weight.get(), scales.get() + i, c.rows, c.cols});
    }
    const auto device_table = uploaded("table", table);
    const auto verdict = uploaded("verdict", std::vector<StepVerdict>{{.skip = skip}});
    const Fp8Weights<bf16> args{device_table.get(), table.data(), static_cast<int>(table.size()), scaling, count, verdict.get()};
    fp8_weights(args, exec());
    const std::vector<Fp8Scale> got_scales = scales.download();
    std::vector<std::vector<uint8_t>> got, got_t;
    for (Item& item : items) {
      got.push_back(item.out.download());
      got_t.push_back(item.out_t.download());
      item.out.poison();
      item.out_t.poison();
    }
    scales.upload(start);
    run(Launch::captured, [&] { fp8_weights(args, exec()); });

    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE("item " + std::to_string(i));
      EXPECT_TRUE(testing::same_bits(items[i].out.download(), got[i]));
      EXPECT_TRUE(testing::same_bits(items[i].out_t.download(), got_t[i]));
      const std::vector<float> wide = testing::widen<float>(items[i].values);
      std::vector<e4m3> expected(got[i].size(), e4m3{0xff}), expected_t(got_t[i].size(), e4m3{0xff});
      Fp8Scale expected_scale = start[i];
      const Fp8WeightItem<float> item{expected.empty() ? nullptr : expected.data(),
                                      expected_t.empty() ? nullptr : expected_t.data(),
                                      wide.data(),
                                      &expected_scale,
                                      cases[i].rows,
                                      cases[i].cols};
      const StepVerdict host_verdict{.skip = skip};
      fp8_weights(Fp8Weights<float>{&item, &item, 1, scaling, count, &host_verdict}, truth_exec());
      EXPECT_TRUE(same_codes(got[i], expected)) << "out";
      EXPECT_TRUE(same_codes(got_t[i], expected_t)) << "out_t";
      Fp8Scale compared = got_scales[i];
      if (scaling == Fp8Scaling::fixed && !skip) compared.amax = expected_scale.amax;
      testing::expect_same_scale(compared, expected_scale);
    }
  }
};

TEST_F(Fp8WeightsCudaTest, MixedTables) {
  const std::vector<ItemCase> cases{{16, 16}, {768, 3072}, {144, 80, true, false}, {128, 64}, {80, 144, false, true}, {3072, 768}};
  for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
    for (const bool count : {false, true}) check(cases, scaling, count);
  }
  check(cases, Fp8Scaling::current, true, true);
  check(cases, Fp8Scaling::delayed, false, true);
}

TEST_F(Fp8WeightsCudaTest, MoreItemsThanOneLaunchTakes) {
  check(std::vector<ItemCase>(300, {16, 32}), Fp8Scaling::current, false);
  check(std::vector<ItemCase>(257, {32, 16}), Fp8Scaling::delayed, true);
}

TEST_F(Fp8WeightsCudaTest, ProductionShapes) {
  check(std::vector<ItemCase>(22, {3072, 768}), Fp8Scaling::delayed, false);
  check({{50304, 768}}, Fp8Scaling::fixed, false);
}

TEST_F(Fp8CudaTest, NextScales) {
  const auto amax = [](float x) { return std::bit_cast<uint32_t>(x); };
  Random random = testing::test_random();
  std::vector<Fp8Scale> finite(700);
  for (Fp8Scale& scale : finite)
    scale = {.scale = 7, .amax = amax(static_cast<float>(std::exp2(random.uniform(-60, 60)))), .flushed = 3};
  finite[5].amax = 0;
  finite[6].scale = kNan;
  std::vector<Fp8Scale> bad = finite;
  bad[650].amax = amax(kInfinity);
  bad[333].amax = amax(kNan);
  bad[334] = {.scale = kNan, .amax = amax(kNan)};
  for (const auto& start : {finite, bad}) {
    for (const bool gradients : {false, true}) {
      const StepVerdict before = gradients ? StepVerdict{.skip = 1, .bad_parameter = 12} : StepVerdict{};
      const float largest = gradients ? kE5m2Max : kE4m3Max;
      const auto scales = uploaded("scales", start);
      const auto verdict = uploaded("verdict", std::vector<StepVerdict>{before});
      fp8_next_scales({scales.get(), static_cast<int>(start.size()), 1.12, verdict.get(), largest, gradients}, exec());
      std::vector<Fp8Scale> expected = start;
      StepVerdict expected_verdict = before;
      fp8_next_scales({expected.data(), static_cast<int>(start.size()), 1.12, &expected_verdict, largest, gradients}, truth_exec());
      const std::vector<Fp8Scale> got = scales.download();
      for (size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE("scale " + std::to_string(i));
        testing::expect_same_scale(got[i], expected[i]);
      }
      const StepVerdict got_verdict = verdict.download()[0];
      EXPECT_EQ(got_verdict.skip, expected_verdict.skip);
      EXPECT_EQ(got_verdict.bad_parameter, expected_verdict.bad_parameter);
    }
  }
}

TEST_F(Fp8CudaTest, RefusesShapesItCannotDo) {
  const auto inp = poisoned<bf16>("inp", 4096);
  const auto out = poisoned<uint8_t>("out", 4096);
  const auto scale = poisoned<Fp8Scale>("scale", 1);
  const Fp8Quantize<bf16> good{codes(out), codes(out) + 2048, inp.get(), scale.get(), 16, 16, Fp8Scaling::fixed, false};
  const auto refused = [&](const auto& change) {
    Fp8Quantize<bf16> args = good;
    change(args);
    EXPECT_THROW(fp8_quantize(args, exec()), Error);
  };
  refused([](auto& args) { args.cols = 24; });
  refused([](auto& args) { args.rows = 24; });
  refused([](auto& args) { args.rows = 0; });
  refused([](auto& args) { args.out = nullptr, args.out_t = nullptr; });
  refused([](auto& args) { args.inp += 1; });
  refused([](auto& args) { args.out_t += 8; });
}

}  // namespace
}  // namespace speedrun::kernels

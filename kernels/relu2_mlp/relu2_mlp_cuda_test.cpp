// The MLP against the CPU reference. Outputs and post by the tolerance rule (the baseline rounds to BF16 and E4M3 as the device
// does). FP8 codes exactly: those of the input from the input, those of post from the BF16 post that the device stored (post itself
// may differ from the reference's in its last bit, and its code with it); the same for maxima and counts.
#include <cmath>
#include <limits>

#include "kernels/gemm/fp8_product_ref.h"
#include "kernels/relu2_mlp/relu2_activation.h"
#include "kernels/relu2_mlp/relu2_mlp_device_test.h"
#include "kernels/relu2_mlp/relu2_up_sm90.h"
#include "kernels/testing/product_ulp.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;

// Of input and post as they start. Some values of post saturate.
constexpr Fp8Scale kInpStart{.scale = 0.0625f, .amax = 0}, kPostStart{.scale = 0.0078125f, .amax = 0};

template <class T>
struct Forward {
  std::vector<T> out, post;
  std::vector<e4m3> inp8, post8;
  Fp8Scale inp_scale = kInpStart, post_scale = kPostStart;
};

template <class T>
Forward<T> forward_reference(const Relu2MlpCase& c, const Relu2MlpData& data, const HostExec& exec) {
  const auto inp = testing::widen<T>(data.inp), up = testing::widen<T>(data.up), down = testing::widen<T>(data.down);
  Forward<T> result{.out = std::vector<T>(data.inp.size()),
                    .post = std::vector<T>(static_cast<size_t>(c.N * c.F)),
                    .inp8 = std::vector<e4m3>(data.inp.size()),
                    .post8 = std::vector<e4m3>(static_cast<size_t>(c.N * c.F))};
  Relu2MlpFp8 fp8{.up8 = c.up8 ? data.codes.up.data() : nullptr,
                  .up_scale = &data.codes.up_scale,
                  .inp8 = result.inp8.data(),
                  .inp_scale = &result.inp_scale,
                  .inp_scaling = c.scaling,
                  .down8 = c.down8 ? data.codes.down_t.data() : nullptr,
                  .down_scale = &data.codes.down_scale,
                  .post8 = result.post8.data(),
                  .post_scale = &result.post_scale,
                  .post_scaling = c.scaling,
                  .count = c.count};
  relu2_mlp_forward(
      Relu2MlpForward<T>{result.out.data(), result.post.data(), inp.data(), up.data(), down.data(), fp8, c.N, c.C, c.F}, exec);
  return result;
}

void expect_codes(const char* what, const std::vector<uint8_t>& got, const std::vector<bf16>& values, float scale) {
  const float inverse_scale = 1.0f / scale;
  ASSERT_EQ(got.size(), values.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const float value = static_cast<float>(values[i]);
    ASSERT_EQ(int{got[i]}, int{to_e4m3(value * inverse_scale).bits})
        << what << " index " << i << ", value " << value << " (SPEEDRUN_TEST_SEED=" << testing::test_seed() << ")";
  }
}

// The reference's pass over the values that the device stored.
Fp8Scale scale_after(const std::vector<bf16>& values, Fp8Scale start, Fp8Scaling scaling, bool count) {
  const std::vector<float> wide = testing::widen<float>(values);
  std::vector<e4m3> codes(values.size());
  fp8_quantize(Fp8Quantize<float>{codes.data(), nullptr, wide.data(), &start, 1, static_cast<int>(values.size()), scaling, count},
               HostExec{});
  return start;
}

void expect_scale(const char* what, const Fp8Scale& got, const Fp8Scale& expected, Fp8Scaling scaling) {
  EXPECT_EQ(got.scale, expected.scale) << what;
  if (scaling != Fp8Scaling::fixed) {
    EXPECT_EQ(std::bit_cast<float>(got.amax), std::bit_cast<float>(expected.amax)) << what;
  }
  EXPECT_EQ(got.saturated, expected.saturated) << what;
  EXPECT_EQ(got.flushed, expected.flushed) << what;
}

class Relu2MlpCudaTest : public Relu2MlpDeviceTest {
 protected:
  static std::vector<uint8_t> bytes(const std::vector<e4m3>& codes) {
    std::vector<uint8_t> result;
    for (const e4m3 code : codes) result.push_back(code.bits);
    return result;
  }
  static e4m3* codes(const DeviceBuffer<uint8_t>& buffer) { return reinterpret_cast<e4m3*>(buffer.get()); }

  bool takes(const Relu2MlpCase& c) const {
    return c.up8 ? relu2_up_sm90_takes<e4m3>(c.C, c.F, exec()) : relu2_up_sm90_takes<bf16>(c.C, c.F, exec());
  }

  void check_forward(const Relu2MlpCase& c) {
    if ((c.up8 || c.down8) && exec().compute_capability < 89)
      GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Relu2MlpData data = make_data(c, random);
    const auto inp = uploaded("inp", data.inp), up = uploaded("up", data.up), down = uploaded("down", data.down);
    const auto up8 = uploaded("up8", bytes(data.codes.up)), down8 = uploaded("down8", bytes(data.codes.down_t));
    const auto weight_scales = uploaded("weight scales", std::vector<Fp8Scale>{data.codes.up_scale, data.codes.down_scale});
    auto out = poisoned<bf16>("out", c.N * c.C), post = poisoned<bf16>("post", c.N * c.F);
    auto inp8 = poisoned<uint8_t>("inp8", c.N * c.C), post8 = poisoned<uint8_t>("post8", c.N * c.F);
    auto scales = uploaded("scales", std::vector<Fp8Scale>{kInpStart, kPostStart});
    const Relu2MlpForward<bf16> args{.out = out.get(),
                                     .post = post.get(),
                                     .inp = inp.get(),
                                     .up_weight = up.get(),
                                     .down_weight = down.get(),
                                     .fp8 = {.up8 = c.up8 ? codes(up8) : nullptr,
                                             .up_scale = weight_scales.get(),
                                             .inp8 = codes(inp8),
                                             .inp_scale = scales.get(),
                                             .inp_scaling = c.scaling,
                                             .down8 = c.down8 ? codes(down8) : nullptr,
                                             .down_scale = weight_scales.get() + 1,
                                             .post8 = codes(post8),
                                             .post_scale = scales.get() + 1,
                                             .post_scaling = c.scaling,
                                             .fused_up = c.fused_up,
                                             .count = c.count},
                                     .N = c.N,
                                     .C = c.C,
                                     .F = c.F};
    relu2_mlp_forward(args, exec());
    const std::vector<bf16> got_out = out.download(), got_post = post.download();
    const std::vector<uint8_t> got_inp8 = inp8.download(), got_post8 = post8.download();
    const std::vector<Fp8Scale> got_scales = scales.download();
    out.poison();
    post.poison();
    inp8.poison();
    post8.poison();
    scales.upload({kInpStart, kPostStart});
    run_captured([&] { relu2_mlp_forward(args, exec()); });
    EXPECT_TRUE(testing::same_bits(out.download(), got_out)) << "out, in a graph";
    EXPECT_TRUE(testing::same_bits(post.download(), got_post)) << "post, in a graph";
    EXPECT_TRUE(testing::same_bits(post8.download(), got_post8)) << "post8, in a graph";

    const Forward<double> truth = forward_reference<double>(c, data, truth_exec());
    const Forward<float> baseline = forward_reference<float>(c, data, baseline_exec());
    EXPECT_TRUE(testing::within_rule(got_post, truth.post, baseline.post)) << "post";
    EXPECT_TRUE(testing::within_rule(got_out, truth.out, baseline.out)) << "out";
    if (c.up8) {
      EXPECT_TRUE(testing::same_bits(got_inp8, bytes(truth.inp8))) << "inp8";
      expect_scale("inp scale", got_scales[0], truth.inp_scale, c.scaling);
    }
    if (!c.down8) return;
    const Fp8Scale post_scale = scale_after(got_post, kPostStart, c.scaling, c.count);
    expect_scale("post scale", got_scales[1], post_scale, c.scaling);
    expect_codes("post8", got_post8, got_post, post_scale.scale);
    // The product alone, from the device's own codes.
    std::vector<e4m3> stored(got_post8.size());
    for (size_t i = 0; i < stored.size(); ++i) stored[i].bits = got_post8[i];
    std::vector<double> product(got_out.size());
    fp8_product_ref(Fp8ProductRef<double, e4m3>{product.data(), stored.data(), data.codes.down_t.data(), post_scale.scale,
                                                data.codes.down_scale.scale, c.N, c.C, c.F},
                    truth_exec());
    std::vector<bf16> rounded(product.size());
    for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = bf16(static_cast<float>(product[i]));
    EXPECT_TRUE(testing::within_rule(got_out, product, rounded)) << "down product";
  }

  void check_backward(const Relu2MlpCase& c) {
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Relu2MlpData data = make_data(c, random);
    BackwardBuffers on_device(*this, c, data);
    const auto launch = [&](Launch how) {
      on_device.reset(data);
      run(how, [&] { relu2_mlp_backward(on_device.args(c), exec()); });
    };
    launch(Launch::direct);
    const BackwardResults got = on_device.download();
    launch(Launch::captured);
    const BackwardResults again = on_device.download();
    const auto truth = backward_reference<double>(c, data, truth_exec());
    const auto baseline = backward_reference<float>(c, data, baseline_exec());
    const auto compare = [](const char* what, const auto& first, const auto& second, const auto& exact, const auto& rounded,
                            auto ulp) {
      EXPECT_TRUE(testing::same_bits(first, second)) << what;
      EXPECT_TRUE(testing::within_rule(first, exact, rounded, ulp)) << what;
    };
    const testing::Ulp stored = testing::Ulp::bf16, product = testing::product_ulp(c.N);
    compare("dhidden", got.dhidden, again.dhidden, truth.dhidden, baseline.dhidden, stored);
    compare("dinp", got.dinp, again.dinp, truth.dinp, baseline.dinp, stored);
    compare("dup", got.dup, again.dup, truth.dup, baseline.dup, product);
    compare("ddown", got.ddown, again.ddown, truth.ddown, baseline.ddown, product);
  }
};

TEST_F(Relu2MlpCudaTest, Bf16) {
  for (const int64_t N : {1, 15, 65, 1000}) {
    check_forward({.N = N, .C = 24, .F = 136});
    check_backward({.N = N, .C = 24, .F = 136});
  }
}

TEST_F(Relu2MlpCudaTest, EveryFp8Choice) {
  for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
    for (const bool count : {false, true}) {
      check_forward({.N = 136, .C = 48, .F = 144, .up8 = true, .down8 = true, .scaling = scaling, .count = count});
      check_forward({.N = 136, .C = 48, .F = 144, .up8 = true, .scaling = scaling, .count = count});
      check_forward({.N = 136, .C = 48, .F = 144, .down8 = true, .scaling = scaling, .count = count});
    }
  }
}

TEST_F(Relu2MlpCudaTest, Fp8TakesAnyNumberOfTokens) {
  for (const int64_t N : {1, 7, 15, 65, 1000}) {
    for (const Fp8Scaling scaling : {Fp8Scaling::current, Fp8Scaling::delayed})
      check_forward({.N = N, .C = 80, .F = 112, .up8 = true, .down8 = true, .scaling = scaling});
  }
}

TEST_F(Relu2MlpCudaTest, ProductionWidths) {
  check_forward({.N = 1021, .C = 768, .F = 3072});
  check_forward({.N = 1021, .C = 768, .F = 3072, .up8 = true, .down8 = true, .scaling = Fp8Scaling::current});
  check_forward({.N = 1021, .C = 768, .F = 3072, .up8 = true, .down8 = true, .scaling = Fp8Scaling::delayed});
  check_backward({.N = 1021, .C = 768, .F = 3072});
}

// Only on a device that has the kernel; its own test covers it beyond this.
TEST_F(Relu2MlpCudaTest, FusedUpProduct) {
  for (const Relu2MlpCase& shape : {Relu2MlpCase{.N = 1021, .C = 768, .F = 3072}, Relu2MlpCase{.N = 37, .C = 128, .F = 256}}) {
    for (const bool up8 : {false, true}) {
      for (const bool down8 : {false, true}) {
        for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
          Relu2MlpCase c = shape;
          c.up8 = up8, c.down8 = down8, c.scaling = scaling, c.fused_up = true, c.count = scaling == Fp8Scaling::delayed;
          if (!takes(c)) GTEST_SKIP() << "the fused kernel does not run on this device";
          check_forward(c);
        }
      }
    }
  }
}

// The pass alone, exactly: square, code and maximum of every BF16 number and of a large tensor.
TEST_F(Relu2MlpCudaTest, ActivationIsExact) {
  Random random = testing::test_random();
  std::vector<bf16> every(65536);
  for (uint32_t i = 0; i < every.size(); ++i) every[i].bits = static_cast<uint16_t>(i);
  std::vector<bf16> finite;
  for (const bf16 x : every) {
    const float value = static_cast<float>(x);
    if (std::isfinite(static_cast<float>(bf16(value * value)))) finite.push_back(x);
  }
  finite.resize(finite.size() / 16 * 16);
  for (const std::vector<bf16>& pre : {every, finite, random.uniform_vector<bf16>(int64_t{16'381} * 1024, 3)}) {
    for (const bool count : {false, true}) {
      const auto given = uploaded("pre", pre);
      const auto post = poisoned<bf16>("post", given.size());
      const auto post8 = poisoned<uint8_t>("post8", post.size());
      const auto scale = uploaded("scale", std::vector<Fp8Scale>{{.scale = 0.0078125f}});
      relu2_activation({.post = post.get(),
                        .pre = given.get(),
                        .post8 = codes(post8),
                        .post_scale = scale.get(),
                        .count = post.size(),
                        .count_losses = count},
                       exec());
      const auto plain = uploaded("in place, without codes", pre);
      relu2_activation({.post = plain.get(), .pre = plain.get(), .count = plain.size()}, exec());
      const std::vector<bf16> got = post.download();
      const std::vector<uint8_t> got8 = post8.download();
      EXPECT_TRUE(testing::same_bits(plain.download(), got));
      uint32_t amax = 0;
      Fp8Scale expected = scale_after(got, {.scale = 0.0078125f}, Fp8Scaling::delayed, count);
      for (size_t i = 0; i < pre.size(); ++i) {
        const float x = static_cast<float>(pre[i]), y = static_cast<float>(got[i]);
        if (std::isnan(x)) {
          ASSERT_TRUE(std::isnan(y)) << i;
          ASSERT_EQ(got8[i] & 0x7f, 0x7f) << i;
        } else {
          ASSERT_EQ(y, static_cast<float>(bf16(x < 0 ? 0 : x * x))) << x;
          ASSERT_EQ(int{got8[i]}, int{to_e4m3(y * (1 / 0.0078125f)).bits}) << x;
        }
        amax = std::max(amax, std::bit_cast<uint32_t>(y) & 0x7fffffffu);
      }
      EXPECT_EQ(scale.download()[0].amax, amax);
      EXPECT_EQ(scale.download()[0].saturated, expected.saturated);
      EXPECT_EQ(scale.download()[0].flushed, expected.flushed);
    }
  }
}

// A NaN may not become a zero on the way: the trainer has to see it.
TEST_F(Relu2MlpCudaTest, KeepsNan) {
  const int64_t N = 3;
  const int C = 128, F = 256;
  std::vector<bf16> inp(static_cast<size_t>(N * C), bf16(1.0f));
  inp[0] = bf16(std::nanf(""));
  const auto x = uploaded("inp", inp), weight = uploaded("weight", std::vector<bf16>(static_cast<size_t>(C * F), bf16(-1.0f)));
  const auto weight8 = uploaded("weight8", std::vector<uint8_t>(static_cast<size_t>(C * F), to_e4m3(-1).bits));
  const auto scales = uploaded("scales", std::vector<Fp8Scale>{{.scale = 1}, {.scale = 1}, {.scale = 1}});
  const auto inp8 = poisoned<uint8_t>("inp8", N * C), post8 = poisoned<uint8_t>("post8", N * F);
  for (const bool fp8 : {false, true}) {
    if (fp8 && exec().compute_capability < 89) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
    const auto out = poisoned<bf16>("out", N * C), post = poisoned<bf16>("post", N * F);
    Relu2MlpForward<bf16> args{.out = out.get(),
                               .post = post.get(),
                               .inp = x.get(),
                               .up_weight = weight.get(),
                               .down_weight = weight.get(),
                               .fp8 = {},
                               .N = N,
                               .C = C,
                               .F = F};
    if (fp8) {
      args.fp8 = {.up8 = codes(weight8),
                  .up_scale = scales.get(),
                  .inp8 = codes(inp8),
                  .inp_scale = scales.get() + 1,
                  .inp_scaling = Fp8Scaling::fixed,
                  .down8 = codes(weight8),
                  .down_scale = scales.get(),
                  .post8 = codes(post8),
                  .post_scale = scales.get() + 2,
                  .post_scaling = Fp8Scaling::delayed};
    }
    relu2_mlp_forward(args, exec());
    const std::vector<bf16> got = out.download();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(static_cast<float>(got[i])), i < C) << i;
    if (fp8) {
      EXPECT_TRUE(std::isnan(std::bit_cast<float>(scales.download()[2].amax)));
    }
  }
}

}  // namespace
}  // namespace speedrun::kernels

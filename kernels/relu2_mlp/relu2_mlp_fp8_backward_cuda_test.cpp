// The MLP's backward pass in FP8 against the CPU reference, each product from the codes that the device stored, and the codes from
// what they are copies of.
#include <cmath>

#include "kernels/gemm/fp8_product_ref.h"
#include "kernels/relu2_mlp/relu2_mlp_device_test.h"

namespace speedrun::kernels {
namespace {

using testing::Random;

struct BackwardCase {
  int64_t N;
  int C, F;
  bool input_grad = true, weight_grad = true;
  Fp8Scaling scaling = Fp8Scaling::delayed;
  Fp8Scaling activations = Fp8Scaling::fixed;  // of input and post
  bool known = true;                           // the delayed scales are there
  bool count = false;
};

std::string name(const BackwardCase& c) {
  const auto of = [](Fp8Scaling scaling) {
    return scaling == Fp8Scaling::fixed ? "fixed" : scaling == Fp8Scaling::current ? "current" : "delayed";
  };
  return "N = " + std::to_string(c.N) + ", C = " + std::to_string(c.C) + ", F = " + std::to_string(c.F) +
         (c.input_grad ? ", FP8 input gradients" : "") + (c.weight_grad ? ", FP8 weight gradients" : "") + ", gradients " +
         of(c.scaling) + ", activations " + of(c.activations) + (c.known ? "" : ", not known") + (c.count ? ", counted" : "");
}

class Relu2MlpFp8BackwardCudaTest : public Relu2MlpDeviceTest {
 protected:
  void check(const BackwardCase& c) {
    if (exec().compute_capability < 89) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Relu2MlpCase sizes{.N = c.N, .C = c.C, .F = c.F};
    Relu2MlpData data = make_data(sizes, random);
    for (bf16& x : data.dout) x = bf16(1e-3f * static_cast<float>(x));
    const int64_t weights = int64_t{c.C} * c.F;
    std::vector<e4m3> up8_t(static_cast<size_t>(weights)), down8(up8_t.size());
    std::vector<Fp8Scale> weight_scales(2);
    const std::vector<float> up_values = testing::widen<float>(data.up), down_values = testing::widen<float>(data.down);
    const Fp8WeightItem<float> items[] = {{nullptr, up8_t.data(), up_values.data(), &weight_scales[0], c.F, c.C},
                                          {down8.data(), nullptr, down_values.data(), &weight_scales[1], c.F, c.C}};
    fp8_weights(Fp8Weights<float>{items, items, 2, Fp8Scaling::current, false, nullptr}, HostExec{});

    BackwardBuffers on_device(*this, sizes, data);
    const auto device_up8_t = uploaded("up8_t", up8_t), device_down8 = uploaded("down8", down8);
    const auto device_scales = uploaded("weight scales", weight_scales);
    const auto activation = [&](int columns, float scale) {
      return testing::DeviceCopies<e4m3>(c.N, columns, false, c.weight_grad, c.activations, {.scale = c.known ? scale : 0}, 2,
                                         c.count, exec().stream);
    };
    const auto gradient = [&](int columns, float scale) {
      return testing::DeviceCopies<e5m2>(c.N, columns, c.input_grad, c.weight_grad, c.scaling, {.scale = c.known ? scale : 0}, 4,
                                         c.count, exec().stream);
    };
    testing::DeviceCopies<e4m3> inp8 = activation(c.C, 0.007f), post8 = activation(c.F, 0.005f);
    testing::DeviceCopies<e5m2> dout8 = gradient(c.C, 1e-7f), dpre8 = gradient(c.F, 3e-7f);
    const Relu2MlpBackward<bf16> args = on_device.args(sizes, {.up8_t = c.input_grad ? device_up8_t.get() : nullptr,
                                                               .up_scale = device_scales.get(),
                                                               .down8 = c.input_grad ? device_down8.get() : nullptr,
                                                               .down_scale = device_scales.get() + 1,
                                                               .inp = inp8.args(),
                                                               .post = post8.args(),
                                                               .dout = dout8.args(),
                                                               .dpre = dpre8.args()});
    const auto launch = [&](Launch how) {
      on_device.reset(data);
      inp8.reset(), post8.reset(), dout8.reset(), dpre8.reset();
      run(how, [&] { relu2_mlp_backward(args, exec()); });
    };
    launch(Launch::direct);
    const BackwardResults got = on_device.download();
    launch(Launch::captured);
    const BackwardResults again = on_device.download();
    EXPECT_TRUE(testing::same_bits(again.dinp, got.dinp)) << "dinp, in a graph";
    EXPECT_TRUE(testing::same_bits(again.dup, got.dup)) << "dup, in a graph";
    EXPECT_TRUE(testing::same_bits(again.ddown, got.ddown)) << "ddown, in a graph";

    // In one pass and with all of its readers in FP8, dhidden keeps the gradient of post.
    const bool one_pass = c.scaling != Fp8Scaling::current && c.N % 16 == 0;
    std::vector<bf16> dpre = got.dhidden;
    if (one_pass && c.input_grad && c.weight_grad) {
      for (size_t i = 0; i < dpre.size(); ++i)
        dpre[i] = bf16(static_cast<float>(dpre[i]) * (2 * std::sqrt(static_cast<float>(data.post[i]))));
    }
    const HostExec host = truth_exec();
    inp8.check("inp", data.inp, host);
    post8.check("post", data.post, host);
    dout8.check("dout", data.dout, host);
    dpre8.check("dpre", dpre, host);
    if (c.input_grad) {
      if (one_pass && c.weight_grad) {
        testing::expect_product("dpost", got.dhidden, dout8.codes(), dout8.scale().scale, down8, weight_scales[1].scale, c.N, c.F,
                                c.C, host);
      }
      testing::expect_product("dinp", got.dinp, dpre8.codes(), dpre8.scale().scale, up8_t, weight_scales[0].scale, c.N, c.C, c.F,
                              host);
    }
    if (c.weight_grad) {
      testing::expect_weight_grad("ddown", got.ddown, data.ddown, post8.codes_t(), post8.scale().scale, dout8.codes_t(),
                                  dout8.scale().scale, c.F, c.C, c.N, host);
      testing::expect_weight_grad("dup", got.dup, data.dup, dpre8.codes_t(), dpre8.scale().scale, inp8.codes_t(),
                                  inp8.scale().scale, c.F, c.C, c.N, host);
    }
    // The whole against the reference with the same FP8 operands.
    const Relu2MlpGradients<double> truth = backward_fp8<double>(c, data, args.fp8, up8_t, down8, weight_scales, truth_exec());
    const Relu2MlpGradients<float> baseline = backward_fp8<float>(c, data, args.fp8, up8_t, down8, weight_scales, baseline_exec());
    EXPECT_TRUE(testing::within_rule(got.dinp, truth.dinp, baseline.dinp)) << "dinp";
    constexpr testing::Ulp kFp8 = static_cast<testing::Ulp>(10);
    EXPECT_TRUE(testing::within_rule(got.dup, truth.dup, baseline.dup, kFp8)) << "dup";
    EXPECT_TRUE(testing::within_rule(got.ddown, truth.ddown, baseline.ddown, kFp8)) << "ddown";
  }

  template <class T>
  static Relu2MlpGradients<T> backward_fp8(const BackwardCase& c, const Relu2MlpData& data, const Relu2MlpBackwardFp8& device,
                                           const std::vector<e4m3>& up8_t, const std::vector<e4m3>& down8,
                                           const std::vector<Fp8Scale>& weight_scales, const HostExec& exec) {
    const auto inp = testing::widen<T>(data.inp), dout = testing::widen<T>(data.dout), up = testing::widen<T>(data.up),
               down = testing::widen<T>(data.down), post = testing::widen<T>(data.post);
    Relu2MlpGradients<T> result{.dinp = std::vector<T>(data.inp.size()),
                                .dhidden = std::vector<T>(data.post.size()),
                                .dup = {data.dup.begin(), data.dup.end()},
                                .ddown = {data.ddown.begin(), data.ddown.end()}};
    std::vector<e4m3> inp8_t(inp.size()), post8_t(post.size());
    std::vector<e5m2> dout8(inp.size()), dout8_t(inp.size()), dpre8(post.size()), dpre8_t(post.size());
    std::vector<Fp8Scale> scales(4);
    const auto start = [&](int index, float scale) {
      scales[static_cast<size_t>(index)].scale = c.known ? scale : 0;
      return &scales[static_cast<size_t>(index)];
    };
    Relu2MlpBackwardFp8 fp8 = device;
    if (c.input_grad)
      fp8.up8_t = up8_t.data(), fp8.down8 = down8.data(), fp8.dout.codes = dout8.data(), fp8.dpre.codes = dpre8.data();
    if (c.weight_grad) {
      fp8.inp.codes_t = inp8_t.data(), fp8.post.codes_t = post8_t.data();
      fp8.dout.codes_t = dout8_t.data(), fp8.dpre.codes_t = dpre8_t.data();
    }
    fp8.up_scale = &weight_scales[0], fp8.down_scale = &weight_scales[1];
    fp8.inp.scale = start(0, 0.007f), fp8.post.scale = start(1, 0.005f);
    fp8.dout.scale = start(2, 1e-7f), fp8.dpre.scale = start(3, 3e-7f);
    relu2_mlp_backward(Relu2MlpBackward<T>{result.dinp.data(), result.dup.data(), result.ddown.data(), result.dhidden.data(),
                                           dout.data(), inp.data(), post.data(), up.data(), down.data(), c.N, c.C, c.F, fp8},
                       exec);
    return result;
  }
};

TEST_F(Relu2MlpFp8BackwardCudaTest, EveryChoice) {
  for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
    for (const auto& [input_grad, weight_grad] : {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
      for (const Fp8Scaling activations : {Fp8Scaling::fixed, scaling}) {
        check({.N = 272,
               .C = 48,
               .F = 144,
               .input_grad = input_grad,
               .weight_grad = weight_grad,
               .scaling = scaling,
               .activations = activations,
               .count = activations == scaling});
      }
    }
  }
}

TEST_F(Relu2MlpFp8BackwardCudaTest, ScalesThatAreNotKnownYet) {
  for (const bool weight_grad : {false, true})
    check({.N = 272, .C = 48, .F = 144, .weight_grad = weight_grad, .activations = Fp8Scaling::delayed, .known = false});
}

TEST_F(Relu2MlpFp8BackwardCudaTest, ShapesOfTiles) {
  for (const int64_t N : {16, 112, 128, 1040}) {
    for (const int F : {16, 64, 80}) check({.N = N, .C = 32, .F = F});
  }
  for (const int64_t N : {1, 7, 65}) check({.N = N, .C = 32, .F = 80, .weight_grad = false});
}

TEST_F(Relu2MlpFp8BackwardCudaTest, ProductionWidths) {
  check({.N = 1040, .C = 768, .F = 3072});
  check({.N = 1040, .C = 768, .F = 3072, .scaling = Fp8Scaling::current});
}

}  // namespace
}  // namespace speedrun::kernels

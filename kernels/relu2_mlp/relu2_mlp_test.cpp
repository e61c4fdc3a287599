#include "kernels/relu2_mlp/relu2_mlp.h"

#include "kernels/gemm/affine_ref.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

constexpr float kUpScale = 0.01f, kDownScale = 0.02f;

template <class T>
struct Problem {
  int64_t N;
  int C, F;
  std::vector<T> inp, up_weight, down_weight, dout;
  std::vector<T> out, post, dinp, dup_weight, ddown_weight, dhidden;
  std::vector<e4m3> up8, down8, inp8, post8;
  Fp8Scale up_scale{.scale = kUpScale}, down_scale{.scale = kDownScale}, inp_scale{.scale = 0.0625f}, post_scale{.scale = 0.125f};
  Relu2MlpFp8 fp8;

  Problem(int64_t tokens, int channels, int hidden, Random& random)
      : N(tokens),
        C(channels),
        F(hidden),
        inp(random.normal_vector<T>(N * C)),
        up_weight(random.normal_vector<T>(int64_t{F} * C, 0.5)),
        down_weight(random.normal_vector<T>(int64_t{F} * C, 0.5)),
        dout(random.normal_vector<T>(N * C)),
        out(poisoned<T>(N * C)),
        post(poisoned<T>(N * F)),
        dinp(poisoned<T>(N * C)),
        dup_weight(random.normal_vector<T>(int64_t{F} * C)),
        ddown_weight(random.normal_vector<T>(int64_t{F} * C)),
        dhidden(poisoned<T>(N * F)),
        up8(up_weight.size()),
        down8(down_weight.size()),
        inp8(inp.size(), e4m3{0xff}),
        post8(post.size(), e4m3{0xff}) {
    for (int f = 0; f < F; ++f) {
      for (int c = 0; c < C; ++c) {
        up8[f * C + c] = to_e4m3(static_cast<float>(up_weight[f * C + c]) / kUpScale);
        down8[c * F + f] = to_e4m3(static_cast<float>(down_weight[f * C + c]) / kDownScale);
      }
    }
  }
  void use_fp8(bool up, bool down, Fp8Scaling scaling) {
    fp8 = {};
    if (up) fp8.up8 = up8.data(), fp8.up_scale = &up_scale, fp8.inp8 = inp8.data(), fp8.inp_scale = &inp_scale;
    if (down) fp8.down8 = down8.data(), fp8.down_scale = &down_scale, fp8.post8 = post8.data(), fp8.post_scale = &post_scale;
    fp8.inp_scaling = fp8.post_scaling = scaling;
  }
  void forward(const HostExec& exec) {
    relu2_mlp_forward(Relu2MlpForward<T>{out.data(), post.data(), inp.data(), up_weight.data(), down_weight.data(), fp8, N, C, F},
                      exec);
  }
  void backward(const HostExec& exec, const Relu2MlpBackwardFp8& backward_fp8 = {}) {
    relu2_mlp_backward(Relu2MlpBackward<T>{dinp.data(), dup_weight.data(), ddown_weight.data(), dhidden.data(), dout.data(),
                                           inp.data(), post.data(), up_weight.data(), down_weight.data(), N, C, F, backward_fp8},
                       exec);
  }
};

TEST(Relu2Mlp, EqualsTheFormula) {
  Random random = test_random();
  Problem<double> p(11, 5, 13, random);
  p.forward(HostExec{});
  for (int64_t n = 0; n < p.N; ++n) {
    std::vector<double> expected(p.C);
    for (int f = 0; f < p.F; ++f) {
      double pre = 0;
      for (int c = 0; c < p.C; ++c) pre += p.inp[n * p.C + c] * p.up_weight[f * p.C + c];
      const double post = pre > 0 ? pre * pre : 0;
      EXPECT_NEAR(p.post[n * p.F + f], post, 1e-12);
      for (int c = 0; c < p.C; ++c) expected[c] += post * p.down_weight[f * p.C + c];
    }
    for (int c = 0; c < p.C; ++c) EXPECT_NEAR(p.out[n * p.C + c], expected[c], 1e-11);
  }
}

TEST(Relu2Mlp, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  Problem<double> p(67, 6, 11, random);
  const Problem<double> before = p;
  p.forward(HostExec{});
  p.backward(HostExec{});
  const std::vector<double> dinp = p.dinp, dup = added(p.dup_weight, before.dup_weight),
                            ddown = added(p.ddown_weight, before.ddown_weight);
  // The second derivative jumps at 0: an element that crosses it within a step costs an error of the order of the step.
  const GradientCheck check{.objective =
                                [&] {
                                  p.forward(HostExec{});
                                  return dot(p.out, p.dout);
                                },
                            .step = 1e-6,
                            .tolerance = 1e-5};
  check_gradients(check, {{"inp", &p.inp, &dinp}, {"up_weight", &p.up_weight, &dup}, {"down_weight", &p.down_weight, &ddown}},
                  random);
}

// Every FP8 choice against plain loops: operands rounded to the nearest code of their scale, products of the rounded ones.
TEST(Relu2Mlp, Fp8ForwardEqualsTheFormulaOnRoundedOperands) {
  Random random = test_random();
  const auto rounded = [](double x, double scale) {
    return scale * static_cast<double>(to_float(to_e4m3(static_cast<float>(x) * (1.0f / static_cast<float>(scale)))));
  };
  const auto scale_of = [](const std::vector<double>& values, Fp8Scaling scaling, double given) {
    float largest = 0;
    for (const double x : values) largest = std::max(largest, std::abs(static_cast<float>(x)));
    return scaling == Fp8Scaling::current ? static_cast<double>(static_cast<float>(largest / 448.0)) : given;
  };
  for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
    for (const bool up : {false, true}) {
      for (const bool down : {false, true}) {
        Problem<double> p(9, 17, 13, random);
        p.use_fp8(up, down, scaling);
        const double inp_scale = scale_of(p.inp, scaling, p.inp_scale.scale), up_scale = kUpScale, down_scale = kDownScale;
        p.forward(HostExec{});
        const double post_scale = scale_of(p.post, scaling, 0.125);
        for (int64_t n = 0; n < p.N; ++n) {
          std::vector<double> expected(p.C);
          for (int f = 0; f < p.F; ++f) {
            double pre = 0;
            for (int c = 0; c < p.C; ++c) {
              const double x = p.inp[n * p.C + c], w = p.up_weight[f * p.C + c];
              pre += up ? rounded(x, inp_scale) * up_scale * to_float(to_e4m3(static_cast<float>(w) / kUpScale)) : x * w;
            }
            ASSERT_NEAR(p.post[n * p.F + f], pre > 0 ? pre * pre : 0, 1e-10);
            const double post = p.post[n * p.F + f];
            for (int c = 0; c < p.C; ++c) {
              const double w = p.down_weight[f * p.C + c];
              expected[c] +=
                  down ? rounded(post, post_scale) * down_scale * to_float(to_e4m3(static_cast<float>(w) / kDownScale)) : post * w;
            }
          }
          for (int c = 0; c < p.C; ++c) ASSERT_NEAR(p.out[n * p.C + c], expected[c], 1e-10);
        }
      }
    }
  }
}

// FP8 operands of a backward pass: each pair of products by itself.
template <class T>
struct BackwardOperands {
  std::vector<e4m3> up8_t, down8, inp8_t, post8_t;
  std::vector<e5m2> dout8, dout8_t, dpre8, dpre8_t;
  Fp8Scale up_scale, down_scale, inp_scale{.scale = 0.02f}, post_scale{.scale = 0.1f}, dout_scale{.scale = 1e-3f},
      dpre_scale{.scale = 2e-3f};
  Relu2MlpBackwardFp8 fp8;

  BackwardOperands(const Problem<T>& p, bool input_grad, bool weight_grad, Fp8Scaling scaling)
      : up8_t(p.up_weight.size()),
        down8(p.down_weight.size()),
        inp8_t(p.inp.size(), e4m3{0xff}),
        post8_t(p.post.size(), e4m3{0xff}),
        dout8(p.dout.size(), e5m2{0xff}),
        dout8_t(p.dout.size(), e5m2{0xff}),
        dpre8(p.post.size(), e5m2{0xff}),
        dpre8_t(p.post.size(), e5m2{0xff}) {
    const Fp8WeightItem<T> items[] = {{nullptr, up8_t.data(), p.up_weight.data(), &up_scale, p.F, p.C},
                                      {down8.data(), nullptr, p.down_weight.data(), &down_scale, p.F, p.C}};
    fp8_weights(Fp8Weights<T>{items, items, 2, Fp8Scaling::current, false, nullptr}, HostExec{});
    const auto if_used = [](bool used, auto& codes) { return used ? codes.data() : nullptr; };
    fp8 = {.up8_t = if_used(input_grad, up8_t),
           .up_scale = &up_scale,
           .down8 = if_used(input_grad, down8),
           .down_scale = &down_scale,
           .inp = {.codes_t = if_used(weight_grad, inp8_t), .scale = &inp_scale, .scaling = scaling},
           .post = {.codes_t = if_used(weight_grad, post8_t), .scale = &post_scale, .scaling = scaling},
           .dout = {.codes = if_used(input_grad, dout8),
                    .codes_t = if_used(weight_grad, dout8_t),
                    .scale = &dout_scale,
                    .scaling = scaling},
           .dpre = {.codes = if_used(input_grad, dpre8),
                    .codes_t = if_used(weight_grad, dpre8_t),
                    .scale = &dpre_scale,
                    .scaling = scaling}};
  }
};

// Every choice against plain loops over rounded operands.
TEST(Relu2Mlp, Fp8BackwardEqualsTheFormulaOnRoundedOperands) {
  Random random = test_random();
  const auto e4 = [](double x, double scale) {
    return scale * static_cast<double>(to_float(to_e4m3(static_cast<float>(x) * (1.0f / static_cast<float>(scale)))));
  };
  const auto e5 = [](double x, double scale) {
    return scale * static_cast<double>(to_float(to_e5m2(static_cast<float>(x) * (1.0f / static_cast<float>(scale)))));
  };
  const auto largest = [](const std::vector<double>& values) {
    float result = 0;
    for (const double x : values) result = std::max(result, std::abs(static_cast<float>(x)));
    return static_cast<double>(result);
  };
  for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
    for (const bool input_grad : {false, true}) {
      for (const bool weight_grad : {false, true}) {
        SCOPED_TRACE(std::string(input_grad ? "input " : "") + (weight_grad ? "weight " : "") +
                     std::to_string(static_cast<int>(scaling)));
        Problem<double> p(14, 6, 9, random);
        p.forward(HostExec{});
        const Problem<double> before = p;
        BackwardOperands<double> operands(p, input_grad, weight_grad, scaling);
        p.backward(HostExec{}, operands.fp8);
        const auto scale_of = [&](const std::vector<double>& values, double most, float given) {
          return static_cast<double>(scaling == Fp8Scaling::current ? static_cast<float>(largest(values) / most) : given);
        };
        const double dout_scale = scale_of(p.dout, 57344, 1e-3f), inp_scale = scale_of(p.inp, 448, 0.02f),
                     post_scale = scale_of(p.post, 448, 0.1f), up_scale = static_cast<float>(largest(p.up_weight) / 448),
                     down_scale = static_cast<float>(largest(p.down_weight) / 448);
        std::vector<double> dpre(p.post.size());
        for (int64_t n = 0; n < p.N; ++n) {
          for (int f = 0; f < p.F; ++f) {
            double dpost = 0;
            for (int c = 0; c < p.C; ++c) {
              const double dy = p.dout[n * p.C + c], w = p.down_weight[f * p.C + c];
              dpost += input_grad ? e5(dy, dout_scale) * e4(w, down_scale) : dy * w;
            }
            dpre[n * p.F + f] = dpost * 2 * std::sqrt(p.post[n * p.F + f]);
            ASSERT_NEAR(p.dhidden[n * p.F + f], dpre[n * p.F + f], 1e-10);
          }
        }
        const double dpre_scale = scale_of(p.dhidden, 57344, 2e-3f);
        for (int64_t n = 0; n < p.N; ++n) {
          for (int c = 0; c < p.C; ++c) {
            double expected = 0;
            for (int f = 0; f < p.F; ++f) {
              const double dx = p.dhidden[n * p.F + f], w = p.up_weight[f * p.C + c];
              expected += input_grad ? e5(dx, dpre_scale) * e4(w, up_scale) : dx * w;
            }
            ASSERT_NEAR(p.dinp[n * p.C + c], expected, 1e-10);
          }
        }
        for (int f = 0; f < p.F; ++f) {
          for (int c = 0; c < p.C; ++c) {
            double dup = before.dup_weight[f * p.C + c], ddown = before.ddown_weight[f * p.C + c];
            for (int64_t n = 0; n < p.N; ++n) {
              const double x = p.inp[n * p.C + c], dx = p.dhidden[n * p.F + f], y = p.post[n * p.F + f], dy = p.dout[n * p.C + c];
              dup += weight_grad ? e5(dx, dpre_scale) * e4(x, inp_scale) : dx * x;
              ddown += weight_grad ? e4(y, post_scale) * e5(dy, dout_scale) : y * dy;
            }
            ASSERT_NEAR(p.dup_weight[f * p.C + c], dup, 1e-10);
            ASSERT_NEAR(p.ddown_weight[f * p.C + c], ddown, 1e-10);
          }
        }
      }
    }
  }
}

TEST(Relu2Mlp, WithoutFp8BackwardIsTheSameProducts) {
  Random random = test_random();
  const HostExec exec{.round_bf16 = true};
  Problem<float> p(70, 24, 40, random);
  p.forward(exec);
  Problem<float> q = p;
  p.backward(exec);
  affine_weight_grad_ref<float>(q.ddown_weight.data(), q.post.data(), q.dout.data(), q.N, q.C, q.F, exec);
  affine_ref(q.dhidden.data(), q.dout.data(), q.down_weight.data(), static_cast<const float*>(nullptr),
             static_cast<const float*>(nullptr), q.N, q.C, q.F, exec);
  for (size_t i = 0; i < q.dhidden.size(); ++i) q.dhidden[i] = exec.store(q.dhidden[i] * (2 * std::sqrt(q.post[i])));
  affine_weight_grad_ref<float>(q.dup_weight.data(), q.dhidden.data(), q.inp.data(), q.N, q.C, q.F, exec);
  affine_input_grad_ref(q.dinp.data(), q.dhidden.data(), q.up_weight.data(), q.N, q.C, q.F, exec);
  EXPECT_TRUE(same_bits(p.dinp, q.dinp));
  EXPECT_TRUE(same_bits(p.dup_weight, q.dup_weight));
  EXPECT_TRUE(same_bits(p.ddown_weight, q.ddown_weight));
}

TEST(Relu2Mlp, Fp8BackwardRefusesMissingOperands) {
  Random random = test_random();
  Problem<float> p(16, 16, 16, random);
  p.forward(HostExec{});
  const BackwardOperands<float> all(p, true, true, Fp8Scaling::current);
  const auto refused = [&](const auto& change) {
    Relu2MlpBackwardFp8 fp8 = all.fp8;
    change(fp8);
    EXPECT_THROW(p.backward(HostExec{}, fp8), Error);
  };
  refused([](auto& fp8) { fp8.down8 = nullptr; });
  refused([](auto& fp8) { fp8.post.codes_t = nullptr; });
  refused([](auto& fp8) { fp8.dpre.codes = nullptr; });
  refused([](auto& fp8) { fp8.dout.codes_t = nullptr; });
  refused([](auto& fp8) { fp8.dout.scale = nullptr; });
}

TEST(Relu2Mlp, DelayedScaleMeasuresPostForTheNextStep) {
  Random random = test_random();
  Problem<float> p(33, 16, 48, random);
  p.use_fp8(true, true, Fp8Scaling::delayed);
  p.forward(HostExec{.round_bf16 = true});
  EXPECT_EQ(p.post_scale.scale, 0.125f);
  EXPECT_EQ(std::bit_cast<float>(p.post_scale.amax), *std::max_element(p.post.begin(), p.post.end()));
}

// Straight-through: with the same post, backward does not know of FP8.
TEST(Relu2Mlp, BackwardIsStraightThrough) {
  Random random = test_random();
  Problem<double> fp8(21, 16, 32, random);
  fp8.use_fp8(true, true, Fp8Scaling::current);
  fp8.forward(HostExec{});
  Problem<double> plain = fp8;
  fp8.backward(HostExec{});
  // d(objective)/d(inp) of the linear map at this post: dout · (W_down ∘ 2√post) · W_up.
  for (int64_t n = 0; n < plain.N; ++n) {
    for (int c = 0; c < plain.C; ++c) {
      double expected = 0;
      for (int f = 0; f < plain.F; ++f) {
        double dpost = 0;
        for (int k = 0; k < plain.C; ++k) dpost += plain.dout[n * plain.C + k] * plain.down_weight[f * plain.C + k];
        expected += dpost * 2 * std::sqrt(plain.post[n * plain.F + f]) * plain.up_weight[f * plain.C + c];
      }
      EXPECT_NEAR(fp8.dinp[n * plain.C + c], expected, 1e-9);
    }
  }
}

TEST(Relu2Mlp, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  for (const bool fp8 : {false, true}) {
    const Problem<float> start(270, 24, 96, random);
    check_thread_counts([&](const HostExec& exec) {
      Problem<float> p = start;
      if (fp8) p.use_fp8(true, true, Fp8Scaling::current);
      p.forward(exec);
      BackwardOperands<float> operands(p, fp8, fp8, Fp8Scaling::current);
      p.backward(exec, operands.fp8);
      return Outputs{p.out, p.post, p.dinp, p.dup_weight, p.ddown_weight, p.dhidden};
    });
  }
}

TEST(Relu2Mlp, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  for (const bool fp8 : {false, true}) {
    Problem<float> p(40, 16, 64, random);
    if (fp8) p.use_fp8(true, true, Fp8Scaling::current);
    p.forward(HostExec{.round_bf16 = true});
    BackwardOperands<float> operands(p, fp8, fp8, Fp8Scaling::current);
    p.backward(HostExec{.round_bf16 = true}, operands.fp8);
    for (const auto& stored : {p.out, p.post, p.dinp, p.dhidden}) EXPECT_TRUE(all_bf16(stored));
    EXPECT_FALSE(all_bf16(p.dup_weight));
  }
}

TEST(Relu2Mlp, KeepsNan) {
  Random random = test_random();
  Problem<float> p(2, 16, 16, random);
  p.inp[3] = std::numeric_limits<float>::quiet_NaN();
  for (const bool fp8 : {false, true}) {
    if (fp8) p.use_fp8(true, true, Fp8Scaling::delayed);
    p.forward(HostExec{});
    for (int c = 0; c < p.C; ++c) {
      EXPECT_TRUE(std::isnan(p.out[c]));
      EXPECT_TRUE(std::isfinite(p.out[p.C + c]));
    }
  }
}

}  // namespace
}  // namespace speedrun::kernels

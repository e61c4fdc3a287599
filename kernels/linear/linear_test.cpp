#include "kernels/linear/linear.h"

#include "kernels/gemm/affine_ref.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t N;
  int K, O;
  std::vector<T> inp, weight, bias, residual, dout;
  std::vector<T> out, dinp, dweight, dbias, scratch;

  Problem(int64_t tokens, int inputs, int outputs, Random& random)
      : N(tokens),
        K(inputs),
        O(outputs),
        inp(random.normal_vector<T>(N * K)),
        weight(random.normal_vector<T>(O * K)),
        bias(random.normal_vector<T>(O)),
        residual(random.normal_vector<T>(N * O)),
        dout(random.normal_vector<T>(N * O)),
        out(poisoned<T>(N * O)),
        dinp(poisoned<T>(N * K)),
        dweight(random.normal_vector<T>(O * K)),
        dbias(random.normal_vector<T>(O)),
        scratch(poisoned<T>(bias_grad_scratch(N, O))) {}

  void forward(const HostExec& exec, bool with_bias = true, bool with_residual = true) {
    linear_forward(LinearForward<T>{out.data(), inp.data(), weight.data(), with_bias ? bias.data() : nullptr,
                                    with_residual ? residual.data() : nullptr, N, K, O},
                   exec);
  }
  void backward(const HostExec& exec, bool with_bias = true, bool with_dinp = true) {
    linear_backward(LinearBackward<T>{with_dinp ? dinp.data() : nullptr, dweight.data(), with_bias ? dbias.data() : nullptr,
                                      dout.data(), inp.data(), weight.data(), with_bias ? scratch.data() : nullptr, N, K, O},
                    exec);
  }
};

TEST(Linear, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const bool with_bias : {true, false}) {
    for (const int64_t N : {1, 7, 150}) {
      Problem<double> p(N, 13, 9, random);
      const std::vector<double> dweight = p.dweight, dbias = p.dbias;
      p.forward(HostExec{}, with_bias);
      p.backward(HostExec{}, with_bias);
      const std::vector<double> weight_gradient = added(p.dweight, dweight), bias_gradient = added(p.dbias, dbias), dinp = p.dinp;
      const GradientCheck check{.objective = [&] {
        p.forward(HostExec{}, with_bias);
        return dot(p.out, p.dout);
      }};
      std::vector<Checked> tensors{
          {"inp", &p.inp, &dinp}, {"weight", &p.weight, &weight_gradient}, {"residual", &p.residual, &p.dout}};
      if (with_bias) tensors.push_back({"bias", &p.bias, &bias_gradient});
      check_gradients(check, tensors, random);
      if (!with_bias) {
        EXPECT_EQ(p.dbias, dbias);
      }
    }
  }
}

TEST(Linear, DinpMayBeLeftOut) {
  Random random = test_random();
  Problem<double> p(6, 5, 4, random), q = p;
  p.backward(HostExec{}, true, false);
  q.backward(HostExec{});
  EXPECT_EQ(p.dweight, q.dweight);
  EXPECT_EQ(p.dbias, q.dbias);
  EXPECT_TRUE(std::isnan(p.dinp[0]));
}

TEST(Linear, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(517, 40, 72, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.out, p.dinp, p.dweight, p.dbias};
  });
}

TEST(Linear, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  Problem<float> exact(50, 16, 24, random), rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  check_rounded(rounded.out, exact.out);
  check_rounded(rounded.dinp, exact.dinp);
  EXPECT_TRUE(same_bits(rounded.dweight, exact.dweight));
  EXPECT_TRUE(same_bits(rounded.dbias, exact.dbias));
}

// What is left of x after its way through FP8.
double rounded(double x, double scale, bool gradient) {
  const float scaled = static_cast<float>(x) * (1.0f / static_cast<float>(scale));
  return scale * static_cast<double>(gradient ? to_float(to_e5m2(scaled)) : to_float(to_e4m3(scaled)));
}

double largest(const std::vector<double>& values) {
  float result = 0;
  for (const double x : values) result = std::max(result, std::abs(static_cast<float>(x)));
  return result;
}

// FP8 operands of a problem, each product by itself.
struct Fp8Operands {
  std::vector<e4m3> weight8, weight8_t, inp8, inp8_t;
  std::vector<e5m2> dout8, dout8_t;
  Fp8Scale weight_scale{}, inp_scale{.scale = 0.02f}, dout_scale{.scale = 1e-4f};
  ProjectionFp8 fp8;

  template <class T>
  Fp8Operands(const Problem<T>& p, bool forward, bool input_grad, bool weight_grad, Fp8Scaling scaling)
      : weight8(p.weight.size()),
        weight8_t(p.weight.size()),
        inp8(p.inp.size(), e4m3{0xff}),
        inp8_t(p.inp.size(), e4m3{0xff}),
        dout8(p.dout.size(), e5m2{0xff}),
        dout8_t(p.dout.size(), e5m2{0xff}) {
    const Fp8WeightItem<T> item{weight8.data(), weight8_t.data(), p.weight.data(), &weight_scale, p.O, p.K};
    fp8_weights(Fp8Weights<T>{&item, &item, 1, Fp8Scaling::current, false, nullptr}, HostExec{});
    fp8 = {.weight8 = forward ? weight8.data() : nullptr,
           .weight8_t = input_grad ? weight8_t.data() : nullptr,
           .weight_scale = &weight_scale,
           .inp = {.codes = forward ? inp8.data() : nullptr,
                   .codes_t = weight_grad ? inp8_t.data() : nullptr,
                   .scale = &inp_scale,
                   .scaling = scaling},
           .dout = {.codes = input_grad ? dout8.data() : nullptr,
                    .codes_t = weight_grad ? dout8_t.data() : nullptr,
                    .scale = &dout_scale,
                    .scaling = scaling}};
  }
};

template <class T>
void run_fp8(Problem<T>& p, const ProjectionFp8& fp8, const HostExec& exec) {
  linear_forward(LinearForward<T>{p.out.data(), p.inp.data(), p.weight.data(), nullptr, nullptr, p.N, p.K, p.O, fp8}, exec);
  linear_backward(LinearBackward<T>{p.dinp.data(), p.dweight.data(), nullptr, p.dout.data(), p.inp.data(), p.weight.data(), nullptr,
                                    p.N, p.K, p.O, fp8},
                  exec);
}

// Every choice against plain loops over rounded operands.
TEST(Linear, Fp8EqualsTheFormulaOnRoundedOperands) {
  Random random = test_random();
  for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed}) {
    for (int choice = 0; choice < 8; ++choice) {
      const bool forward = choice & 1, input_grad = choice & 2, weight_grad = choice & 4;
      SCOPED_TRACE("choice " + std::to_string(choice) + ", scaling " + std::to_string(static_cast<int>(scaling)));
      Problem<double> p(11, 7, 5, random);
      for (double& x : p.dout) x *= 1e-3;
      const std::vector<double> dweight_before = p.dweight;
      Fp8Operands operands(p, forward, input_grad, weight_grad, scaling);
      run_fp8(p, operands.fp8, HostExec{});
      const bool current = scaling == Fp8Scaling::current;
      const double inp_scale = current ? static_cast<double>(static_cast<float>(largest(p.inp) / 448)) : 0.02f,
                   dout_scale = current ? static_cast<double>(static_cast<float>(largest(p.dout) / 57344)) : 1e-4f,
                   weight_scale = static_cast<float>(largest(p.weight) / 448);
      const auto x = [&](int64_t n, int k, bool fp8) {
        return fp8 ? rounded(p.inp[n * p.K + k], inp_scale, false) : p.inp[n * p.K + k];
      };
      const auto w = [&](int o, int k, bool fp8) {
        return fp8 ? rounded(p.weight[o * p.K + k], weight_scale, false) : p.weight[o * p.K + k];
      };
      const auto dy = [&](int64_t n, int o, bool fp8) {
        return fp8 ? rounded(p.dout[n * p.O + o], dout_scale, true) : p.dout[n * p.O + o];
      };
      for (int64_t n = 0; n < p.N; ++n) {
        for (int o = 0; o < p.O; ++o) {
          double expected = 0;
          for (int k = 0; k < p.K; ++k) expected += x(n, k, forward) * w(o, k, forward);
          EXPECT_NEAR(p.out[n * p.O + o], expected, 1e-12);
        }
        for (int k = 0; k < p.K; ++k) {
          double expected = 0;
          for (int o = 0; o < p.O; ++o) expected += dy(n, o, input_grad) * w(o, k, input_grad);
          EXPECT_NEAR(p.dinp[n * p.K + k], expected, 1e-14);
        }
      }
      for (int o = 0; o < p.O; ++o) {
        for (int k = 0; k < p.K; ++k) {
          double expected = dweight_before[o * p.K + k];
          for (int64_t n = 0; n < p.N; ++n) expected += dy(n, o, weight_grad) * x(n, k, weight_grad);
          EXPECT_NEAR(p.dweight[o * p.K + k], expected, 1e-13);
        }
      }
    }
  }
}

TEST(Linear, WithoutFp8ItIsTheSameProducts) {
  Random random = test_random();
  Problem<float> p(130, 24, 40, random), q = p;
  const HostExec exec{.round_bf16 = true};
  run_fp8(p, {}, exec);
  affine_ref(q.out.data(), q.inp.data(), q.weight.data(), static_cast<const float*>(nullptr), static_cast<const float*>(nullptr),
             q.N, q.K, q.O, exec);
  affine_weight_grad_ref<float>(q.dweight.data(), q.dout.data(), q.inp.data(), q.N, q.K, q.O, exec);
  affine_input_grad_ref(q.dinp.data(), q.dout.data(), q.weight.data(), q.N, q.K, q.O, exec);
  EXPECT_TRUE(same_bits(p.out, q.out));
  EXPECT_TRUE(same_bits(p.dweight, q.dweight));
  EXPECT_TRUE(same_bits(p.dinp, q.dinp));
}

// Backward takes the scale that forward left, and looks for no maximum of its own.
TEST(Linear, BackwardKeepsForwardsScaleOfTheInput) {
  Random random = test_random();
  Problem<float> p(32, 16, 16, random);
  Fp8Operands operands(p, true, false, true, Fp8Scaling::current);
  linear_forward(LinearForward<float>{p.out.data(), p.inp.data(), p.weight.data(), nullptr, nullptr, p.N, p.K, p.O, operands.fp8},
                 HostExec{});
  const Fp8Scale after_forward = operands.inp_scale;
  run_fp8(p, operands.fp8, HostExec{});
  EXPECT_EQ(operands.inp_scale.scale, after_forward.scale);
  for (int64_t n = 0; n < p.N; ++n) {
    for (int k = 0; k < p.K; ++k) ASSERT_EQ(operands.inp8[n * p.K + k].bits, operands.inp8_t[k * p.N + n].bits);
  }
}

TEST(Linear, Fp8RefusesABiasAndMissingOperands) {
  Random random = test_random();
  Problem<float> p(4, 16, 16, random);
  Fp8Operands operands(p, true, true, true, Fp8Scaling::current);
  EXPECT_THROW(linear_forward(LinearForward<float>{p.out.data(), p.inp.data(), p.weight.data(), p.bias.data(), nullptr, p.N, p.K,
                                                   p.O, operands.fp8},
                              HostExec{}),
               Error);
  ProjectionFp8 no_gradient = operands.fp8;
  no_gradient.dout.codes_t = nullptr;
  EXPECT_THROW(run_fp8(p, no_gradient, HostExec{}), Error);
  ProjectionFp8 no_input = operands.fp8;
  no_input.inp.codes = nullptr;
  EXPECT_THROW(run_fp8(p, no_input, HostExec{}), Error);
}

TEST(Linear, Fp8SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(170, 32, 48, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    Fp8Operands operands(p, true, true, true, Fp8Scaling::current);
    run_fp8(p, operands.fp8, exec);
    return Outputs{p.out, p.dinp, p.dweight};
  });
}

}  // namespace
}  // namespace speedrun::kernels

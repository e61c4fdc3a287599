#include "kernels/mlp/mlp.h"

#include "kernels/linear/linear.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t N;
  int C, F;
  Activation activation;
  bool biases;
  std::vector<T> inp, residual, up_weight, up_bias, down_weight, down_bias, dout;
  std::vector<T> out, post, pre, dinp, dup_weight, dup_bias, ddown_weight, ddown_bias, dhidden, scratch;

  Problem(int64_t tokens, int channels, int hidden, Activation act, bool with_biases, Random& random)
      : N(tokens),
        C(channels),
        F(hidden),
        activation(act),
        biases(with_biases),
        inp(random.normal_vector<T>(N * C)),
        residual(random.normal_vector<T>(N * C)),
        up_weight(random.normal_vector<T>(int64_t{F} * C, 0.5)),
        up_bias(random.normal_vector<T>(F)),
        down_weight(random.normal_vector<T>(int64_t{C} * F, 0.5)),
        down_bias(random.normal_vector<T>(C)),
        dout(random.normal_vector<T>(N * C)),
        out(poisoned<T>(N * C)),
        post(poisoned<T>(N * F)),
        pre(poisoned<T>(N * F)),
        dinp(poisoned<T>(N * C)),
        dup_weight(random.normal_vector<T>(int64_t{F} * C)),
        dup_bias(random.normal_vector<T>(F)),
        ddown_weight(random.normal_vector<T>(int64_t{C} * F)),
        ddown_bias(random.normal_vector<T>(C)),
        dhidden(poisoned<T>(N * F)),
        scratch(poisoned<T>(bias_grad_scratch(N, std::max(C, F)))) {}

  T* saved_pre() { return activation == Activation::gelu ? pre.data() : nullptr; }
  void forward(const HostExec& exec) {
    mlp_forward(MlpForward<T>{out.data(), post.data(), saved_pre(), inp.data(), residual.data(), up_weight.data(),
                              biases ? up_bias.data() : nullptr, down_weight.data(), biases ? down_bias.data() : nullptr, N, C, F,
                              activation},
                exec);
  }
  void backward(const HostExec& exec) {
    mlp_backward(
        MlpBackward<T>{dinp.data(), dup_weight.data(), biases ? dup_bias.data() : nullptr, ddown_weight.data(),
                       biases ? ddown_bias.data() : nullptr, dhidden.data(), dout.data(), inp.data(), saved_pre(), post.data(),
                       up_weight.data(), down_weight.data(), biases ? scratch.data() : nullptr, N, C, F, activation},
        exec);
  }
};

double activate(double x, Activation activation) {
  if (activation == Activation::relu2) return x > 0 ? x * x : 0;
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

TEST(Mlp, EqualsTheFormula) {
  Random random = test_random();
  for (const Activation activation : {Activation::gelu, Activation::relu2}) {
    for (const bool biases : {true, false}) {
      Problem<double> p(11, 5, 13, activation, biases, random);
      p.forward(HostExec{});
      for (int64_t n = 0; n < p.N; ++n) {
        std::vector<double> expected(p.residual.begin() + n * p.C, p.residual.begin() + (n + 1) * p.C);
        for (int f = 0; f < p.F; ++f) {
          double pre = biases ? p.up_bias[f] : 0;
          for (int c = 0; c < p.C; ++c) pre += p.inp[n * p.C + c] * p.up_weight[f * p.C + c];
          EXPECT_NEAR(p.post[n * p.F + f], activate(pre, activation), 1e-12);
          for (int c = 0; c < p.C; ++c) expected[c] += activate(pre, activation) * p.down_weight[c * p.F + f];
        }
        for (int c = 0; c < p.C; ++c) EXPECT_NEAR(p.out[n * p.C + c], expected[c] + (biases ? p.down_bias[c] : 0), 1e-11);
      }
    }
  }
}

TEST(Mlp, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Activation activation : {Activation::gelu, Activation::relu2}) {
    for (const bool biases : {true, false}) {
      Problem<double> p(67, 6, 11, activation, biases, random);
      const Problem<double> before = p;
      p.forward(HostExec{});
      p.backward(HostExec{});
      const std::vector<double> dinp = p.dinp, dup_weight = added(p.dup_weight, before.dup_weight),
                                dup_bias = added(p.dup_bias, before.dup_bias);
      const std::vector<double> ddown_weight = added(p.ddown_weight, before.ddown_weight),
                                ddown_bias = added(p.ddown_bias, before.ddown_bias);
      // The second derivative of relu² jumps at 0: an element that crosses it within a step costs an error of the order of the
      // step.
      const bool smooth = activation == Activation::gelu;
      const GradientCheck check{.objective =
                                    [&] {
                                      p.forward(HostExec{});
                                      return dot(p.out, p.dout);
                                    },
                                .step = smooth ? 1e-4 : 1e-6,
                                .tolerance = smooth ? 1e-7 : 1e-5};
      std::vector<Checked> tensors{{"inp", &p.inp, &dinp},
                                   {"up_weight", &p.up_weight, &dup_weight},
                                   {"down_weight", &p.down_weight, &ddown_weight},
                                   {"residual", &p.residual, &p.dout}};
      if (biases) tensors.insert(tensors.end(), {{"up_bias", &p.up_bias, &dup_bias}, {"down_bias", &p.down_bias, &ddown_bias}});
      check_gradients(check, tensors, random);
    }
  }
}

TEST(Mlp, FloatGeluAgreesWithDoubleFarFromZero) {
  Random random = test_random();
  Problem<float> single(3, 1, 40, Activation::gelu, true, random);
  Problem<double> exact(3, 1, 40, Activation::gelu, true, random);
  for (int f = 0; f < 40; ++f) {
    single.up_weight[f] = 0;
    exact.up_weight[f] = 0;
    exact.up_bias[f] = single.up_bias[f] = static_cast<float>(f - 20) * 0.75f;
  }
  exact.dout.assign(single.dout.begin(), single.dout.end());
  exact.down_weight.assign(single.down_weight.begin(), single.down_weight.end());
  single.forward(HostExec{});
  exact.forward(HostExec{});
  single.backward(HostExec{});
  exact.backward(HostExec{});
  for (size_t i = 0; i < exact.post.size(); ++i)
    EXPECT_NEAR(single.post[i], exact.post[i], 1e-6 * (1e-6 + std::abs(exact.post[i]) * 5)) << single.pre[i];
  for (size_t i = 0; i < exact.dhidden.size(); ++i)
    EXPECT_NEAR(single.dhidden[i], exact.dhidden[i], 1e-5 * (0.01 + std::abs(exact.dhidden[i]))) << single.pre[i];
}

TEST(Mlp, ResidualMayBeUpdatedInPlace) {
  Random random = test_random();
  Problem<double> p(9, 4, 8, Activation::relu2, true, random);
  p.forward(HostExec{});
  const std::vector<double> expected = p.out;
  mlp_forward(MlpForward<double>{p.residual.data(), p.post.data(), nullptr, p.inp.data(), p.residual.data(), p.up_weight.data(),
                                 p.up_bias.data(), p.down_weight.data(), p.down_bias.data(), p.N, p.C, p.F, p.activation},
              HostExec{});
  EXPECT_EQ(p.residual, expected);
}

TEST(Mlp, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  for (const Activation activation : {Activation::gelu, Activation::relu2}) {
    const Problem<float> start(270, 24, 96, activation, true, random);
    check_thread_counts([&](const HostExec& exec) {
      Problem<float> p = start;
      p.forward(exec);
      p.backward(exec);
      return Outputs{p.out, p.post, p.dinp, p.dup_weight, p.dup_bias, p.ddown_weight, p.ddown_bias, p.dhidden};
    });
  }
}

TEST(Mlp, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  for (const Activation activation : {Activation::gelu, Activation::relu2}) {
    Problem<float> exact(40, 16, 64, activation, true, random), rounded = exact;
    exact.forward(HostExec{});
    exact.backward(HostExec{});
    rounded.forward(HostExec{.round_bf16 = true});
    rounded.backward(HostExec{.round_bf16 = true});
    check_rounded(rounded.out, exact.out);
    check_rounded(rounded.post, exact.post);
    check_rounded(rounded.dhidden, exact.dhidden);
    check_rounded(rounded.dinp, exact.dinp);
    if (activation == Activation::gelu) check_rounded(rounded.pre, exact.pre);
    EXPECT_FALSE(all_bf16(rounded.dup_weight));
  }
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/linear/linear.h"

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

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/smear/smear.h"

#include "kernels/base/error.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t N, row_tokens;
  int C, G;
  std::vector<T> inp, gate_weight, lambda, dout, out, dinp, dgate_weight, dlambda, scratch;

  Problem(int64_t rows, int64_t tokens_of_row, int channels, int gate_channels, Random& random)
      : N(rows * tokens_of_row),
        row_tokens(tokens_of_row),
        C(channels),
        G(gate_channels),
        inp(random.normal_vector<T>(N * C)),
        gate_weight(random.normal_vector<T>(G, 0.5)),
        lambda(random.normal_vector<T>(1)),
        dout(random.normal_vector<T>(N * C)),
        out(poisoned<T>(N * C)),
        dinp(poisoned<T>(N * C)),
        dgate_weight(random.normal_vector<T>(G)),
        dlambda(random.normal_vector<T>(1)),
        scratch(poisoned<T>(smear_scratch(N))) {}

  void forward(const HostExec& exec) {
    smear_forward(SmearForward<T>{out.data(), inp.data(), gate_weight.data(), lambda.data(), N, row_tokens, C, G}, exec);
  }
  void backward(const HostExec& exec) {
    smear_backward(SmearBackward<T>{dinp.data(), dgate_weight.data(), dlambda.data(), dout.data(), inp.data(), gate_weight.data(),
                                    lambda.data(), scratch.data(), N, row_tokens, C, G},
                   exec);
  }
};

TEST(Smear, KnownNumbers) {
  // Two rows of two tokens of two channels, the gate looks at the first: σ(0) = 1/2, σ(ln 3) = 3/4; λ = 4.
  const std::vector<double> inp{7, 1, 0, 5, 2, 3, 1, 10}, gate_weight{std::log(3.0)};
  const double lambda = 4;
  std::vector<double> out(8);
  smear_forward(SmearForward<double>{out.data(), inp.data(), gate_weight.data(), &lambda, 4, 2, 2, 1}, HostExec{});
  const std::vector<double> expected{7, 1, 0 + 2 * 7, 5 + 2 * 1, 2, 3, 1 + 3 * 2, 10 + 3 * 3};
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected[i], 1e-13) << "index " << i;
}

TEST(Smear, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const auto& [rows, row_tokens] : {std::pair<int64_t, int64_t>{1, 1}, {5, 1}, {1, 2}, {3, 5}, {2, 50}}) {
    for (const auto& [C, G] : {std::pair{3, 3}, {40, 12}, {35, 32}}) {
      SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(row_tokens) + ", C=" + std::to_string(C));
      Problem<double> p(rows, row_tokens, C, G, random);
      const std::vector<double> dgate_weight = p.dgate_weight, dlambda = p.dlambda;
      p.backward(HostExec{});
      const std::vector<double> weight_gradient = added(p.dgate_weight, dgate_weight), lambda_gradient = added(p.dlambda, dlambda);
      const GradientCheck check{.objective = [&] {
        p.forward(HostExec{});
        return dot(p.out, p.dout);
      }};
      check_gradients(
          check,
          {{"inp", &p.inp, &p.dinp}, {"gate_weight", &p.gate_weight, &weight_gradient}, {"lambda", &p.lambda, &lambda_gradient}},
          random);
    }
  }
}

TEST(Smear, LambdaZeroIsTheIdentity) {
  Random random = test_random();
  Problem<float> p(3, 20, 24, 12, random);
  p.lambda = {0};
  p.forward(HostExec{});
  p.backward(HostExec{});
  EXPECT_EQ(p.out, p.inp);
  EXPECT_EQ(p.dinp, p.dout);
}

TEST(Smear, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(3, 101, 72, 12, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.out, p.dinp, p.dgate_weight, p.dlambda};
  });
}

TEST(Smear, RoundsActivationsAndTheirGradientsOnce) {
  Random random = test_random();
  Problem<float> exact(2, 40, 48, 12, random), rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  for (size_t i = 0; i < exact.out.size(); ++i) {
    EXPECT_EQ(rounded.out[i], static_cast<float>(bf16(exact.out[i])));
    EXPECT_EQ(rounded.dinp[i], static_cast<float>(bf16(exact.dinp[i])));
  }
  EXPECT_TRUE(same_bits(rounded.dgate_weight, exact.dgate_weight));
  EXPECT_TRUE(same_bits(rounded.dlambda, exact.dlambda));
}

TEST(Smear, RefusesShapesItCannotDo) {
  Random random = test_random();
  Problem<float> p(2, 3, 40, 12, random);
  p.row_tokens = 4;
  EXPECT_THROW(p.forward(HostExec{}), Error);
  EXPECT_THROW(p.backward(HostExec{}), Error);
  p.row_tokens = 3;
  p.G = 33;
  EXPECT_THROW(p.forward(HostExec{}), Error);
  EXPECT_THROW(p.backward(HostExec{}), Error);
}

}  // namespace
}  // namespace speedrun::kernels

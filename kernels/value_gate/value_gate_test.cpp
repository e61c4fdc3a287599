#include "kernels/value_gate/value_gate.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t N;
  int C, H, P;
  std::vector<T> inp, embed, weight, dgate;
  std::vector<T> gate, dinp, dembed, dweight, scratch;

  Problem(int64_t tokens, int channels, int heads, int gate_channels, Random& random)
      : N(tokens),
        C(channels),
        H(heads),
        P(gate_channels),
        inp(random.normal_vector<T>(N * C)),
        embed(random.normal_vector<T>(N * C)),
        weight(random.normal_vector<T>(H * 2 * P, 0.5)),
        dgate(random.normal_vector<T>(N * H)),
        gate(poisoned<T>(N * H)),
        dinp(random.normal_vector<T>(N * C)),
        dembed(random.normal_vector<T>(N * C)),
        dweight(random.normal_vector<T>(H * 2 * P)),
        scratch(poisoned<T>(value_gate_scratch(N, H, P))) {}

  void forward(const HostExec& exec) {
    value_gate_forward(ValueGateForward<T>{gate.data(), inp.data(), embed.data(), weight.data(), N, C, H, P}, exec);
  }
  void backward(const HostExec& exec) {
    value_gate_backward(ValueGateBackward<T>{.dinp = dinp.data(),
                                             .dembed = dembed.data(),
                                             .dweight = dweight.data(),
                                             .dgate = dgate.data(),
                                             .gate = gate.data(),
                                             .inp = inp.data(),
                                             .embed = embed.data(),
                                             .weight = weight.data(),
                                             .scratch = scratch.data(),
                                             .N = N,
                                             .C = C,
                                             .H = H,
                                             .P = P},
                        exec);
  }
};

TEST(ValueGate, EqualsTheFormula) {
  Random random = test_random();
  Problem<double> p(5, 8, 3, 2, random);
  p.forward(HostExec{});
  for (int64_t t = 0; t < p.N; ++t) {
    for (int h = 0; h < p.H; ++h) {
      const double z = p.inp[t * 8] * p.weight[h * 4] + p.inp[t * 8 + 1] * p.weight[h * 4 + 1] +
                       p.embed[t * 8] * p.weight[h * 4 + 2] + p.embed[t * 8 + 1] * p.weight[h * 4 + 3];
      EXPECT_NEAR(p.gate[t * 3 + h], 1 + std::tanh(z / 2), 1e-14);  // 2·σ(z) = 1 + tanh(z/2)
    }
  }
}

// Gates start at 1, where zero weights put them.
TEST(ValueGate, ZeroWeightsOpenTheGateHalfway) {
  Random random = test_random();
  Problem<float> p(4, 16, 2, 3, random);
  std::fill(p.weight.begin(), p.weight.end(), 0.0f);
  p.forward(HostExec{});
  for (const float gate : p.gate) EXPECT_EQ(gate, 1.0f);
}

TEST(ValueGate, GradientsEqualFiniteDifferencesAndAreAdded) {
  Random random = test_random();
  for (const auto& [N, C, H, P] : {std::tuple{7, 8, 3, 2}, std::tuple{300, 16, 6, 6}, std::tuple{3, 16, 1, 16}}) {
    Problem<double> p(N, C, H, P, random);
    const Problem<double> before = p;
    p.forward(HostExec{});
    p.backward(HostExec{});
    const std::vector<double> dinp = added(p.dinp, before.dinp), dembed = added(p.dembed, before.dembed),
                              dweight = added(p.dweight, before.dweight);
    for (int64_t i = 0; i < p.N * p.C; ++i) {
      if (i % p.C < p.P) continue;
      EXPECT_EQ(p.dinp[i], before.dinp[i]) << "channel " << i % p.C << " has no part in a gate";
      EXPECT_EQ(p.dembed[i], before.dembed[i]) << "channel " << i % p.C << " has no part in a gate";
    }
    const GradientCheck check{.objective = [&] {
      p.forward(HostExec{});
      return dot(p.gate, p.dgate);
    }};
    check_gradients(check, {{"inp", &p.inp, &dinp}, {"embed", &p.embed, &dembed}, {"weight", &p.weight, &dweight}}, random);
  }
}

TEST(ValueGate, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(1000, 24, 6, 6, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.gate, p.dinp, p.dembed, p.dweight};
  });
}

TEST(ValueGate, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  Problem<float> exact(40, 8, 6, 8, random);
  Problem<float> rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  check_rounded(rounded.gate, exact.gate);
  check_rounded(rounded.dinp, exact.dinp);
  check_rounded(rounded.dembed, exact.dembed);
  EXPECT_FALSE(all_bf16(rounded.dweight));
}

}  // namespace
}  // namespace speedrun::kernels

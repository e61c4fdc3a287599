#include "kernels/head_gate/head_gate.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

struct Parts {
  bool xsa, gate;
};
constexpr Parts kParts[] = {{true, false}, {false, true}, {true, true}};

template <class T>
struct Problem {
  Parts parts;
  int64_t N;
  int H, D, stride;
  std::vector<T> y, v, alpha, gate, dout;
  std::vector<T> out, dy, dv, dalpha, dgate;

  Problem(Parts used, int64_t tokens, int heads, int head_size, Random& random, double value_scale = 1)
      : parts(used),
        N(tokens),
        H(heads),
        D(head_size),
        stride(heads + 3),
        y(random.normal_vector<T>(N * H * D)),
        v(random.normal_vector<T>(N * H * D, value_scale)),
        alpha(random.normal_vector<T>(N * stride)),
        gate(random.normal_vector<T>(N * stride)),
        dout(random.normal_vector<T>(N * H * D)),
        out(poisoned<T>(N * H * D)),
        dy(poisoned<T>(N * H * D)),
        dv(random.normal_vector<T>(N * H * D)),
        dalpha(random.normal_vector<T>(N * stride)),
        dgate(random.normal_vector<T>(N * stride)) {}

  void forward(const HostExec& exec) {
    head_gate_forward(HeadGateForward<T>{.out = out.data(),
                                         .y = y.data(),
                                         .v = parts.xsa ? v.data() : nullptr,
                                         .alpha = parts.xsa ? alpha.data() : nullptr,
                                         .gate = parts.gate ? gate.data() : nullptr,
                                         .stride = stride,
                                         .N = N,
                                         .H = H,
                                         .D = D},
                      exec);
  }
  void backward(const HostExec& exec, bool in_place = false) {
    if (in_place) dy = dout;
    head_gate_backward(HeadGateBackward<T>{.dy = dy.data(),
                                           .dv = parts.xsa ? dv.data() : nullptr,
                                           .dalpha = parts.xsa ? dalpha.data() : nullptr,
                                           .dgate = parts.gate ? dgate.data() : nullptr,
                                           .dout = in_place ? dy.data() : dout.data(),
                                           .y = y.data(),
                                           .v = parts.xsa ? v.data() : nullptr,
                                           .alpha = parts.xsa ? alpha.data() : nullptr,
                                           .gate = parts.gate ? gate.data() : nullptr,
                                           .stride = stride,
                                           .N = N,
                                           .H = H,
                                           .D = D},
                       exec);
  }
};

TEST(HeadGate, EqualsTheFormula) {
  Random random = test_random();
  for (const Parts parts : kParts) {
    Problem<double> p(parts, 4, 3, 5, random);
    std::fill_n(p.v.begin(), p.D, 0.0);  // a head without direction keeps its y
    p.forward(HostExec{});
    for (int64_t t = 0; t < p.N; ++t) {
      for (int h = 0; h < p.H; ++h) {
        const int64_t at = (t * p.H + h) * p.D;
        double y_v = 0, v_v = 0;
        for (int d = 0; d < p.D; ++d) y_v += p.y[at + d] * p.v[at + d], v_v += p.v[at + d] * p.v[at + d];
        for (int d = 0; d < p.D; ++d) {
          double expected = p.y[at + d];
          if (parts.xsa) expected -= std::tanh(p.alpha[t * p.stride + h]) * y_v / std::max(v_v, 1e-8) * p.v[at + d];
          if (parts.gate) expected *= p.gate[t * p.stride + h];
          EXPECT_NEAR(p.out[at + d], expected, 1e-13) << "token " << t << ", head " << h << ", " << d;
        }
      }
    }
  }
}

// With tanh α near 1 nothing of v's direction is left.
TEST(HeadGate, LargeAlphaLeavesTheOutputOrthogonalToTheValue) {
  Random random = test_random();
  Problem<double> p({true, false}, 2, 2, 8, random);
  std::fill(p.alpha.begin(), p.alpha.end(), 30.0);
  p.forward(HostExec{});
  EXPECT_NEAR(dot({p.out.begin(), p.out.begin() + p.D}, {p.v.begin(), p.v.begin() + p.D}), 0, 1e-13);
}

void check_all_gradients(Problem<double>& p, double value_step, Random& random) {
  const Problem<double> before = p;
  p.forward(HostExec{});
  p.backward(HostExec{});
  const std::vector<double> dy = p.dy, dv = p.dv;
  std::vector<double> dalpha = p.dalpha, dgate = p.dgate;
  for (int64_t i = 0; i < p.N * p.stride; ++i) {
    const bool of_a_head = i % p.stride < p.H;
    if (!of_a_head || !p.parts.xsa) {
      EXPECT_EQ(dalpha[i], before.dalpha[i]) << "not this op's";
    }
    if (!of_a_head || !p.parts.gate) {
      EXPECT_EQ(dgate[i], before.dgate[i]) << "not this op's";
    }
    if (!of_a_head) dalpha[i] = dgate[i] = 0;
  }
  GradientCheck check{.objective = [&] {
    p.forward(HostExec{});
    return dot(p.out, p.dout);
  }};
  std::vector<Checked> tensors{{"y", &p.y, &dy}};
  if (p.parts.xsa) tensors.push_back({"alpha", &p.alpha, &dalpha});
  if (p.parts.gate) tensors.push_back({"gate", &p.gate, &dgate});
  check_gradients(check, tensors, random);
  check.step = value_step;
  if (p.parts.xsa) check_gradients(check, {{"v", &p.v, &dv}}, random);
}

TEST(HeadGate, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Parts parts : kParts) {
    for (const auto& [N, H, D] : {std::tuple{5, 3, 7}, std::tuple{40, 2, 16}, std::tuple{1, 1, 4}}) {
      Problem<double> p(parts, N, H, D, random);
      // A short v makes the formula curved on the scale of the steps.
      for (double& x : p.v) x += x < 0 ? -0.5 : 0.5;
      check_all_gradients(p, 1e-4, random);
    }
  }
}

// Below ‖v‖² = 1e−8 the divisor is constant.
TEST(HeadGate, GradientsOfVanishingValues) {
  Random random = test_random();
  Problem<double> p({true, true}, 4, 2, 8, random, 1e-6);
  check_all_gradients(p, 1e-8, random);
}

TEST(HeadGate, BackwardInPlaceGivesTheSameBits) {
  Random random = test_random();
  for (const Parts parts : kParts) {
    Problem<float> apart(parts, 9, 3, 16, random);
    apart.forward(HostExec{});
    Problem<float> in_place = apart;
    apart.backward(HostExec{});
    in_place.backward(HostExec{}, true);
    EXPECT_TRUE(same_bits(in_place.dy, apart.dy));
    EXPECT_TRUE(same_bits(in_place.dv, apart.dv));
    EXPECT_TRUE(same_bits(in_place.dgate, apart.dgate));
  }
}

TEST(HeadGate, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start({true, true}, 131, 3, 16, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.out, p.dy, p.dv, p.dalpha, p.dgate};
  });
}

TEST(HeadGate, RoundsWhatItStores) {
  Random random = test_random();
  Problem<float> exact({true, true}, 20, 3, 16, random);
  exact.stride = exact.H;  // no elements that the op leaves alone
  for (auto* coefficients : {&exact.dalpha, &exact.dgate}) coefficients->resize(static_cast<size_t>(exact.N * exact.H));
  Problem<float> rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  check_rounded(rounded.out, exact.out);
  check_rounded(rounded.dy, exact.dy);
  check_rounded(rounded.dv, exact.dv);
  check_rounded(rounded.dalpha, exact.dalpha);
  check_rounded(rounded.dgate, exact.dgate);
}

}  // namespace
}  // namespace speedrun::kernels

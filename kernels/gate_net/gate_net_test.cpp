#include "kernels/gate_net/gate_net.h"

#include "kernels/base/error.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

struct Options {
  bool net = true;  // false: bias alone
  bool learned_scale = true;
  bool accumulate = true;
};

template <class T>
struct Problem {
  int64_t N;
  int C, G, O;
  Options options;
  double constant_scale = 0.3;
  std::vector<T> inp, w1, w2, bias, scale, dout;
  std::vector<T> out, hidden, dinp, dw1, dw2, dbias, dscale, dhidden, scratch;

  Problem(int64_t tokens, int channels, int hidden_width, int outputs, Options the_options, Random& random)
      : N(tokens),
        C(channels),
        G(hidden_width),
        O(outputs),
        options(the_options),
        inp(random.normal_vector<T>(N * C)),
        w1(random.normal_vector<T>(int64_t{G} * C, 0.4)),
        w2(random.normal_vector<T>(int64_t{O} * G)),
        bias(random.normal_vector<T>(O)),
        scale(random.normal_vector<T>(1, 0.1, 0.7)),
        dout(random.normal_vector<T>(N * O)),
        out(poisoned<T>(N * O)),
        hidden(poisoned<T>(N * G)),
        dinp(the_options.accumulate ? random.normal_vector<T>(N * C) : poisoned<T>(N * C)),
        dw1(random.normal_vector<T>(int64_t{G} * C)),
        dw2(random.normal_vector<T>(int64_t{O} * G)),
        dbias(random.normal_vector<T>(O)),
        dscale(random.normal_vector<T>(1)),
        dhidden(poisoned<T>(N * G)),
        scratch(poisoned<T>(gate_net_scratch(N, G, O))) {}

  void forward(const HostExec& exec) {
    gate_net_forward(GateNetForward<T>{.out = out.data(),
                                       .hidden = options.net ? hidden.data() : nullptr,
                                       .inp = options.net ? inp.data() : nullptr,
                                       .w1 = options.net ? w1.data() : nullptr,
                                       .w2 = options.net ? w2.data() : nullptr,
                                       .bias = bias.data(),
                                       .scale = options.learned_scale ? scale.data() : nullptr,
                                       .constant_scale = constant_scale,
                                       .N = N,
                                       .C = C,
                                       .G = G,
                                       .O = O},
                     exec);
  }
  void backward(const HostExec& exec) {
    gate_net_backward(GateNetBackward<T>{.dinp = options.net ? dinp.data() : nullptr,
                                         .accumulate = options.accumulate,
                                         .dw1 = options.net ? dw1.data() : nullptr,
                                         .dw2 = options.net ? dw2.data() : nullptr,
                                         .dbias = dbias.data(),
                                         .dscale = options.learned_scale ? dscale.data() : nullptr,
                                         .dhidden = options.net ? dhidden.data() : nullptr,
                                         .dout = dout.data(),
                                         .hidden = options.net ? hidden.data() : nullptr,
                                         .inp = options.net ? inp.data() : nullptr,
                                         .w1 = options.net ? w1.data() : nullptr,
                                         .w2 = options.net ? w2.data() : nullptr,
                                         .bias = bias.data(),
                                         .scale = options.learned_scale ? scale.data() : nullptr,
                                         .constant_scale = constant_scale,
                                         .scratch = scratch.data(),
                                         .N = N,
                                         .C = C,
                                         .G = G,
                                         .O = O},
                      exec);
  }
};

TEST(GateNet, EqualsTheFormula) {
  Random random = test_random();
  for (const Options options : {Options{}, {.learned_scale = false}, {.net = false}, {.net = false, .learned_scale = false}}) {
    Problem<double> p(19, 7, 5, 3, options, random);
    p.forward(HostExec{});
    const double scale = options.learned_scale ? p.scale[0] : 0.3;
    for (int64_t n = 0; n < p.N; ++n) {
      for (int o = 0; o < p.O; ++o) {
        double sum = p.bias[o];
        for (int k = 0; k < p.G && options.net; ++k) {
          double x = 0;
          for (int c = 0; c < p.C; ++c) x += p.inp[n * p.C + c] * p.w1[k * p.C + c];
          EXPECT_NEAR(p.hidden[n * p.G + k], x, 1e-12);
          sum += p.w2[o * p.G + k] * x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
        }
        EXPECT_NEAR(p.out[n * p.O + o], sum * scale, 1e-12);
      }
    }
  }
}

TEST(GateNet, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const bool net : {true, false}) {
    for (const bool learned_scale : {true, false}) {
      for (const int64_t N : {1, 3, 300}) {
        Problem<double> p(N, 6, 9, 5, {.net = net, .learned_scale = learned_scale}, random);
        const Problem<double> before = p;
        p.forward(HostExec{});
        p.backward(HostExec{});
        const std::vector<double> dinp = added(p.dinp, before.dinp), dw1 = added(p.dw1, before.dw1), dw2 = added(p.dw2, before.dw2),
                                  dbias = added(p.dbias, before.dbias), dscale = added(p.dscale, before.dscale);
        const GradientCheck check{.objective = [&] {
          p.forward(HostExec{});
          return dot(p.out, p.dout);
        }};
        std::vector<Checked> tensors{{"bias", &p.bias, &dbias}};
        if (learned_scale) tensors.push_back({"scale", &p.scale, &dscale});
        if (net) {
          tensors.push_back({"inp", &p.inp, &dinp});
          tensors.push_back({"w1", &p.w1, &dw1});
          tensors.push_back({"w2", &p.w2, &dw2});
        } else {
          EXPECT_EQ(p.dinp, before.dinp);
          EXPECT_EQ(p.dw1, before.dw1);
          EXPECT_EQ(p.dw2, before.dw2);
        }
        if (!learned_scale) {
          EXPECT_EQ(p.dscale, before.dscale);
        }
        check_gradients(check, tensors, random);
      }
    }
  }
}

TEST(GateNet, InputGradientIsWrittenOrAdded) {
  Random random = test_random();
  Problem<double> added_to(33, 8, 4, 3, {}, random);
  Problem<double> written = added_to;
  written.options.accumulate = false;
  written.dinp = poisoned<double>(33 * 8);
  const std::vector<double> before = added_to.dinp;
  for (Problem<double>* p : {&added_to, &written}) {
    p->forward(HostExec{});
    p->backward(HostExec{});
  }
  for (size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(added_to.dinp[i], before[i] + written.dinp[i], 1e-12);
}

TEST(GateNet, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  for (const bool net : {true, false}) {
    const Problem<float> start(1501, 24, 16, 13, {.net = net}, random);
    check_thread_counts([&](const HostExec& exec) {
      Problem<float> p = start;
      p.forward(exec);
      p.backward(exec);
      return Outputs{p.out, p.hidden, p.dinp, p.dw1, p.dw2, p.dbias, p.dscale};
    });
  }
}

TEST(GateNet, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  Problem<float> exact(200, 24, 16, 13, {}, random), rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  check_rounded(rounded.out, exact.out);
  check_rounded(rounded.hidden, exact.hidden);
  check_rounded(rounded.dhidden, exact.dhidden);
  check_rounded(rounded.dinp, exact.dinp);
  for (const auto* gradient : {&rounded.dw1, &rounded.dw2, &rounded.dbias}) EXPECT_FALSE(all_bf16(*gradient));
}

TEST(GateNet, HalfANetIsRefused) {
  Random random = test_random();
  Problem<float> p(8, 8, 8, 8, {}, random);
  EXPECT_THROW(gate_net_forward(GateNetForward<float>{.out = p.out.data(),
                                                      .hidden = p.hidden.data(),
                                                      .inp = p.inp.data(),
                                                      .w1 = p.w1.data(),
                                                      .w2 = nullptr,
                                                      .bias = p.bias.data(),
                                                      .scale = nullptr,
                                                      .constant_scale = 1,
                                                      .N = 8,
                                                      .C = 8,
                                                      .G = 8,
                                                      .O = 8},
                                HostExec{}),
               Error);
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/norm/norm.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

struct Options {
  Norm kind;
  bool gain, shift, add;
};

template <class T>
struct Problem {
  int64_t N;
  int C;
  Options options;
  std::vector<T> inp, gain, shift, dout, dinp_add;
  std::vector<T> out, mean, rstd, dinp, dgain, dshift, scratch;

  Problem(int64_t rows, int channels, Options the_options, Random& random)
      : N(rows),
        C(channels),
        options(the_options),
        inp(random.normal_vector<T>(N * C, 2, 0.5)),
        gain(random.normal_vector<T>(C, 0.3, 1)),
        shift(random.normal_vector<T>(C)),
        dout(random.normal_vector<T>(N * C)),
        dinp_add(random.normal_vector<T>(N * C)),
        out(poisoned<T>(N * C)),
        mean(poisoned<T>(N)),
        rstd(poisoned<T>(N)),
        dinp(poisoned<T>(N * C)),
        dgain(random.normal_vector<T>(C)),
        dshift(random.normal_vector<T>(C)),
        scratch(poisoned<T>(norm_backward_scratch(N, C))) {}

  void forward(const HostExec& exec) {
    norm_forward(
        NormForward<T>{out.data(), options.kind == Norm::layer ? mean.data() : nullptr, rstd.data(), inp.data(),
                       options.gain ? gain.data() : nullptr, options.shift ? shift.data() : nullptr, N, C, 1e-5, options.kind},
        exec);
  }
  void backward(const HostExec& exec) {
    norm_backward(NormBackward<T>{dinp.data(), options.add ? dinp_add.data() : nullptr, options.gain ? dgain.data() : nullptr,
                                  options.shift ? dshift.data() : nullptr, dout.data(), inp.data(),
                                  options.kind == Norm::layer ? mean.data() : nullptr, rstd.data(),
                                  options.gain ? gain.data() : nullptr, scratch.data(), N, C, options.kind},
                  exec);
  }
};

TEST(Norm, EqualsTheFormula) {
  Random random = test_random();
  for (const Norm kind : {Norm::rms, Norm::layer}) {
    for (const int C : {1, 5, 64, 131}) {
      Problem<double> p(37, C, {kind, true, true, false}, random);
      p.forward(HostExec{});
      for (int64_t n = 0; n < p.N; ++n) {
        double mean = 0, squares = 0;
        for (int c = 0; c < C; ++c) mean += kind == Norm::layer ? p.inp[n * C + c] / C : 0;
        for (int c = 0; c < C; ++c) squares += (p.inp[n * C + c] - mean) * (p.inp[n * C + c] - mean) / C;
        for (int c = 0; c < C; ++c) {
          const double expected = (p.inp[n * C + c] - mean) / std::sqrt(squares + 1e-5) * p.gain[c] + p.shift[c];
          EXPECT_NEAR(p.out[n * C + c], expected, 1e-11);
        }
      }
    }
  }
}

TEST(Norm, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Norm kind : {Norm::rms, Norm::layer}) {
    for (const Options options :
         {Options{kind, true, true, true}, {kind, true, false, false}, {kind, false, false, true}, {kind, false, true, false}}) {
      for (const int64_t N : {1, 3, 100}) {
        Problem<double> p(N, 19, options, random);
        const std::vector<double> dgain = p.dgain, dshift = p.dshift;
        p.forward(HostExec{});
        p.backward(HostExec{});
        const std::vector<double> gain_gradient = added(p.dgain, dgain), shift_gradient = added(p.dshift, dshift), dinp = p.dinp;
        // dinp_add is the gradient of an objective that the input reaches by another way: Σ dinp_add·inp.
        const GradientCheck check{.objective = [&] {
          p.forward(HostExec{});
          return dot(p.out, p.dout) + (options.add ? dot(p.inp, p.dinp_add) : 0);
        }};
        std::vector<Checked> tensors{{"inp", &p.inp, &dinp}};
        if (options.gain) tensors.push_back({"gain", &p.gain, &gain_gradient});
        if (options.shift) tensors.push_back({"shift", &p.shift, &shift_gradient});
        check_gradients(check, tensors, random);
      }
    }
  }
}

TEST(Norm, ResidualGradientMayBeUpdatedInPlace) {
  Random random = test_random();
  Problem<double> p(9, 12, {Norm::layer, true, true, true}, random);
  p.forward(HostExec{});
  p.backward(HostExec{});
  const std::vector<double> expected = p.dinp;
  norm_backward(NormBackward<double>{p.dinp_add.data(), p.dinp_add.data(), nullptr, nullptr, p.dout.data(), p.inp.data(),
                                     p.mean.data(), p.rstd.data(), p.gain.data(), p.scratch.data(), p.N, p.C, Norm::layer},
                HostExec{});
  EXPECT_EQ(p.dinp_add, expected);
}

TEST(Norm, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(301, 72, {Norm::layer, true, true, true}, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.out, p.mean, p.rstd, p.dinp, p.dgain, p.dshift};
  });
}

TEST(Norm, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  Problem<float> exact(40, 48, {Norm::rms, true, false, true}, random), rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  for (size_t i = 0; i < exact.out.size(); ++i) EXPECT_EQ(rounded.out[i], static_cast<float>(bf16(exact.out[i])));
  for (size_t i = 0; i < exact.dinp.size(); ++i) EXPECT_EQ(rounded.dinp[i], static_cast<float>(bf16(exact.dinp[i])));
  EXPECT_TRUE(same_bits(rounded.dgain, exact.dgain));
}

}  // namespace
}  // namespace speedrun::kernels

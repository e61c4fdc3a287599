#include "kernels/stream_mix/stream_mix.h"

#include "kernels/base/error.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

enum class Scalar { none, plain, sigmoid };

struct TermOptions {
  Scalar scalar = Scalar::none;
  bool gate = false;
  double gate_add = 0;
  bool dsrc = true, accumulate = false, dscalar = true, dgate = true;
};

// Every kind of factor, and of gradient wanted and not wanted.
const std::vector<TermOptions> kAllKinds = {
    {Scalar::plain, false, 1},
    {Scalar::none, true, 0, true, true},
    {Scalar::sigmoid, true, 0.5},
    {Scalar::plain, true, -1, false},
    {Scalar::sigmoid, false, 2, true, true, false},
    {Scalar::none, true, 1, true, false, false, false},
};

template <class T>
struct Problem {
  int64_t N, stride;
  int C;
  std::vector<TermOptions> options;
  std::vector<std::vector<T>> src, dsrc;
  std::vector<T> scalars, gates, dgates, dscalars, dout, out, scratch;

  Problem(int64_t rows, int channels, std::vector<TermOptions> the_options, Random& random)
      : N(rows),
        stride(static_cast<int64_t>(the_options.size()) + 2),
        C(channels),
        options(std::move(the_options)),
        scalars(random.normal_vector<T>(static_cast<int64_t>(options.size()))),
        gates(random.normal_vector<T>(N * stride)),
        dgates(poisoned<T>(N * stride)),
        dscalars(random.normal_vector<T>(static_cast<int64_t>(options.size()))),
        dout(random.normal_vector<T>(N * C)),
        out(poisoned<T>(N * C)),
        scratch(poisoned<T>(stream_mix_scratch(N))) {
    for (const TermOptions& option : options) {
      src.push_back(random.normal_vector<T>(N * C));
      dsrc.push_back(option.accumulate ? random.normal_vector<T>(N * C) : poisoned<T>(N * C));
    }
  }

  MixTerm<T> term(size_t i) const {
    const TermOptions& o = options[i];
    return {.src = src[i].data(),
            .scalar = o.scalar != Scalar::none ? &scalars[i] : nullptr,
            .sigmoid = o.scalar == Scalar::sigmoid,
            .gate = o.gate ? gates.data() + i : nullptr,
            .gate_stride = stride,
            .gate_add = o.gate_add};
  }
  bool wants_dscalar(size_t i) const { return options[i].dscalar && options[i].scalar != Scalar::none; }
  bool wants_dgate(size_t i) const { return options[i].dgate && options[i].gate; }

  StreamMixForward<T> forward_args() {
    StreamMixForward<T> args{.out = out.data(), .terms = {}, .num_terms = static_cast<int>(options.size()), .N = N, .C = C};
    for (size_t i = 0; i < options.size(); ++i) args.terms[i] = term(i);
    return args;
  }
  StreamMixBackward<T> backward_args() {
    StreamMixBackward<T> args{.terms = {},
                              .grads = {},
                              .num_terms = static_cast<int>(options.size()),
                              .dout = dout.data(),
                              .scratch = scratch.data(),
                              .N = N,
                              .C = C};
    for (size_t i = 0; i < options.size(); ++i) {
      args.terms[i] = term(i);
      args.grads[i] = {.dsrc = options[i].dsrc ? dsrc[i].data() : nullptr,
                       .accumulate = options[i].accumulate,
                       .dscalar = wants_dscalar(i) ? &dscalars[i] : nullptr,
                       .dgate = wants_dgate(i) ? dgates.data() + i : nullptr};
    }
    return args;
  }
  void forward(const HostExec& exec) { stream_mix_forward(forward_args(), exec); }
  void backward(const HostExec& exec) { stream_mix_backward(backward_args(), exec); }
};

TEST(StreamMix, EqualsTheFormula) {
  Random random = test_random();
  for (size_t num_terms = 1; num_terms <= kMaxMixTerms; ++num_terms) {
    for (const int C : {1, 8, 37}) {
      Problem<double> p(21, C, {kAllKinds.end() - static_cast<int64_t>(num_terms), kAllKinds.end()}, random);
      p.forward(HostExec{});
      for (int64_t t = 0; t < p.N; ++t) {
        for (int c = 0; c < C; ++c) {
          double expected = 0;
          for (size_t i = 0; i < num_terms; ++i) {
            double factor = p.options[i].gate_add + (p.options[i].gate ? p.gates[t * p.stride + i] : 0);
            if (p.options[i].scalar == Scalar::plain) factor *= p.scalars[i];
            if (p.options[i].scalar == Scalar::sigmoid) factor *= 1 / (1 + std::exp(-p.scalars[i]));
            expected += factor * p.src[i][t * C + c];
          }
          EXPECT_NEAR(p.out[t * C + c], expected, 1e-12) << "token " << t << " channel " << c;
        }
      }
    }
  }
}

TEST(StreamMix, KnownNumbers) {
  // Two tokens of one channel: 3·(1 + 1)·5 + σ(0)·(4 + 0)·7, and with the gates −1 and 2: 3·(−1 + 1)·6 + σ(0)·2·8.
  const std::vector<double> first{5, 6}, second{7, 8}, gates{1, 4, -1, 2}, scalars{3, 0};
  std::vector<double> out(2);
  stream_mix_forward(StreamMixForward<double>{.out = out.data(),
                                              .terms = {{first.data(), &scalars[0], false, &gates[0], 2, 1},
                                                        {second.data(), &scalars[1], true, &gates[1], 2, 0}},
                                              .num_terms = 2,
                                              .N = 2,
                                              .C = 1},
                     HostExec{});
  EXPECT_EQ(out, (std::vector<double>{44, 8}));
}

TEST(StreamMix, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const int64_t N : {1, 5, 40}) {
    Problem<double> p(N, 11, kAllKinds, random);
    const std::vector<double> dscalars = p.dscalars;
    const std::vector<std::vector<double>> dsrc = p.dsrc;
    p.forward(HostExec{});
    p.backward(HostExec{});

    const std::vector<double> scalar_gradient = added(p.dscalars, dscalars);
    const GradientCheck check{.objective = [&] {
      p.forward(HostExec{});
      return dot(p.out, p.dout);
    }};
    for (size_t i = 0; i < kMaxMixTerms; ++i) {
      SCOPED_TRACE("N=" + std::to_string(N) + " term " + std::to_string(i));
      if (p.options[i].dsrc) {
        const std::vector<double> gradient = p.options[i].accumulate ? added(p.dsrc[i], dsrc[i]) : p.dsrc[i];
        check_gradients(check, {{"src", &p.src[i], &gradient}}, random);
      } else {
        EXPECT_TRUE(same_bits(p.dsrc[i], dsrc[i]));
      }
      if (p.wants_dscalar(i)) {
        std::vector<double> direction(kMaxMixTerms);
        direction[i] = 1;
        const double found = directional_difference(check, p.scalars, direction);
        EXPECT_NEAR(found, scalar_gradient[i], 1e-8 * (1 + std::abs(found))) << "scalar";
      } else {
        EXPECT_EQ(scalar_gradient[i], 0) << "dscalar that was not wanted";
      }
      std::vector<double> column(static_cast<size_t>(N));
      for (int64_t t = 0; t < N; ++t) column[t] = p.dgates[t * p.stride + static_cast<int64_t>(i)];
      for (int64_t t = 0; t < N; ++t) {
        if (!p.wants_dgate(i)) {
          EXPECT_TRUE(std::isnan(column[t])) << "dgate that was not wanted";
          continue;
        }
        std::vector<double> direction(p.gates.size());
        direction[t * p.stride + static_cast<int64_t>(i)] = 1;
        const double found = directional_difference(check, p.gates, direction);
        EXPECT_NEAR(found, column[t], 1e-8 * (1 + std::abs(found))) << "gate of token " << t;
      }
    }
  }
}

TEST(StreamMix, OutMayBeATermAndDsrcMayBeDout) {
  Random random = test_random();
  Problem<double> p(35, 24, kAllKinds, random);
  const Problem<double> start = p;
  p.forward(HostExec{});
  p.backward(HostExec{});

  for (const size_t i : {size_t{0}, size_t{2}}) {
    Problem<double> in_place = start;
    StreamMixForward<double> forward = in_place.forward_args();
    forward.out = in_place.src[i].data();
    stream_mix_forward(forward, HostExec{});
    EXPECT_EQ(in_place.src[i], p.out);

    in_place = start;
    StreamMixBackward<double> backward = in_place.backward_args();
    backward.grads[i].dsrc = in_place.dout.data();
    stream_mix_backward(backward, HostExec{});
    EXPECT_EQ(in_place.dout, p.dsrc[i]);
    EXPECT_EQ(in_place.dscalars, p.dscalars);
    for (size_t k = 0; k < kMaxMixTerms; ++k) {
      if (k == i) continue;
      EXPECT_TRUE(same_bits(in_place.dsrc[k], p.dsrc[k])) << "term " << k;
    }
    EXPECT_TRUE(same_bits(in_place.dgates, p.dgates));
  }
}

TEST(StreamMix, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(301, 72, kAllKinds, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    Outputs outputs{p.out, p.dscalars, p.dgates};
    outputs.insert(outputs.end(), p.dsrc.begin(), p.dsrc.end());
    return outputs;
  });
}

TEST(StreamMix, RoundsActivationsAndTheirGradientsOnce) {
  Random random = test_random();
  Problem<float> exact(40, 48, kAllKinds, random), rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  auto expect_rounded = [](const std::vector<float>& found, const std::vector<float>& unrounded) {
    for (size_t i = 0; i < found.size(); ++i) {
      if (std::isnan(unrounded[i])) continue;  // not wanted, not written
      EXPECT_EQ(found[i], static_cast<float>(bf16(unrounded[i])));
    }
  };
  expect_rounded(rounded.out, exact.out);
  expect_rounded(rounded.dgates, exact.dgates);
  for (size_t i = 0; i < kMaxMixTerms; ++i) {
    if (rounded.options[i].dsrc) expect_rounded(rounded.dsrc[i], exact.dsrc[i]);
  }
  EXPECT_TRUE(same_bits(rounded.dscalars, exact.dscalars));
}

TEST(StreamMix, RefusesNumbersOfTermsItDoesNotHave) {
  Random random = test_random();
  Problem<float> p(2, 8, kAllKinds, random);
  for (const int num_terms : {0, kMaxMixTerms + 1}) {
    StreamMixForward<float> forward = p.forward_args();
    forward.num_terms = num_terms;
    EXPECT_THROW(stream_mix_forward(forward, HostExec{}), Error);
    StreamMixBackward<float> backward = p.backward_args();
    backward.num_terms = num_terms;
    EXPECT_THROW(stream_mix_backward(backward, HostExec{}), Error);
  }
}

}  // namespace
}  // namespace speedrun::kernels

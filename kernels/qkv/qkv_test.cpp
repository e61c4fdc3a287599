#include "kernels/qkv/qkv.h"

#include "kernels/linear/linear.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

struct Options {
  bool bias, norm, rotary;
};
constexpr Options kOptions[] = {{true, true, true}, {true, false, false}, {false, true, false}, {false, false, true}};
constexpr double kEps = 1e-3;

template <class T>
struct Problem {
  int64_t N, row_tokens;
  int H, D, C;
  Options options;
  std::vector<T> inp, weight, bias, cosine, sine, dout;
  std::vector<T> qkv, rstd, dinp, dweight, dbias, dqkv, scratch;

  Problem(int64_t rows, int64_t tokens_of_row, int heads, int head_size, Options the_options, Random& random)
      : N(rows * tokens_of_row),
        row_tokens(tokens_of_row),
        H(heads),
        D(head_size),
        C(heads * head_size),
        options(the_options),
        inp(random.normal_vector<T>(N * C)),
        weight(random.normal_vector<T>(int64_t{3} * C * C)),
        bias(random.normal_vector<T>(int64_t{3} * C)),
        dout(random.normal_vector<T>(N * 3 * C)),
        qkv(poisoned<T>(N * 3 * C)),
        rstd(poisoned<T>(N * 2 * H)),
        dinp(poisoned<T>(N * C)),
        dweight(random.normal_vector<T>(int64_t{3} * C * C)),
        dbias(random.normal_vector<T>(int64_t{3} * C)),
        dqkv(dout),
        scratch(poisoned<T>(bias_grad_scratch(N, 3 * C))) {
    for (int64_t pos = 0; pos < row_tokens; ++pos) {
      for (int i = 0; i < D / 2; ++i) {
        const double angle = static_cast<double>(pos) * std::pow(100.0, -i / 3.0);
        cosine.push_back(static_cast<T>(std::cos(angle)));
        sine.push_back(static_cast<T>(std::sin(angle)));
      }
    }
  }

  void forward(const HostExec& exec) {
    qkv_forward(QkvForward<T>{qkv.data(), options.norm ? rstd.data() : nullptr, inp.data(), weight.data(),
                              options.bias ? bias.data() : nullptr, options.rotary ? cosine.data() : nullptr,
                              options.rotary ? sine.data() : nullptr, N, row_tokens, C, H, kEps},
                exec);
  }
  void backward(const HostExec& exec) {
    dqkv = dout;
    qkv_backward(
        QkvBackward<T>{dinp.data(), dweight.data(), options.bias ? dbias.data() : nullptr, dqkv.data(), qkv.data(),
                       options.norm ? rstd.data() : nullptr, inp.data(), weight.data(), options.rotary ? cosine.data() : nullptr,
                       options.rotary ? sine.data() : nullptr, options.bias ? scratch.data() : nullptr, N, row_tokens, C, H},
        exec);
  }
};

TEST(Qkv, EqualsTheFormula) {
  Random random = test_random();
  for (const Options options : kOptions) {
    Problem<double> p(2, 5, 3, 6, options, random);
    p.forward(HostExec{});
    for (int64_t t = 0; t < p.N; ++t) {
      for (int head = 0; head < 3 * p.H; ++head) {
        std::vector<double> x(static_cast<size_t>(p.D));
        double squares = 0;
        for (int d = 0; d < p.D; ++d) {
          const int feature = head * p.D + d;
          x[d] = options.bias ? p.bias[feature] : 0;
          for (int c = 0; c < p.C; ++c) x[d] += p.inp[t * p.C + c] * p.weight[feature * p.C + c];
          squares += x[d] * x[d];
        }
        const bool is_value = head >= 2 * p.H;
        const double rstd = options.norm && !is_value ? 1 / std::sqrt(squares / p.D + kEps) : 1;
        for (int d = 0; d < p.D; ++d) {
          const int half = p.D / 2, i = d % half;
          const int64_t angle = t % p.row_tokens * half + i;
          const double cosine = options.rotary && !is_value ? p.cosine[angle] : 1,
                       sine = options.rotary && !is_value ? p.sine[angle] : 0;
          const double expected = rstd * (d < half ? x[i] * cosine + x[i + half] * sine : -x[i] * sine + x[i + half] * cosine);
          EXPECT_NEAR(p.qkv[t * 3 * p.C + head * p.D + d], expected, 1e-12);
        }
        if (options.norm && !is_value) {
          EXPECT_NEAR(p.rstd[t * 2 * p.H + head], rstd, 1e-12);
        }
      }
    }
  }
}

TEST(Qkv, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Options options : kOptions) {
    Problem<double> p(3, 7, 2, 8, options, random);
    const std::vector<double> dweight = p.dweight, dbias = p.dbias;
    p.forward(HostExec{});
    p.backward(HostExec{});
    const std::vector<double> weight_gradient = added(p.dweight, dweight), bias_gradient = added(p.dbias, dbias), dinp = p.dinp;
    const GradientCheck check{.objective = [&] {
      p.forward(HostExec{});
      return dot(p.qkv, p.dout);
    }};
    std::vector<Checked> tensors{{"inp", &p.inp, &dinp}, {"weight", &p.weight, &weight_gradient}};
    if (options.bias) tensors.push_back({"bias", &p.bias, &bias_gradient});
    check_gradients(check, tensors, random);
  }
}

TEST(Qkv, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(4, 33, 3, 16, {true, true, true}, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.qkv, p.rstd, p.dinp, p.dweight, p.dbias, p.dqkv};
  });
}

TEST(Qkv, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  Problem<float> exact(2, 9, 2, 16, {true, true, true}, random);
  for (float& d : exact.dout) d = static_cast<float>(bf16(d));  // the part of v passes through
  Problem<float> rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  check_rounded(rounded.qkv, exact.qkv);
  check_rounded(rounded.dinp, exact.dinp);
  check_rounded(rounded.dqkv, exact.dqkv);
  EXPECT_FALSE(all_bf16(rounded.rstd));
  EXPECT_FALSE(all_bf16(rounded.dweight));
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/dc_attention/dc_attention.h"

#include "kernels/testing/documents.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t N;
  int H, D;
  int64_t window, stride;
  double scale;
  std::vector<int32_t> doc_start;
  std::vector<T> q, k, v, y, dout, w;                      // w1 is column 1 …, w2 column H + 2 … of w (N, stride)
  std::vector<T> out, lse, dq, dk, dv, dw, dq0, dk0, dv0;  // dq0 …: what dq … hold before the call

  Problem(int64_t tokens, int heads, int head_size, int64_t the_window, const std::vector<int>& lengths, Random& random)
      : N(tokens),
        H(heads),
        D(head_size),
        window(the_window),
        stride(2 * heads + 3),
        scale(1.2 / std::sqrt(head_size)),
        doc_start(document_starts(N, lengths)) {
    for (std::vector<T>* x : {&q, &k, &v, &y, &dout, &dq0, &dk0, &dv0}) *x = random.normal_vector<T>(N * H * D);
    w = random.normal_vector<T>(N * stride);
    for (T& x : w) x += x < 0 ? T(-0.3) : T(0.3);  // for a token whose w1 are all near 0 the normalisation bends within a step
    out = poisoned<T>(N * H * D);
    lse = poisoned<T>(N * H);
  }

  const T* w1() const { return w.data() + 1; }
  const T* w2() const { return w.data() + H + 2; }

  void forward(const HostExec& exec) {
    dc_attention_forward(DcAttentionForward<T>{out.data(), lse.data(), y.data(), q.data(), k.data(), v.data(), w1(), w2(), stride,
                                               doc_start.data(), N, H, D, window, scale},
                         exec);
  }
  void backward(const HostExec& exec) {
    dq = dq0, dk = dk0, dv = dv0;
    dw = poisoned<T>(N * stride);
    dc_attention_backward(DcAttentionBackward<T>{dq.data(),   dk.data(), dv.data(),  dw.data() + 1,    dw.data() + H + 2,
                                                 dout.data(), q.data(),  k.data(),   v.data(),         w1(),
                                                 w2(),        stride,    lse.data(), doc_start.data(), nullptr,
                                                 N,           H,         D,          window,           scale},
                          exec);
  }
  // dw with its columns that belong to nobody replaced by what they should be.
  std::vector<T> written_dw(T others) const {
    std::vector<T> result = dw;
    for (int64_t t = 0; t < N; ++t) {
      for (const int column : {0, H + 1, 2 * H + 2}) result[t * stride + column] = others;
    }
    return result;
  }
};

struct Case {
  int64_t N;
  int H, D;
  int64_t window;
  std::vector<int> lengths;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{{1, 1, 4, 0, {}},     {5, 2, 3, 2, {}},         {63, 1, 8, 10, {}},
                                     {64, 2, 8, 1, {}},    {65, 3, 8, 111, {}},      {130, 2, 4, 30, {1, 1, 1, 60, 2, 1, 30}},
                                     {200, 3, 4, 111, {}}, {200, 2, 5, 0, {199, 1}}, {210, 2, 4, 80, {3, 130, 1, 1, 64}}};
  return all;
}

TEST(DcAttention, EqualsTheFormula) {
  Random random = test_random();
  for (const Case& shape : cases()) {
    Problem<double> p(shape.N, shape.H, shape.D, shape.window, shape.lengths, random);
    p.forward(HostExec{});
    for (int64_t t = 0; t < p.N; ++t) {
      std::vector<double> mixed(static_cast<size_t>(p.N));
      double squares = 0;
      for (int h = 0; h < p.H; ++h) squares += p.w1()[t * p.stride + h] * p.w1()[t * p.stride + h];
      for (int h = 0; h < p.H; ++h) {
        const double u = p.w1()[t * p.stride + h] / std::sqrt(squares / p.H + 1e-6);
        std::vector<double> weights(static_cast<size_t>(p.N));
        double total = 0;
        for (int64_t s = 0; s <= t; ++s) {
          if (s < p.doc_start[t] || t - s > p.window) continue;
          double score = 0;
          for (int d = 0; d < p.D; ++d) score += p.scale * p.q[(t * p.H + h) * p.D + d] * p.k[(s * p.H + h) * p.D + d];
          total += weights[s] = std::exp(score);
        }
        for (int64_t s = 0; s <= t; ++s) mixed[s] += u * weights[s] / total;
        ASSERT_NEAR(p.lse[h * p.N + t], std::log(total), 1e-11) << "token " << t << " of " << p.N << ", window " << p.window;
      }
      for (int h = 0; h < p.H; ++h) {
        for (int d = 0; d < p.D; ++d) {
          double sum = 0;
          for (int64_t s = 0; s <= t; ++s) sum += mixed[s] * p.v[(s * p.H + h) * p.D + d];
          const int64_t i = (t * p.H + h) * p.D + d;
          ASSERT_NEAR(p.out[i], p.y[i] + p.w2()[t * p.stride + h] * sum, 1e-11) << "token " << t << " of " << p.N << ", head " << h;
        }
      }
    }
  }
}

TEST(DcAttention, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Case& shape : cases()) {
    Problem<double> p(shape.N, shape.H, shape.D, shape.window, shape.lengths, random);
    p.forward(HostExec{});
    p.backward(HostExec{});
    const std::vector<double> dq = added(p.dq, p.dq0), dk = added(p.dk, p.dk0), dv = added(p.dv, p.dv0), dw = p.written_dw(0);
    const GradientCheck check{.objective =
                                  [&] {
                                    p.forward(HostExec{});
                                    return dot(p.out, p.dout);
                                  },
                              .elements = 12};
    const std::string of = " of N = " + std::to_string(shape.N) + ", window " + std::to_string(shape.window);
    check_gradients(check, {{"q" + of, &p.q, &dq}, {"k" + of, &p.k, &dk}, {"v" + of, &p.v, &dv}, {"w1, w2" + of, &p.w, &dw}},
                    random);
  }
}

// w1 near 0: the eps of its normalisation decides.
TEST(DcAttention, SmallMixingWeights) {
  Random random = test_random();
  Problem<double> p(40, 3, 4, 9, {}, random);
  for (double& w : p.w) w *= 1e-3;
  p.forward(HostExec{});
  p.backward(HostExec{});
  const std::vector<double> dw = p.written_dw(0);
  const GradientCheck check{.objective =
                                [&] {
                                  p.forward(HostExec{});
                                  return dot(p.out, p.dout);
                                },
                            .step = 1e-6,
                            .tolerance = 1e-5};
  check_gradients(check, {{"w1, w2", &p.w, &dw}}, random);
}

// w2 = 0 leaves y as it is, and w1 = 0 as well (u = 0 / √eps).
TEST(DcAttention, OffWithoutWeights) {
  Random random = test_random();
  for (const int off : {1, 2}) {
    Problem<float> p(100, 2, 8, 30, {40}, random);
    for (int64_t t = 0; t < p.N; ++t) {
      for (int h = 0; h < p.H; ++h) p.w[t * p.stride + (off == 1 ? 1 : p.H + 2) + h] = 0;
    }
    p.forward(HostExec{});
    EXPECT_TRUE(same_bits(p.out, p.y));
  }
}

TEST(DcAttention, NeverReadsOtherDocumentsOrOldKeys) {
  Random random = test_random();
  Problem<float> clean(192, 1, 8, 20, {64, 128}, random), poisoned = clean;
  clean.forward(HostExec{});
  // The first query block that meets none of these keys begins at token 128.
  for (int64_t i = 0; i < 64 * 8; ++i) poisoned.k[i] = poisoned.v[i] = std::numeric_limits<float>::quiet_NaN();
  poisoned.forward(HostExec{});
  for (int64_t i = 64 * 8; i < 192 * 8; ++i) EXPECT_EQ(clean.out[i], poisoned.out[i]) << "token " << i / 8;
}

TEST(DcAttention, LargeScoresDoNotOverflow) {
  Random random = test_random();
  Problem<float> p(70, 2, 8, 50, {}, random);
  p.scale = 300;
  p.forward(HostExec{});
  p.backward(HostExec{});
  for (const std::vector<float>& values : {p.out, p.dq, p.dk, p.dv, p.written_dw(0)}) {
    for (const float x : values) EXPECT_TRUE(std::isfinite(x));
  }
}

// Columns of dw between those of w1 and w2 belong to others.
TEST(DcAttention, WritesItsOwnColumnsOnly) {
  Random random = test_random();
  Problem<float> p(70, 2, 8, 50, {}, random);
  p.forward(HostExec{});
  p.backward(HostExec{});
  for (int64_t t = 0; t < p.N; ++t) {
    for (int64_t column = 0; column < p.stride; ++column) {
      const bool other = column == 0 || column == p.H + 1 || column == 2 * p.H + 2;
      EXPECT_EQ(std::isnan(p.dw[t * p.stride + column]), other) << "token " << t << ", column " << column;
    }
  }
}

TEST(DcAttention, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(333, 3, 16, 111, {40, 1, 200}, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.out, p.lse, p.dq, p.dk, p.dv, p.written_dw(0)};
  });
}

TEST(DcAttention, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  Problem<float> exact(150, 3, 16, 60, {40}, random), rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  check_rounded(rounded.out, exact.out);
  check_rounded(rounded.dq, exact.dq);
  check_rounded(rounded.dk, exact.dk);
  check_rounded(rounded.dv, exact.dv);
  check_rounded(rounded.written_dw(0), exact.written_dw(0));
  EXPECT_TRUE(same_bits(rounded.lse, exact.lse));
}

}  // namespace
}  // namespace speedrun::kernels

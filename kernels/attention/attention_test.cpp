#include "kernels/attention/attention.h"

#include "kernels/testing/documents.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t N, stride;
  int H, D;
  int64_t window;
  double scale;
  std::vector<int32_t> doc_start;
  std::vector<T> qkv, dout, out, lse, dqkv, delta;

  Problem(int64_t tokens, int heads, int head_size, int64_t the_window, const std::vector<int>& lengths, Random& random)
      : N(tokens),
        stride(int64_t{3} * heads * head_size),
        H(heads),
        D(head_size),
        window(the_window),
        scale(1.2 / std::sqrt(head_size)),
        doc_start(document_starts(N, lengths)),
        qkv(random.normal_vector<T>(N * stride)),
        dout(random.normal_vector<T>(N * H * D)),
        out(poisoned<T>(N * H * D)),
        lse(poisoned<T>(N * H)),
        dqkv(poisoned<T>(N * stride)),
        delta(poisoned<T>(N * H)) {}

  void forward(const HostExec& exec) {
    const T* q = qkv.data();
    attention_forward(
        AttentionForward<T>{out.data(), lse.data(), q, q + H * D, q + 2 * H * D, doc_start.data(), N, stride, H, D, window, scale},
        exec);
  }
  void backward(const HostExec& exec) {
    const T* q = qkv.data();
    T* dq = dqkv.data();
    attention_backward(AttentionBackward<T>{dq, dq + H * D, dq + 2 * H * D, dout.data(), out.data(), lse.data(), q, q + H * D,
                                            q + 2 * H * D, doc_start.data(), delta.data(), N, stride, H, D, window, scale},
                       exec);
  }
};

struct Case {
  int64_t N;
  int H, D;
  int64_t window;
  std::vector<int> lengths;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{{1, 1, 4, 0, {}},
                                     {5, 2, 3, 0, {}},
                                     {63, 1, 8, 0, {}},
                                     {64, 1, 8, 1, {}},
                                     {65, 2, 8, 1000, {}},
                                     {130, 1, 16, 0, {1, 1, 1, 60, 2, 1, 30}},
                                     {200, 1, 4, 7, {3, 100, 1, 1, 64}},
                                     {200, 2, 5, -1, {199, 1}},
                                     {150, 1, 4, 66, {}}};
  return all;
}

TEST(Attention, EqualsTheFormula) {
  Random random = test_random();
  for (const Case& shape : cases()) {
    Problem<double> p(shape.N, shape.H, shape.D, shape.window, shape.lengths, random);
    p.forward(HostExec{});
    const double* q = p.qkv.data();
    const double* k = q + p.H * p.D;
    const double* v = k + p.H * p.D;
    for (int64_t t = 0; t < p.N; ++t) {
      for (int h = 0; h < p.H; ++h) {
        double total = 0;
        std::vector<double> expected(static_cast<size_t>(p.D));
        for (int64_t key = p.doc_start[t]; key <= t; ++key) {
          if (p.window > 0 && key < t - p.window) continue;
          double score = 0;
          for (int d = 0; d < p.D; ++d) score += p.scale * q[t * p.stride + h * p.D + d] * k[key * p.stride + h * p.D + d];
          total += std::exp(score);
          for (int d = 0; d < p.D; ++d) expected[d] += std::exp(score) * v[key * p.stride + h * p.D + d];
        }
        ASSERT_NEAR(p.lse[h * p.N + t], std::log(total), 1e-11) << "token " << t << " of " << p.N << ", window " << p.window;
        for (int d = 0; d < p.D; ++d)
          ASSERT_NEAR(p.out[(t * p.H + h) * p.D + d], expected[d] / total, 1e-11) << "token " << t << " of " << p.N;
      }
    }
  }
}

TEST(Attention, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Case& shape : cases()) {
    Problem<double> p(shape.N, shape.H, shape.D, shape.window, shape.lengths, random);
    p.forward(HostExec{});
    p.backward(HostExec{});
    const std::vector<double> dqkv = p.dqkv;
    const GradientCheck check{.objective =
                                  [&] {
                                    p.forward(HostExec{});
                                    return dot(p.out, p.dout);
                                  },
                              .elements = 20};
    check_gradients(check, {{"qkv of N = " + std::to_string(shape.N), &p.qkv, &dqkv}}, random);
  }
}

// Paired heads are a view: planes (N, H·D) read as 2N tokens of H/2 heads with half the row stride, doc_start and window in
// positions of that stream. Head h of token t then sits at position 2t + [h >= H/2] among the heads h and h ± H/2 of all tokens.
TEST(Attention, PairedHeadsAreAView) {
  Random random = test_random();
  constexpr int64_t kN = 75, kWindow = 33;
  constexpr int H = 6, D = 4, C = H * D;
  const std::vector<int32_t> starts = document_starts(kN, {1, 2, 40, 3});
  std::vector<int32_t> paired_starts;
  for (const int32_t start : starts) paired_starts.insert(paired_starts.end(), 2, 2 * start);
  std::vector<double> q = random.normal_vector<double>(kN * C), k = random.normal_vector<double>(kN * C),
                      v = random.normal_vector<double>(kN * C);
  const std::vector<double> dout = random.normal_vector<double>(kN * C);
  std::vector<double> out = poisoned<double>(kN * C), lse = poisoned<double>(kN * H), delta = lse, dq = out, dk = out, dv = out;
  const double scale = 0.4;
  auto forward = [&] {
    attention_forward(AttentionForward<double>{.out = out.data(),
                                               .lse = lse.data(),
                                               .q = q.data(),
                                               .k = k.data(),
                                               .v = v.data(),
                                               .doc_start = paired_starts.data(),
                                               .N = 2 * kN,
                                               .stride = C / 2,
                                               .H = H / 2,
                                               .D = D,
                                               .window = kWindow,
                                               .scale = scale},
                      HostExec{});
  };
  forward();
  for (int64_t t = 0; t < kN; ++t) {
    for (int h = 0; h < H; ++h) {
      double total = 0;
      std::vector<double> expected(D);
      for (int64_t s = starts[t]; s <= t; ++s) {
        for (const int other : {h % (H / 2), h % (H / 2) + H / 2}) {  // its own head and its partner
          const int64_t distance = 2 * (t - s) + (h >= H / 2) - (other >= H / 2);
          if (distance < 0 || distance > kWindow) continue;
          double score = 0;
          for (int d = 0; d < D; ++d) score += scale * q[t * C + h * D + d] * k[s * C + other * D + d];
          total += std::exp(score);
          for (int d = 0; d < D; ++d) expected[d] += std::exp(score) * v[s * C + other * D + d];
        }
      }
      for (int d = 0; d < D; ++d)
        ASSERT_NEAR(out[t * C + h * D + d], expected[d] / total, 1e-12) << "token " << t << ", head " << h << ", column " << d;
    }
  }

  attention_backward(AttentionBackward<double>{.dq = dq.data(),
                                               .dk = dk.data(),
                                               .dv = dv.data(),
                                               .dout = dout.data(),
                                               .out = out.data(),
                                               .lse = lse.data(),
                                               .q = q.data(),
                                               .k = k.data(),
                                               .v = v.data(),
                                               .doc_start = paired_starts.data(),
                                               .delta = delta.data(),
                                               .N = 2 * kN,
                                               .stride = C / 2,
                                               .H = H / 2,
                                               .D = D,
                                               .window = kWindow,
                                               .scale = scale},
                     HostExec{});
  const GradientCheck check{.objective =
                                [&] {
                                  forward();
                                  return dot(out, dout);
                                },
                            .elements = 20};
  check_gradients(check, {{"q", &q, &dq}, {"k", &k, &dk}, {"v", &v, &dv}}, random);
}

TEST(Attention, LargeScoresDoNotOverflow) {
  Random random = test_random();
  Problem<float> p(70, 1, 8, 0, {}, random);
  p.scale = 300;
  p.forward(HostExec{});
  p.backward(HostExec{});
  for (const float x : p.out) EXPECT_TRUE(std::isfinite(x));
  for (const float x : p.dqkv) EXPECT_TRUE(std::isfinite(x));
}

// What a token sees does not reach beyond its window: poison everything outside it.
TEST(Attention, NeverReadsOtherDocumentsOrOldKeys) {
  Random random = test_random();
  const Problem<float> clean(192, 1, 8, 20, {64, 128}, random);
  Problem<float> p = clean, q = clean;
  p.forward(HostExec{});
  for (int64_t t = 0; t < 128; ++t) {  // the first query block after these tokens that sees none of them starts at 192 − 20 − …
    for (int d = 0; d < 8; ++d) q.qkv[t * q.stride + 8 + d] = q.qkv[t * q.stride + 16 + d] = 1e30f;
  }
  q.forward(HostExec{});
  for (int64_t i = 149 * 8; i < 192 * 8; ++i) EXPECT_EQ(p.out[i], q.out[i]) << "token " << i / 8;
}

TEST(Attention, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(333, 2, 16, 150, {40, 1, 200}, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.out, p.lse, p.dqkv, p.delta};
  });
}

TEST(Attention, FloatAgreesWithDouble) {
  Random random = test_random();
  Problem<float> single(260, 2, 64, 100, {130}, random);
  single.forward(HostExec{});
  single.backward(HostExec{});
  Problem<double> exact(260, 2, 64, 100, {130}, random);
  exact.qkv.assign(single.qkv.begin(), single.qkv.end());
  exact.dout.assign(single.dout.begin(), single.dout.end());
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  for (size_t i = 0; i < exact.out.size(); ++i) ASSERT_NEAR(single.out[i], exact.out[i], 1e-5) << i;
  for (size_t i = 0; i < exact.dqkv.size(); ++i) ASSERT_NEAR(single.dqkv[i], exact.dqkv[i], 3e-5) << i;
}

TEST(Attention, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  Problem<float> exact(100, 2, 16, 0, {}, random), rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  check_rounded(rounded.out, exact.out);
  check_rounded(rounded.dqkv, exact.dqkv);
  EXPECT_TRUE(same_bits(rounded.lse, exact.lse));
}

}  // namespace
}  // namespace speedrun::kernels

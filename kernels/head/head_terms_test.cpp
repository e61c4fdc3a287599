// The loss with several terms: multi-token prediction and prefix.
#include "kernels/base/error.h"
#include "kernels/head/head_problem_test.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

constexpr int64_t kRow = 7;  // tokens

// Two rows with a vocabulary so small that later targets and prefixes coincide. prefix: half of the tokens have none.
template <class T>
HeadProblem<T> make_problem(int loss_terms, bool with_prefix, Softcap softcap, int64_t chunk, Random& random) {
  HeadProblem<T> p(2 * kRow, chunk, 5, 11, softcap, true, random);
  p.loss_weights =
      LossWeights<T>{.next = {static_cast<T>(1), static_cast<T>(0.5), static_cast<T>(0.25)}, .prefix = static_cast<T>(0.375)};
  p.loss_terms = loss_terms;
  p.row_tokens = kRow;
  if (with_prefix) {
    for (int v = 0; v < p.V; ++v) p.prefix.push_back(v % 2 == 0 ? -1 : static_cast<int32_t>(random.below(p.V)));
  }
  // Every case occurs: twice the same target in a row, a target that is its own prefix, and a prefix that is the next target.
  p.targets[0] = p.targets[1] = 3;
  p.targets[kRow] = 5;
  p.targets[kRow + 1] = 7;
  p.targets[kRow - 1] = 4;  // the end of a row without a prefix, and
  p.targets.back() = 9;     // with one
  if (with_prefix) p.prefix[3] = 3, p.prefix[5] = 7;
  return p;
}

struct Expected {
  std::vector<double> loss, dlogits, dinp, dweight, dbias;
};

// The header's formulas, term by term.
Expected formula(const HeadProblem<double>& p) {
  Expected e{.loss = std::vector<double>(p.N),
             .dlogits = std::vector<double>(p.N * p.V),
             .dinp = std::vector<double>(p.inp.size()),
             .dweight = p.dweight,
             .dbias = p.dbias};
  for (int64_t t = 0; t < p.N; ++t) {
    std::vector<double> logits(p.V), z(p.V);
    double total = 0;
    for (int v = 0; v < p.V; ++v) {
      logits[v] = p.bias[v];
      for (int c = 0; c < p.C; ++c) logits[v] += p.inp[t * p.C + c] * p.weight[v * p.C + c];
      z[v] = cap(logits[v], p.softcap, p.softcap_value);
      total += std::exp(z[v]);
    }
    const double lse = std::log(total);
    const int32_t prefix = p.prefix.empty() ? -1 : p.prefix[p.targets[t]];
    double weight_sum = 0;
    for (int k = 0; k < p.loss_terms; ++k) {
      weight_sum += p.loss_weights->next[k];
      if (t % kRow + k < kRow) e.loss[t] += p.loss_weights->next[k] * (lse - z[p.targets[t + k]]);
    }
    if (prefix >= 0) {
      weight_sum += p.loss_weights->prefix;
      e.loss[t] += p.loss_weights->prefix * (lse - z[prefix]);
    }
    for (int v = 0; v < p.V; ++v) {
      double residual = weight_sum * std::exp(z[v] - lse);
      for (int k = 0; k < p.loss_terms && t % kRow + k < kRow; ++k) residual -= p.targets[t + k] == v ? p.loss_weights->next[k] : 0;
      if (prefix == v) residual -= p.loss_weights->prefix;
      const double dlogit = p.grad_scale[0] * cap_derivative(logits[v], p.softcap, p.softcap_value) * residual;
      e.dlogits[t * p.V + v] = dlogit;
      e.dbias[v] += dlogit;
      for (int c = 0; c < p.C; ++c) {
        e.dinp[t * p.C + c] += dlogit * p.weight[v * p.C + c];
        e.dweight[v * p.C + c] += dlogit * p.inp[t * p.C + c];
      }
    }
  }
  return e;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, const char* name) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-11) << name << '[' << i << ']';
}

// Chunks that cut rows, hold one row, two rows, and more.
TEST(HeadTerms, EqualTheFormulaForAnyChunk) {
  Random random = test_random();
  for (const Softcap softcap : kSoftcaps) {
    for (const int loss_terms : {1, 2, 3}) {
      for (const bool with_prefix : {false, true}) {
        for (const int64_t chunk : {int64_t{1}, int64_t{2}, int64_t{5}, kRow, 2 * kRow, int64_t{20}}) {
          HeadProblem<double> p = make_problem<double>(loss_terms, with_prefix, softcap, chunk, random);
          const Expected expected = formula(p);
          p.run(HostExec{}, true);
          SCOPED_TRACE(std::to_string(loss_terms) + " terms, prefix " + std::to_string(with_prefix) + ", chunk " +
                       std::to_string(chunk) + ", soft-cap " + std::to_string(static_cast<int>(softcap)));
          expect_near(p.loss, expected.loss, "loss");
          expect_near(p.dinp, expected.dinp, "dinp");
          expect_near(p.dweight, expected.dweight, "dweight");
          expect_near(p.dbias, expected.dbias, "dbias");
          if (chunk == 2 * kRow) expect_near(p.logits, expected.dlogits, "dlogits");
        }
      }
    }
  }
}

// The gradient is the derivative of the loss, except at row ends, where it is that of a loss that keeps w_k·lse of the terms whose
// target lies beyond the row: with them added, all of it is checked.
TEST(HeadTerms, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Softcap softcap : kSoftcaps) {
    for (const int loss_terms : {1, 3}) {
      HeadProblem<double> p = make_problem<double>(loss_terms, true, softcap, 4, random);
      const std::vector<double> dweight = p.dweight, dbias = p.dbias;
      p.run(HostExec{}, true);
      const std::vector<double> weight_gradient = added(p.dweight, dweight), bias_gradient = added(p.dbias, dbias), dinp = p.dinp;
      const GradientCheck check{.objective = [&] {
        p.run(HostExec{}, false);
        const std::vector<double> z = p.capped_logits(HostExec{});
        double sum = 0;
        for (int64_t t = 0; t < p.N; ++t) {
          double total = 0;
          for (int v = 0; v < p.V; ++v) total += std::exp(z[t * p.V + v]);
          sum += p.loss[t];
          for (int k = 0; k < loss_terms; ++k) sum += t % kRow + k < kRow ? 0 : p.loss_weights->next[k] * std::log(total);
        }
        return p.grad_scale[0] * sum;
      }};
      check_gradients(check, {{"inp", &p.inp, &dinp}, {"weight", &p.weight, &weight_gradient}, {"bias", &p.bias, &bias_gradient}},
                      random);
    }
  }
}

TEST(HeadTerms, LossAloneIsTheSame) {
  Random random = test_random();
  HeadProblem<float> p = make_problem<float>(3, true, Softcap::sigmoid, 5, random);
  p.run(HostExec{}, true);
  const std::vector<float> loss = p.loss;
  p.run(HostExec{}, false);
  EXPECT_TRUE(same_bits(p.loss, loss));
}

TEST(HeadTerms, WithoutWeightsItIsPlainCrossEntropy) {
  Random random = test_random();
  HeadProblem<float> off = make_problem<float>(3, true, Softcap::sigmoid, 5, random), one = off, plain = off;
  off.loss_weights.reset();
  one.loss_weights = LossWeights<float>{};
  one.loss_terms = 1;
  one.prefix.clear();
  plain.loss_weights.reset();
  plain.loss_terms = 1;
  plain.prefix.clear();
  plain.row_tokens = 0;
  for (HeadProblem<float>* p : {&off, &one, &plain}) p->run(HostExec{}, true);
  for (const HeadProblem<float>* p : {&off, &one}) {
    EXPECT_TRUE(same_bits(p->loss, plain.loss));
    EXPECT_TRUE(same_bits(p->dinp, plain.dinp));
    EXPECT_TRUE(same_bits(p->dweight, plain.dweight));
  }
}

TEST(HeadTerms, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  HeadProblem<float> start(20 * kRow, 90, 24, 150, Softcap::sigmoid, true, random);
  start.loss_weights = LossWeights<float>{.next = {1, 0.5f, 0.25f}, .prefix = 0.25f};
  start.loss_terms = 3;
  start.row_tokens = kRow;
  for (int v = 0; v < start.V; ++v) start.prefix.push_back(v / 2 - 1);
  check_thread_counts([&](const HostExec& exec) {
    HeadProblem<float> p = start;
    p.run(exec, true);
    return Outputs{p.loss, p.dinp, p.dweight, p.dbias};
  });
}

TEST(HeadTerms, RefusesRowsThatDoNotFillTheTokens) {
  Random random = test_random();
  HeadProblem<float> p = make_problem<float>(3, true, Softcap::sigmoid, 5, random);
  p.row_tokens = kRow + 1;
  EXPECT_THROW(p.run(HostExec{}, true), Error);
  p.row_tokens = 0;
  EXPECT_THROW(p.run(HostExec{}, true), Error);
  p.row_tokens = kRow;
  p.loss_terms = kMaxLossTerms + 1;
  EXPECT_THROW(p.run(HostExec{}, true), Error);
}

}  // namespace
}  // namespace speedrun::kernels

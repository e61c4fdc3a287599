#include "kernels/head/head_loss.h"

#include "kernels/head/head_problem_test.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

TEST(HeadLoss, EqualsTheFormula) {
  Random random = test_random();
  for (const Softcap softcap : kSoftcaps) {
    for (const bool with_bias : {true, false}) {
      HeadProblem<double> p(10, 4, 6, 23, softcap, with_bias, random);
      p.run(HostExec{}, false);
      const std::vector<double> capped = p.capped_logits(HostExec{});
      for (int64_t t = 0; t < p.N; ++t) {
        double total = 0, target = 0;
        for (int v = 0; v < p.V; ++v) {
          double logit = with_bias ? p.bias[v] : 0;
          for (int c = 0; c < p.C; ++c) logit += p.inp[t * p.C + c] * p.weight[v * p.C + c];
          const double z = cap(logit, softcap, p.softcap_value);
          EXPECT_NEAR(capped[t * p.V + v], z, 1e-12);
          total += std::exp(z);
          if (v == p.targets[t]) target = z;
        }
        EXPECT_NEAR(p.loss[t], std::log(total) - target, 1e-12);
      }
    }
  }
}

TEST(HeadLoss, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Softcap softcap : kSoftcaps) {
    for (const bool with_bias : {true, false}) {
      for (const int64_t chunk : {1, 4, 9, 20}) {  // of 9 tokens: divides, does not, all, more
        HeadProblem<double> p(9, chunk, 7, 19, softcap, with_bias, random);
        const std::vector<double> dweight = p.dweight, dbias = p.dbias;
        p.run(HostExec{}, true);
        const std::vector<double> weight_gradient = added(p.dweight, dweight), bias_gradient = added(p.dbias, dbias), dinp = p.dinp;
        const GradientCheck check{.objective = [&] {
          p.run(HostExec{}, false);
          double sum = 0;
          for (const double x : p.loss) sum += p.grad_scale[0] * x;
          return sum;
        }};
        std::vector<Checked> tensors{{"inp", &p.inp, &dinp}, {"weight", &p.weight, &weight_gradient}};
        if (with_bias) tensors.push_back({"bias", &p.bias, &bias_gradient});
        check_gradients(check, tensors, random);
        if (!with_bias) {
          EXPECT_EQ(p.dbias, dbias);
        }
      }
    }
  }
}

TEST(HeadLoss, LossIsTheSameWithGradientsAndForAnyChunk) {
  Random random = test_random();
  HeadProblem<float> start(21, 21, 8, 100, Softcap::rational, true, random);
  start.run(HostExec{}, true);
  for (const int64_t chunk : {1, 5, 8}) {
    HeadProblem<float> p = start;
    p.chunk = chunk;
    p.run(HostExec{}, false);
    EXPECT_TRUE(same_bits(p.loss, start.loss)) << "chunk " << chunk;
  }
}

TEST(HeadLoss, ZeroWeightsGiveLogV) {
  Random random = test_random();
  HeadProblem<float> p(5, 5, 8, 64, Softcap::rational, false, random);
  std::fill(p.weight.begin(), p.weight.end(), 0.0f);
  p.run(HostExec{}, true);
  for (const float loss : p.loss) EXPECT_NEAR(loss, std::log(64.0), 1e-6);
  for (const float d : p.dinp) EXPECT_EQ(d, 0);
}

TEST(HeadLoss, LargeLogitsDoNotOverflow) {
  Random random = test_random();
  for (const Softcap softcap : kSoftcaps) {
    HeadProblem<float> p(6, 6, 8, 40, softcap, true, random);
    for (float& w : p.weight) w *= 1e4f;
    p.run(HostExec{}, true);
    for (const float x : p.loss) EXPECT_TRUE(std::isfinite(x));
    for (const float x : p.dinp) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST(HeadLoss, NanReachesTheLoss) {
  Random random = test_random();
  for (const Softcap softcap : kSoftcaps) {
    HeadProblem<float> p(3, 3, 8, 40, softcap, true, random);
    p.inp[8 + 2] = std::nanf("");
    p.run(HostExec{}, true);
    EXPECT_TRUE(std::isfinite(p.loss[0]));
    EXPECT_TRUE(std::isnan(p.loss[1]));
    EXPECT_TRUE(std::isfinite(p.loss[2]));
  }
}

TEST(HeadLoss, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const HeadProblem<float> start(200, 90, 24, 150, Softcap::sigmoid, true, random);
  check_thread_counts([&](const HostExec& exec) {
    HeadProblem<float> p = start;
    p.run(exec, true);
    return Outputs{p.loss, p.dinp, p.dweight, p.dbias, p.capped_logits(exec)};
  });
}

TEST(HeadLoss, RoundsLogitsAndGradients) {
  Random random = test_random();
  HeadProblem<float> exact(30, 30, 16, 64, Softcap::rational, true, random), rounded = exact;
  exact.run(HostExec{}, true);
  rounded.run(HostExec{.round_bf16 = true}, true);
  check_rounded(rounded.dinp, exact.dinp);
  check_rounded(rounded.logits, exact.logits);  // by now their gradients
  check_rounded(rounded.capped_logits(HostExec{.round_bf16 = true}), exact.capped_logits(HostExec{}));
  EXPECT_FALSE(all_bf16(rounded.loss));
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/scaled_weight/scaled_weight.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  std::vector<int64_t> sizes;
  std::vector<std::vector<T>> weight, out, grad;
  std::vector<T> scalars, dscalars;
  std::vector<double> scratch;

  Problem(std::vector<int64_t> the_sizes, Random& random)
      : sizes(std::move(the_sizes)),
        scalars(random.normal_vector<T>(static_cast<int64_t>(sizes.size()))),
        dscalars(random.normal_vector<T>(static_cast<int64_t>(sizes.size()))),
        scratch(poisoned<double>(scaled_weights_scratch(static_cast<int>(sizes.size())))) {
    for (const int64_t n : sizes) {
      weight.push_back(random.normal_vector<T>(n));
      out.push_back(poisoned<T>(n));
      grad.push_back(random.normal_vector<T>(n));
    }
  }

  // item_without_grad: −1, or the one that has no backward.
  void call(const HostExec& exec, bool backward, int item_without_grad = -1) {
    std::vector<ScaledWeightItem<T>> items;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const bool has_grad = static_cast<int>(i) != item_without_grad;
      items.push_back({.out = out[i].data(),
                       .weight = weight[i].data(),
                       .scalar = &scalars[i],
                       .grad = has_grad ? grad[i].data() : nullptr,
                       .dscalar = has_grad ? &dscalars[i] : nullptr,
                       .n = sizes[i]});
    }
    const ScaledWeights<T> args{items.data(), scratch.data(), static_cast<int>(items.size())};
    backward ? scaled_weights_backward(args, exec) : scaled_weights_forward(args, exec);
  }
  void forward(const HostExec& exec) { call(exec, false); }
  void backward(const HostExec& exec, int item_without_grad = -1) { call(exec, true, item_without_grad); }
};

const std::vector<int64_t> kSizes = {1, 8, 511, 512, 513, 4096, 5000};

TEST(ScaledWeight, KnownNumbers) {
  std::vector<double> weight{1, -2, 4}, out(3), grad{3, 5, 0.5}, scratch(static_cast<size_t>(scaled_weights_scratch(1)));
  const double scalar = 0.5;
  double dscalar = 10;
  const ScaledWeightItem<double> item{out.data(), weight.data(), &scalar, grad.data(), &dscalar, 3};
  scaled_weights_forward(ScaledWeights<double>{&item, scratch.data(), 1}, HostExec{});
  scaled_weights_backward(ScaledWeights<double>{&item, scratch.data(), 1}, HostExec{});
  EXPECT_EQ(out, (std::vector<double>{0.5, -1, 2}));
  EXPECT_EQ(dscalar, 10 + 3 - 10 + 2);
  EXPECT_EQ(grad, (std::vector<double>{1.5, 2.5, 0.25}));
}

TEST(ScaledWeight, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  Problem<double> p(kSizes, random);
  // The gradient buffer holds the gradient of `out`: that of Σ grad·out.
  const std::vector<std::vector<double>> dout = p.grad;
  const std::vector<double> dscalars = p.dscalars;
  p.backward(HostExec{});
  const std::vector<double> scalar_gradient = added(p.dscalars, dscalars);
  const GradientCheck check{.objective = [&] {
    p.forward(HostExec{});
    double sum = 0;
    for (size_t i = 0; i < p.sizes.size(); ++i) sum += dot(p.out[i], dout[i]);
    return sum;
  }};
  check_gradients(check, {{"scalars", &p.scalars, &scalar_gradient}}, random);
  for (size_t i = 0; i < p.sizes.size(); ++i) check_gradients(check, {{"weight", &p.weight[i], &p.grad[i]}}, random);
}

TEST(ScaledWeight, ItemsWithoutGradientAreLeftAlone) {
  Random random = test_random();
  Problem<float> p(kSizes, random);
  const Problem<float> start = p;
  Problem<float> all = p;
  all.backward(HostExec{});
  p.backward(HostExec{}, 3);
  for (size_t i = 0; i < kSizes.size(); ++i) {
    EXPECT_EQ(p.grad[i], i == 3 ? start.grad[i] : all.grad[i]) << "item " << i;
    EXPECT_EQ(p.dscalars[i], i == 3 ? start.dscalars[i] : all.dscalars[i]) << "item " << i;
  }
}

TEST(ScaledWeight, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(kSizes, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    Outputs outputs{p.dscalars};
    outputs.insert(outputs.end(), p.out.begin(), p.out.end());
    outputs.insert(outputs.end(), p.grad.begin(), p.grad.end());
    return outputs;
  });
}

TEST(ScaledWeight, RoundsTheWeightsOnly) {
  Random random = test_random();
  Problem<float> exact(kSizes, random), rounded = exact;
  for (Problem<float>* p : {&exact, &rounded}) {
    const HostExec exec{.round_bf16 = p == &rounded};
    p->forward(exec);
    p->backward(exec);
  }
  for (size_t k = 0; k < kSizes.size(); ++k) {
    for (size_t i = 0; i < exact.out[k].size(); ++i) EXPECT_EQ(rounded.out[k][i], static_cast<float>(bf16(exact.out[k][i])));
    EXPECT_TRUE(same_bits(rounded.grad[k], exact.grad[k]));
  }
  EXPECT_TRUE(same_bits(rounded.dscalars, exact.dscalars));
}

}  // namespace
}  // namespace speedrun::kernels

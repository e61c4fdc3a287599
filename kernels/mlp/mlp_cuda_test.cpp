#include "kernels/base/thread_pool.h"
#include "kernels/linear/linear.h"
#include "kernels/mlp/mlp.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/product_ulp.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;

struct Config {
  int64_t N;
  int C, F;
  Activation activation;
  bool bias = true;
  bool gelu() const { return activation == Activation::gelu; }
};

std::string name(const Config& c) {
  return "N = " + std::to_string(c.N) + ", C = " + std::to_string(c.C) + ", F = " + std::to_string(c.F) +
         (c.gelu() ? ", gelu" : ", relu2") + (c.bias ? ", bias" : "");
}

struct Data {
  std::vector<bf16> inp, residual, dout, up, up_bias, down, down_bias;
  std::vector<float> dup, dup_bias, ddown, ddown_bias;
};

Data make_data(const Config& c, Random& random) {
  const int64_t weights = int64_t{c.C} * c.F;
  return {.inp = random.normal_vector<bf16>(c.N * c.C),
          .residual = random.normal_vector<bf16>(c.N * c.C),
          .dout = random.normal_vector<bf16>(c.N * c.C, 1, 0.1),
          .up = random.normal_vector<bf16>(weights, 1 / std::sqrt(c.C)),
          .up_bias = random.normal_vector<bf16>(c.F, 0.5),
          .down = random.normal_vector<bf16>(weights, 1 / std::sqrt(c.F)),
          .down_bias = random.normal_vector<bf16>(c.C),
          .dup = random.normal_vector<float>(weights),
          .dup_bias = random.normal_vector<float>(c.F),
          .ddown = random.normal_vector<float>(weights),
          .ddown_bias = random.normal_vector<float>(c.C)};
}

template <class T>
struct Forward {
  std::vector<T> out, pre, post;
};
template <class T>
struct Backward {
  std::vector<T> dinp, dhidden, dup, dup_bias, ddown, ddown_bias;
};
struct Saved {
  std::vector<bf16> pre, post;
};

template <class T>
Forward<T> forward_reference(const Config& c, const Data& data, const HostExec& exec) {
  const auto inp = testing::widen<T>(data.inp), residual = testing::widen<T>(data.residual), up = testing::widen<T>(data.up),
             up_bias = testing::widen<T>(data.up_bias), down = testing::widen<T>(data.down),
             down_bias = testing::widen<T>(data.down_bias);
  const size_t hidden = static_cast<size_t>(c.N * c.F);
  Forward<T> result{.out = std::vector<T>(data.inp.size()), .pre = std::vector<T>(hidden), .post = std::vector<T>(hidden)};
  mlp_forward(MlpForward<T>{.out = result.out.data(),
                            .post = result.post.data(),
                            .pre = c.gelu() ? result.pre.data() : nullptr,
                            .inp = inp.data(),
                            .residual = residual.data(),
                            .up_weight = up.data(),
                            .up_bias = c.bias ? up_bias.data() : nullptr,
                            .down_weight = down.data(),
                            .down_bias = c.bias ? down_bias.data() : nullptr,
                            .N = c.N,
                            .C = c.C,
                            .F = c.F,
                            .activation = c.activation},
              exec);
  return result;
}

template <class T>
Backward<T> backward_reference(const Config& c, const Data& data, const Saved& saved, const HostExec& exec) {
  const auto inp = testing::widen<T>(data.inp), dout = testing::widen<T>(data.dout), up = testing::widen<T>(data.up),
             down = testing::widen<T>(data.down), pre = testing::widen<T>(saved.pre), post = testing::widen<T>(saved.post);
  Backward<T> result{.dinp = std::vector<T>(data.inp.size()),
                     .dhidden = std::vector<T>(static_cast<size_t>(c.N * c.F)),
                     .dup = {data.dup.begin(), data.dup.end()},
                     .dup_bias = {data.dup_bias.begin(), data.dup_bias.end()},
                     .ddown = {data.ddown.begin(), data.ddown.end()},
                     .ddown_bias = {data.ddown_bias.begin(), data.ddown_bias.end()}};
  std::vector<T> scratch(static_cast<size_t>(bias_grad_scratch(c.N, std::max(c.F, c.C))));
  mlp_backward(MlpBackward<T>{.dinp = result.dinp.data(),
                              .dup_weight = result.dup.data(),
                              .dup_bias = c.bias ? result.dup_bias.data() : nullptr,
                              .ddown_weight = result.ddown.data(),
                              .ddown_bias = c.bias ? result.ddown_bias.data() : nullptr,
                              .dhidden = result.dhidden.data(),
                              .dout = dout.data(),
                              .inp = inp.data(),
                              .pre = c.gelu() ? pre.data() : nullptr,
                              .post = post.data(),
                              .up_weight = up.data(),
                              .down_weight = down.data(),
                              .scratch = scratch.data(),
                              .N = c.N,
                              .C = c.C,
                              .F = c.F,
                              .activation = c.activation},
               exec);
  return result;
}

struct DeviceResult {
  std::vector<bf16> out, pre, post, dinp, dhidden;
  std::vector<float> dup, dup_bias, ddown, ddown_bias;
};

class MlpCudaTest : public testing::CudaTest {
 protected:
  DeviceResult run(const Config& c, const Data& data, const Saved& saved) {
    const auto inp = uploaded("inp", data.inp), dout = uploaded("dout", data.dout), up = uploaded("up", data.up),
               up_bias = uploaded("up bias", data.up_bias), down = uploaded("down", data.down),
               down_bias = uploaded("down bias", data.down_bias);
    const auto out = uploaded("out", data.residual);  // the residual in place
    const auto pre = poisoned<bf16>("pre", c.N * c.F), post = poisoned<bf16>("post", c.N * c.F),
               dinp = poisoned<bf16>("dinp", c.N * c.C), dhidden = poisoned<bf16>("dhidden", c.N * c.F),
               saved_pre = uploaded("saved pre", saved.pre), saved_post = uploaded("saved post", saved.post);
    const auto dup = uploaded("dup", data.dup), dup_bias = uploaded("dup bias", data.dup_bias),
               ddown = uploaded("ddown", data.ddown), ddown_bias = uploaded("ddown bias", data.ddown_bias);
    const auto scratch = poisoned<float>("scratch", bias_grad_scratch(c.N, std::max(c.F, c.C)));
    mlp_forward({.out = out.get(),
                 .post = post.get(),
                 .pre = c.gelu() ? pre.get() : nullptr,
                 .inp = inp.get(),
                 .residual = out.get(),
                 .up_weight = up.get(),
                 .up_bias = c.bias ? up_bias.get() : nullptr,
                 .down_weight = down.get(),
                 .down_bias = c.bias ? down_bias.get() : nullptr,
                 .N = c.N,
                 .C = c.C,
                 .F = c.F,
                 .activation = c.activation},
                exec());
    mlp_backward({.dinp = dinp.get(),
                  .dup_weight = dup.get(),
                  .dup_bias = c.bias ? dup_bias.get() : nullptr,
                  .ddown_weight = ddown.get(),
                  .ddown_bias = c.bias ? ddown_bias.get() : nullptr,
                  .dhidden = dhidden.get(),
                  .dout = dout.get(),
                  .inp = inp.get(),
                  .pre = c.gelu() ? saved_pre.get() : nullptr,
                  .post = saved_post.get(),
                  .up_weight = up.get(),
                  .down_weight = down.get(),
                  .scratch = scratch.get(),
                  .N = c.N,
                  .C = c.C,
                  .F = c.F,
                  .activation = c.activation},
                 exec());
    return {.out = out.download(),
            .pre = pre.download(),
            .post = post.download(),
            .dinp = dinp.download(),
            .dhidden = dhidden.download(),
            .dup = dup.download(),
            .dup_bias = dup_bias.download(),
            .ddown = ddown.download(),
            .ddown_bias = ddown_bias.download()};
  }

  void check(const Config& c) {
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    ThreadPool pool(0);
    const HostExec exact{.pool = &pool}, rounding{.pool = &pool, .round_bf16 = true};
    const auto forward = forward_reference<double>(c, data, exact);
    const auto forward_baseline = forward_reference<float>(c, data, rounding);
    Saved saved;
    for (const float x : forward_baseline.pre) saved.pre.emplace_back(x);
    for (const float x : forward_baseline.post) saved.post.emplace_back(x);
    const auto backward = backward_reference<double>(c, data, saved, exact);
    const auto backward_baseline = backward_reference<float>(c, data, saved, rounding);

    const DeviceResult got = run(c, data, saved), again = run(c, data, saved);
    const auto compare = [](const char* what, const auto& first, const auto& second, const auto& truth, const auto& baseline,
                            testing::Ulp ulp) {
      EXPECT_TRUE(testing::same_bits(first, second)) << what;
      EXPECT_TRUE(testing::within_rule(first, truth, baseline, ulp)) << what;
    };
    const testing::Ulp stored = testing::Ulp::bf16, product = testing::product_ulp(c.N), sum = testing::Ulp::accumulated;
    if (c.gelu()) compare("pre", got.pre, again.pre, forward.pre, forward_baseline.pre, stored);
    compare("post", got.post, again.post, forward.post, forward_baseline.post, stored);
    compare("out", got.out, again.out, forward.out, forward_baseline.out, stored);
    compare("dhidden", got.dhidden, again.dhidden, backward.dhidden, backward_baseline.dhidden, stored);
    compare("dinp", got.dinp, again.dinp, backward.dinp, backward_baseline.dinp, stored);
    compare("dup", got.dup, again.dup, backward.dup, backward_baseline.dup, product);
    compare("ddown", got.ddown, again.ddown, backward.ddown, backward_baseline.ddown, product);
    compare("dup bias", got.dup_bias, again.dup_bias, backward.dup_bias, backward_baseline.dup_bias, sum);
    compare("ddown bias", got.ddown_bias, again.ddown_bias, backward.ddown_bias, backward_baseline.ddown_bias, sum);
  }
};

TEST_F(MlpCudaTest, BothActivationsWithAndWithoutBias) {
  for (const Activation activation : {Activation::gelu, Activation::relu2}) {
    for (const bool bias : {false, true}) check({.N = 136, .C = 72, .F = 264, .activation = activation, .bias = bias});
  }
}

TEST_F(MlpCudaTest, OddNumbersOfTokens) {
  for (const Activation activation : {Activation::gelu, Activation::relu2}) {
    for (const int64_t N : {1, 15, 65, 1000}) check({.N = N, .C = 24, .F = 136, .activation = activation});
  }
}

TEST_F(MlpCudaTest, ProductionWidths) {
  check({.N = 1024, .C = 768, .F = 3072, .activation = Activation::gelu});
  check({.N = 1024, .C = 768, .F = 3072, .activation = Activation::relu2});
}

// max(x, 0)² may not turn a NaN into a zero: the trainer has to see it.
TEST_F(MlpCudaTest, Relu2KeepsNan) {
  const int64_t N = 8;
  const int C = 8, F = 8;
  std::vector<bf16> inp(static_cast<size_t>(N * C), bf16(1.0f));
  inp[0] = bf16(std::nanf(""));
  const auto x = uploaded("inp", inp), weight = uploaded("weight", std::vector<bf16>(static_cast<size_t>(C * F), bf16(-1.0f)));
  const auto out = poisoned<bf16>("out", N * C), post = poisoned<bf16>("post", N * F);
  const auto residual = uploaded("residual", std::vector<bf16>(static_cast<size_t>(N * C), bf16(0.0f)));
  mlp_forward({.out = out.get(),
               .post = post.get(),
               .pre = nullptr,
               .inp = x.get(),
               .residual = residual.get(),
               .up_weight = weight.get(),
               .up_bias = nullptr,
               .down_weight = weight.get(),
               .down_bias = nullptr,
               .N = N,
               .C = C,
               .F = F,
               .activation = Activation::relu2},
              exec());
  const std::vector<bf16> got = post.download();
  for (int64_t i = 0; i < N * F; ++i) {
    const float value = static_cast<float>(got[static_cast<size_t>(i)]);
    if (i < F) {
      EXPECT_TRUE(std::isnan(value)) << i;
    } else {
      EXPECT_EQ(value, 0.0f) << i;
    }
  }
}

TEST_F(MlpCudaTest, GeluWithoutPreIsRefused) {
  const auto x = poisoned<bf16>("x", 64);
  EXPECT_THROW(mlp_forward({.out = x.get(),
                            .post = x.get(),
                            .pre = nullptr,
                            .inp = x.get(),
                            .residual = x.get(),
                            .up_weight = x.get(),
                            .up_bias = nullptr,
                            .down_weight = x.get(),
                            .down_bias = nullptr,
                            .N = 8,
                            .C = 8,
                            .F = 8,
                            .activation = Activation::gelu},
                           exec()),
               Error);
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/base/thread_pool.h"
#include "kernels/linear/linear.h"
#include "kernels/qkv/qkv.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/product_ulp.h"

namespace speedrun::kernels {
namespace {

using testing::Random;

struct Config {
  int64_t N, row_tokens;
  int H, D;
  bool norm = true, rotary = true, bias = true;
  int C() const { return H * D; }
};

std::string name(const Config& c) {
  return "N = " + std::to_string(c.N) + ", row_tokens = " + std::to_string(c.row_tokens) + ", H = " + std::to_string(c.H) +
         ", D = " + std::to_string(c.D) + (c.norm ? ", norm" : "") + (c.rotary ? ", rotary" : "") + (c.bias ? ", bias" : "");
}

constexpr double kEps = 1e-6;

struct Data {
  std::vector<bf16> inp, weight, bias, dqkv;
  std::vector<float> cos, sin, dweight, dbias;
};

Data make_data(const Config& c, Random& random) {
  const int C = c.C();
  Data data{.inp = random.normal_vector<bf16>(c.N * C),
            .weight = random.normal_vector<bf16>(int64_t{3} * C * C, 0.05),
            .bias = random.normal_vector<bf16>(3 * C, 0.3),
            .dqkv = random.normal_vector<bf16>(c.N * 3 * C),
            .cos = {},
            .sin = {},
            .dweight = random.normal_vector<float>(int64_t{3} * C * C),
            .dbias = random.normal_vector<float>(3 * C)};
  for (int64_t t = 0; t < c.row_tokens; ++t) {
    for (int i = 0; i < c.D / 2; ++i) {
      const double angle = static_cast<double>(t) * std::pow(1024.0, -2.0 * i / c.D);
      data.cos.push_back(static_cast<float>(std::cos(angle)));
      data.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return data;
}

template <class T>
struct Forward {
  std::vector<T> qkv, rstd;
};
template <class T>
struct Backward {
  std::vector<T> dqkv, dinp, dweight, dbias;
};

template <class T>
Forward<T> forward_reference(const Config& c, const Data& data, const HostExec& exec) {
  const auto inp = testing::widen<T>(data.inp), weight = testing::widen<T>(data.weight), bias = testing::widen<T>(data.bias);
  const std::vector<T> cos(data.cos.begin(), data.cos.end()), sin(data.sin.begin(), data.sin.end());
  Forward<T> result{.qkv = std::vector<T>(static_cast<size_t>(c.N * 3 * c.C())),
                    .rstd = std::vector<T>(static_cast<size_t>(c.N * 2 * c.H))};
  qkv_forward(QkvForward<T>{.qkv = result.qkv.data(),
                            .qk_rstd = c.norm ? result.rstd.data() : nullptr,
                            .inp = inp.data(),
                            .weight = weight.data(),
                            .bias = c.bias ? bias.data() : nullptr,
                            .rotary_cos = c.rotary ? cos.data() : nullptr,
                            .rotary_sin = c.rotary ? sin.data() : nullptr,
                            .N = c.N,
                            .row_tokens = c.row_tokens,
                            .C = c.C(),
                            .H = c.H,
                            .eps = kEps},
              exec);
  return result;
}

// What backward gets from forward: bf16 q and k and float factors.
struct Saved {
  std::vector<bf16> qkv;
  std::vector<float> rstd;
};

template <class T>
Backward<T> backward_reference(const Config& c, const Data& data, const Saved& saved, const HostExec& exec) {
  const auto inp = testing::widen<T>(data.inp), weight = testing::widen<T>(data.weight), qkv = testing::widen<T>(saved.qkv);
  const std::vector<T> cos(data.cos.begin(), data.cos.end()), sin(data.sin.begin(), data.sin.end()),
      rstd(saved.rstd.begin(), saved.rstd.end());
  Backward<T> result{.dqkv = testing::widen<T>(data.dqkv),
                     .dinp = std::vector<T>(data.inp.size()),
                     .dweight = std::vector<T>(data.dweight.begin(), data.dweight.end()),
                     .dbias = std::vector<T>(data.dbias.begin(), data.dbias.end())};
  std::vector<T> scratch(static_cast<size_t>(bias_grad_scratch(c.N, 3 * c.C())));
  qkv_backward(QkvBackward<T>{.dinp = result.dinp.data(),
                              .dweight = result.dweight.data(),
                              .dbias = c.bias ? result.dbias.data() : nullptr,
                              .dqkv = result.dqkv.data(),
                              .qkv = qkv.data(),
                              .qk_rstd = c.norm ? rstd.data() : nullptr,
                              .inp = inp.data(),
                              .weight = weight.data(),
                              .rotary_cos = c.rotary ? cos.data() : nullptr,
                              .rotary_sin = c.rotary ? sin.data() : nullptr,
                              .scratch = scratch.data(),
                              .N = c.N,
                              .row_tokens = c.row_tokens,
                              .C = c.C(),
                              .H = c.H},
               exec);
  return result;
}

struct DeviceResult {
  std::vector<bf16> qkv, dqkv, dinp;
  std::vector<float> rstd, dweight, dbias;
};

class QkvCudaTest : public testing::CudaTest {
 protected:
  DeviceResult run(const Config& c, const Data& data, const Saved& saved) {
    const int C = c.C();
    const auto inp = uploaded("inp", data.inp), weight = uploaded("weight", data.weight), bias = uploaded("bias", data.bias);
    const auto cos = uploaded("cos", data.cos), sin = uploaded("sin", data.sin);
    const auto qkv = poisoned<bf16>("qkv", c.N * 3 * C), saved_qkv = uploaded("saved qkv", saved.qkv),
               dqkv = uploaded("dqkv", data.dqkv), dinp = poisoned<bf16>("dinp", c.N * C);
    const auto rstd = poisoned<float>("rstd", c.N * 2 * c.H), saved_rstd = uploaded("saved rstd", saved.rstd),
               dweight = uploaded("dweight", data.dweight), dbias = uploaded("dbias", data.dbias),
               scratch = poisoned<float>("scratch", bias_grad_scratch(c.N, 3 * C));
    qkv_forward({.qkv = qkv.get(),
                 .qk_rstd = c.norm ? rstd.get() : nullptr,
                 .inp = inp.get(),
                 .weight = weight.get(),
                 .bias = c.bias ? bias.get() : nullptr,
                 .rotary_cos = c.rotary ? cos.get() : nullptr,
                 .rotary_sin = c.rotary ? sin.get() : nullptr,
                 .N = c.N,
                 .row_tokens = c.row_tokens,
                 .C = C,
                 .H = c.H,
                 .eps = kEps},
                exec());
    qkv_backward({.dinp = dinp.get(),
                  .dweight = dweight.get(),
                  .dbias = c.bias ? dbias.get() : nullptr,
                  .dqkv = dqkv.get(),
                  .qkv = saved_qkv.get(),
                  .qk_rstd = c.norm ? saved_rstd.get() : nullptr,
                  .inp = inp.get(),
                  .weight = weight.get(),
                  .rotary_cos = c.rotary ? cos.get() : nullptr,
                  .rotary_sin = c.rotary ? sin.get() : nullptr,
                  .scratch = scratch.get(),
                  .N = c.N,
                  .row_tokens = c.row_tokens,
                  .C = C,
                  .H = c.H},
                 exec());
    return {.qkv = qkv.download(),
            .dqkv = dqkv.download(),
            .dinp = dinp.download(),
            .rstd = rstd.download(),
            .dweight = dweight.download(),
            .dbias = dbias.download()};
  }

  void check(const Config& c) {
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    ThreadPool pool(0);
    const HostExec exact{.pool = &pool}, rounding{.pool = &pool, .round_bf16 = true};
    const auto forward = forward_reference<double>(c, data, exact);
    const auto forward_baseline = forward_reference<float>(c, data, rounding);
    Saved saved{.qkv = {}, .rstd = forward_baseline.rstd};
    for (const float x : forward_baseline.qkv) saved.qkv.emplace_back(x);
    const auto backward = backward_reference<double>(c, data, saved, exact);
    const auto backward_baseline = backward_reference<float>(c, data, saved, rounding);

    const DeviceResult got = run(c, data, saved), again = run(c, data, saved);
    EXPECT_TRUE(testing::same_bits(got.qkv, again.qkv)) << "qkv";
    EXPECT_TRUE(testing::same_bits(got.rstd, again.rstd)) << "rstd";
    EXPECT_TRUE(testing::same_bits(got.dqkv, again.dqkv)) << "dqkv";
    EXPECT_TRUE(testing::same_bits(got.dinp, again.dinp)) << "dinp";
    EXPECT_TRUE(testing::same_bits(got.dweight, again.dweight)) << "dweight";
    EXPECT_TRUE(testing::same_bits(got.dbias, again.dbias)) << "dbias";
    EXPECT_TRUE(testing::within_rule(got.qkv, forward.qkv, forward_baseline.qkv)) << "qkv";
    if (c.norm) {
      EXPECT_TRUE(testing::within_rule(got.rstd, forward.rstd, forward_baseline.rstd, testing::Ulp::accumulated)) << "rstd";
    }
    EXPECT_TRUE(testing::within_rule(got.dqkv, backward.dqkv, backward_baseline.dqkv)) << "dqkv";
    EXPECT_TRUE(testing::within_rule(got.dinp, backward.dinp, backward_baseline.dinp)) << "dinp";
    EXPECT_TRUE(testing::within_rule(got.dweight, backward.dweight, backward_baseline.dweight, testing::product_ulp(c.N)))
        << "dweight";
    EXPECT_TRUE(testing::within_rule(got.dbias, backward.dbias, backward_baseline.dbias, testing::Ulp::accumulated)) << "dbias";
  }
};

TEST_F(QkvCudaTest, EveryCombinationOfFeatures) {
  for (const bool norm : {false, true}) {
    for (const bool rotary : {false, true}) {
      for (const bool bias : {false, true})
        check({.N = 128, .row_tokens = 64, .H = 3, .D = 64, .norm = norm, .rotary = rotary, .bias = bias});
    }
  }
}

// Head widths that fill their lanes and ones that leave some idle; heads that do not fill the last warp step.
TEST_F(QkvCudaTest, HeadWidths) {
  for (const int D : {16, 32, 48, 64, 80, 96, 128, 256, 512}) check({.N = 48, .row_tokens = 16, .H = D > 128 ? 1 : 5, .D = D});
}

TEST_F(QkvCudaTest, OddNumbersOfTokens) {
  check({.N = 1, .row_tokens = 1, .H = 1, .D = 64});
  check({.N = 7, .row_tokens = 7, .H = 6, .D = 128});
  check({.N = 111, .row_tokens = 37, .H = 12, .D = 64});
}

TEST_F(QkvCudaTest, ProductionWidths) {
  check({.N = 2048, .row_tokens = 1024, .H = 6, .D = 128});
  check({.N = 2048, .row_tokens = 1024, .H = 12, .D = 64, .norm = false});
}

TEST_F(QkvCudaTest, RefusesOtherHeadWidths) {
  const auto x = poisoned<bf16>("x", 4096);
  const auto rstd = poisoned<float>("rstd", 64);
  EXPECT_THROW(qkv_forward({.qkv = x.get(),
                            .qk_rstd = rstd.get(),
                            .inp = x.get(),
                            .weight = x.get(),
                            .bias = nullptr,
                            .rotary_cos = nullptr,
                            .rotary_sin = nullptr,
                            .N = 8,
                            .row_tokens = 8,
                            .C = 24,
                            .H = 1,
                            .eps = kEps},
                           exec()),
               Error);
}

}  // namespace
}  // namespace speedrun::kernels

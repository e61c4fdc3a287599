#include "kernels/base/thread_pool.h"
#include "kernels/linear/linear.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/fp8_check.h"
#include "kernels/testing/product_ulp.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;

struct Size {
  int64_t N;
  int K, O;
};

struct Data {
  std::vector<bf16> inp, weight, bias, residual, dout;
  std::vector<float> dweight, dbias;  // before the call
};

Data make_data(Size size, Random& random) {
  return {.inp = random.normal_vector<bf16>(size.N * size.K),
          .weight = random.normal_vector<bf16>(int64_t{size.O} * size.K, 0.05),
          .bias = random.normal_vector<bf16>(size.O),
          .residual = random.normal_vector<bf16>(size.N * size.O),
          .dout = random.normal_vector<bf16>(size.N * size.O, 1, 0.1),
          .dweight = random.normal_vector<float>(int64_t{size.O} * size.K),
          .dbias = random.normal_vector<float>(size.O)};
}

template <class T>
struct Result {
  std::vector<T> out, dinp, dweight, dbias;
};

template <class T>
Result<T> reference(Size size, const Data& data, bool bias, bool residual, const HostExec& exec) {
  const auto inp = testing::widen<T>(data.inp), weight = testing::widen<T>(data.weight), bias_values = testing::widen<T>(data.bias),
             residual_values = testing::widen<T>(data.residual), dout = testing::widen<T>(data.dout);
  Result<T> result{.out = std::vector<T>(data.dout.size()),
                   .dinp = std::vector<T>(data.inp.size()),
                   .dweight = std::vector<T>(data.dweight.begin(), data.dweight.end()),
                   .dbias = std::vector<T>(data.dbias.begin(), data.dbias.end())};
  std::vector<T> scratch(static_cast<size_t>(bias_grad_scratch(size.N, size.O)));
  linear_forward(LinearForward<T>{.out = result.out.data(),
                                  .inp = inp.data(),
                                  .weight = weight.data(),
                                  .bias = bias ? bias_values.data() : nullptr,
                                  .residual = residual ? residual_values.data() : nullptr,
                                  .N = size.N,
                                  .K = size.K,
                                  .O = size.O},
                 exec);
  linear_backward(LinearBackward<T>{.dinp = result.dinp.data(),
                                    .dweight = result.dweight.data(),
                                    .dbias = bias ? result.dbias.data() : nullptr,
                                    .dout = dout.data(),
                                    .inp = inp.data(),
                                    .weight = weight.data(),
                                    .scratch = scratch.data(),
                                    .N = size.N,
                                    .K = size.K,
                                    .O = size.O},
                  exec);
  return result;
}

struct DeviceResult {
  std::vector<bf16> out, dinp;
  std::vector<float> dweight, dbias;
};

class LinearCudaTest : public testing::CudaTest {
 protected:
  DeviceResult run(Size size, const Data& data, bool bias, bool residual) {
    const auto inp = uploaded("inp", data.inp), weight = uploaded("weight", data.weight), bias_values = uploaded("bias", data.bias),
               dout = uploaded("dout", data.dout);
    // The residual is read in place, as the residual stream is.
    DeviceBuffer<bf16> out = residual ? uploaded("out", data.residual) : poisoned<bf16>("out", size.N * size.O);
    const auto dinp = poisoned<bf16>("dinp", size.N * size.K);
    const auto dweight = uploaded("dweight", data.dweight), dbias = uploaded("dbias", data.dbias);
    const auto scratch = poisoned<float>("scratch", bias_grad_scratch(size.N, size.O));
    linear_forward({.out = out.get(),
                    .inp = inp.get(),
                    .weight = weight.get(),
                    .bias = bias ? bias_values.get() : nullptr,
                    .residual = residual ? out.get() : nullptr,
                    .N = size.N,
                    .K = size.K,
                    .O = size.O},
                   exec());
    linear_backward({.dinp = dinp.get(),
                     .dweight = dweight.get(),
                     .dbias = bias ? dbias.get() : nullptr,
                     .dout = dout.get(),
                     .inp = inp.get(),
                     .weight = weight.get(),
                     .scratch = scratch.get(),
                     .N = size.N,
                     .K = size.K,
                     .O = size.O},
                    exec());
    return {.out = out.download(), .dinp = dinp.download(), .dweight = dweight.download(), .dbias = dbias.download()};
  }

  void check(Size size, bool bias, bool residual) {
    SCOPED_TRACE("N = " + std::to_string(size.N) + ", K = " + std::to_string(size.K) + ", O = " + std::to_string(size.O) +
                 (bias ? ", bias" : "") + (residual ? ", residual" : ""));
    Random random = testing::test_random();
    const Data data = make_data(size, random);
    const DeviceResult got = run(size, data, bias, residual), again = run(size, data, bias, residual);
    EXPECT_TRUE(testing::same_bits(got.out, again.out)) << "out";
    EXPECT_TRUE(testing::same_bits(got.dinp, again.dinp)) << "dinp";
    EXPECT_TRUE(testing::same_bits(got.dweight, again.dweight)) << "dweight";
    EXPECT_TRUE(testing::same_bits(got.dbias, again.dbias)) << "dbias";
    ThreadPool pool(0);
    const auto truth = reference<double>(size, data, bias, residual, {.pool = &pool});
    const auto baseline = reference<float>(size, data, bias, residual, {.pool = &pool, .round_bf16 = true});
    EXPECT_TRUE(testing::within_rule(got.out, truth.out, baseline.out)) << "out";
    EXPECT_TRUE(testing::within_rule(got.dinp, truth.dinp, baseline.dinp)) << "dinp";
    EXPECT_TRUE(testing::within_rule(got.dweight, truth.dweight, baseline.dweight, testing::product_ulp(size.N))) << "dweight";
    EXPECT_TRUE(testing::within_rule(got.dbias, truth.dbias, baseline.dbias, testing::Ulp::accumulated)) << "dbias";
  }
};

TEST_F(LinearCudaTest, WithAndWithoutBiasAndResidual) {
  for (const bool bias : {false, true}) {
    for (const bool residual : {false, true}) check({.N = 136, .K = 72, .O = 200}, bias, residual);
  }
}

// Around the column sums' cuts: 64 rows a part, 16 rows at a time, 128 columns a block.
TEST_F(LinearCudaTest, OddNumbersOfTokens) {
  for (const int64_t N : {1, 15, 17, 63, 65, 129, 1000, 4097}) check({.N = N, .K = 24, .O = 136}, true, true);
}

TEST_F(LinearCudaTest, ProductionWidths) {
  check({.N = 2048, .K = 768, .O = 768}, true, true);
  check({.N = 1000, .K = 3072, .O = 768}, true, true);
}

// A whole micro-batch: the bias gradient and some rows of the weight gradient need all tokens, so a few outputs are checked.
TEST_F(LinearCudaTest, ManyTokens) {
  const Size size{.N = 70000, .K = 64, .O = 2304};
  constexpr int kSampled = 8;
  Random random = testing::test_random();
  const Data data = make_data(size, random);
  const DeviceResult got = run(size, data, true, false);
  Data narrow = data;  // kSampled of the O outputs
  narrow.dout.clear(), narrow.weight.clear(), narrow.bias.clear(), narrow.dweight.clear(), narrow.dbias.clear();
  std::vector<int64_t> outputs;
  for (int i = 0; i < kSampled; ++i) outputs.push_back(i == 0 ? size.O - 1 : random.below(size.O));
  for (int64_t n = 0; n < size.N; ++n) {
    for (const int64_t o : outputs) narrow.dout.push_back(data.dout[static_cast<size_t>(n * size.O + o)]);
  }
  DeviceResult sampled;
  for (const int64_t o : outputs) {
    narrow.bias.push_back(data.bias[static_cast<size_t>(o)]);
    narrow.dbias.push_back(data.dbias[static_cast<size_t>(o)]);
    sampled.dbias.push_back(got.dbias[static_cast<size_t>(o)]);
    for (int64_t k = 0; k < size.K; ++k) {
      narrow.weight.push_back(data.weight[static_cast<size_t>(o * size.K + k)]);
      narrow.dweight.push_back(data.dweight[static_cast<size_t>(o * size.K + k)]);
      sampled.dweight.push_back(got.dweight[static_cast<size_t>(o * size.K + k)]);
    }
  }
  for (int64_t n = 0; n < size.N; ++n) {
    for (const int64_t o : outputs) sampled.out.push_back(got.out[static_cast<size_t>(n * size.O + o)]);
  }
  const Size narrow_size{.N = size.N, .K = size.K, .O = kSampled};
  const auto truth = reference<double>(narrow_size, narrow, true, false, {});
  const auto baseline = reference<float>(narrow_size, narrow, true, false, {.round_bf16 = true});
  EXPECT_TRUE(testing::within_rule(sampled.out, truth.out, baseline.out)) << "out";
  EXPECT_TRUE(testing::within_rule(sampled.dweight, truth.dweight, baseline.dweight, testing::product_ulp(size.N))) << "dweight";
  EXPECT_TRUE(testing::within_rule(sampled.dbias, truth.dbias, baseline.dbias, testing::Ulp::accumulated)) << "dbias";
}

class LinearFp8CudaTest : public LinearCudaTest {
 protected:
  void check_fp8(Size size, const testing::ProjectionFp8Case& fp8_case) {
    SCOPED_TRACE("N = " + std::to_string(size.N) + ", K = " + std::to_string(size.K) + ", O = " + std::to_string(size.O) + ", " +
                 name(fp8_case));
    Random random = testing::test_random();
    Data data = make_data(size, random);
    for (bf16& x : data.dout) x = bf16(1e-3f * static_cast<float>(x));
    const auto inp = uploaded("inp", data.inp), weight = uploaded("weight", data.weight), dout = uploaded("dout", data.dout);
    auto out = poisoned<bf16>("out", size.N * size.O), dinp = poisoned<bf16>("dinp", size.N * size.K);
    auto dweight = uploaded("dweight", data.dweight);
    testing::DeviceProjectionFp8 fp8(data.weight, {.N = size.N, .K = size.K, .O = size.O}, fp8_case, exec().stream);
    const auto launch = [&](Launch how) {
      out.poison();
      dinp.poison();
      dweight.upload(data.dweight);
      fp8.reset();
      CudaTest::run(how, [&] {
        linear_forward({.out = out.get(),
                        .inp = inp.get(),
                        .weight = weight.get(),
                        .bias = nullptr,
                        .residual = nullptr,
                        .N = size.N,
                        .K = size.K,
                        .O = size.O,
                        .fp8 = fp8.args()},
                       exec());
        linear_backward({.dinp = dinp.get(),
                         .dweight = dweight.get(),
                         .dbias = nullptr,
                         .dout = dout.get(),
                         .inp = inp.get(),
                         .weight = weight.get(),
                         .scratch = nullptr,
                         .N = size.N,
                         .K = size.K,
                         .O = size.O,
                         .fp8 = fp8.args()},
                        exec());
      });
      return DeviceResult{.out = out.download(), .dinp = dinp.download(), .dweight = dweight.download(), .dbias = {}};
    };
    const DeviceResult got = launch(Launch::direct), again = launch(Launch::captured);
    EXPECT_TRUE(testing::same_bits(got.out, again.out)) << "out";
    EXPECT_TRUE(testing::same_bits(got.dinp, again.dinp)) << "dinp";
    EXPECT_TRUE(testing::same_bits(got.dweight, again.dweight)) << "dweight";
    fp8.check_forward(got.out, truth_exec());
    fp8.check_backward(data.inp, data.dout, got.dinp, data.dweight, got.dweight, truth_exec());
    const auto truth = reference<double>(size, data, false, false, truth_exec());
    const auto baseline = reference<float>(size, data, false, false, baseline_exec());
    if (!fp8_case.forward) {
      EXPECT_TRUE(testing::within_rule(got.out, truth.out, baseline.out)) << "out, BF16";
    }
    if (!fp8_case.input_grad) {
      EXPECT_TRUE(testing::within_rule(got.dinp, truth.dinp, baseline.dinp)) << "dinp, BF16";
    }
    if (!fp8_case.weight_grad) {
      EXPECT_TRUE(testing::within_rule(got.dweight, truth.dweight, baseline.dweight, testing::product_ulp(size.N)))
          << "dweight, BF16";
    }
  }
};

TEST_F(LinearFp8CudaTest, EveryChoice) {
  if (exec().compute_capability < 89) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
  for (const testing::ProjectionFp8Case& each : testing::every_projection_fp8()) check_fp8({.N = 144, .K = 80, .O = 208}, each);
}

TEST_F(LinearFp8CudaTest, ProductionWidths) {
  if (exec().compute_capability < 89) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
  check_fp8({.N = 4112, .K = 768, .O = 768}, {});
  check_fp8({.N = 1040, .K = 768, .O = 2304}, {.scaling = Fp8Scaling::delayed});
}

// Only the sum over tokens needs whole sixteens of them.
TEST_F(LinearFp8CudaTest, AnyNumberOfTokensWithoutTheWeightGradient) {
  if (exec().compute_capability < 89) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
  for (const int64_t N : {1, 7, 333}) check_fp8({.N = N, .K = 48, .O = 64}, {.weight_grad = false});
  EXPECT_THROW(check_fp8({.N = 24, .K = 48, .O = 64}, {}), Error);
}

TEST_F(LinearCudaTest, RefusesABiasGradientWithoutScratch) {
  const auto x = poisoned<bf16>("x", 64 * 64);
  const auto sums = poisoned<float>("sums", 64 * 64);
  EXPECT_THROW(linear_backward({.dinp = nullptr,
                                .dweight = sums.get(),
                                .dbias = sums.get(),
                                .dout = x.get(),
                                .inp = x.get(),
                                .weight = x.get(),
                                .scratch = nullptr,
                                .N = 8,
                                .K = 8,
                                .O = 8},
                               exec()),
               Error);
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/base/thread_pool.h"
#include "kernels/head/head_loss.h"
#include "kernels/linear/linear.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/product_ulp.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;

struct Config {
  int64_t N, chunk;
  int C, V;
  Softcap softcap = Softcap::none;
  bool gradients = true, bias = true;
  double logit_deviation = 3;
  double softcap_value = 15;
  int loss_terms = 0;  // 0: plain cross-entropy
  bool prefix = false;
  int64_t row_tokens = 0;
};

std::string name(const Config& c) {
  return "N = " + std::to_string(c.N) + ", chunk = " + std::to_string(c.chunk) + ", C = " + std::to_string(c.C) +
         ", V = " + std::to_string(c.V) + ", soft-cap " + std::to_string(static_cast<int>(c.softcap)) +
         (c.gradients ? ", gradients" : "") + (c.bias ? ", bias" : "") +
         (c.loss_terms > 0 ? ", " + std::to_string(c.loss_terms) + " terms, rows of " + std::to_string(c.row_tokens) : "") +
         (c.prefix ? ", prefix" : "");
}

struct Data {
  std::vector<bf16> inp, weight, bias;
  std::vector<int32_t> targets, prefix;
  std::vector<float> dweight, dbias, grad_scale;
};

Data make_data(const Config& c, Random& random) {
  Data data{.inp = random.normal_vector<bf16>(c.N * c.C),
            .weight = random.normal_vector<bf16>(int64_t{c.V} * c.C, c.logit_deviation / std::sqrt(c.C)),
            .bias = random.normal_vector<bf16>(c.V),
            .targets = random.index_vector(c.N, c.V),
            .prefix = random.index_vector(c.V, c.V),
            .dweight = random.normal_vector<float>(int64_t{c.V} * c.C, 0.1),
            .dbias = random.normal_vector<float>(c.V, 0.1),
            .grad_scale = {0.37f}};
  data.targets.front() = 0;
  data.targets.back() = c.V - 1;
  for (int v = 1; v < c.V; v += 3) data.prefix[v] = -1;
  data.prefix[0] = 0;  // a target's own prefix
  return data;
}

template <class T>
constexpr LossWeights<T> kWeights{.next = {1, static_cast<Acc<T>>(0.4f), static_cast<Acc<T>>(0.15f)},
                                  .prefix = static_cast<Acc<T>>(0.2f)};

template <class T>
struct Result {
  std::vector<T> loss, dinp, dweight, dbias, logits;
};

template <class T>
Result<T> reference(const Config& c, const Data& data, const HostExec& exec) {
  const auto inp = testing::widen<T>(data.inp), weight = testing::widen<T>(data.weight), bias = testing::widen<T>(data.bias);
  Result<T> result{.loss = std::vector<T>(static_cast<size_t>(c.N)),
                   .dinp = std::vector<T>(data.inp.size()),
                   .dweight = {data.dweight.begin(), data.dweight.end()},
                   .dbias = {data.dbias.begin(), data.dbias.end()},
                   .logits = std::vector<T>(static_cast<size_t>(c.N * c.V))};
  std::vector<T> logits(static_cast<size_t>(c.chunk * c.V)), scratch(static_cast<size_t>(bias_grad_scratch(c.chunk, c.V)));
  const T scale = data.grad_scale[0];
  head_loss(HeadLoss<T>{.loss = result.loss.data(),
                        .dinp = c.gradients ? result.dinp.data() : nullptr,
                        .dweight = c.gradients ? result.dweight.data() : nullptr,
                        .dbias = c.gradients && c.bias ? result.dbias.data() : nullptr,
                        .inp = inp.data(),
                        .weight = weight.data(),
                        .bias = c.bias ? bias.data() : nullptr,
                        .targets = data.targets.data(),
                        .loss_weights = c.loss_terms > 0 ? &kWeights<T> : nullptr,
                        .loss_terms = c.loss_terms,
                        .prefix = c.prefix ? data.prefix.data() : nullptr,
                        .row_tokens = c.row_tokens,
                        .grad_scale = &scale,
                        .logits = logits.data(),
                        .scratch = scratch.data(),
                        .N = c.N,
                        .chunk = c.chunk,
                        .C = c.C,
                        .V = c.V,
                        .softcap = c.softcap,
                        .softcap_value = c.softcap_value},
            exec);
  head_logits(HeadLogits<T>{.logits = result.logits.data(),
                            .inp = inp.data(),
                            .weight = weight.data(),
                            .bias = c.bias ? bias.data() : nullptr,
                            .N = c.N,
                            .C = c.C,
                            .V = c.V,
                            .softcap = c.softcap,
                            .softcap_value = c.softcap_value},
              exec);
  return result;
}

struct DeviceResult {
  std::vector<float> loss, dweight, dbias;
  std::vector<bf16> dinp, logits;
};

class HeadLossCudaTest : public testing::CudaTest {
 protected:
  DeviceResult run(const Config& c, const Data& data, bool with_logits) {
    const auto inp = uploaded("inp", data.inp), weight = uploaded("weight", data.weight), bias = uploaded("bias", data.bias);
    const auto targets = uploaded("targets", data.targets), prefix = uploaded("prefix", data.prefix);
    const auto loss_weights = uploaded("loss weights", std::vector<LossWeights<bf16>>{kWeights<bf16>});
    const auto grad_scale = uploaded("grad_scale", data.grad_scale), dweight = uploaded("dweight", data.dweight),
               dbias = uploaded("dbias", data.dbias), loss = poisoned<float>("loss", c.N),
               scratch = poisoned<float>("scratch", bias_grad_scratch(c.chunk, c.V));
    const auto dinp = poisoned<bf16>("dinp", c.N * c.C), chunk_logits = poisoned<bf16>("chunk of logits", c.chunk * c.V);
    head_loss({.loss = loss.get(),
               .dinp = c.gradients ? dinp.get() : nullptr,
               .dweight = c.gradients ? dweight.get() : nullptr,
               .dbias = c.gradients && c.bias ? dbias.get() : nullptr,
               .inp = inp.get(),
               .weight = weight.get(),
               .bias = c.bias ? bias.get() : nullptr,
               .targets = targets.get(),
               .loss_weights = c.loss_terms > 0 ? loss_weights.get() : nullptr,
               .loss_terms = c.loss_terms,
               .prefix = c.prefix ? prefix.get() : nullptr,
               .row_tokens = c.row_tokens,
               .grad_scale = grad_scale.get(),
               .logits = chunk_logits.get(),
               .scratch = scratch.get(),
               .N = c.N,
               .chunk = c.chunk,
               .C = c.C,
               .V = c.V,
               .softcap = c.softcap,
               .softcap_value = c.softcap_value},
              exec());
    DeviceResult result{
        .loss = loss.download(), .dweight = dweight.download(), .dbias = dbias.download(), .dinp = dinp.download(), .logits = {}};
    if (!with_logits) return result;
    const auto logits = poisoned<bf16>("logits", c.N * c.V);
    head_logits({.logits = logits.get(),
                 .inp = inp.get(),
                 .weight = weight.get(),
                 .bias = c.bias ? bias.get() : nullptr,
                 .N = c.N,
                 .C = c.C,
                 .V = c.V,
                 .softcap = c.softcap,
                 .softcap_value = c.softcap_value},
                exec());
    result.logits = logits.download();
    return result;
  }

  void check(const Config& c) {
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    ThreadPool pool(0);
    const auto truth = reference<double>(c, data, {.pool = &pool});
    const auto baseline = reference<float>(c, data, {.pool = &pool, .round_bf16 = true});
    const DeviceResult got = run(c, data, true), again = run(c, data, true);
    EXPECT_TRUE(testing::same_bits(got.loss, again.loss)) << "loss";
    EXPECT_TRUE(testing::same_bits(got.logits, again.logits)) << "logits";
    EXPECT_TRUE(testing::same_bits(got.dweight, again.dweight)) << "dweight";
    EXPECT_TRUE(testing::same_bits(got.dbias, again.dbias)) << "dbias";
    EXPECT_TRUE(testing::same_bits(got.dinp, again.dinp)) << "dinp";
    EXPECT_TRUE(testing::within_rule(got.loss, truth.loss, baseline.loss, testing::Ulp::accumulated)) << "loss";
    EXPECT_TRUE(testing::within_rule(got.logits, truth.logits, baseline.logits)) << "logits";
    EXPECT_TRUE(testing::within_rule(got.dweight, truth.dweight, baseline.dweight, testing::product_ulp(c.chunk))) << "dweight";
    EXPECT_TRUE(testing::within_rule(got.dbias, truth.dbias, baseline.dbias, testing::Ulp::accumulated)) << "dbias";
    if (c.gradients) {
      EXPECT_TRUE(testing::within_rule(got.dinp, truth.dinp, baseline.dinp)) << "dinp";
    }
  }
};

TEST_F(HeadLossCudaTest, EverySoftcapWithAndWithoutGradientsAndBias) {
  for (const Softcap softcap : {Softcap::none, Softcap::rational, Softcap::sigmoid}) {
    for (const bool gradients : {false, true}) {
      for (const bool bias : {false, true}) {
        check({.N = 37, .chunk = 16, .C = 72, .V = 1000, .softcap = softcap, .gradients = gradients, .bias = bias});
      }
    }
  }
}

// Borders of chunks inside of rows; with 16 columns targets and prefixes coincide.
TEST_F(HeadLossCudaTest, SeveralTerms) {
  for (const int V : {16, 1000}) {
    for (const Softcap softcap : {Softcap::none, Softcap::rational, Softcap::sigmoid}) {
      for (const int loss_terms : {1, 2, 3}) {
        for (const bool prefix : {false, true}) {
          check({.N = 42,
                 .chunk = 16,
                 .C = 72,
                 .V = V,
                 .softcap = softcap,
                 .loss_terms = loss_terms,
                 .prefix = prefix,
                 .row_tokens = 14});
        }
      }
    }
  }
  check({.N = 42,
         .chunk = 64,
         .C = 24,
         .V = 264,
         .softcap = Softcap::sigmoid,
         .gradients = false,
         .loss_terms = 3,
         .prefix = true,
         .row_tokens = 21});
  for (const int64_t row_tokens : {1, 2, 42})
    check({.N = 42, .chunk = 5, .C = 24, .V = 264, .loss_terms = 3, .prefix = true, .row_tokens = row_tokens});
  check({.N = 6, .chunk = 4, .C = 8, .V = 524288, .loss_terms = 3, .prefix = true, .row_tokens = 3});  // beyond shared memory
}

// Rows shorter than a block's 512 vectors, exactly as long, one vector more, and a batch of loads more.
TEST_F(HeadLossCudaTest, RowLengths) {
  for (const int V : {8, 16, 4088, 4096, 4104, 16384, 16392, 50304})
    check({.N = 5, .chunk = 5, .C = 16, .V = V, .softcap = Softcap::rational});
}

// 1 MB rows fit no shared memory.
TEST_F(HeadLossCudaTest, RowsBeyondSharedMemory) {
  for (const Softcap softcap : {Softcap::none, Softcap::rational})
    check({.N = 5, .chunk = 3, .C = 8, .V = 524288, .softcap = softcap});
}

TEST_F(HeadLossCudaTest, ChunkLargerThanTheTokens) { check({.N = 11, .chunk = 64, .C = 24, .V = 264}); }

TEST_F(HeadLossCudaTest, ProductionWidths) {
  check({.N = 96, .chunk = 64, .C = 768, .V = 50304, .softcap = Softcap::rational});
  check({.N = 64, .chunk = 64, .C = 768, .V = 50304, .softcap = Softcap::none});
  check({.N = 96,
         .chunk = 64,
         .C = 768,
         .V = 50304,
         .softcap = Softcap::sigmoid,
         .bias = false,
         .loss_terms = 3,
         .prefix = true,
         .row_tokens = 48});
}

// Logits of hundreds: exp of them overflows without the maximum, and a cap's derivative vanishes.
TEST_F(HeadLossCudaTest, LargeLogits) {
  for (const Softcap softcap : {Softcap::none, Softcap::rational, Softcap::sigmoid}) {
    check({.N = 33, .chunk = 33, .C = 64, .V = 520, .softcap = softcap, .logit_deviation = 200});
  }
  check({.N = 33, .chunk = 33, .C = 64, .V = 520, .softcap = Softcap::rational, .logit_deviation = 200, .softcap_value = 1000});
}

TEST_F(HeadLossCudaTest, NanReachesTheLoss) {
  Random random = testing::test_random();
  for (const Softcap softcap : {Softcap::none, Softcap::rational, Softcap::sigmoid}) {
    const Config c{.N = 4, .chunk = 4, .C = 16, .V = 64, .softcap = softcap};
    Data data = make_data(c, random);
    data.inp[static_cast<size_t>(c.C)] = bf16(std::nanf(""));  // token 1
    const DeviceResult got = run(c, data, false);
    for (size_t t = 0; t < got.loss.size(); ++t) EXPECT_EQ(std::isnan(got.loss[t]), t == 1) << "token " << t;
    for (size_t i = 0; i < got.dinp.size(); ++i)
      EXPECT_EQ(std::isnan(static_cast<float>(got.dinp[i])), i / c.C == 1) << "dinp " << i;
  }
}

// Logits of a whole micro-batch in one chunk: 2.5 · 10⁹ elements, beyond 32-bit indices. Sampled tokens against the reference; the
// weight gradient, which takes all tokens, against the same in small chunks.
TEST_F(HeadLossCudaTest, MoreThanTwoToThe31Logits) {
  size_t free_bytes = 0, total_bytes = 0;
  cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "free memory");
  constexpr size_t kNeeded = size_t{8} << 30;
  if (free_bytes < kNeeded) GTEST_SKIP() << "needs 8 GiB of device memory, " << (free_bytes >> 20) << " MiB are free";
  Random random = testing::test_random();
  const Config whole{.N = 49152, .chunk = 49152, .C = 16, .V = 50304, .softcap = Softcap::rational};
  Config chunked = whole;
  chunked.chunk = 5000;  // the last chunk is shorter
  const Data data = make_data(whole, random);
  const DeviceResult got = run(whole, data, false), small = run(chunked, data, false);

  constexpr int kSampled = 64;
  Config few = whole;
  few.N = few.chunk = kSampled;
  Data sampled_data = data;
  sampled_data.inp.clear(), sampled_data.targets.clear();
  DeviceResult sampled, sampled_small;
  for (int i = 0; i < kSampled; ++i) {
    const int64_t t = i == 0   ? whole.N - 1
                      : i == 1 ? 42690
                               : random.below(whole.N);  // row 42,690 is where 2^31 elements are passed
    sampled_data.targets.push_back(data.targets[static_cast<size_t>(t)]);
    sampled.loss.push_back(got.loss[static_cast<size_t>(t)]);
    sampled_small.loss.push_back(small.loss[static_cast<size_t>(t)]);
    for (int64_t k = t * whole.C; k < (t + 1) * whole.C; ++k) {
      sampled_data.inp.push_back(data.inp[static_cast<size_t>(k)]);
      sampled.dinp.push_back(got.dinp[static_cast<size_t>(k)]);
      sampled_small.dinp.push_back(small.dinp[static_cast<size_t>(k)]);
    }
  }
  ThreadPool pool(0);
  const auto truth = reference<double>(few, sampled_data, {.pool = &pool});
  const auto baseline = reference<float>(few, sampled_data, {.pool = &pool, .round_bf16 = true});
  EXPECT_TRUE(testing::within_rule(sampled.loss, truth.loss, baseline.loss, testing::Ulp::accumulated)) << "loss, one chunk";
  EXPECT_TRUE(testing::within_rule(sampled.dinp, truth.dinp, baseline.dinp)) << "dinp, one chunk";
  EXPECT_TRUE(testing::within_rule(sampled_small.loss, truth.loss, baseline.loss, testing::Ulp::accumulated)) << "loss, chunks";
  EXPECT_TRUE(testing::within_rule(sampled_small.dinp, truth.dinp, baseline.dinp)) << "dinp, chunks";

  const auto distance = [](const std::vector<float>& x, const std::vector<float>& y) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      difference += (static_cast<double>(x[i]) - y[i]) * (static_cast<double>(x[i]) - y[i]);
      size += static_cast<double>(y[i]) * y[i];
    }
    return std::sqrt(difference / size);
  };
  // The gradients differ in the order of FP32 sums only; dlogits are the same unless a logit was rounded the other way.
  EXPECT_LT(distance(got.dweight, small.dweight), 1e-3);
  EXPECT_LT(distance(got.dbias, small.dbias), 1e-3);
}

TEST_F(HeadLossCudaTest, RefusesOddVocabularies) {
  const auto x = poisoned<bf16>("x", 4096);
  EXPECT_THROW(head_logits({.logits = x.get(),
                            .inp = x.get(),
                            .weight = x.get(),
                            .bias = nullptr,
                            .N = 1,
                            .C = 8,
                            .V = 1001,
                            .softcap = Softcap::none,
                            .softcap_value = 0},
                           exec()),
               Error);
}

}  // namespace
}  // namespace speedrun::kernels

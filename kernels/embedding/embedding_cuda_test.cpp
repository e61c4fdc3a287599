// CUDA embedding against the reference; the backward on the token distributions that break segment sums: one token only, all
// different, Zipf.
#include "kernels/embedding/embedding.h"

#include <cmath>
#include <numeric>

#include "kernels/embedding/embedding_scratch.h"
#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

struct Case {
  std::vector<int32_t> tokens;
  int64_t row_tokens;
  int C, V;
  bool positions;
};

// Token k with probability ~ 1/(k + 1), like text; the most frequent one of 50,304 has about 9%.
std::vector<int32_t> zipf_tokens(testing::Random& random, int64_t N, int V) {
  std::vector<int32_t> tokens(static_cast<size_t>(N));
  for (int32_t& token : tokens) token = static_cast<int32_t>(std::pow(static_cast<double>(V), random.uniform())) - 1;
  return tokens;
}

template <class T>
struct Gradients {
  std::vector<T> dwte, dwpe;
};

class EmbeddingCudaTest : public CudaTest {
 protected:
  Gradients<float> device(const Case& c, const std::vector<bf16>& dout_values, const Gradients<float>& before, Launch launch) {
    const int64_t N = static_cast<int64_t>(c.tokens.size());
    auto dout = uploaded("dout", dout_values);
    auto tokens = uploaded("tokens", c.tokens);
    auto dwte = uploaded("dwte", before.dwte), dwpe = uploaded("dwpe", before.dwpe);
    auto scratch = poisoned<uint8_t>("scratch", static_cast<int64_t>(embedding_backward_scratch(N, c.C, c.V)));
    run(launch, [&] {
      embedding_backward(EmbeddingBackward<bf16>{.dwte = dwte.get(),
                                                 .dwpe = c.positions ? dwpe.get() : nullptr,
                                                 .dout = dout.get(),
                                                 .tokens = tokens.get(),
                                                 .scratch = scratch.get(),
                                                 .N = N,
                                                 .row_tokens = c.row_tokens,
                                                 .C = c.C,
                                                 .V = c.V},
                         exec());
    });
    return {.dwte = dwte.download(), .dwpe = dwpe.download()};
  }

  template <class T>
  Gradients<T> reference(const Case& c, const std::vector<bf16>& dout_values, const Gradients<float>& before,
                         const HostExec& exec) {
    const std::vector<T> dout = widen<T>(dout_values);
    Gradients<T> g{.dwte = {before.dwte.begin(), before.dwte.end()}, .dwpe = {before.dwpe.begin(), before.dwpe.end()}};
    embedding_backward(EmbeddingBackward<T>{.dwte = g.dwte.data(),
                                            .dwpe = c.positions ? g.dwpe.data() : nullptr,
                                            .dout = dout.data(),
                                            .tokens = c.tokens.data(),
                                            .scratch = nullptr,
                                            .N = static_cast<int64_t>(c.tokens.size()),
                                            .row_tokens = c.row_tokens,
                                            .C = c.C,
                                            .V = c.V},
                       exec);
    return g;
  }

  void check_backward(const Case& c, testing::Random& random) {
    SCOPED_TRACE("N=" + std::to_string(c.tokens.size()) + " C=" + std::to_string(c.C) + " V=" + std::to_string(c.V) +
                 " row_tokens=" + std::to_string(c.row_tokens) + " first token=" + std::to_string(c.tokens.front()));
    const std::vector<bf16> dout = random.normal_vector<bf16>(static_cast<int64_t>(c.tokens.size()) * c.C);
    const Gradients<float> before{.dwte = random.uniform_vector<float>(int64_t{c.V} * c.C),
                                  .dwpe = random.normal_vector<float>(c.row_tokens * c.C)};
    const Gradients<float> got = device(c, dout, before, Launch::direct);
    const Gradients<double> truth = reference<double>(c, dout, before, truth_exec());
    const Gradients<float> baseline = reference<float>(c, dout, before, baseline_exec());
    EXPECT_TRUE(within_rule(got.dwte, truth.dwte, baseline.dwte, Ulp::accumulated)) << "dwte";
    EXPECT_TRUE(within_rule(got.dwpe, truth.dwpe, baseline.dwpe, Ulp::accumulated)) << "dwpe";

    // Rows of tokens that do not occur are not touched; of tokens that occur once the one addition is exact.
    std::vector<int> occurrences(static_cast<size_t>(c.V));
    for (const int32_t token : c.tokens) ++occurrences[static_cast<size_t>(token)];
    for (size_t token = 0; token < occurrences.size(); ++token) {
      if (occurrences[token] > 1) continue;
      for (size_t i = token * static_cast<size_t>(c.C); i < (token + 1) * static_cast<size_t>(c.C); ++i) {
        ASSERT_EQ(got.dwte[i], baseline.dwte[i])
            << "token " << token << " occurs " << occurrences[token] << " times; channel " << i % c.C;
      }
    }

    const Gradients<float> again = device(c, dout, before, Launch::captured);
    EXPECT_TRUE(same_bits(got.dwte, again.dwte)) << "dwte, second run";
    EXPECT_TRUE(same_bits(got.dwpe, again.dwpe)) << "dwpe, second run";
  }
};

TEST_F(EmbeddingCudaTest, ForwardIsExact) {
  testing::Random random = testing::test_random();
  for (const int C : {8, 768, 776, 4096}) {
    for (const int64_t rows : {1, 7, 63}) {
      const int64_t row_tokens = 16, N = rows * row_tokens;
      const int V = 300;
      const std::vector<bf16> wte = random.normal_vector<bf16>(int64_t{V} * C), wpe = random.normal_vector<bf16>(row_tokens * C);
      const std::vector<int32_t> tokens = random.index_vector(N, V);
      auto wte_device = uploaded("wte", wte), wpe_device = uploaded("wpe", wpe);
      auto tokens_device = uploaded("tokens", tokens);
      const std::vector<float> wte_host = widen<float>(wte), wpe_host = widen<float>(wpe);
      for (const bool positions : {false, true}) {
        auto out = poisoned<bf16>("out", N * C);
        run(Launch::direct, [&] {
          embedding_forward(EmbeddingForward<bf16>{.out = out.get(),
                                                   .wte = wte_device.get(),
                                                   .wpe = positions ? wpe_device.get() : nullptr,
                                                   .tokens = tokens_device.get(),
                                                   .N = N,
                                                   .row_tokens = row_tokens,
                                                   .C = C},
                            exec());
        });
        std::vector<float> expected(static_cast<size_t>(N * C));
        embedding_forward(EmbeddingForward<float>{.out = expected.data(),
                                                  .wte = wte_host.data(),
                                                  .wpe = positions ? wpe_host.data() : nullptr,
                                                  .tokens = tokens.data(),
                                                  .N = N,
                                                  .row_tokens = row_tokens,
                                                  .C = C},
                          baseline_exec());
        EXPECT_TRUE(same_bits(widen<float>(out.download()), expected)) << "C=" << C << " N=" << N << " positions=" << positions;
      }
    }
  }
}

TEST_F(EmbeddingCudaTest, AllTokensEqual) {
  testing::Random random = testing::test_random();
  for (const int64_t N : {1, 7, 64, 65, 128, 1000, 70'000}) {
    check_backward(
        {.tokens = std::vector<int32_t>(static_cast<size_t>(N), 3), .row_tokens = N, .C = 64, .V = 11, .positions = true}, random);
  }
}

TEST_F(EmbeddingCudaTest, AllTokensDifferent) {
  testing::Random random = testing::test_random();
  for (const int64_t N : {7, 64, 1000, 50'304}) {
    std::vector<int32_t> tokens(static_cast<size_t>(N));
    std::iota(tokens.begin(), tokens.end(), 0);
    for (size_t i = tokens.size(); i > 1; --i)
      std::swap(tokens[i - 1], tokens[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
    check_backward({.tokens = tokens, .row_tokens = N, .C = 32, .V = static_cast<int>(N), .positions = false}, random);
  }
}

TEST_F(EmbeddingCudaTest, RunsAroundChunkBorders) {
  // Run lengths that begin, end and span at, before and after the borders of the sorted list's chunks.
  testing::Random random = testing::test_random();
  const int k = kEmbeddingChunk;
  std::vector<int32_t> tokens;
  int32_t token = 0;
  for (const int length : {k, k, 1, k - 1, k - 1, 1, 1, 2 * k, k + 1, k - 2, 3 * k + 5, 1, 2 * k - 6, 5}) {
    tokens.insert(tokens.end(), static_cast<size_t>(length), token++);
  }
  for (const int C : {8, 256, 2056}) {
    check_backward({.tokens = tokens, .row_tokens = static_cast<int64_t>(tokens.size()), .C = C, .V = token, .positions = false},
                   random);
  }
}

TEST_F(EmbeddingCudaTest, ZipfTokens) {
  testing::Random random = testing::test_random();
  for (const int C : {8, 128, 768, 1048}) {
    check_backward({.tokens = zipf_tokens(random, 8'000, 5'000), .row_tokens = 1'000, .C = C, .V = 5'000, .positions = true},
                   random);
  }
  check_backward({.tokens = zipf_tokens(random, 65'536, 50'304), .row_tokens = 1'024, .C = 64, .V = 50'304, .positions = true},
                 random);
}

TEST_F(EmbeddingCudaTest, ProductionNumberOfTokens) {
  testing::Random random = testing::test_random();
  check_backward({.tokens = zipf_tokens(random, 262'144, 50'304), .row_tokens = 1'024, .C = 32, .V = 50'304, .positions = true},
                 random);
}

TEST_F(EmbeddingCudaTest, ManyRowsOfFewTokens) {
  testing::Random random = testing::test_random();
  check_backward({.tokens = random.index_vector(70'000, 100), .row_tokens = 7, .C = 16, .V = 100, .positions = true}, random);
}

}  // namespace
}  // namespace speedrun::kernels

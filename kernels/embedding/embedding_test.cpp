#include "kernels/embedding/embedding.h"

#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

template <class T>
struct Problem {
  int64_t N, row_tokens;
  int C, V;
  bool positions;
  std::vector<int32_t> tokens;
  std::vector<T> wte, wpe, dout, out, dwte, dwpe;

  Problem(int64_t rows, int64_t tokens_of_row, int channels, int vocabulary, bool with_positions, Random& random)
      : N(rows * tokens_of_row),
        row_tokens(tokens_of_row),
        C(channels),
        V(vocabulary),
        positions(with_positions),
        tokens(random.index_vector(N, V)),
        wte(random.normal_vector<T>(int64_t{V} * C)),
        wpe(random.normal_vector<T>((row_tokens + 2) * C)),
        dout(random.normal_vector<T>(N * C)),
        out(poisoned<T>(N * C)),
        dwte(random.normal_vector<T>(int64_t{V} * C)),
        dwpe(random.normal_vector<T>((row_tokens + 2) * C)) {}

  void forward(const HostExec& exec) {
    embedding_forward(
        EmbeddingForward<T>{out.data(), wte.data(), positions ? wpe.data() : nullptr, tokens.data(), N, row_tokens, C}, exec);
  }
  void backward(const HostExec& exec) {
    embedding_backward(EmbeddingBackward<T>{dwte.data(), positions ? dwpe.data() : nullptr, dout.data(), tokens.data(), nullptr, N,
                                            row_tokens, C, V},
                       exec);
  }
};

TEST(Embedding, AddsTokenAndPosition) {
  Random random = test_random();
  for (const bool positions : {true, false}) {
    Problem<double> p(3, 5, 7, 11, positions, random);
    p.forward(HostExec{});
    for (int64_t t = 0; t < p.N; ++t) {
      for (int c = 0; c < p.C; ++c) {
        EXPECT_EQ(p.out[t * p.C + c], p.wte[p.tokens[t] * p.C + c] + (positions ? p.wpe[t % p.row_tokens * p.C + c] : 0));
      }
    }
  }
}

TEST(Embedding, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const bool positions : {true, false}) {
    Problem<double> p(4, 5, 40, 6, positions, random);  // 20 tokens of 6: repeats are certain
    const std::vector<double> dwte = p.dwte, dwpe = p.dwpe;
    p.backward(HostExec{});
    const std::vector<double> token_gradient = added(p.dwte, dwte), position_gradient = added(p.dwpe, dwpe);
    const GradientCheck check{.objective = [&] {
      p.forward(HostExec{});
      return dot(p.out, p.dout);
    }};
    std::vector<Checked> tensors{{"wte", &p.wte, &token_gradient}};
    if (positions) tensors.push_back({"wpe", &p.wpe, &position_gradient});
    check_gradients(check, tensors, random);
    if (!positions) {
      EXPECT_EQ(p.dwpe, dwpe);
    }
  }
}

TEST(Embedding, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start(6, 50, 100, 20, true, random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.out, p.dwte, p.dwpe};
  });
}

TEST(Embedding, RoundsTheSumOnce) {
  Random random = test_random();
  Problem<float> exact(2, 8, 16, 9, true, random), rounded = exact;
  exact.forward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  for (size_t i = 0; i < exact.out.size(); ++i) EXPECT_EQ(rounded.out[i], static_cast<float>(bf16(exact.out[i])));
}

}  // namespace
}  // namespace speedrun::kernels

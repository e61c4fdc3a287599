#include <cmath>

#include "kernels/bench/bench.h"
#include "kernels/embedding/embedding.h"

namespace speedrun::kernels {
namespace {

// Token k with probability ~ 1/(k + 1), like text.
std::vector<int32_t> zipf_tokens(int64_t N, int V) {
  std::vector<int32_t> tokens(static_cast<size_t>(N));
  uint64_t state = 1;
  for (int32_t& token : tokens) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    token = static_cast<int32_t>(std::pow(static_cast<double>(V), static_cast<double>(state >> 11) * 0x1p-53)) - 1;
  }
  return tokens;
}

}  // namespace

void bench_embedding(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t N = 65'536, kRowTokens = 1'024;
  constexpr int C = 768, V = 50'304;
  constexpr double kElements = double{N} * C;
  const std::vector<int32_t> host_tokens = zipf_tokens(N, V);
  std::vector<bool> seen(V);
  double distinct = 0;
  for (const int32_t token : host_tokens) {
    if (!seen[static_cast<size_t>(token)]) ++distinct;
    seen[static_cast<size_t>(token)] = true;
  }
  const BenchBuffer tokens = BenchBuffer::copy_of(host_tokens.data(), host_tokens.size() * sizeof(int32_t));
  const BenchBuffer wte = BenchBuffer::normal_bf16(int64_t{V} * C), wpe = BenchBuffer::normal_bf16(kRowTokens * C);
  const BenchBuffer dout = BenchBuffer::normal_bf16(N * C), result = BenchBuffer::zeroed(N * C * sizeof(bf16));
  const BenchBuffer dwte = BenchBuffer::zeroed(size_t{V} * C * sizeof(float)),
                    dwpe = BenchBuffer::zeroed(kRowTokens * C * sizeof(float));
  const BenchBuffer scratch = BenchBuffer::zeroed(embedding_backward_scratch(N, C, V));

  EmbeddingForward<bf16> forward{.out = result.as<bf16>(),
                                 .wte = wte.as<bf16>(),
                                 .wpe = nullptr,
                                 .tokens = tokens.as<int32_t>(),
                                 .N = N,
                                 .row_tokens = kRowTokens,
                                 .C = C};
  EmbeddingForward<bf16> forward_positions = forward;
  forward_positions.wpe = wpe.as<bf16>();
  EmbeddingBackward<bf16> backward{.dwte = dwte.as<float>(),
                                   .dwpe = nullptr,
                                   .dout = dout.as<bf16>(),
                                   .tokens = tokens.as<int32_t>(),
                                   .scratch = scratch.as<void>(),
                                   .N = N,
                                   .row_tokens = kRowTokens,
                                   .C = C,
                                   .V = V};
  EmbeddingBackward<bf16> backward_positions = backward;
  backward_positions.dwpe = dwpe.as<float>();
  const double forward_bytes = 2 * kElements + 2 * distinct * C, backward_bytes = 2 * kElements + 8 * distinct * C;
  bench_table("embedding, 65536 Zipf tokens, V = 50304, C = 768",
              {bench_copy(N * C * sizeof(bf16), exec),
               {"forward", [&] { embedding_forward(forward, exec); }, 0, forward_bytes},
               {"forward + positions", [&] { embedding_forward(forward_positions, exec); }, 0, forward_bytes},
               {"backward", [&] { embedding_backward(backward, exec); }, 0, backward_bytes},
               {"backward + positions", [&] { embedding_backward(backward_positions, exec); }, 0, backward_bytes + 2 * kElements}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

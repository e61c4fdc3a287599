#include "kernels/bench/bench.h"
#include "kernels/embedding/bigram.h"
#include "kernels/embedding/embedding.h"

namespace speedrun::kernels {

void bench_bigram(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t kN = 49'152;
  constexpr int kC = 768, kRows = 377'280, kSignRows = 8'192;
  constexpr double kElements = double{kN} * kC;
  // Uniform tokens: nearly every pair is another row of the table, the worst case of its traffic.
  std::vector<int32_t> host_tokens(kN);
  uint64_t state = 1;
  for (int32_t& token : host_tokens) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    token = static_cast<int32_t>((state >> 33) % 50'304);
  }
  const std::vector<bf16> host_sign(size_t{kSignRows} * kC, bf16(-1.0f));
  const BenchBuffer tokens = BenchBuffer::copy_of(host_tokens.data(), host_tokens.size() * sizeof(int32_t));
  const BenchBuffer sign = BenchBuffer::copy_of(host_sign.data(), host_sign.size() * sizeof(bf16));
  const BenchBuffer table = BenchBuffer::normal_bf16(int64_t{kRows} * kC), dout = BenchBuffer::normal_bf16(kN * kC);
  const BenchBuffer result = BenchBuffer::zeroed(kN * kC * sizeof(bf16)),
                    dtable = BenchBuffer::zeroed(size_t{kRows} * kC * sizeof(float));
  const BenchBuffer index = BenchBuffer::zeroed(kN * sizeof(int32_t)), sign_row = BenchBuffer::zeroed(kN * sizeof(int32_t));
  const BenchBuffer scratch = BenchBuffer::zeroed(embedding_backward_scratch(kN, kC, kRows));
  const BigramForward<bf16> forward{.out = result.as<bf16>(),
                                    .index = index.as<int32_t>(),
                                    .sign_row = sign_row.as<int32_t>(),
                                    .table = table.as<bf16>(),
                                    .sign = sign.as<bf16>(),
                                    .tokens = tokens.as<int32_t>(),
                                    .N = kN,
                                    .row_tokens = kN,
                                    .C = kC,
                                    .rows = kRows,
                                    .sign_rows = kSignRows};
  const BigramBackward<bf16> backward{.dtable = dtable.as<float>(),
                                      .signed_dout = result.as<bf16>(),
                                      .dout = dout.as<bf16>(),
                                      .index = index.as<int32_t>(),
                                      .sign_row = sign_row.as<int32_t>(),
                                      .sign = sign.as<bf16>(),
                                      .scratch = scratch.as<void>(),
                                      .N = kN,
                                      .row_tokens = kN,
                                      .C = kC,
                                      .rows = kRows};
  // Backward: the signs (4 bytes an element), the sum (2, and 8 for the rows of dtable).
  bench_table("bigram, 49152 tokens, 377280 x 768",
              {bench_copy(kN * kC * sizeof(bf16), exec),
               {"forward", [&] { bigram_forward(forward, exec); }, 0, 4 * kElements},
               {"backward", [&] { bigram_backward(backward, exec); }, 0, 14 * kElements}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

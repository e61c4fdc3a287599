#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/bench/bench.h"

namespace speedrun::kernels {
namespace {

struct BenchShape {
  std::string name;
  int H, D;
  int64_t window;
  std::vector<int32_t> doc_start;
};

std::vector<int32_t> rows(int64_t N, int64_t row_tokens) {
  std::vector<int32_t> doc_start(static_cast<size_t>(N));
  for (int64_t t = 0; t < N; ++t) doc_start[static_cast<size_t>(t)] = static_cast<int32_t>(t / row_tokens * row_tokens);
  return doc_start;
}

// Documents as long as those of web text: log-normal (sigma 1, mean about 590 tokens), cut at 2048. The lengths are its quantiles
// in a scrambled order, the same in every run.
std::vector<int32_t> web_documents(int64_t N) {
  constexpr double kMean = 590, kSigma = 1, kGoldenRatio = 0.6180339887498949;
  std::vector<int32_t> doc_start;
  for (int document = 0; static_cast<int64_t>(doc_start.size()) < N; ++document) {
    const double u = std::fmod(0.5 + document * kGoldenRatio, 1.0);
    // The logistic distribution stands in for the normal one: the same variance, and a closed form for its quantiles.
    const double normal = std::log(u / (1 - u)) * std::sqrt(3.0) / 3.14159265358979;
    const double length = std::exp(std::log(kMean) - kSigma * kSigma / 2 + kSigma * normal);
    const auto start = static_cast<int32_t>(doc_start.size());
    doc_start.insert(doc_start.end(), static_cast<size_t>(std::clamp(length, 16.0, 2048.0)), start);
  }
  doc_start.resize(static_cast<size_t>(N));
  return doc_start;
}

double attended_pairs(const BenchShape& shape) {
  double pairs = 0;
  for (size_t t = 0; t < shape.doc_start.size(); ++t) {
    const int64_t query = static_cast<int64_t>(t);
    const int64_t first = std::max<int64_t>(shape.doc_start[t], shape.window > 0 ? query - shape.window : 0);
    pairs += static_cast<double>(query - first + 1);
  }
  return pairs * shape.H;
}

void bench_shape(const BenchShape& shape, const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  const auto N = static_cast<int64_t>(shape.doc_start.size());
  const int64_t channels = int64_t{shape.H} * shape.D, stride = 3 * channels;
  const BenchBuffer qkv = BenchBuffer::normal_bf16(N * stride), dqkv = BenchBuffer::normal_bf16(N * stride),
                    result = BenchBuffer::normal_bf16(N * channels), dout = BenchBuffer::normal_bf16(N * channels),
                    lse = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(shape.H * N)),
                    delta = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(shape.H * N)),
                    doc_start = BenchBuffer::copy_of(shape.doc_start.data(), sizeof(int32_t) * shape.doc_start.size());
  const double scale = 1 / std::sqrt(static_cast<double>(shape.D));
  const AttentionForward<bf16> forward{.out = result.as<bf16>(),
                                       .lse = lse.as<float>(),
                                       .q = qkv.as<bf16>(),
                                       .k = qkv.as<bf16>() + channels,
                                       .v = qkv.as<bf16>() + 2 * channels,
                                       .doc_start = doc_start.as<int32_t>(),
                                       .N = N,
                                       .stride = stride,
                                       .H = shape.H,
                                       .D = shape.D,
                                       .window = shape.window,
                                       .scale = scale};
  const AttentionBackward<bf16> backward{.dq = dqkv.as<bf16>(),
                                         .dk = dqkv.as<bf16>() + channels,
                                         .dv = dqkv.as<bf16>() + 2 * channels,
                                         .dout = dout.as<bf16>(),
                                         .out = forward.out,
                                         .lse = forward.lse,
                                         .q = forward.q,
                                         .k = forward.k,
                                         .v = forward.v,
                                         .doc_start = forward.doc_start,
                                         .delta = delta.as<float>(),
                                         .N = N,
                                         .stride = stride,
                                         .H = shape.H,
                                         .D = shape.D,
                                         .window = shape.window,
                                         .scale = scale};
  const double pairs = attended_pairs(shape);
  const double tensor = 2.0 * static_cast<double>(N * channels);  // bytes of one (N, H·D)
  bench_table(
      "attention, " + shape.name + ", " + std::to_string(static_cast<int>(pairs / shape.H / static_cast<double>(N))) +
          " keys per query",
      {{.name = "forward", .run = [&] { attention_forward(forward, exec); }, .flops = 4 * pairs * shape.D, .bytes = 4 * tensor},
       {.name = "backward",
        .run = [&] { attention_backward(backward, exec); },
        .flops = 10 * pairs * shape.D,
        .bytes = 8 * tensor}},
      exec, options.seconds, out);
}

}  // namespace

// FLOPs count attended pairs only: 4·D forward and 10·D backward, whatever a kernel computes beside them.
void bench_attention(const BenchOptions& options, std::ostream& out) {
  bench_shape(
      {.name = "GPT-2 124M: 64 rows of 1024, 12 heads of 64", .H = 12, .D = 64, .window = 0, .doc_start = rows(65536, 1024)},
      options, out);
  bench_shape({.name = "Optimization Track: 64 rows of 1024, 6 heads of 128",
               .H = 6,
               .D = 128,
               .window = 0,
               .doc_start = rows(65536, 1024)},
              options, out);
  for (const int64_t window : {640, 1408}) {
    bench_shape({.name = "Main Track: 49152 tokens in documents, window " + std::to_string(window) + ", 6 heads of 128",
                 .H = 6,
                 .D = 128,
                 .window = window,
                 .doc_start = web_documents(49152)},
                options, out);
  }
}

}  // namespace speedrun::kernels

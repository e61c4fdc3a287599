#include <cmath>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/bench/bench.h"
#include "kernels/bench/bench_documents.h"

namespace speedrun::kernels {
namespace {

struct BenchShape {
  std::string name;
  int H, D;
  int64_t window;
  std::vector<int32_t> doc_start;
  bool planes = false;  // q, k and v each a plane (N, H·D), not side by side in rows
};

void bench_shape(const BenchShape& shape, const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  const auto N = static_cast<int64_t>(shape.doc_start.size());
  const int64_t channels = int64_t{shape.H} * shape.D, stride = shape.planes ? channels : 3 * channels;
  const int64_t next = shape.planes ? N * channels : channels;  // from q to k and from k to v
  const BenchBuffer qkv = BenchBuffer::normal_bf16(3 * N * channels), dqkv = BenchBuffer::normal_bf16(3 * N * channels),
                    result = BenchBuffer::normal_bf16(N * channels), dout = BenchBuffer::normal_bf16(N * channels),
                    lse = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(shape.H * N)),
                    delta = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(shape.H * N)),
                    doc_start = BenchBuffer::copy_of(shape.doc_start.data(), sizeof(int32_t) * shape.doc_start.size());
  const double scale = 1 / std::sqrt(static_cast<double>(shape.D));
  const AttentionForward<bf16> forward{.out = result.as<bf16>(),
                                       .lse = lse.as<float>(),
                                       .q = qkv.as<bf16>(),
                                       .k = qkv.as<bf16>() + next,
                                       .v = qkv.as<bf16>() + 2 * next,
                                       .doc_start = doc_start.as<int32_t>(),
                                       .N = N,
                                       .stride = stride,
                                       .H = shape.H,
                                       .D = shape.D,
                                       .window = shape.window,
                                       .scale = scale};
  const AttentionBackward<bf16> backward{.dq = dqkv.as<bf16>(),
                                         .dk = dqkv.as<bf16>() + next,
                                         .dv = dqkv.as<bf16>() + 2 * next,
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
  const double pairs = attended_pairs(shape.doc_start, shape.window > 0 ? shape.window : -1) * shape.H;
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
      {.name = "GPT-2 124M: 64 rows of 1024, 12 heads of 64", .H = 12, .D = 64, .window = 0, .doc_start = bench_rows(65536, 1024)},
      options, out);
  bench_shape({.name = "Optimization Track: 64 rows of 1024, 6 heads of 128",
               .H = 6,
               .D = 128,
               .window = 0,
               .doc_start = bench_rows(65536, 1024)},
              options, out);
  // The Main Track's rows by stage: short and long windows, and the short one with paired heads, whose stream has two positions a
  // token and half the heads.
  struct MainTrackRow {
    int64_t tokens, window;
    bool paired;
  };
  for (const MainTrackRow& row :
       {MainTrackRow{16384, 128, false}, MainTrackRow{16384, 384, false}, MainTrackRow{16384, 128, true},
        MainTrackRow{49152, 640, false}, MainTrackRow{49152, 1408, false}, MainTrackRow{49152, 640, true}}) {
    BenchShape shape{.name = "Main Track: " + std::to_string(row.tokens) + " tokens in documents, window " +
                             std::to_string(row.window) + (row.paired ? ", 3 paired heads of 128" : ", 6 heads of 128"),
                     .H = row.paired ? 3 : 6,
                     .D = 128,
                     .window = row.window,
                     .doc_start = {},
                     .planes = true};
    for (const int32_t start : bench_web_documents(row.tokens))
      shape.doc_start.insert(shape.doc_start.end(), row.paired ? 2 : 1, row.paired ? 2 * start : start);
    bench_shape(shape, options, out);
  }
}

}  // namespace speedrun::kernels

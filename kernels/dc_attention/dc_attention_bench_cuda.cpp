#include <cmath>
#include <string>

#include "kernels/bench/bench.h"
#include "kernels/bench/bench_documents.h"
#include "kernels/dc_attention/dc_attention.h"

namespace speedrun::kernels {
namespace {

void bench_row(int64_t N, const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int H = 6, D = 128;
  constexpr int64_t C = H * D, kStride = 41, kWindow = 111;
  constexpr double kScale = 0.1;
  const std::vector<int32_t> documents = bench_web_documents(N);
  const BenchBuffer q = BenchBuffer::normal_bf16(N * C), k = BenchBuffer::normal_bf16(N * C), v = BenchBuffer::normal_bf16(N * C),
                    y = BenchBuffer::normal_bf16(N * C), dout = BenchBuffer::normal_bf16(N * C),
                    weights = BenchBuffer::normal_bf16(N * kStride), result = BenchBuffer::normal_bf16(N * C),
                    dq = BenchBuffer::normal_bf16(N * C), dk = BenchBuffer::normal_bf16(N * C),
                    dv = BenchBuffer::normal_bf16(N * C), dweights = BenchBuffer::normal_bf16(N * kStride),
                    lse = BenchBuffer::zeroed(sizeof(float) * static_cast<size_t>(N * H)),
                    doc_start = BenchBuffer::copy_of(documents.data(), sizeof(int32_t) * documents.size()),
                    scratch = BenchBuffer::zeroed(dc_attention_scratch(N, H, kWindow));
  const DcAttentionForward<bf16> forward{.out = result.as<bf16>(),
                                         .lse = lse.as<float>(),
                                         .y = y.as<bf16>(),
                                         .q = q.as<bf16>(),
                                         .k = k.as<bf16>(),
                                         .v = v.as<bf16>(),
                                         .w1 = weights.as<bf16>() + 29,
                                         .w2 = weights.as<bf16>() + 35,
                                         .stride = kStride,
                                         .doc_start = doc_start.as<int32_t>(),
                                         .N = N,
                                         .H = H,
                                         .D = D,
                                         .window = kWindow,
                                         .scale = kScale};
  const DcAttentionBackward<bf16> backward{.dq = dq.as<bf16>(),
                                           .dk = dk.as<bf16>(),
                                           .dv = dv.as<bf16>(),
                                           .dw1 = dweights.as<bf16>() + 29,
                                           .dw2 = dweights.as<bf16>() + 35,
                                           .dout = dout.as<bf16>(),
                                           .q = forward.q,
                                           .k = forward.k,
                                           .v = forward.v,
                                           .w1 = forward.w1,
                                           .w2 = forward.w2,
                                           .stride = kStride,
                                           .lse = forward.lse,
                                           .doc_start = forward.doc_start,
                                           .scratch = scratch.as<void>(),
                                           .N = N,
                                           .H = H,
                                           .D = D,
                                           .window = kWindow,
                                           .scale = kScale};
  const double pairs = attended_pairs(documents, kWindow) * H;
  const double plane = 2.0 * static_cast<double>(N * C);  // bytes of one (N, H, D)
  bench_table(
      "dc_attention, " + std::to_string(N) + " tokens in documents, window " + std::to_string(kWindow) + ", 6 heads of 128",
      {{.name = "forward", .run = [=] { dc_attention_forward(forward, exec); }, .flops = 4 * pairs * D, .bytes = 5 * plane},
       {.name = "backward", .run = [=] { dc_attention_backward(backward, exec); }, .flops = 10 * pairs * D, .bytes = 10 * plane}},
      exec, options.seconds, out);
}

}  // namespace

// FLOPs count the products that the formulas need for attended pairs: 4·D forward, 10·D backward.
void bench_dc_attention(const BenchOptions& options, std::ostream& out) {
  for (const int64_t N : {16'384, 49'152}) bench_row(N, options, out);
}

}  // namespace speedrun::kernels

#include "kernels/bench/bench.h"
#include "kernels/scaled_weight/scaled_weight.h"

namespace speedrun::kernels {

void bench_scaled_weight(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  // W_qkv and W_o of 10 layers, as one buffer each for weights, products and gradients.
  constexpr int kLayers = 10;
  constexpr int64_t kSquare = 768 * 768, kTotal = kLayers * 4 * kSquare;
  const BenchBuffer weight = BenchBuffer::normal_bf16(kTotal, 0.02), product = BenchBuffer::zeroed(kTotal * sizeof(bf16));
  const BenchBuffer grad = BenchBuffer::normal_f32(kTotal, 0.001);
  // Gradients are scaled again and again; −1 keeps their size.
  const std::vector<bf16> host_scalars(2 * kLayers, bf16(-1.0f));
  const BenchBuffer scalars = BenchBuffer::copy_of(host_scalars.data(), host_scalars.size() * sizeof(bf16));
  const BenchBuffer dscalars = BenchBuffer::zeroed(2 * kLayers * sizeof(float));
  std::vector<ScaledWeightItem<bf16>> items;
  int64_t offset = 0;
  for (int i = 0; i < 2 * kLayers; ++i) {
    items.push_back({.out = product.as<bf16>() + offset,
                     .weight = weight.as<bf16>() + offset,
                     .scalar = scalars.as<bf16>() + i,
                     .grad = grad.as<float>() + offset,
                     .dscalar = dscalars.as<float>() + i,
                     .n = i % 2 == 0 ? 3 * kSquare : kSquare});
    offset += items.back().n;
  }
  const BenchBuffer table = BenchBuffer::copy_of(items.data(), items.size() * sizeof(items[0]));
  const BenchBuffer scratch = BenchBuffer::zeroed(static_cast<size_t>(scaled_weights_scratch(2 * kLayers)) * sizeof(double));
  const ScaledWeights<bf16> args{
      .items = table.as<ScaledWeightItem<bf16>>(), .scratch = scratch.as<double>(), .num_items = 2 * kLayers};
  bench_table("scaled_weight, 10 layers of width 768",
              {bench_copy(kTotal * sizeof(bf16), exec),
               {"forward", [&] { scaled_weights_forward(args, exec); }, 0, 4.0 * kTotal},
               {"backward", [&] { scaled_weights_backward(args, exec); }, 0, 10.0 * kTotal}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/fp8/fp8.h"

namespace speedrun::kernels {
namespace {

BenchBuffer scales(int count) {
  const std::vector<Fp8Scale> values(static_cast<size_t>(count), Fp8Scale{.scale = 0.01f});
  return BenchBuffer::copy_of(values.data(), values.size() * sizeof(Fp8Scale));
}

// `count` matrices and their copies in E4M3, with the tables that the pass takes.
struct Weights {
  Weights(int count, int rows, int cols)
      : elements(static_cast<double>(count) * rows * cols), scale(scales(count)), items(static_cast<size_t>(count)) {
    for (int i = 0; i < count; ++i) {
      const int64_t size = int64_t{rows} * cols;
      weights.push_back(BenchBuffer::normal_bf16(size, 0.018));
      copies.push_back(BenchBuffer::zeroed(static_cast<size_t>(2 * size)));
      items[static_cast<size_t>(i)] = {copies.back().as<e4m3>(),
                                       copies.back().as<e4m3>() + size,
                                       weights.back().as<bf16>(),
                                       scale.as<Fp8Scale>() + i,
                                       rows,
                                       cols};
    }
    table = std::make_unique<BenchBuffer>(BenchBuffer::copy_of(items.data(), items.size() * sizeof(items[0])));
  }
  Fp8Weights<bf16> args(Fp8Scaling scaling) const {
    return {table->as<Fp8WeightItem<bf16>>(), items.data(), static_cast<int>(items.size()), scaling, false, nullptr};
  }

  double elements;
  BenchBuffer scale;
  std::vector<Fp8WeightItem<bf16>> items;
  std::vector<BenchBuffer> weights, copies;
  std::unique_ptr<BenchBuffer> table;
};

}  // namespace

// The Main Track's passes: both copies of the MLP's and the head's weights, an activation of a row of tokens.
void bench_fp8(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  const Weights mlp(22, 3072, 768), head(1, 50304, 768);
  constexpr int64_t kN = 49152;
  constexpr int kC = 768;
  const double activation = static_cast<double>(kN) * kC;
  const BenchBuffer inp = BenchBuffer::normal_bf16(kN * kC), copy = BenchBuffer::zeroed(static_cast<size_t>(2 * kN * kC)),
                    scale = scales(1);
  const auto weights = [&](const Weights& w, Fp8Scaling scaling) { return [&, scaling] { fp8_weights(w.args(scaling), exec); }; };
  const auto quantize = [&](bool transposed, Fp8Scaling scaling) {
    return [&, transposed, scaling] {
      fp8_quantize({copy.as<e4m3>(), transposed ? copy.as<e4m3>() + kN * kC : nullptr, inp.as<bf16>(), scale.as<Fp8Scale>(), kN, kC,
                    scaling, false},
                   exec);
    };
  };
  const auto gradient = [&](Fp8Scaling scaling) {
    return [&, scaling] {
      e5m2* const codes = copy.as<e5m2>();
      fp8_quantize(Fp8Quantize<bf16, e5m2>{codes, codes + kN * kC, inp.as<bf16>(), scale.as<Fp8Scale>(), kN, kC, scaling, false, 4},
                   exec);
    };
  };
  bench_table("FP8 copies",
              {bench_copy(static_cast<size_t>(2 * activation), exec),
               {"22 weights, both, delayed", weights(mlp, Fp8Scaling::delayed), 0, 4 * mlp.elements},
               {"22 weights, both, current", weights(mlp, Fp8Scaling::current), 0, 6 * mlp.elements},
               {"head, both, fixed", weights(head, Fp8Scaling::fixed), 0, 4 * head.elements},
               {"activation, fixed", quantize(false, Fp8Scaling::fixed), 0, 3 * activation},
               {"activation, delayed", quantize(false, Fp8Scaling::delayed), 0, 3 * activation},
               {"activation, current", quantize(false, Fp8Scaling::current), 0, 5 * activation},
               {"activation, both, fixed", quantize(true, Fp8Scaling::fixed), 0, 4 * activation},
               {"gradient (E5M2), both, delayed", gradient(Fp8Scaling::delayed), 0, 4 * activation},
               {"gradient (E5M2), both, current", gradient(Fp8Scaling::current), 0, 6 * activation}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

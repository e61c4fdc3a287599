#include <algorithm>

#include "kernels/bench/bench.h"
#include "kernels/muon/muon.h"

namespace speedrun::kernels {
namespace {

// A batch of matrices with all it needs; the update is launched again and again on the same gradients.
class MuonBench {
 public:
  MuonBench(int batch, int rows, int cols, MuonForm form = MuonForm::muon)
      : elements_(int64_t{rows} * cols),
        weights_(BenchBuffer::normal_bf16(batch * elements_, 0.02)),
        lows_(BenchBuffer::normal_bf16(batch * elements_)),
        momenta_(BenchBuffer::normal_f32(batch * elements_, 0.001)),
        grads_(BenchBuffer::normal_f32(batch * elements_, 0.001)),
        x_(BenchBuffer::zeroed(static_cast<size_t>(2 * batch * elements_) * sizeof(bf16))),
        gram_(BenchBuffer::zeroed(static_cast<size_t>(2 * batch * smaller(rows, cols) * smaller(rows, cols)) * sizeof(bf16))),
        second_(BenchBuffer::zeroed(static_cast<size_t>(batch) * static_cast<size_t>(std::max(rows, cols)) * sizeof(float))),
        sums_(BenchBuffer::zeroed(static_cast<size_t>(batch * muon_sums(rows, cols)) * sizeof(float))),
        step_(copy(MuonStep{.lr = 1e-4f, .decay = 1e-6f, .momentum = 0.95f})),
        verdict_(copy(StepVerdict{})),
        matrices_(table(batch, form, std::max(rows, cols))),
        args_{.matrices = matrices_.as<MuonMatrix<bf16>>(),
              .coefficients = kCoefficients,
              .x = x_.as<bf16>(),
              .gram = gram_.as<bf16>(),
              .sums = sums_.as<float>(),
              .verdict = verdict_.as<StepVerdict>(),
              .batch = batch,
              .rows = rows,
              .cols = cols,
              .iterations = 5,
              .nesterov = true,
              .norm_margin = 1.02,
              .eps = 1e-6,
              .form = form,
              .beta2 = 0.9} {}

  void run(const CudaExec& exec) const { muon_update(args_, exec); }
  double flops() const {
    const double m = static_cast<double>(smaller(args_.rows, args_.cols)), n = std::max(args_.rows, args_.cols);
    return args_.batch * args_.iterations * (4 * m * m * n + 2 * m * m * m);
  }
  double bytes() const { return (args_.form == MuonForm::normuon ? 30.0 : 28.0) * static_cast<double>(args_.batch * elements_); }
  BenchCase bench_case(const std::string& name, const CudaExec& exec) const {
    return {name, [this, exec] { run(exec); }, flops(), bytes()};
  }

 private:
  static constexpr MuonCoefficients kCoefficients[5] = {{3.4445, -4.7750, 2.0315},
                                                        {3.4445, -4.7750, 2.0315},
                                                        {3.4445, -4.7750, 2.0315},
                                                        {3.4445, -4.7750, 2.0315},
                                                        {3.4445, -4.7750, 2.0315}};

  static int64_t smaller(int rows, int cols) { return std::min(rows, cols); }
  template <class T>
  static BenchBuffer copy(const T& value) {
    return BenchBuffer::copy_of(&value, sizeof value);
  }
  BenchBuffer table(int batch, MuonForm form, int64_t statistics) const {
    std::vector<MuonMatrix<bf16>> matrices;
    for (int64_t i = 0; i < batch; ++i) {
      matrices.push_back({.weight = {.value = weights_.as<bf16>() + i * elements_,
                                     .low = lows_.as<uint16_t>() + i * elements_,
                                     .split = MasterSplit::nearest},
                          .momentum = momenta_.as<float>() + i * elements_,
                          .second = form == MuonForm::normuon ? second_.as<float>() + i * statistics : nullptr,
                          .grad = grads_.as<float>() + i * elements_,
                          .step = step_.as<MuonStep>()});
    }
    return BenchBuffer::copy_of(matrices.data(), matrices.size() * sizeof matrices[0]);
  }

  int64_t elements_;
  BenchBuffer weights_, lows_, momenta_, grads_, x_, gram_, second_, sums_, step_, verdict_, matrices_;
  Muon<bf16> args_;
};

}  // namespace

void bench_muon(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  const MuonBench square(48, 768, 768), tall(12, 3072, 768), wide(12, 768, 3072);
  bench_table("muon, the matrices of 12 layers of width 768, 5 iterations",
              {bench_copy(size_t{48} * 768 * 768 * sizeof(float), exec), square.bench_case("48 x 768 x 768", exec),
               tall.bench_case("12 x 3072 x 768", exec), wide.bench_case("12 x 768 x 3072", exec)},
              exec, options.seconds, out);

  const MuonBench qk(60, 256, 768, MuonForm::normuon), vo(20, 768, 768, MuonForm::normuon), mlp(22, 3072, 768, MuonForm::normuon);
  const BenchCase step{"all, a step",
                       [&] {
                         for (const MuonBench* bank : {&qk, &vo, &mlp}) bank->run(exec);
                       },
                       qk.flops() + vo.flops() + mlp.flops(), qk.bytes() + vo.bytes() + mlp.bytes()};
  bench_table("normuon, the banks of the Main Track, 5 iterations",
              {bench_copy(size_t{22} * 3072 * 768 * sizeof(float), exec), qk.bench_case("60 x 256 x 768", exec),
               vo.bench_case("20 x 768 x 768", exec), mlp.bench_case("22 x 3072 x 768", exec), step},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

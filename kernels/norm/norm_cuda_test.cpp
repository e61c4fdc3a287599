// CUDA norm against the reference: every group size and combination of gain, shift and residual gradient, production shape on
// sampled rows.
#include "kernels/norm/norm.h"

#include <sstream>

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::to_double;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

constexpr double kEps = 1e-5;

enum class Residual { none, separate, in_place };

struct Case {
  Norm kind;
  int64_t N;
  int C;
  bool gain, shift;
  Residual residual = Residual::separate;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << (c.kind == Norm::rms ? "rms" : "layer") << " N=" << c.N << " C=" << c.C << " gain=" << c.gain
             << " shift=" << c.shift << " residual=" << static_cast<int>(c.residual);
}

struct Inputs {
  std::vector<bf16> inp, dout, dinp_add, gain, shift;
  std::vector<float> dgain, dshift;  // before the call
};

Inputs make_inputs(const Case& c, testing::Random& random) {
  return {.inp = random.normal_vector<bf16>(c.N * c.C, 2.0, 0.7),
          .dout = random.normal_vector<bf16>(c.N * c.C, 0.3, 0.05),
          .dinp_add = random.normal_vector<bf16>(c.N * c.C, 0.5),
          .gain = random.normal_vector<bf16>(c.C, 0.2, 1.0),
          .shift = random.normal_vector<bf16>(c.C, 0.3),
          .dgain = random.normal_vector<float>(c.C),
          .dshift = random.normal_vector<float>(c.C)};
}

template <class T>
struct Results {
  std::vector<T> out, dinp;
  std::vector<Acc<T>> mean, rstd, dgain, dshift;
};

template <class T>
Results<T> reference(const Case& c, const Inputs& in, const HostExec& exec) {
  const size_t elements = in.inp.size(), rows = static_cast<size_t>(c.N);
  const std::vector<T> inp = widen<T>(in.inp), dout = widen<T>(in.dout), add = widen<T>(in.dinp_add), gain = widen<T>(in.gain),
                       shift = widen<T>(in.shift);
  Results<T> r{.out = std::vector<T>(elements),
               .dinp = std::vector<T>(elements),
               .mean = std::vector<T>(rows),
               .rstd = std::vector<T>(rows),
               .dgain = {in.dgain.begin(), in.dgain.end()},
               .dshift = {in.dshift.begin(), in.dshift.end()}};
  std::vector<T> scratch(static_cast<size_t>(norm_backward_scratch(c.N, c.C)));
  norm_forward(NormForward<T>{.out = r.out.data(),
                              .mean = c.kind == Norm::layer ? r.mean.data() : nullptr,
                              .rstd = r.rstd.data(),
                              .inp = inp.data(),
                              .gain = c.gain ? gain.data() : nullptr,
                              .shift = c.shift ? shift.data() : nullptr,
                              .N = c.N,
                              .C = c.C,
                              .eps = kEps,
                              .kind = c.kind},
               exec);
  norm_backward(NormBackward<T>{.dinp = r.dinp.data(),
                                .dinp_add = c.residual == Residual::none ? nullptr : add.data(),
                                .dgain = c.gain ? r.dgain.data() : nullptr,
                                .dshift = c.shift ? r.dshift.data() : nullptr,
                                .dout = dout.data(),
                                .inp = inp.data(),
                                .mean = c.kind == Norm::layer ? r.mean.data() : nullptr,
                                .rstd = r.rstd.data(),
                                .gain = c.gain ? gain.data() : nullptr,
                                .scratch = scratch.data(),
                                .N = c.N,
                                .C = c.C,
                                .kind = c.kind},
                exec);
  return r;
}

class NormCudaTest : public CudaTest {
 protected:
  Results<bf16> device(const Case& c, const Inputs& in, Launch launch) {
    const bool layer = c.kind == Norm::layer;
    auto inp = uploaded("inp", in.inp), dout = uploaded("dout", in.dout), add = uploaded("dinp_add", in.dinp_add);
    auto gain = uploaded("gain", in.gain), shift = uploaded("shift", in.shift);
    auto dgain = uploaded("dgain", in.dgain), dshift = uploaded("dshift", in.dshift);
    auto out = poisoned<bf16>("out", inp.size()), dinp = poisoned<bf16>("dinp", inp.size());
    auto mean = poisoned<float>("mean", c.N), rstd = poisoned<float>("rstd", c.N);
    auto scratch = poisoned<float>("scratch", norm_backward_scratch(c.N, c.C));
    bf16* dinp_pointer = c.residual == Residual::in_place ? add.get() : dinp.get();
    run(launch, [&] {
      norm_forward(NormForward<bf16>{.out = out.get(),
                                     .mean = layer ? mean.get() : nullptr,
                                     .rstd = rstd.get(),
                                     .inp = inp.get(),
                                     .gain = c.gain ? gain.get() : nullptr,
                                     .shift = c.shift ? shift.get() : nullptr,
                                     .N = c.N,
                                     .C = c.C,
                                     .eps = kEps,
                                     .kind = c.kind},
                   exec());
      norm_backward(NormBackward<bf16>{.dinp = dinp_pointer,
                                       .dinp_add = c.residual == Residual::none ? nullptr : add.get(),
                                       .dgain = c.gain ? dgain.get() : nullptr,
                                       .dshift = c.shift ? dshift.get() : nullptr,
                                       .dout = dout.get(),
                                       .inp = inp.get(),
                                       .mean = layer ? mean.get() : nullptr,
                                       .rstd = rstd.get(),
                                       .gain = c.gain ? gain.get() : nullptr,
                                       .scratch = scratch.get(),
                                       .N = c.N,
                                       .C = c.C,
                                       .kind = c.kind},
                    exec());
    });
    return {.out = out.download(),
            .dinp = c.residual == Residual::in_place ? add.download() : dinp.download(),
            .mean = mean.download(),
            .rstd = rstd.download(),
            .dgain = dgain.download(),
            .dshift = dshift.download()};
  }

  void check(const Case& c) {
    std::ostringstream text;
    text << c;
    SCOPED_TRACE(text.str());
    testing::Random random = testing::test_random();
    const Inputs in = make_inputs(c, random);
    const Results<bf16> got = device(c, in, Launch::direct);
    const Results<double> truth = reference<double>(c, in, truth_exec());
    const Results<float> baseline = reference<float>(c, in, baseline_exec());
    EXPECT_TRUE(within_rule(got.out, truth.out, baseline.out)) << "out";
    EXPECT_TRUE(within_rule(got.rstd, truth.rstd, baseline.rstd, Ulp::accumulated)) << "rstd";
    if (c.kind == Norm::layer) {
      EXPECT_TRUE(within_rule(got.mean, truth.mean, baseline.mean, Ulp::accumulated)) << "mean";
    }
    EXPECT_TRUE(within_rule(got.dinp, truth.dinp, baseline.dinp)) << "dinp";
    EXPECT_TRUE(within_rule(got.dgain, truth.dgain, baseline.dgain, Ulp::accumulated)) << "dgain";
    EXPECT_TRUE(within_rule(got.dshift, truth.dshift, baseline.dshift, Ulp::accumulated)) << "dshift";

    const Results<bf16> again = device(c, in, Launch::captured);
    EXPECT_TRUE(same_bits(got.out, again.out)) << "out, second run";
    EXPECT_TRUE(same_bits(got.dinp, again.dinp)) << "dinp, second run";
    EXPECT_TRUE(same_bits(got.dgain, again.dgain)) << "dgain, second run";
    EXPECT_TRUE(same_bits(got.dshift, again.dshift)) << "dshift, second run";
  }
};

TEST_F(NormCudaTest, EveryGroupSizeAndItsEdges) {
  for (const int C : {8, 256, 264, 504, 768, 760, 776, 1024, 1032, 2048, 2056, 4096, 8192}) {
    check({Norm::rms, 65, C, true, false});
    check({Norm::layer, 65, C, true, true});
  }
}

TEST_F(NormCudaTest, NumbersOfRows) {
  for (const int64_t N : {1, 7, 1000}) {
    check({Norm::rms, N, 768, true, false});
    check({Norm::layer, N, 768, true, true});
    check({Norm::layer, N, 1536, true, true});
  }
  check({Norm::layer, 70'000, 64, true, true});
}

TEST_F(NormCudaTest, EveryCombinationOfOptionalParts) {
  for (const Norm kind : {Norm::rms, Norm::layer}) {
    for (const Residual residual : {Residual::none, Residual::separate, Residual::in_place}) {
      check({kind, 100, 768, false, false, residual});
      check({kind, 100, 768, true, false, residual});
      check({kind, 100, 768, true, true, residual});
      check({kind, 100, 2048, false, false, residual});
    }
  }
}

TEST_F(NormCudaTest, ProductionShapeOnSampledRowsAndColumns) {
  const Case whole{Norm::rms, 49'152, 768, true, false};
  testing::Random random = testing::test_random();
  Inputs in{.inp = random.uniform_vector<bf16>(whole.N * whole.C, 3),
            .dout = random.uniform_vector<bf16>(whole.N * whole.C, 0.1),
            .dinp_add = random.uniform_vector<bf16>(whole.N * whole.C, 0.2),
            .gain = random.normal_vector<bf16>(whole.C, 0.2, 1.0),
            .shift = random.normal_vector<bf16>(whole.C, 0.3),
            .dgain = random.normal_vector<float>(whole.C),
            .dshift = random.normal_vector<float>(whole.C)};
  const Results<bf16> got = device(whole, in, Launch::direct);

  std::vector<int64_t> rows = {0, 1, 7, 8, whole.N / 2, whole.N - 8, whole.N - 1};
  while (rows.size() < 500) rows.push_back(random.below(whole.N));
  auto gather = [&](const std::vector<bf16>& matrix) {
    std::vector<bf16> picked;
    for (const int64_t row : rows)
      picked.insert(picked.end(), matrix.begin() + row * whole.C, matrix.begin() + (row + 1) * whole.C);
    return picked;
  };
  Case sampled = whole;
  sampled.N = static_cast<int64_t>(rows.size());
  Inputs part = in;
  part.inp = gather(in.inp);
  part.dout = gather(in.dout);
  part.dinp_add = gather(in.dinp_add);
  const Results<double> truth = reference<double>(sampled, part, truth_exec());
  const Results<float> baseline = reference<float>(sampled, part, baseline_exec());
  EXPECT_TRUE(within_rule(gather(got.out), truth.out, baseline.out)) << "out";
  EXPECT_TRUE(within_rule(gather(got.dinp), truth.dinp, baseline.dinp)) << "dinp";

  // dgain of a few columns, summed here in double over all rows.
  const std::vector<double> rstd = to_double(got.rstd);
  for (const int64_t column : {int64_t{0}, int64_t{255}, int64_t{256}, whole.C - int64_t{1}, random.below(whole.C)}) {
    double sum = in.dgain[static_cast<size_t>(column)], magnitude = 0;
    for (int64_t row = 0; row < whole.N; ++row) {
      const size_t i = static_cast<size_t>(row * whole.C + column);
      const double term = static_cast<double>(static_cast<float>(in.dout[i])) * static_cast<double>(static_cast<float>(in.inp[i])) *
                          rstd[static_cast<size_t>(row)];
      sum += term;
      magnitude += std::abs(term);
    }
    EXPECT_NEAR(got.dgain[static_cast<size_t>(column)], sum, 1e-6 * magnitude) << "dgain of column " << column;
  }
}

TEST_F(NormCudaTest, RefusesShapesItCannotDo) {
  auto memory = poisoned<bf16>("memory", 1 << 16);
  auto statistics = poisoned<float>("statistics", 64);
  NormForward<bf16> args{.out = memory.get(),
                         .mean = nullptr,
                         .rstd = statistics.get(),
                         .inp = memory.get(),
                         .gain = nullptr,
                         .shift = nullptr,
                         .N = 2,
                         .C = 12,
                         .eps = kEps,
                         .kind = Norm::rms};
  EXPECT_THROW(norm_forward(args, exec()), Error);
  args.C = 8200;
  EXPECT_THROW(norm_forward(args, exec()), Error);
  args.C = 8;
  args.inp = memory.get() + 1;
  EXPECT_THROW(norm_forward(args, exec()), Error);
}

}  // namespace
}  // namespace speedrun::kernels

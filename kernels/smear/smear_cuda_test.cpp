// CUDA smear against the reference: rows of every length, gates of every width, production shape.
#include "kernels/smear/smear.h"

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

struct Case {
  int64_t rows, row_tokens;
  int C, G;
};

struct Inputs {
  std::vector<bf16> inp, gate_weight, lambda, dout;
  std::vector<float> dgate_weight, dlambda;  // before the call
};

template <class T>
struct Results {
  std::vector<T> out, dinp;
  std::vector<Acc<T>> dgate_weight, dlambda;
};

template <class T>
Results<T> reference(const Case& c, const Inputs& in, const HostExec& exec) {
  const int64_t N = c.rows * c.row_tokens;
  const std::vector<T> inp = widen<T>(in.inp), gate_weight = widen<T>(in.gate_weight), lambda = widen<T>(in.lambda),
                       dout = widen<T>(in.dout);
  Results<T> r{.out = std::vector<T>(inp.size()),
               .dinp = std::vector<T>(inp.size()),
               .dgate_weight = {in.dgate_weight.begin(), in.dgate_weight.end()},
               .dlambda = {in.dlambda.begin(), in.dlambda.end()}};
  std::vector<T> scratch(static_cast<size_t>(smear_scratch(N)));
  smear_forward(SmearForward<T>{.out = r.out.data(),
                                .inp = inp.data(),
                                .gate_weight = gate_weight.data(),
                                .lambda = lambda.data(),
                                .N = N,
                                .row_tokens = c.row_tokens,
                                .C = c.C,
                                .G = c.G},
                exec);
  smear_backward(SmearBackward<T>{.dinp = r.dinp.data(),
                                  .dgate_weight = r.dgate_weight.data(),
                                  .dlambda = r.dlambda.data(),
                                  .dout = dout.data(),
                                  .inp = inp.data(),
                                  .gate_weight = gate_weight.data(),
                                  .lambda = lambda.data(),
                                  .scratch = scratch.data(),
                                  .N = N,
                                  .row_tokens = c.row_tokens,
                                  .C = c.C,
                                  .G = c.G},
                 exec);
  return r;
}

class SmearCudaTest : public CudaTest {
 protected:
  Results<bf16> device(const Case& c, const Inputs& in, Launch launch) {
    const int64_t N = c.rows * c.row_tokens;
    auto inp = uploaded("inp", in.inp), gate_weight = uploaded("gate_weight", in.gate_weight);
    auto lambda = uploaded("lambda", in.lambda), dout = uploaded("dout", in.dout);
    auto dgate_weight = uploaded("dgate_weight", in.dgate_weight), dlambda = uploaded("dlambda", in.dlambda);
    auto out = poisoned<bf16>("out", inp.size()), dinp = poisoned<bf16>("dinp", inp.size());
    auto scratch = poisoned<float>("scratch", smear_scratch(N));
    run(launch, [&] {
      smear_forward(SmearForward<bf16>{.out = out.get(),
                                       .inp = inp.get(),
                                       .gate_weight = gate_weight.get(),
                                       .lambda = lambda.get(),
                                       .N = N,
                                       .row_tokens = c.row_tokens,
                                       .C = c.C,
                                       .G = c.G},
                    exec());
      smear_backward(SmearBackward<bf16>{.dinp = dinp.get(),
                                         .dgate_weight = dgate_weight.get(),
                                         .dlambda = dlambda.get(),
                                         .dout = dout.get(),
                                         .inp = inp.get(),
                                         .gate_weight = gate_weight.get(),
                                         .lambda = lambda.get(),
                                         .scratch = scratch.get(),
                                         .N = N,
                                         .row_tokens = c.row_tokens,
                                         .C = c.C,
                                         .G = c.G},
                     exec());
    });
    return {.out = out.download(), .dinp = dinp.download(), .dgate_weight = dgate_weight.download(), .dlambda = dlambda.download()};
  }

  void check(const Case& c) {
    SCOPED_TRACE(std::to_string(c.rows) + " rows of " + std::to_string(c.row_tokens) + ", C=" + std::to_string(c.C) +
                 " G=" + std::to_string(c.G));
    testing::Random random = testing::test_random();
    const int64_t elements = c.rows * c.row_tokens * c.C;
    const Inputs in{.inp = random.uniform_vector<bf16>(elements, 2),
                    .gate_weight = random.normal_vector<bf16>(c.G, 0.5),
                    .lambda = random.normal_vector<bf16>(1, 0.2, 1),
                    .dout = random.uniform_vector<bf16>(elements, 0.3),
                    .dgate_weight = random.normal_vector<float>(c.G),
                    .dlambda = random.normal_vector<float>(1)};
    const Results<bf16> got = device(c, in, Launch::direct), again = device(c, in, Launch::captured);
    const Results<double> truth = reference<double>(c, in, truth_exec());
    const Results<float> baseline = reference<float>(c, in, baseline_exec());
    EXPECT_TRUE(within_rule(got.out, truth.out, baseline.out)) << "out";
    EXPECT_TRUE(within_rule(got.dinp, truth.dinp, baseline.dinp)) << "dinp";
    EXPECT_TRUE(within_rule(got.dgate_weight, truth.dgate_weight, baseline.dgate_weight, Ulp::accumulated)) << "dgate_weight";
    EXPECT_TRUE(within_rule(got.dlambda, truth.dlambda, baseline.dlambda, Ulp::accumulated)) << "dlambda";
    EXPECT_TRUE(same_bits(got.out, again.out)) << "out, second run";
    EXPECT_TRUE(same_bits(got.dinp, again.dinp)) << "dinp, second run";
    EXPECT_TRUE(same_bits(got.dgate_weight, again.dgate_weight)) << "dgate_weight, second run";
    EXPECT_TRUE(same_bits(got.dlambda, again.dlambda)) << "dlambda, second run";
  }
};

TEST_F(SmearCudaTest, RowsOfEveryLength) {
  for (const int64_t row_tokens : {2, 3, 7, 8, 31, 32, 33, 257}) {
    check({1, row_tokens, 768, 12});
    check({5, row_tokens, 64, 12});
  }
}

TEST_F(SmearCudaTest, WidthsOfRowAndGate) {
  for (const int C : {8, 16, 24, 32, 40, 248, 256, 264, 768, 776, 1544}) {
    for (const int G : {1, 7, 8, 12, 31, 32}) {
      if (G <= C) check({2, 45, C, G});
    }
  }
}

TEST_F(SmearCudaTest, RowsOfOneTokenAreCopied) {
  testing::Random random = testing::test_random();
  const Case c{100, 1, 768, 12};
  const Inputs in{.inp = random.normal_vector<bf16>(100 * 768),
                  .gate_weight = random.normal_vector<bf16>(12),
                  .lambda = random.normal_vector<bf16>(1),
                  .dout = random.normal_vector<bf16>(100 * 768),
                  .dgate_weight = random.normal_vector<float>(12),
                  .dlambda = random.normal_vector<float>(1)};
  const Results<bf16> got = device(c, in, Launch::direct);
  EXPECT_TRUE(same_bits(got.out, in.inp));
  EXPECT_TRUE(same_bits(got.dinp, in.dout));
  EXPECT_EQ(got.dgate_weight, in.dgate_weight);
  EXPECT_EQ(got.dlambda, in.dlambda);
}

TEST_F(SmearCudaTest, ProductionShapes) {
  check({1, 16'381, 768, 12});
  check({8, 2'047, 768, 12});
  check({70'001, 3, 64, 12});
}

TEST_F(SmearCudaTest, RefusesShapesItCannotDo) {
  auto memory = poisoned<bf16>("memory", 1 << 12), out = poisoned<bf16>("out", 1 << 12);
  const SmearForward<bf16> good{.out = out.get(),
                                .inp = memory.get(),
                                .gate_weight = memory.get(),
                                .lambda = memory.get(),
                                .N = 4,
                                .row_tokens = 2,
                                .C = 64,
                                .G = 12};
  SmearForward<bf16> args = good;
  args.C = 60;
  EXPECT_THROW(smear_forward(args, exec()), Error);
  args = good;
  args.G = 33;
  EXPECT_THROW(smear_forward(args, exec()), Error);
  args = good;
  args.row_tokens = 3;
  EXPECT_THROW(smear_forward(args, exec()), Error);
  args = good;
  args.out = memory.get();
  EXPECT_THROW(smear_forward(args, exec()), Error);
}

}  // namespace
}  // namespace speedrun::kernels

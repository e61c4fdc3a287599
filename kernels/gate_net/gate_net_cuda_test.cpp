// CUDA gate net against the reference: every width of the hidden layer and number of outputs at its edges, few and many tokens,
// without a net, with learned and constant scale.
#include "kernels/gate_net/gate_net.h"

#include <array>
#include <sstream>

#include "kernels/testing/cuda_test.h"
#include "kernels/testing/product_ulp.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::same_bits;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

struct Case {
  int64_t N;
  int C, G, O;
  bool net = true;
  bool learned_scale = true;
  bool accumulate = true;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "N=" << c.N << " C=" << c.C << " G=" << c.G << " O=" << c.O << " net=" << c.net
             << " learned_scale=" << c.learned_scale << " accumulate=" << c.accumulate;
}

constexpr double kConstantScale = 0.1;

struct Inputs {
  std::vector<bf16> inp, w1, w2, bias, scale, dout, dinp;
  std::vector<float> dw1, dw2, dbias, dscale;  // before the call
};

// Means are not zero, so that the scale's gradient is no accidental remainder of cancelling terms.
Inputs make_inputs(const Case& c, testing::Random& random) {
  const int64_t first = int64_t{c.G} * c.C, second = int64_t{c.O} * c.G;
  return {.inp = random.normal_vector<bf16>(c.N * c.C),
          .w1 = random.normal_vector<bf16>(first, 1.5 / std::sqrt(c.C)),
          .w2 = random.normal_vector<bf16>(second, 1 / std::sqrt(c.G)),
          .bias = random.normal_vector<bf16>(c.O, 0.3, 2.0),
          .scale = random.normal_vector<bf16>(1, 0.05, 0.3),
          .dout = random.normal_vector<bf16>(c.N * c.O, 0.2, 0.1),
          .dinp = random.normal_vector<bf16>(c.N * c.C, 0.1),
          .dw1 = random.normal_vector<float>(first),
          .dw2 = random.normal_vector<float>(second),
          .dbias = random.normal_vector<float>(c.O),
          .dscale = random.normal_vector<float>(1)};
}

template <class T>
struct Results {
  std::vector<T> out, hidden, dhidden, dinp;
  std::vector<Acc<T>> dw1, dw2, dbias, dscale;
};

// Forward and backward arguments from what points to the buffers of either side.
template <class T, class Pointers>
GateNetForward<T> forward_args(const Case& c, const Pointers& p) {
  return {.out = p.out,
          .hidden = c.net ? p.hidden : nullptr,
          .inp = c.net ? p.inp : nullptr,
          .w1 = c.net ? p.w1 : nullptr,
          .w2 = c.net ? p.w2 : nullptr,
          .bias = p.bias,
          .scale = c.learned_scale ? p.scale : nullptr,
          .constant_scale = kConstantScale,
          .N = c.N,
          .C = c.C,
          .G = c.G,
          .O = c.O};
}
template <class T, class Pointers>
GateNetBackward<T> backward_args(const Case& c, const Pointers& p) {
  return {.dinp = c.net ? p.dinp : nullptr,
          .accumulate = c.accumulate,
          .dw1 = c.net ? p.dw1 : nullptr,
          .dw2 = c.net ? p.dw2 : nullptr,
          .dbias = p.dbias,
          .dscale = c.learned_scale ? p.dscale : nullptr,
          .dhidden = c.net ? p.dhidden : nullptr,
          .dout = p.dout,
          .hidden = c.net ? p.hidden : nullptr,
          .inp = c.net ? p.inp : nullptr,
          .w1 = c.net ? p.w1 : nullptr,
          .w2 = c.net ? p.w2 : nullptr,
          .bias = p.bias,
          .scale = c.learned_scale ? p.scale : nullptr,
          .constant_scale = kConstantScale,
          .scratch = p.scratch,
          .N = c.N,
          .C = c.C,
          .G = c.G,
          .O = c.O};
}

template <class T>
struct Pointers {
  T *out, *hidden, *dhidden, *dinp;
  const T *inp, *w1, *w2, *bias, *scale, *dout;
  Acc<T>*dw1, *dw2, *dbias, *dscale, *scratch;
};

template <class T>
Results<T> reference(const Case& c, const Inputs& in, const HostExec& exec) {
  const std::vector<T> inp = widen<T>(in.inp), w1 = widen<T>(in.w1), w2 = widen<T>(in.w2), bias = widen<T>(in.bias),
                       scale = widen<T>(in.scale), dout = widen<T>(in.dout);
  const size_t hidden = static_cast<size_t>(c.N * c.G);
  Results<T> r{.out = std::vector<T>(in.dout.size()),
               .hidden = std::vector<T>(hidden),
               .dhidden = std::vector<T>(hidden),
               .dinp = widen<T>(in.dinp),
               .dw1 = {in.dw1.begin(), in.dw1.end()},
               .dw2 = {in.dw2.begin(), in.dw2.end()},
               .dbias = {in.dbias.begin(), in.dbias.end()},
               .dscale = {in.dscale.begin(), in.dscale.end()}};
  std::vector<T> scratch(static_cast<size_t>(gate_net_scratch(c.N, c.G, c.O)));
  const Pointers<T> pointers{.out = r.out.data(),
                             .hidden = r.hidden.data(),
                             .dhidden = r.dhidden.data(),
                             .dinp = r.dinp.data(),
                             .inp = inp.data(),
                             .w1 = w1.data(),
                             .w2 = w2.data(),
                             .bias = bias.data(),
                             .scale = scale.data(),
                             .dout = dout.data(),
                             .dw1 = r.dw1.data(),
                             .dw2 = r.dw2.data(),
                             .dbias = r.dbias.data(),
                             .dscale = r.dscale.data(),
                             .scratch = scratch.data()};
  gate_net_forward(forward_args<T>(c, pointers), exec);
  gate_net_backward(backward_args<T>(c, pointers), exec);
  return r;
}

class GateNetCudaTest : public CudaTest {
 protected:
  Results<bf16> device(const Case& c, const Inputs& in, Launch launch) {
    auto inp = uploaded("inp", in.inp), w1 = uploaded("w1", in.w1), w2 = uploaded("w2", in.w2), bias = uploaded("bias", in.bias),
         scale = uploaded("scale", in.scale), dout = uploaded("dout", in.dout), dinp = uploaded("dinp", in.dinp);
    auto dw1 = uploaded("dw1", in.dw1), dw2 = uploaded("dw2", in.dw2), dbias = uploaded("dbias", in.dbias),
         dscale = uploaded("dscale", in.dscale);
    if (!c.accumulate) dinp.poison();
    auto out = poisoned<bf16>("out", c.N * c.O), hidden = poisoned<bf16>("hidden", c.N * c.G),
         dhidden = poisoned<bf16>("dhidden", c.N * c.G);
    auto scratch = poisoned<float>("scratch", gate_net_scratch(c.N, c.G, c.O));
    if (!c.net) {
      hidden.zero();
      dhidden.zero();
    }
    const Pointers<bf16> pointers{.out = out.get(),
                                  .hidden = hidden.get(),
                                  .dhidden = dhidden.get(),
                                  .dinp = dinp.get(),
                                  .inp = inp.get(),
                                  .w1 = w1.get(),
                                  .w2 = w2.get(),
                                  .bias = bias.get(),
                                  .scale = scale.get(),
                                  .dout = dout.get(),
                                  .dw1 = dw1.get(),
                                  .dw2 = dw2.get(),
                                  .dbias = dbias.get(),
                                  .dscale = dscale.get(),
                                  .scratch = scratch.get()};
    run(launch, [&] {
      gate_net_forward(forward_args<bf16>(c, pointers), exec());
      gate_net_backward(backward_args<bf16>(c, pointers), exec());
    });
    return {.out = out.download(),
            .hidden = hidden.download(),
            .dhidden = dhidden.download(),
            .dinp = dinp.download(),
            .dw1 = dw1.download(),
            .dw2 = dw2.download(),
            .dbias = dbias.download(),
            .dscale = dscale.download()};
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
    const Ulp sum_ulp = testing::product_ulp(c.N);
    EXPECT_TRUE(within_rule(got.hidden, truth.hidden, baseline.hidden)) << "hidden";
    EXPECT_TRUE(within_rule(got.out, truth.out, baseline.out)) << "out";
    EXPECT_TRUE(within_rule(got.dhidden, truth.dhidden, baseline.dhidden)) << "dhidden";
    EXPECT_TRUE(within_rule(got.dinp, truth.dinp, baseline.dinp)) << "dinp";
    EXPECT_TRUE(within_rule(got.dw1, truth.dw1, baseline.dw1, sum_ulp)) << "dw1";
    EXPECT_TRUE(within_rule(got.dw2, truth.dw2, baseline.dw2, sum_ulp)) << "dw2";
    EXPECT_TRUE(within_rule(got.dbias, truth.dbias, baseline.dbias, sum_ulp)) << "dbias";
    EXPECT_TRUE(within_rule(got.dscale, truth.dscale, baseline.dscale)) << "dscale";

    const Results<bf16> again = device(c, in, Launch::captured);
    EXPECT_TRUE(same_bits(got.out, again.out)) << "out, second run";
    EXPECT_TRUE(same_bits(got.dinp, again.dinp)) << "dinp, second run";
    EXPECT_TRUE(same_bits(got.dw1, again.dw1)) << "dw1, second run";
    EXPECT_TRUE(same_bits(got.dw2, again.dw2)) << "dw2, second run";
    EXPECT_TRUE(same_bits(got.dbias, again.dbias)) << "dbias, second run";
    EXPECT_TRUE(same_bits(got.dscale, again.dscale)) << "dscale, second run";
  }
};

TEST_F(GateNetCudaTest, NumbersOfOutputs) {
  for (const int O : {1, 5, 8, 14, 16, 17, 26, 32, 33, 41, 48, 49, 64}) check({.N = 300, .C = 64, .G = 64, .O = O});
}

TEST_F(GateNetCudaTest, HiddenWidths) {
  for (const int G : {8, 16, 24, 56, 64, 72, 104, 128}) {
    check({.N = 257, .C = 40, .G = G, .O = 13});
    check({.N = 257, .C = 40, .G = G, .O = 64});
  }
}

TEST_F(GateNetCudaTest, NumbersOfTokens) {
  for (const int64_t N : {1, 7, 15, 16, 17, 127, 128, 129, 1000}) {
    check({.N = N, .C = 48, .G = 64, .O = 41});
    check({.N = N, .C = 48, .G = 64, .O = 5});
  }
  check({.N = 70'001, .C = 8, .G = 8, .O = 3});  // several tiles a part
  check({.N = 40'003, .C = 16, .G = 128, .O = 9});
}

TEST_F(GateNetCudaTest, OptionalParts) {
  for (const bool learned_scale : {true, false}) {
    for (const bool accumulate : {true, false})
      check({.N = 500, .C = 64, .G = 64, .O = 14, .learned_scale = learned_scale, .accumulate = accumulate});
    for (const int O : {1, 5, 41, 64}) {
      check({.N = 501, .C = 64, .G = 64, .O = O, .net = false, .learned_scale = learned_scale});
      check({.N = 70'001, .C = 8, .G = 8, .O = O, .net = false, .learned_scale = learned_scale});
    }
  }
}

TEST_F(GateNetCudaTest, ProductionShapes) {
  for (const int O : {26, 41, 14, 5}) check({.N = 16'391, .C = 768, .G = 64, .O = O});
}

// Hidden values where erf has long saturated and where a sloppy formula would make NaN of 0 times infinity.
TEST_F(GateNetCudaTest, LargeHiddenValues) {
  const Case c{.N = 200, .C = 64, .G = 64, .O = 14};
  testing::Random random = testing::test_random();
  Inputs in = make_inputs(c, random);
  for (bf16& x : in.inp) x = bf16(static_cast<float>(x) * 1e4f);
  const Results<bf16> got = device(c, in, Launch::direct);
  const Results<double> truth = reference<double>(c, in, truth_exec());
  const Results<float> baseline = reference<float>(c, in, baseline_exec());
  EXPECT_TRUE(within_rule(got.out, truth.out, baseline.out)) << "out";
  EXPECT_TRUE(within_rule(got.dhidden, truth.dhidden, baseline.dhidden)) << "dhidden";
}

TEST_F(GateNetCudaTest, RefusesShapesItCannotDo) {
  const Case good{.N = 16, .C = 64, .G = 64, .O = 5};
  auto memory = poisoned<bf16>("memory", 1 << 16);
  auto sums = poisoned<float>("sums", 1 << 16);
  const Pointers<bf16> pointers{.out = memory.get(),
                                .hidden = memory.get(),
                                .dhidden = memory.get(),
                                .dinp = memory.get(),
                                .inp = memory.get(),
                                .w1 = memory.get(),
                                .w2 = memory.get(),
                                .bias = memory.get(),
                                .scale = memory.get(),
                                .dout = memory.get(),
                                .dw1 = sums.get(),
                                .dw2 = sums.get(),
                                .dbias = sums.get(),
                                .dscale = sums.get(),
                                .scratch = sums.get()};
  for (const auto& [G, O, C] : {std::array{60, 5, 64}, {136, 5, 64}, {64, 65, 64}, {64, 5, 60}}) {
    Case c = good;
    c.G = G;
    c.O = O;
    c.C = C;
    EXPECT_THROW(gate_net_forward(forward_args<bf16>(c, pointers), exec()), Error) << c;
    EXPECT_THROW(gate_net_backward(backward_args<bf16>(c, pointers), exec()), Error) << c;
  }
  GateNetForward<bf16> half = forward_args<bf16>(good, pointers);
  half.w2 = nullptr;
  EXPECT_THROW(gate_net_forward(half, exec()), Error);
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/value_gate/value_gate.h"

#include <string>

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::Random;
using testing::same_bits;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

struct Case {
  int64_t N;
  int C, H, P;
};

struct Data {
  std::vector<bf16> inp, embed, weight, dgate, dinp, dembed;
  std::vector<float> dweight;
};

Data make_data(const Case& c, Random& random) {
  return {.inp = random.normal_vector<bf16>(c.N * c.C),
          .embed = random.normal_vector<bf16>(c.N * c.C),
          .weight = random.normal_vector<bf16>(c.H * 2 * c.P, 0.5),
          .dgate = random.normal_vector<bf16>(c.N * c.H),
          .dinp = random.normal_vector<bf16>(c.N * c.C),
          .dembed = random.normal_vector<bf16>(c.N * c.C),
          .dweight = random.normal_vector<float>(c.H * 2 * c.P)};
}

template <class T>
struct Results {
  std::vector<T> gate, dinp, dembed;
  std::vector<Acc<T>> dweight;
};

// Backward starts from the same BF16 gates everywhere.
template <class T>
Results<T> reference(const Case& c, const Data& data, const std::vector<bf16>& saved_gate, const HostExec& exec) {
  const auto inp = widen<T>(data.inp), embed = widen<T>(data.embed), weight = widen<T>(data.weight), dgate = widen<T>(data.dgate),
             saved = widen<T>(saved_gate);
  Results<T> r{.gate = std::vector<T>(static_cast<size_t>(c.N * c.H)),
               .dinp = widen<T>(data.dinp),
               .dembed = widen<T>(data.dembed),
               .dweight = {data.dweight.begin(), data.dweight.end()}};
  std::vector<T> scratch(static_cast<size_t>(value_gate_scratch(c.N, c.H, c.P)));
  value_gate_forward(ValueGateForward<T>{r.gate.data(), inp.data(), embed.data(), weight.data(), c.N, c.C, c.H, c.P}, exec);
  value_gate_backward(ValueGateBackward<T>{.dinp = r.dinp.data(),
                                           .dembed = r.dembed.data(),
                                           .dweight = r.dweight.data(),
                                           .dgate = dgate.data(),
                                           .gate = saved.data(),
                                           .inp = inp.data(),
                                           .embed = embed.data(),
                                           .weight = weight.data(),
                                           .scratch = scratch.data(),
                                           .N = c.N,
                                           .C = c.C,
                                           .H = c.H,
                                           .P = c.P},
                      exec);
  return r;
}

class ValueGateCudaTest : public testing::CudaTest {
 protected:
  Results<bf16> device(const Case& c, const Data& data, const std::vector<bf16>& saved_gate, Launch launch) {
    const auto inp = uploaded("inp", data.inp), embed = uploaded("embed", data.embed), weight = uploaded("weight", data.weight),
               dgate = uploaded("dgate", data.dgate), saved = uploaded("saved gate", saved_gate),
               dinp = uploaded("dinp", data.dinp), dembed = uploaded("dembed", data.dembed),
               gate = poisoned<bf16>("gate", c.N * c.H);
    const auto dweight = uploaded("dweight", data.dweight), scratch = poisoned<float>("scratch", value_gate_scratch(c.N, c.H, c.P));
    run(launch, [&] {
      value_gate_forward({gate.get(), inp.get(), embed.get(), weight.get(), c.N, c.C, c.H, c.P}, exec());
      value_gate_backward({.dinp = dinp.get(),
                           .dembed = dembed.get(),
                           .dweight = dweight.get(),
                           .dgate = dgate.get(),
                           .gate = saved.get(),
                           .inp = inp.get(),
                           .embed = embed.get(),
                           .weight = weight.get(),
                           .scratch = scratch.get(),
                           .N = c.N,
                           .C = c.C,
                           .H = c.H,
                           .P = c.P},
                          exec());
    });
    return {.gate = gate.download(), .dinp = dinp.download(), .dembed = dembed.download(), .dweight = dweight.download()};
  }

  void check(const Case& c) {
    SCOPED_TRACE("N = " + std::to_string(c.N) + ", C = " + std::to_string(c.C) + ", H = " + std::to_string(c.H) +
                 ", P = " + std::to_string(c.P));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    const std::vector<bf16> saved = random.normal_vector<bf16>(c.N * c.H, 0.4, 1);
    const Results<double> truth = reference<double>(c, data, saved, truth_exec());
    const Results<float> baseline = reference<float>(c, data, saved, baseline_exec());
    const Results<bf16> got = device(c, data, saved, Launch::direct);
    EXPECT_TRUE(within_rule(got.gate, truth.gate, baseline.gate)) << "gate";
    EXPECT_TRUE(within_rule(got.dinp, truth.dinp, baseline.dinp)) << "dinp";
    EXPECT_TRUE(within_rule(got.dembed, truth.dembed, baseline.dembed)) << "dembed";
    EXPECT_TRUE(within_rule(got.dweight, truth.dweight, baseline.dweight, Ulp::accumulated)) << "dweight";
    for (int64_t i = 0; i < c.N * c.C; ++i) {
      if (i % c.C < c.P) continue;
      ASSERT_EQ(got.dinp[i].bits, data.dinp[i].bits) << "dinp[" << i << "] has no part in a gate";
      ASSERT_EQ(got.dembed[i].bits, data.dembed[i].bits) << "dembed[" << i << "] has no part in a gate";
    }

    const Results<bf16> again = device(c, data, saved, Launch::captured);
    EXPECT_TRUE(same_bits(got.gate, again.gate)) << "gate, second run";
    EXPECT_TRUE(same_bits(got.dinp, again.dinp)) << "dinp, second run";
    EXPECT_TRUE(same_bits(got.dembed, again.dembed)) << "dembed, second run";
    EXPECT_TRUE(same_bits(got.dweight, again.dweight)) << "dweight, second run";
  }
};

TEST_F(ValueGateCudaTest, NumbersOfTokens) {
  for (const int64_t N : {1, 31, 32, 33, 127, 128, 129, 1000}) check({N, 64, 6, 6});
}

TEST_F(ValueGateCudaTest, HeadsAndChannels) {
  for (const int H : {1, 3, 7, 32}) {
    for (const int P : {1, 5, 8, 9, 15, 16}) check({200, 24, H, P});
  }
  check({50, 8, 6, 8});
}

TEST_F(ValueGateCudaTest, ProductionShape) { check({16'411, 768, 6, 6}); }

// More tokens than parts of one tile each.
TEST_F(ValueGateCudaTest, LongSums) { check({70'001, 16, 6, 6}); }

// Whatever lies in the channels beyond P, it is not read into a gate.
TEST_F(ValueGateCudaTest, OtherChannelsDoNotMatter) {
  const Case c{40, 16, 6, 6};
  Random random = testing::test_random();
  Data data = make_data(c, random);
  const std::vector<bf16> saved = random.normal_vector<bf16>(c.N * c.H, 0.4, 1);
  const Results<bf16> clean = device(c, data, saved, Launch::direct);
  for (int64_t i = 0; i < c.N * c.C; ++i) {
    if (i % c.C >= c.P) data.inp[i] = data.embed[i] = bf16(std::numeric_limits<float>::infinity());
  }
  const Results<bf16> odd = device(c, data, saved, Launch::direct);
  EXPECT_TRUE(same_bits(odd.gate, clean.gate));
  EXPECT_TRUE(same_bits(odd.dinp, clean.dinp));
  EXPECT_TRUE(same_bits(odd.dweight, clean.dweight));
}

TEST_F(ValueGateCudaTest, RefusesShapesItCannotDo) {
  const auto x = poisoned<bf16>("x", 1 << 12);
  const auto forward = [&](int C, int H, int P, int shift) {
    value_gate_forward({x.get(), x.get() + shift, x.get(), x.get(), 2, C, H, P}, exec());
  };
  EXPECT_THROW(forward(12, 6, 6, 0), Error);
  EXPECT_THROW(forward(16, 33, 6, 0), Error);
  EXPECT_THROW(forward(16, 6, 17, 0), Error);
  EXPECT_THROW(forward(8, 6, 9, 0), Error);
  EXPECT_THROW(forward(16, 6, 6, 1), Error);
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/head_gate/head_gate.h"

#include <string>

#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::Random;
using testing::same_bits;
using testing::widen;
using testing::within_rule;

struct Case {
  int64_t N;
  int H, D;
  bool xsa = true, gate = true;
  bool in_place = false;  // dy is dout
  int64_t elements() const { return N * H * D; }
  int64_t stride() const { return H + 5; }
};

struct Data {
  std::vector<bf16> y, v, alpha, gate, dout, dv, dalpha, dgate;
};

Data make_data(const Case& c, Random& random) {
  Data data{.y = random.normal_vector<bf16>(c.elements()),
            .v = random.normal_vector<bf16>(c.elements(), 0.7),
            .alpha = random.normal_vector<bf16>(c.N * c.stride()),
            .gate = random.normal_vector<bf16>(c.N * c.stride(), 0.5, 0.5),
            .dout = random.normal_vector<bf16>(c.elements()),
            .dv = random.normal_vector<bf16>(c.elements()),
            .dalpha = random.normal_vector<bf16>(c.N * c.stride()),
            .dgate = random.normal_vector<bf16>(c.N * c.stride())};
  std::fill_n(data.v.begin(), c.D, bf16(0.0f));  // a head without direction
  return data;
}

template <class T>
struct Results {
  std::vector<T> out, dy, dv, dalpha, dgate;
};

template <class T>
struct Pointers {
  T *out, *dy, *dv, *dalpha, *dgate;
  const T *y, *v, *alpha, *gate, *dout;
};

template <class T>
HeadGateForward<T> forward_args(const Case& c, const Pointers<T>& p) {
  return {.out = p.out,
          .y = p.y,
          .v = c.xsa ? p.v : nullptr,
          .alpha = c.xsa ? p.alpha : nullptr,
          .gate = c.gate ? p.gate : nullptr,
          .stride = c.stride(),
          .N = c.N,
          .H = c.H,
          .D = c.D};
}

template <class T>
HeadGateBackward<T> backward_args(const Case& c, const Pointers<T>& p) {
  return {.dy = p.dy,
          .dv = c.xsa ? p.dv : nullptr,
          .dalpha = c.xsa ? p.dalpha : nullptr,
          .dgate = c.gate ? p.dgate : nullptr,
          .dout = p.dout,
          .y = p.y,
          .v = c.xsa ? p.v : nullptr,
          .alpha = c.xsa ? p.alpha : nullptr,
          .gate = c.gate ? p.gate : nullptr,
          .stride = c.stride(),
          .N = c.N,
          .H = c.H,
          .D = c.D};
}

template <class T>
Results<T> reference(const Case& c, const Data& data, const HostExec& exec) {
  const auto y = widen<T>(data.y), v = widen<T>(data.v), alpha = widen<T>(data.alpha), gate = widen<T>(data.gate),
             dout = widen<T>(data.dout);
  Results<T> r{.out = std::vector<T>(y.size()),
               .dy = std::vector<T>(y.size()),
               .dv = widen<T>(data.dv),
               .dalpha = widen<T>(data.dalpha),
               .dgate = widen<T>(data.dgate)};
  const Pointers<T> pointers{.out = r.out.data(),
                             .dy = r.dy.data(),
                             .dv = r.dv.data(),
                             .dalpha = r.dalpha.data(),
                             .dgate = r.dgate.data(),
                             .y = y.data(),
                             .v = v.data(),
                             .alpha = alpha.data(),
                             .gate = gate.data(),
                             .dout = dout.data()};
  head_gate_forward(forward_args(c, pointers), exec);
  head_gate_backward(backward_args(c, pointers), exec);
  return r;
}

class HeadGateCudaTest : public testing::CudaTest {
 protected:
  Results<bf16> device(const Case& c, const Data& data, Launch launch) {
    const auto y = uploaded("y", data.y), v = uploaded("v", data.v), alpha = uploaded("alpha", data.alpha),
               gate = uploaded("gate", data.gate), dout = uploaded("dout", data.dout), dv = uploaded("dv", data.dv),
               dalpha = uploaded("dalpha", data.dalpha), dgate = uploaded("dgate", data.dgate),
               out = poisoned<bf16>("out", c.elements()),
               dy = c.in_place ? uploaded("dy", data.dout) : poisoned<bf16>("dy", c.elements());
    const Pointers<bf16> pointers{.out = out.get(),
                                  .dy = dy.get(),
                                  .dv = dv.get(),
                                  .dalpha = dalpha.get(),
                                  .dgate = dgate.get(),
                                  .y = y.get(),
                                  .v = v.get(),
                                  .alpha = alpha.get(),
                                  .gate = gate.get(),
                                  .dout = c.in_place ? dy.get() : dout.get()};
    run(launch, [&] {
      head_gate_forward(forward_args(c, pointers), exec());
      head_gate_backward(backward_args(c, pointers), exec());
    });
    return {
        .out = out.download(), .dy = dy.download(), .dv = dv.download(), .dalpha = dalpha.download(), .dgate = dgate.download()};
  }

  void check(const Case& c) {
    SCOPED_TRACE("N = " + std::to_string(c.N) + ", H = " + std::to_string(c.H) + ", D = " + std::to_string(c.D) +
                 (c.xsa ? ", XSA" : "") + (c.gate ? ", gate" : "") + (c.in_place ? ", in place" : ""));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    const Results<double> truth = reference<double>(c, data, truth_exec());
    const Results<float> baseline = reference<float>(c, data, baseline_exec());
    const Results<bf16> got = device(c, data, Launch::direct);
    EXPECT_TRUE(within_rule(got.out, truth.out, baseline.out)) << "out";
    EXPECT_TRUE(within_rule(got.dy, truth.dy, baseline.dy)) << "dy";
    EXPECT_TRUE(within_rule(got.dv, truth.dv, baseline.dv)) << "dv";
    EXPECT_TRUE(within_rule(got.dalpha, truth.dalpha, baseline.dalpha)) << "dalpha";
    EXPECT_TRUE(within_rule(got.dgate, truth.dgate, baseline.dgate)) << "dgate";
    for (int64_t i = 0; i < c.N * c.stride(); ++i) {
      const bool of_a_head = i % c.stride() < c.H;
      if (!of_a_head || !c.xsa) {
        ASSERT_EQ(got.dalpha[i].bits, data.dalpha[i].bits) << "dalpha[" << i << "] is not this op's";
      }
      if (!of_a_head || !c.gate) {
        ASSERT_EQ(got.dgate[i].bits, data.dgate[i].bits) << "dgate[" << i << "] is not this op's";
      }
    }

    const Results<bf16> again = device(c, data, Launch::captured);
    EXPECT_TRUE(same_bits(got.out, again.out)) << "out, second run";
    EXPECT_TRUE(same_bits(got.dy, again.dy)) << "dy, second run";
    EXPECT_TRUE(same_bits(got.dv, again.dv)) << "dv, second run";
    EXPECT_TRUE(same_bits(got.dalpha, again.dalpha)) << "dalpha, second run";
    EXPECT_TRUE(same_bits(got.dgate, again.dgate)) << "dgate, second run";
  }
};

TEST_F(HeadGateCudaTest, EveryCombinationOfParts) {
  for (const auto& [xsa, gate] : {std::pair{true, false}, std::pair{false, true}, std::pair{true, true}}) {
    for (const bool in_place : {false, true}) check({.N = 333, .H = 6, .D = 128, .xsa = xsa, .gate = gate, .in_place = in_place});
  }
}

// Groups of lanes that a head fills and ones that stay partly idle.
TEST_F(HeadGateCudaTest, HeadWidths) {
  for (const int D : {8, 24, 64, 72, 128, 136, 256}) {
    for (const int H : {1, 5}) check({.N = 37, .H = H, .D = D});
  }
}

TEST_F(HeadGateCudaTest, NumbersOfHeads) {
  for (const int64_t N : {1, 2, 15, 16, 17, 1000}) check({.N = N, .H = 3, .D = 128});
}

TEST_F(HeadGateCudaTest, ProductionShape) {
  check({.N = 16'411, .H = 6, .D = 128});
  check({.N = 16'411, .H = 6, .D = 128, .xsa = true, .gate = false});
  check({.N = 16'411, .H = 6, .D = 128, .xsa = false, .gate = true, .in_place = true});
}

TEST_F(HeadGateCudaTest, RefusesWhatItCannotDo) {
  const auto x = poisoned<bf16>("x", 1 << 12);
  const Pointers<bf16> pointers{.out = x.get(),
                                .dy = x.get(),
                                .dv = x.get(),
                                .dalpha = x.get(),
                                .dgate = x.get(),
                                .y = x.get(),
                                .v = x.get(),
                                .alpha = x.get(),
                                .gate = x.get(),
                                .dout = x.get()};
  const auto forward = [&](const auto& change) {
    HeadGateForward<bf16> args = forward_args({.N = 2, .H = 2, .D = 16}, pointers);
    change(args);
    head_gate_forward(args, exec());
  };
  EXPECT_THROW(forward([](auto& args) { args.D = 12; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.D = 264; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.alpha = args.gate = nullptr; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.v = nullptr; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.stride = 1; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.N = int64_t{1} << 31; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.y += 1; }), Error);
}

}  // namespace
}  // namespace speedrun::kernels

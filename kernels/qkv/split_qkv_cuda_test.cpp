#include <algorithm>

#include "kernels/qkv/split_qkv.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/fp8_check.h"
#include "kernels/testing/product_ulp.h"

namespace speedrun::kernels {
namespace {

using testing::Random;
using testing::Ulp;
using testing::widen;
using testing::within_rule;

constexpr double kEps = 1.1920929e-7;

struct Config {
  int64_t rows, row_tokens;
  int H, D;
  bool paired = false, key_shift = false;
  int gate_heads = 0;  // 0: no value embedding
  bool value_add = false, accumulate = false;

  int64_t N() const { return rows * row_tokens; }
  int C() const { return H * D; }
  int64_t elements() const { return N() * C(); }
  bool embeds() const { return gate_heads > 0; }
  int num_gates() const { return embeds() ? (H + gate_heads - 1) / gate_heads : 0; }
  int gate_stride() const { return num_gates() + 3; }  // gates among other outputs of a net
};

std::string name(const Config& c) {
  return std::to_string(c.rows) + " rows of " + std::to_string(c.row_tokens) + " tokens, H = " + std::to_string(c.H) +
         ", D = " + std::to_string(c.D) + (c.paired ? ", paired" : "") + (c.key_shift ? ", key shift" : "") + ", heads of a gate " +
         std::to_string(c.gate_heads) + (c.value_add ? ", added values" : "") + (c.accumulate ? ", accumulating" : "");
}

struct Data {
  std::vector<bf16> inp, weight, value_embed, value_gate, value_add, dq, dk, dv, dvalue_embed, dvalue_gate;
  std::vector<float> frequencies, dweight;
};

Data make_data(const Config& c, Random& random) {
  Data data{.inp = random.normal_vector<bf16>(c.elements()),
            .weight = random.normal_vector<bf16>(int64_t{3} * c.C() * c.C(), 0.05),
            .value_embed = random.normal_vector<bf16>(c.elements()),
            .value_gate = random.normal_vector<bf16>(c.N() * c.gate_stride(), 0.5, 1),
            .value_add = random.normal_vector<bf16>(c.elements()),
            .dq = random.normal_vector<bf16>(c.elements()),
            .dk = random.normal_vector<bf16>(c.elements()),
            .dv = random.normal_vector<bf16>(c.elements()),
            .dvalue_embed = random.normal_vector<bf16>(c.elements()),
            .dvalue_gate = random.normal_vector<bf16>(c.N() * c.gate_stride()),
            .frequencies = {},
            .dweight = random.normal_vector<float>(int64_t{3} * c.C() * c.C())};
  for (int i = 0; i < c.D / 4; ++i) data.frequencies.push_back(static_cast<float>(std::pow(1024.0, -i / (c.D / 4 - 1.0))));
  return data;
}

// What forward leaves for backward.
template <class T>
struct Forward {
  std::vector<T> q, k, v, key_tail;
  std::vector<Acc<T>> rstd;
};
template <class T>
struct Backward {
  std::vector<T> raw, dinp, dvalue_embed, dvalue_gate;
  std::vector<Acc<T>> dweight;
};

// A reference's vectors or a device's buffers: the arguments are the same but for where they lie.
template <class T>
struct Pointers {
  T *q, *k, *v, *key_tail, *raw;
  Acc<T>* rstd;
  const T *inp, *weight;
  const Acc<T>* frequencies;
  const T *value_embed, *value_gate, *value_add;
  T* dinp = nullptr;
  Acc<T>* dweight = nullptr;
  T *dvalue_embed = nullptr, *dvalue_gate = nullptr;
  const T *dq = nullptr, *dk = nullptr, *dv = nullptr;
};

template <class T>
SplitQkvForward<T> forward_args(const Config& c, const Pointers<T>& p) {
  return {.q = p.q,
          .k = p.k,
          .v = p.v,
          .qk_rstd = p.rstd,
          .key_tail = c.key_shift ? p.key_tail : nullptr,
          .raw = p.raw,
          .inp = p.inp,
          .weight = p.weight,
          .frequencies = p.frequencies,
          .value_embed = c.embeds() ? p.value_embed : nullptr,
          .value_gate = c.embeds() ? p.value_gate : nullptr,
          .value_add = c.value_add ? p.value_add : nullptr,
          .value_gate_stride = c.gate_stride(),
          .gate_heads = c.gate_heads,
          .paired = c.paired,
          .key_shift = c.key_shift,
          .N = c.N(),
          .row_tokens = c.row_tokens,
          .C = c.C(),
          .H = c.H,
          .eps = kEps};
}

template <class T>
SplitQkvBackward<T> backward_args(const Config& c, const Pointers<T>& p) {
  return {.dinp = p.dinp,
          .dweight = p.dweight,
          .dvalue_embed = c.embeds() ? p.dvalue_embed : nullptr,
          .accumulate_dvalue_embed = c.accumulate,
          .dvalue_gate = c.embeds() ? p.dvalue_gate : nullptr,
          .raw = p.raw,
          .dq = p.dq,
          .dk = p.dk,
          .dv = p.dv,
          .q = p.q,
          .k = p.k,
          .qk_rstd = p.rstd,
          .key_tail = c.key_shift ? p.key_tail : nullptr,
          .inp = p.inp,
          .weight = p.weight,
          .frequencies = p.frequencies,
          .value_embed = c.embeds() ? p.value_embed : nullptr,
          .value_gate = c.embeds() ? p.value_gate : nullptr,
          .value_gate_stride = c.gate_stride(),
          .gate_heads = c.gate_heads,
          .paired = c.paired,
          .key_shift = c.key_shift,
          .N = c.N(),
          .row_tokens = c.row_tokens,
          .C = c.C(),
          .H = c.H};
}

template <class T>
Forward<T> forward_reference(const Config& c, const Data& data, const HostExec& exec) {
  const auto inp = widen<T>(data.inp), weight = widen<T>(data.weight), value_embed = widen<T>(data.value_embed),
             value_gate = widen<T>(data.value_gate), value_add = widen<T>(data.value_add);
  const std::vector<T> frequencies(data.frequencies.begin(), data.frequencies.end());
  const size_t elements = data.inp.size();
  std::vector<T> raw(3 * elements);
  Forward<T> f{.q = std::vector<T>(elements),
               .k = std::vector<T>(elements),
               .v = std::vector<T>(elements),
               .key_tail = std::vector<T>(static_cast<size_t>(c.rows * c.H * c.D / 2)),
               .rstd = std::vector<T>(static_cast<size_t>(c.N() * 2 * c.H))};
  const Pointers<T> pointers{.q = f.q.data(),
                             .k = f.k.data(),
                             .v = f.v.data(),
                             .key_tail = f.key_tail.data(),
                             .raw = raw.data(),
                             .rstd = f.rstd.data(),
                             .inp = inp.data(),
                             .weight = weight.data(),
                             .frequencies = frequencies.data(),
                             .value_embed = value_embed.data(),
                             .value_gate = value_gate.data(),
                             .value_add = value_add.data()};
  split_qkv_forward(forward_args(c, pointers), exec);
  return f;
}

// Every implementation goes backward from the same BF16 q and k and the same FP32 factors.
struct Saved {
  std::vector<bf16> q, k, key_tail;
  std::vector<float> rstd;
};

template <class T>
Backward<T> backward_reference(const Config& c, const Data& data, const Saved& saved, const HostExec& exec) {
  const auto inp = widen<T>(data.inp), weight = widen<T>(data.weight), value_embed = widen<T>(data.value_embed),
             value_gate = widen<T>(data.value_gate), dq = widen<T>(data.dq), dk = widen<T>(data.dk), dv = widen<T>(data.dv);
  auto q = widen<T>(saved.q), k = widen<T>(saved.k), key_tail = widen<T>(saved.key_tail);
  std::vector<T> rstd(saved.rstd.begin(), saved.rstd.end());
  const std::vector<T> frequencies(data.frequencies.begin(), data.frequencies.end());
  Backward<T> b{.raw = std::vector<T>(3 * data.inp.size()),
                .dinp = std::vector<T>(data.inp.size()),
                .dvalue_embed = widen<T>(data.dvalue_embed),
                .dvalue_gate = widen<T>(data.dvalue_gate),
                .dweight = {data.dweight.begin(), data.dweight.end()}};
  const Pointers<T> pointers{.q = q.data(),
                             .k = k.data(),
                             .v = nullptr,
                             .key_tail = key_tail.data(),
                             .raw = b.raw.data(),
                             .rstd = rstd.data(),
                             .inp = inp.data(),
                             .weight = weight.data(),
                             .frequencies = frequencies.data(),
                             .value_embed = value_embed.data(),
                             .value_gate = value_gate.data(),
                             .value_add = nullptr,
                             .dinp = b.dinp.data(),
                             .dweight = b.dweight.data(),
                             .dvalue_embed = b.dvalue_embed.data(),
                             .dvalue_gate = b.dvalue_gate.data(),
                             .dq = dq.data(),
                             .dk = dk.data(),
                             .dv = dv.data()};
  split_qkv_backward(backward_args(c, pointers), exec);
  return b;
}

struct DeviceResult {
  Forward<bf16> forward;
  Backward<bf16> backward;
};

class SplitQkvCudaTest : public testing::CudaTest {
 protected:
  DeviceResult device(const Config& c, const Data& data, const Saved& saved, Launch launch) {
    const auto inp = uploaded("inp", data.inp), weight = uploaded("weight", data.weight),
               value_embed = uploaded("value_embed", data.value_embed), value_gate = uploaded("value_gate", data.value_gate),
               value_add = uploaded("value_add", data.value_add), dq = uploaded("dq", data.dq), dk = uploaded("dk", data.dk),
               dv = uploaded("dv", data.dv), saved_q = uploaded("saved q", saved.q), saved_k = uploaded("saved k", saved.k),
               saved_tail = uploaded("saved key_tail", saved.key_tail);
    const auto frequencies = uploaded("frequencies", data.frequencies), saved_rstd = uploaded("saved rstd", saved.rstd),
               dweight = uploaded("dweight", data.dweight), rstd = poisoned<float>("rstd", c.N() * 2 * c.H);
    const auto q = poisoned<bf16>("q", c.elements()), k = poisoned<bf16>("k", c.elements()), v = poisoned<bf16>("v", c.elements()),
               tail = poisoned<bf16>("key_tail", c.rows * c.H * c.D / 2), raw = poisoned<bf16>("raw", 3 * c.elements()),
               raw_gradient = poisoned<bf16>("gradient of raw", 3 * c.elements()), dinp = poisoned<bf16>("dinp", c.elements()),
               dvalue_embed =
                   c.accumulate ? uploaded("dvalue_embed", data.dvalue_embed) : poisoned<bf16>("dvalue_embed", c.elements()),
               dvalue_gate = uploaded("dvalue_gate", data.dvalue_gate);
    Pointers<bf16> pointers{.q = q.get(),
                            .k = k.get(),
                            .v = v.get(),
                            .key_tail = tail.get(),
                            .raw = raw.get(),
                            .rstd = rstd.get(),
                            .inp = inp.get(),
                            .weight = weight.get(),
                            .frequencies = frequencies.get(),
                            .value_embed = value_embed.get(),
                            .value_gate = value_gate.get(),
                            .value_add = value_add.get(),
                            .dinp = dinp.get(),
                            .dweight = dweight.get(),
                            .dvalue_embed = dvalue_embed.get(),
                            .dvalue_gate = dvalue_gate.get(),
                            .dq = dq.get(),
                            .dk = dk.get(),
                            .dv = dv.get()};
    run(launch, [&] { split_qkv_forward(forward_args(c, pointers), exec()); });
    pointers.q = saved_q.get(), pointers.k = saved_k.get(), pointers.key_tail = saved_tail.get();
    pointers.rstd = saved_rstd.get(), pointers.raw = raw_gradient.get();
    run(launch, [&] { split_qkv_backward(backward_args(c, pointers), exec()); });
    return {
        .forward = {.q = q.download(), .k = k.download(), .v = v.download(), .key_tail = tail.download(), .rstd = rstd.download()},
        .backward = {.raw = raw_gradient.download(),
                     .dinp = dinp.download(),
                     .dvalue_embed = dvalue_embed.download(),
                     .dvalue_gate = dvalue_gate.download(),
                     .dweight = dweight.download()}};
  }

  void check(const Config& c) {
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    const Forward<double> forward = forward_reference<double>(c, data, truth_exec());
    const Forward<float> forward_baseline = forward_reference<float>(c, data, baseline_exec());
    const auto narrow = [](const std::vector<float>& values) {
      std::vector<bf16> narrowed;
      for (const float x : values) narrowed.emplace_back(x);
      return narrowed;
    };
    const Saved saved{.q = narrow(forward_baseline.q),
                      .k = narrow(forward_baseline.k),
                      .key_tail = narrow(forward_baseline.key_tail),
                      .rstd = forward_baseline.rstd};
    const Backward<double> backward = backward_reference<double>(c, data, saved, truth_exec());
    const Backward<float> backward_baseline = backward_reference<float>(c, data, saved, baseline_exec());

    const DeviceResult got = device(c, data, saved, Launch::direct);
    EXPECT_TRUE(within_rule(got.forward.q, forward.q, forward_baseline.q)) << "q";
    EXPECT_TRUE(within_rule(got.forward.k, forward.k, forward_baseline.k)) << "k";
    EXPECT_TRUE(within_rule(got.forward.v, forward.v, forward_baseline.v)) << "v";
    EXPECT_TRUE(within_rule(got.forward.rstd, forward.rstd, forward_baseline.rstd, Ulp::accumulated)) << "rstd";
    if (c.key_shift) {
      EXPECT_TRUE(within_rule(got.forward.key_tail, forward.key_tail, forward_baseline.key_tail)) << "key_tail";
    }
    EXPECT_TRUE(within_rule(got.backward.raw, backward.raw, backward_baseline.raw)) << "gradient of raw";
    EXPECT_TRUE(within_rule(got.backward.dinp, backward.dinp, backward_baseline.dinp)) << "dinp";
    EXPECT_TRUE(within_rule(got.backward.dweight, backward.dweight, backward_baseline.dweight, testing::product_ulp(c.N())))
        << "dweight";
    if (c.embeds()) {
      EXPECT_TRUE(within_rule(got.backward.dvalue_embed, backward.dvalue_embed, backward_baseline.dvalue_embed)) << "dvalue_embed";
      EXPECT_TRUE(within_rule(got.backward.dvalue_gate, backward.dvalue_gate, backward_baseline.dvalue_gate)) << "dvalue_gate";
    }
    for (int64_t i = 0; i < c.N() * c.gate_stride(); ++i) {
      if (i % c.gate_stride() < c.num_gates()) continue;
      ASSERT_EQ(got.backward.dvalue_gate[i].bits, data.dvalue_gate[i].bits) << "dvalue_gate[" << i << "], which is no gate's";
    }

    const DeviceResult again = device(c, data, saved, Launch::captured);
    EXPECT_TRUE(testing::same_bits(got.forward.q, again.forward.q)) << "q, second run";
    EXPECT_TRUE(testing::same_bits(got.forward.k, again.forward.k)) << "k, second run";
    EXPECT_TRUE(testing::same_bits(got.forward.v, again.forward.v)) << "v, second run";
    EXPECT_TRUE(testing::same_bits(got.forward.rstd, again.forward.rstd)) << "rstd, second run";
    EXPECT_TRUE(testing::same_bits(got.forward.key_tail, again.forward.key_tail)) << "key_tail, second run";
    EXPECT_TRUE(testing::same_bits(got.backward.raw, again.backward.raw)) << "gradient of raw, second run";
    EXPECT_TRUE(testing::same_bits(got.backward.dinp, again.backward.dinp)) << "dinp, second run";
    EXPECT_TRUE(testing::same_bits(got.backward.dweight, again.backward.dweight)) << "dweight, second run";
    EXPECT_TRUE(testing::same_bits(got.backward.dvalue_embed, again.backward.dvalue_embed)) << "dvalue_embed, second run";
    EXPECT_TRUE(testing::same_bits(got.backward.dvalue_gate, again.backward.dvalue_gate)) << "dvalue_gate, second run";
  }
};

TEST_F(SplitQkvCudaTest, EveryCombinationOfFeatures) {
  for (const bool paired : {false, true}) {
    for (const bool key_shift : {false, true}) {
      for (const int gate_heads : {0, 1, 3}) {
        for (const bool value_add : {false, true}) {
          check({.rows = 3,
                 .row_tokens = 37,
                 .H = 6,
                 .D = 64,
                 .paired = paired,
                 .key_shift = key_shift,
                 .gate_heads = gate_heads,
                 .value_add = value_add,
                 .accumulate = value_add});
        }
      }
    }
  }
}

// Both widths, with head counts that leave lanes idle and ones beyond one batch of loads.
TEST_F(SplitQkvCudaTest, HeadWidthsAndCounts) {
  for (const int D : {64, 128}) {
    for (const int H : {1, 2, 5, 7, 13})
      check({.rows = 2, .row_tokens = 19, .H = H, .D = D, .paired = true, .key_shift = true, .gate_heads = 2, .value_add = true});
  }
}

// The first token of a row may be its last, and rows may end anywhere in a block.
TEST_F(SplitQkvCudaTest, RowLengths) {
  for (const int64_t row_tokens : {1, 2, 3, 7, 8, 9})
    check({.rows = 5, .row_tokens = row_tokens, .H = 2, .D = 128, .key_shift = true, .gate_heads = 1});
  check({.rows = 1, .row_tokens = 1, .H = 1, .D = 64, .paired = true, .key_shift = true});
}

TEST_F(SplitQkvCudaTest, ProductionWidths) {
  check({.rows = 3, .row_tokens = 1367, .H = 6, .D = 128, .paired = true, .gate_heads = 1, .accumulate = true});
  check({.rows = 1, .row_tokens = 4099, .H = 6, .D = 128, .key_shift = true, .gate_heads = 3, .value_add = true});
  check({.rows = 2, .row_tokens = 8195, .H = 6, .D = 128, .paired = true, .key_shift = true});
}

// The projection in FP8; everything behind it works on its result in BF16 as before.
class SplitQkvFp8CudaTest : public SplitQkvCudaTest {
 protected:
  void check_fp8(const Config& c, const testing::ProjectionFp8Case& fp8_case) {
    SCOPED_TRACE(name(c) + ", " + name(fp8_case));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    const auto inp = uploaded("inp", data.inp), weight = uploaded("weight", data.weight), dq = uploaded("dq", data.dq),
               dk = uploaded("dk", data.dk), dv = uploaded("dv", data.dv);
    const auto frequencies = uploaded("frequencies", data.frequencies);
    auto rstd = poisoned<float>("rstd", c.N() * 2 * c.H), dweight = uploaded("dweight", data.dweight);
    auto q = poisoned<bf16>("q", c.elements()), k = poisoned<bf16>("k", c.elements()), v = poisoned<bf16>("v", c.elements()),
         tail = poisoned<bf16>("key_tail", c.rows * c.H * c.D / 2), raw = poisoned<bf16>("raw", 3 * c.elements()),
         raw_gradient = poisoned<bf16>("gradient of raw", 3 * c.elements()), dinp = poisoned<bf16>("dinp", c.elements());
    testing::DeviceProjectionFp8 fp8(data.weight, {.N = c.N(), .K = c.C(), .O = 3 * c.C()}, fp8_case, exec().stream);
    Pointers<bf16> pointers{.q = q.get(),
                            .k = k.get(),
                            .v = v.get(),
                            .key_tail = tail.get(),
                            .raw = raw.get(),
                            .rstd = rstd.get(),
                            .inp = inp.get(),
                            .weight = weight.get(),
                            .frequencies = frequencies.get(),
                            .value_embed = nullptr,
                            .value_gate = nullptr,
                            .value_add = nullptr,
                            .dinp = dinp.get(),
                            .dweight = dweight.get(),
                            .dq = dq.get(),
                            .dk = dk.get(),
                            .dv = dv.get()};
    SplitQkvForward<bf16> forward = forward_args(c, pointers);
    forward.fp8 = fp8.args();
    pointers.raw = raw_gradient.get();
    SplitQkvBackward<bf16> backward = backward_args(c, pointers);
    backward.fp8 = fp8.args();
    const auto launch = [&](Launch how) {
      dinp.poison();
      dweight.upload(data.dweight);
      fp8.reset();
      run(how, [&] {
        split_qkv_forward(forward, exec());
        split_qkv_backward(backward, exec());
      });
    };
    launch(Launch::direct);
    const std::vector<bf16> got_raw = raw.download(), got_dinp = dinp.download();
    const std::vector<float> got_dweight = dweight.download();
    launch(Launch::captured);
    EXPECT_TRUE(testing::same_bits(raw.download(), got_raw)) << "raw";
    EXPECT_TRUE(testing::same_bits(dinp.download(), got_dinp)) << "dinp";
    EXPECT_TRUE(testing::same_bits(dweight.download(), got_dweight)) << "dweight";
    fp8.check_forward(got_raw, truth_exec());
    fp8.check_backward(data.inp, raw_gradient.download(), got_dinp, data.dweight, got_dweight, truth_exec());
  }
};

TEST_F(SplitQkvFp8CudaTest, EveryChoice) {
  if (exec().compute_capability < 89) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
  for (const testing::ProjectionFp8Case& each : testing::every_projection_fp8())
    check_fp8({.rows = 3, .row_tokens = 48, .H = 2, .D = 64, .key_shift = true}, each);
}

TEST_F(SplitQkvFp8CudaTest, ProductionWidths) {
  if (exec().compute_capability < 89) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
  check_fp8({.rows = 2, .row_tokens = 1040, .H = 6, .D = 128, .paired = true}, {});
  check_fp8({.rows = 1, .row_tokens = 1040, .H = 6, .D = 128}, {.scaling = Fp8Scaling::delayed});
}

TEST_F(SplitQkvCudaTest, RefusesWhatItCannotDo) {
  const auto x = poisoned<bf16>("x", 1 << 16);
  const auto f = poisoned<float>("f", 1 << 10);
  const Pointers<bf16> pointers{.q = x.get(),
                                .k = x.get(),
                                .v = x.get(),
                                .key_tail = x.get(),
                                .raw = x.get(),
                                .rstd = f.get(),
                                .inp = x.get(),
                                .weight = x.get(),
                                .frequencies = f.get(),
                                .value_embed = x.get(),
                                .value_gate = x.get(),
                                .value_add = x.get()};
  const auto forward = [&](const auto& change) {
    SplitQkvForward<bf16> args =
        forward_args({.rows = 2, .row_tokens = 4, .H = 1, .D = 64, .key_shift = true, .gate_heads = 1}, pointers);
    change(args);
    split_qkv_forward(args, exec());
  };
  EXPECT_THROW(forward([](auto& args) { args.C = 96; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.row_tokens = 3; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.key_tail = nullptr; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.value_gate = nullptr; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.gate_heads = 0; }), Error);
  EXPECT_THROW(forward([](auto& args) { args.k += 1; }), Error);
}

}  // namespace
}  // namespace speedrun::kernels

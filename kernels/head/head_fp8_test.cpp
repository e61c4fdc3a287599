// The head in FP8: what is stored, in which layouts and units, and what the products make of it.
#include "kernels/base/error.h"
#include "kernels/head/head_problem_test.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

constexpr int64_t kRow = 8;  // tokens
constexpr float kInpScale = 0.0625f, kWeightScale = 0.0078125f;

// A head with three terms and prefix, and its FP8 tensors. `representable`: inputs and weights are E4M3 numbers times their scale,
// so that quantising them changes nothing.
template <class T>
struct Fp8Problem {
  HeadProblem<T> head;
  std::vector<e4m3> weight8, weight8_t, inp8, inp8_t;
  std::vector<e5m2> grad8, grad8_t;
  Fp8Scale weight_scale{.scale = kWeightScale}, inp_scale{.scale = kInpScale}, grad_scale8{.scale = 0};
  double grad_bound = 0.75;
  bool count = false;

  Fp8Problem(int64_t tokens, int64_t chunk, int C, int V, Softcap softcap, bool representable, Random& random)
      : head(tokens, chunk, C, V, softcap, false, random),
        weight8(head.weight.size()),
        weight8_t(head.weight.size()),
        inp8(static_cast<size_t>(chunk * C)),
        inp8_t(inp8.size()),
        grad8(static_cast<size_t>(chunk * V)),
        grad8_t(grad8.size()) {
    head.loss_weights =
        LossWeights<T>{.next = {static_cast<T>(1), static_cast<T>(0.5), static_cast<T>(0.25)}, .prefix = static_cast<T>(0.25)};
    head.loss_terms = 3;
    head.row_tokens = kRow;
    for (int v = 0; v < V; ++v) head.prefix.push_back(v / 2 - 1);
    for (T& w : head.weight) w *= static_cast<T>(0.3);
    if (representable) {
      for (T& x : head.inp) x = quantised(x, kInpScale);
      for (T& w : head.weight) w = quantised(w, kWeightScale);
    }
    for (int v = 0; v < V; ++v) {
      for (int c = 0; c < C; ++c) {
        weight8_t[c * V + v] = weight8[v * C + c] = to_e4m3(static_cast<float>(head.weight[v * C + c]) / kWeightScale);
      }
    }
  }

  static T quantised(T x, float scale) { return static_cast<T>(to_float(to_e4m3(static_cast<float>(x) / scale)) * scale); }

  void run(const HostExec& exec, bool gradients) {
    const HeadFp8 fp8{.weight8 = weight8.data(),
                      .weight8_t = gradients ? weight8_t.data() : nullptr,
                      .weight_scale = &weight_scale,
                      .inp8 = inp8.data(),
                      .inp8_t = gradients ? inp8_t.data() : nullptr,
                      .inp_scale = &inp_scale,
                      .grad8 = gradients ? grad8.data() : nullptr,
                      .grad8_t = gradients ? grad8_t.data() : nullptr,
                      .grad_scale8 = gradients ? &grad_scale8 : nullptr,
                      .grad_bound = grad_bound,
                      .count = count};
    head.run(exec, gradients, fp8);
  }
};

// What the codes stand for.
template <class Fp8>
double value(Fp8 code, const Fp8Scale& scale) {
  return static_cast<double>(to_float(code)) * static_cast<double>(scale.scale);
}

// The plain head is the truth: its dlogits, rounded to E5M2 in units of grad_bound/448 of grad_scale, are what the gradients must
// be made of.
TEST(HeadFp8, StoresRoundedGradientsAndMultipliesThem) {
  Random random = test_random();
  for (const Softcap softcap : kSoftcaps) {
    Fp8Problem<double> p(2 * kRow, 2 * kRow, 6, 21, softcap, true, random);
    HeadProblem<double> plain = p.head;
    const std::vector<double> start = p.head.dweight;
    plain.run(HostExec{}, true);
    p.run(HostExec{}, true);
    const int64_t N = p.head.N, V = p.head.V, C = p.head.C;
    for (int64_t t = 0; t < N; ++t) EXPECT_NEAR(p.head.loss[t], plain.loss[t], 1e-12);
    EXPECT_FLOAT_EQ(p.grad_scale8.scale, static_cast<float>(0.75 / 448 * 0.7));
    std::vector<double> dinp(p.head.dinp.size()), dweight = start;
    for (int64_t t = 0; t < N; ++t) {
      for (int64_t v = 0; v < V; ++v) {
        const e5m2 code = p.grad8[t * V + v];
        EXPECT_EQ(code.bits, to_e5m2(static_cast<float>(plain.logits[t * V + v] / 0.7 * 448 / 0.75)).bits) << t << ' ' << v;
        EXPECT_EQ(p.grad8_t[v * N + t].bits, code.bits);
        for (int64_t c = 0; c < C; ++c) {
          dinp[t * C + c] += value(code, p.grad_scale8) * plain.weight[v * C + c];
          dweight[v * C + c] += value(code, p.grad_scale8) * plain.inp[t * C + c];
        }
      }
    }
    for (size_t i = 0; i < dinp.size(); ++i) EXPECT_NEAR(p.head.dinp[i], dinp[i], 1e-11);
    for (size_t i = 0; i < dweight.size(); ++i) EXPECT_NEAR(p.head.dweight[i], dweight[i], 1e-11);
  }
}

// Inputs and weights that E4M3 rounds: everything is as if they had been rounded before.
TEST(HeadFp8, RoundsInputsAndWeights) {
  Random random = test_random();
  Fp8Problem<double> p(2 * kRow, 2 * kRow, 6, 21, Softcap::sigmoid, false, random), rounded = p;
  for (double& x : rounded.head.inp) x = Fp8Problem<double>::quantised(x, kInpScale);
  for (double& w : rounded.head.weight) w = Fp8Problem<double>::quantised(w, kWeightScale);
  EXPECT_NE(p.head.inp, rounded.head.inp);
  p.run(HostExec{}, true);
  rounded.run(HostExec{}, true);
  EXPECT_EQ(p.head.loss, rounded.head.loss);
  EXPECT_EQ(p.head.dinp, rounded.head.dinp);
  EXPECT_EQ(p.head.dweight, rounded.head.dweight);
}

// Chunks that cut rows and a last chunk that is shorter: its tensors are dense.
TEST(HeadFp8, AnyChunkGivesTheSame) {
  Random random = test_random();
  const Fp8Problem<double> start(3 * kRow, 3 * kRow, 6, 21, Softcap::sigmoid, false, random);
  Fp8Problem<double> whole = start;
  whole.run(HostExec{}, true);
  for (const int64_t chunk : {5, 9, 16, 40}) {
    Fp8Problem<double> p = start;
    p.head.chunk = chunk;
    for (auto* tensor : {&p.inp8, &p.inp8_t}) tensor->assign(static_cast<size_t>(chunk * p.head.C), {});
    for (auto* tensor : {&p.grad8, &p.grad8_t}) tensor->assign(static_cast<size_t>(chunk * p.head.V), {});
    p.head.logits = poisoned<double>(chunk * p.head.V);
    p.run(HostExec{}, true);
    EXPECT_EQ(p.head.loss, whole.head.loss) << chunk;
    EXPECT_EQ(p.head.dinp, whole.head.dinp) << chunk;
    for (size_t i = 0; i < p.head.dweight.size(); ++i) EXPECT_NEAR(p.head.dweight[i], whole.head.dweight[i], 1e-12);
    const int64_t last = (p.head.N - 1) % chunk + 1;  // tokens of the last chunk
    for (int64_t t = 0; t < last; ++t) {
      for (int64_t v = 0; v < p.head.V; ++v)
        EXPECT_EQ(p.grad8[t * p.head.V + v].bits, p.grad8_t[v * last + t].bits) << chunk << ' ' << t << ' ' << v;
    }
  }
}

TEST(HeadFp8, StoredBitsDoNotDependOnTheGradientsScale) {
  Random random = test_random();
  Fp8Problem<float> p(2 * kRow, 2 * kRow, 6, 21, Softcap::sigmoid, false, random), halved = p;
  halved.head.grad_scale[0] = p.head.grad_scale[0] / 8;
  p.run(HostExec{}, true);
  halved.run(HostExec{}, true);
  for (size_t i = 0; i < p.grad8.size(); ++i) EXPECT_EQ(p.grad8[i].bits, halved.grad8[i].bits);
  for (size_t i = 0; i < p.head.dinp.size(); ++i) EXPECT_EQ(p.head.dinp[i], 8 * halved.head.dinp[i]);
}

TEST(HeadFp8, LossAloneNeedsNoGradientTensors) {
  Random random = test_random();
  Fp8Problem<float> p(2 * kRow, kRow, 6, 21, Softcap::sigmoid, false, random);
  p.run(HostExec{}, true);
  const std::vector<float> loss = p.head.loss;
  p.run(HostExec{}, false);
  EXPECT_TRUE(same_bits(p.head.loss, loss));
}

TEST(HeadFp8, CountsOnRequest) {
  Random random = test_random();
  Fp8Problem<double> p(2 * kRow, 2 * kRow, 6, 200, Softcap::none, true, random);
  for (const double bound : {1e-3, 1e6}) {  // a gradient of 1 becomes 448,000, and 4.5e-4: one of 1/100 is lost
    p.grad_bound = bound;
    p.grad_scale8 = {};
    p.count = false;
    p.run(HostExec{}, true);
    EXPECT_EQ(p.grad_scale8.saturated, 0u);
    EXPECT_EQ(p.grad_scale8.flushed, 0u);
    p.count = true;
    p.run(HostExec{}, true);
    uint32_t largest = 0, zeros = 0;
    for (const e5m2 code : p.grad8) largest += std::abs(to_float(code)) == kE5m2Max, zeros += to_float(code) == 0;
    EXPECT_EQ(p.grad_scale8.saturated > 0, bound < 1);
    EXPECT_LE(p.grad_scale8.saturated, largest);  // values that round to the largest number from below are not counted
    EXPECT_EQ(p.grad_scale8.flushed > 0, bound > 1);
    EXPECT_EQ(p.grad_scale8.flushed, zeros);
  }
}

TEST(HeadFp8, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Fp8Problem<float> start(12 * kRow, 90, 24, 150, Softcap::sigmoid, false, random);
  check_thread_counts([&](const HostExec& exec) {
    Fp8Problem<float> p = start;
    p.run(exec, true);
    return Outputs{p.head.loss, p.head.dinp, p.head.dweight};
  });
}

TEST(HeadFp8, RefusesABias) {
  Random random = test_random();
  Fp8Problem<float> p(kRow, kRow, 6, 21, Softcap::sigmoid, false, random);
  p.head.with_bias = true;
  EXPECT_THROW(p.run(HostExec{}, true), Error);
}

}  // namespace
}  // namespace speedrun::kernels

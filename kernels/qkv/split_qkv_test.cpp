#include "kernels/qkv/split_qkv.h"

#include <string>

#include "kernels/gemm/affine_ref.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

constexpr double kEps = 1e-3;

struct Options {
  int64_t rows = 2, row_tokens = 5;
  int H = 6, D = 8;
  bool paired = false, key_shift = false;
  int gate_heads = 0;  // 0: no value embedding
  bool value_add = false;
  bool accumulate = false;
};

std::string name(const Options& o) {
  return std::to_string(o.rows) + " rows of " + std::to_string(o.row_tokens) + " tokens, H = " + std::to_string(o.H) +
         ", D = " + std::to_string(o.D) + (o.paired ? ", paired" : "") + (o.key_shift ? ", key shift" : "") + ", heads of a gate " +
         std::to_string(o.gate_heads) + (o.value_add ? ", added values" : "") + (o.accumulate ? ", accumulating" : "");
}

// What a layer may ask for, on rows of several lengths, one token included.
std::vector<Options> every_combination() {
  std::vector<Options> all;
  for (const bool paired : {false, true}) {
    for (const bool key_shift : {false, true}) {
      for (const int gate_heads : {0, 1, 3}) {
        const Options o{.paired = paired, .key_shift = key_shift, .gate_heads = gate_heads, .value_add = gate_heads != 1};
        all.push_back(o);
        all.back().row_tokens = 3 + gate_heads, all.back().accumulate = gate_heads == 3;
      }
    }
  }
  for (const bool key_shift : {false, true}) {
    all.push_back({.rows = 3, .row_tokens = 1, .H = 4, .D = 4, .paired = true, .key_shift = key_shift, .gate_heads = 2});
    all.push_back({.rows = 1, .row_tokens = 9, .H = 1, .D = 12, .key_shift = key_shift, .gate_heads = 1, .value_add = true});
    all.push_back({.rows = 2, .row_tokens = 2, .H = 3, .D = 4, .paired = true, .key_shift = key_shift});
  }
  return all;
}

template <class T>
struct Problem {
  Options options;
  int64_t N;
  int H, D, C, num_gates, gate_stride;
  std::vector<T> inp, weight, value_embed, value_gate, value_add, frequencies, dq, dk, dv;
  std::vector<T> q, k, v, rstd, key_tail, raw, dinp, dweight, dvalue_embed, dvalue_gate;
  ProjectionFp8 fp8;

  Problem(const Options& o, Random& random)
      : options(o),
        N(o.rows * o.row_tokens),
        H(o.H),
        D(o.D),
        C(o.H * o.D),
        num_gates(o.gate_heads == 0 ? 0 : o.H / o.gate_heads),
        gate_stride(num_gates + 2),
        inp(random.normal_vector<T>(N * C)),
        weight(random.normal_vector<T>(int64_t{3} * C * C, 0.3)),
        value_embed(random.normal_vector<T>(N * C)),
        value_gate(random.normal_vector<T>(N * gate_stride)),
        value_add(random.normal_vector<T>(N * C)),
        dq(random.normal_vector<T>(N * C)),
        dk(random.normal_vector<T>(N * C)),
        dv(random.normal_vector<T>(N * C)),
        q(poisoned<T>(N * C)),
        k(poisoned<T>(N * C)),
        v(poisoned<T>(N * C)),
        rstd(poisoned<T>(N * 2 * H)),
        key_tail(poisoned<T>(o.rows * H * D / 2)),
        raw(poisoned<T>(N * 3 * C)),
        dinp(poisoned<T>(N * C)),
        dweight(random.normal_vector<T>(int64_t{3} * C * C)),
        dvalue_embed(o.accumulate ? random.normal_vector<T>(N * C) : poisoned<T>(N * C)),
        dvalue_gate(random.normal_vector<T>(N * gate_stride)) {
    for (int i = 0; i < D / 4; ++i) frequencies.push_back(static_cast<T>(std::pow(30.0, -0.5 * i)));
  }

  bool embeds() const { return options.gate_heads > 0; }

  void forward(const HostExec& exec) {
    split_qkv_forward(SplitQkvForward<T>{.q = q.data(),
                                         .k = k.data(),
                                         .v = v.data(),
                                         .qk_rstd = rstd.data(),
                                         .key_tail = options.key_shift ? key_tail.data() : nullptr,
                                         .raw = raw.data(),
                                         .inp = inp.data(),
                                         .weight = weight.data(),
                                         .frequencies = frequencies.data(),
                                         .value_embed = embeds() ? value_embed.data() : nullptr,
                                         .value_gate = embeds() ? value_gate.data() : nullptr,
                                         .value_add = options.value_add ? value_add.data() : nullptr,
                                         .value_gate_stride = gate_stride,
                                         .gate_heads = options.gate_heads,
                                         .paired = options.paired,
                                         .key_shift = options.key_shift,
                                         .N = N,
                                         .row_tokens = options.row_tokens,
                                         .C = C,
                                         .H = H,
                                         .eps = kEps,
                                         .fp8 = fp8},
                      exec);
  }

  void backward(const HostExec& exec) {
    std::fill(raw.begin(), raw.end(), std::numeric_limits<T>::quiet_NaN());
    split_qkv_backward(SplitQkvBackward<T>{.dinp = dinp.data(),
                                           .dweight = dweight.data(),
                                           .dvalue_embed = embeds() ? dvalue_embed.data() : nullptr,
                                           .accumulate_dvalue_embed = options.accumulate,
                                           .dvalue_gate = embeds() ? dvalue_gate.data() : nullptr,
                                           .raw = raw.data(),
                                           .dq = dq.data(),
                                           .dk = dk.data(),
                                           .dv = dv.data(),
                                           .q = q.data(),
                                           .k = k.data(),
                                           .qk_rstd = rstd.data(),
                                           .key_tail = options.key_shift ? key_tail.data() : nullptr,
                                           .inp = inp.data(),
                                           .weight = weight.data(),
                                           .frequencies = frequencies.data(),
                                           .value_embed = embeds() ? value_embed.data() : nullptr,
                                           .value_gate = embeds() ? value_gate.data() : nullptr,
                                           .value_gate_stride = gate_stride,
                                           .gate_heads = options.gate_heads,
                                           .paired = options.paired,
                                           .key_shift = options.key_shift,
                                           .N = N,
                                           .row_tokens = options.row_tokens,
                                           .C = C,
                                           .H = H,
                                           .fp8 = fp8},
                       exec);
  }

  // Element d of head `head` of plane 0, 1, 2 (q, k, v) of the product, times `rstd` of that head if it is not null.
  double product(int64_t t, int plane, int head, int d) const {
    double sum = 0;
    const int64_t feature = (int64_t{plane} * H + head) * D + d;
    for (int c = 0; c < C; ++c) sum += inp[t * C + c] * weight[feature * C + c];
    return sum;
  }
  double expected_rstd(int64_t t, int plane, int head) const {
    double squares = 0;
    for (int d = 0; d < D; ++d) squares += std::pow(product(t, plane, head, d), 2);
    return 1 / std::sqrt(squares / D + kEps);
  }
  // Normalised and rotated, before the key shift.
  double expected_rotated(int64_t t, int plane, int head, int d) const {
    const double rstd_of_head = expected_rstd(t, plane, head), x = rstd_of_head * product(t, plane, head, d);
    if (d >= D / 2) return x;
    const int64_t in_row = t % options.row_tokens, position = options.paired ? 2 * in_row + head % 2 : in_row;
    const double theta = static_cast<double>(position) * frequencies[d / 2];
    const double partner = rstd_of_head * product(t, plane, head, d ^ 1);
    return std::cos(theta) * x + (d % 2 == 0 ? 1 : -1) * std::sin(theta) * partner;
  }
};

TEST(SplitQkv, EqualsTheFormula) {
  Random random = test_random();
  for (const Options& options : every_combination()) {
    SCOPED_TRACE(name(options));
    Problem<double> p(options, random);
    p.forward(HostExec{});
    for (int64_t t = 0; t < p.N; ++t) {
      const bool first = t % options.row_tokens == 0, last = (t + 1) % options.row_tokens == 0;
      for (int head = 0; head < p.H; ++head) {
        EXPECT_NEAR(p.rstd[t * 2 * p.H + head], p.expected_rstd(t, 0, head), 1e-11);
        EXPECT_NEAR(p.rstd[t * 2 * p.H + p.H + head], p.expected_rstd(t, 1, head), 1e-11);
        for (int d = 0; d < p.D; ++d) {
          const int64_t at = t * p.C + head * p.D + d;
          EXPECT_NEAR(p.q[at], p.expected_rotated(t, 0, head, d), 1e-11) << "q, token " << t << ", head " << head << ", " << d;
          const bool from_before = options.key_shift && d >= p.D / 2 && !first;
          EXPECT_NEAR(p.k[at], p.expected_rotated(from_before ? t - 1 : t, 1, head, d), 1e-11)
              << "k, token " << t << ", head " << head << ", " << d;
          double value = p.product(t, 2, head, d);
          if (p.embeds()) value += p.value_gate[t * p.gate_stride + head / options.gate_heads] * p.value_embed[at];
          if (options.value_add) value += p.value_add[at];
          EXPECT_NEAR(p.v[at], value, 1e-11) << "v, token " << t << ", head " << head << ", " << d;
          if (options.key_shift && last && d >= p.D / 2) {
            EXPECT_NEAR(p.key_tail[(t / options.row_tokens * p.H + head) * p.D / 2 + d - p.D / 2],
                        p.expected_rotated(t, 1, head, d), 1e-11)
                << "key_tail, head " << head << ", " << d;
          }
        }
      }
    }
  }
}

TEST(SplitQkv, GradientsEqualFiniteDifferences) {
  Random random = test_random();
  for (const Options& options : every_combination()) {
    SCOPED_TRACE(name(options));
    Problem<double> p(options, random);
    const std::vector<double> dweight = p.dweight, dvalue_embed = p.dvalue_embed, dvalue_gate = p.dvalue_gate;
    p.forward(HostExec{});
    p.backward(HostExec{});
    const std::vector<double> weight_gradient = added(p.dweight, dweight), dinp = p.dinp,
                              embed_gradient = options.accumulate ? added(p.dvalue_embed, dvalue_embed) : p.dvalue_embed;
    std::vector<double> gate_gradient = p.dvalue_gate;
    for (int64_t i = 0; i < p.N * p.gate_stride; ++i) {
      if (p.embeds() && i % p.gate_stride < p.num_gates) continue;
      EXPECT_EQ(p.dvalue_gate[i], dvalue_gate[i]) << "an element that is no gate's";
      gate_gradient[i] = 0;
    }
    const GradientCheck check{.objective = [&] {
      p.forward(HostExec{});
      return dot(p.q, p.dq) + dot(p.k, p.dk) + dot(p.v, p.dv);
    }};
    std::vector<Checked> tensors{{"inp", &p.inp, &dinp}, {"weight", &p.weight, &weight_gradient}};
    if (p.embeds()) {
      tensors.push_back({"value_embed", &p.value_embed, &embed_gradient});
      tensors.push_back({"value_gate", &p.value_gate, &gate_gradient});
    }
    if (options.value_add) tensors.push_back({"value_add", &p.value_add, &p.dv});
    check_gradients(check, tensors, random);
  }
}

TEST(SplitQkv, ProductionHeadsHaveTheRightGradients) {
  Random random = test_random();
  for (const int D : {64, 128}) {
    Problem<double> p({.rows = 1, .row_tokens = 3, .H = 2, .D = D, .paired = true, .key_shift = true, .gate_heads = 1}, random);
    const std::vector<double> dweight = p.dweight;
    p.forward(HostExec{});
    p.backward(HostExec{});
    const std::vector<double> weight_gradient = added(p.dweight, dweight), dinp = p.dinp;
    const GradientCheck check{.objective =
                                  [&] {
                                    p.forward(HostExec{});
                                    return dot(p.q, p.dq) + dot(p.k, p.dk) + dot(p.v, p.dv);
                                  },
                              .directions = 1,
                              .elements = 2};
    check_gradients(check, {{"inp", &p.inp, &dinp}, {"weight", &p.weight, &weight_gradient}}, random);
  }
}

// Heads 0 and 3 share a stream in which token t is position 2t of head 0 and 2t + 1 of head 3: scores of equal contents go by the
// distance of these positions, whichever of the two heads a query or key belongs to.
TEST(SplitQkv, PairedHeadsRotateByInterleavedPositions) {
  Random random = test_random();
  Problem<double> p({.rows = 1, .row_tokens = 7, .paired = true}, random);
  // All tokens alike, and all heads, so that rotary alone makes a difference.
  for (int64_t t = 1; t < p.N; ++t) std::copy_n(p.inp.begin(), p.C, p.inp.begin() + t * p.C);
  for (int plane = 0; plane < 2; ++plane) {
    for (int head = 1; head < p.H; ++head) {
      const auto first = p.weight.begin() + plane * p.C * p.C;
      std::copy_n(first, p.D * p.C, first + head * p.D * p.C);
    }
  }
  p.forward(HostExec{});
  const auto score = [&](int query_head, int64_t query, int key_head, int64_t key) {
    double sum = 0;
    for (int d = 0; d < p.D; ++d) sum += p.q[query * p.C + query_head * p.D + d] * p.k[key * p.C + key_head * p.D + d];
    return sum;
  };
  EXPECT_NEAR(score(0, 4, 0, 2), score(3, 6, 3, 4), 1e-11);  // four positions back
  EXPECT_NEAR(score(3, 4, 0, 4), score(0, 5, 3, 4), 1e-11);  // one position back
  EXPECT_GT(std::abs(score(3, 4, 0, 4) - score(0, 4, 0, 4)), 1e-6);
}

// FP8 operands of the projection, each product by itself.
template <class T>
struct Fp8Operands {
  std::vector<e4m3> weight8, weight8_t, inp8, inp8_t;
  std::vector<e5m2> dout8, dout8_t;
  Fp8Scale weight_scale, inp_scale, dout_scale;

  void use_in(Problem<T>& p, bool forward, bool input_grad, bool weight_grad) {
    for (auto* codes : {&weight8, &weight8_t}) codes->resize(p.weight.size());
    for (auto* codes : {&inp8, &inp8_t}) codes->resize(p.inp.size());
    for (auto* codes : {&dout8, &dout8_t}) codes->resize(p.raw.size());
    const Fp8WeightItem<T> item{weight8.data(), weight8_t.data(),          p.weight.data(),
                                &weight_scale,  static_cast<int>(3 * p.C), static_cast<int>(p.C)};
    fp8_weights(Fp8Weights<T>{&item, &item, 1, Fp8Scaling::current, false, nullptr}, HostExec{});
    p.fp8 = {
        .weight8 = forward ? weight8.data() : nullptr,
        .weight8_t = input_grad ? weight8_t.data() : nullptr,
        .weight_scale = &weight_scale,
        .inp = {.codes = forward ? inp8.data() : nullptr, .codes_t = weight_grad ? inp8_t.data() : nullptr, .scale = &inp_scale},
        .dout = {
            .codes = input_grad ? dout8.data() : nullptr, .codes_t = weight_grad ? dout8_t.data() : nullptr, .scale = &dout_scale}};
  }
};

// What is left of a tensor after its way through FP8 with its own scale.
std::vector<double> rounded(const std::vector<double>& values, bool gradient) {
  float largest = 0;
  for (const double x : values) largest = std::max(largest, std::abs(static_cast<float>(x)));
  const float scale = static_cast<float>(static_cast<double>(largest) / (gradient ? 57344 : 448));
  std::vector<double> result;
  for (const double x : values) {
    const float scaled = static_cast<float>(x) * (1.0f / scale);
    result.push_back(static_cast<double>(scale) *
                     static_cast<double>(gradient ? to_float(to_e5m2(scaled)) : to_float(to_e4m3(scaled))));
  }
  return result;
}

// Forward is that of a layer whose operands are rounded numbers; the gradients are products of rounded operands.
TEST(SplitQkv, Fp8EqualsProductsOfRoundedOperands) {
  Random random = test_random();
  for (int choice = 0; choice < 8; ++choice) {
    const bool forward = choice & 1, input_grad = choice & 2, weight_grad = choice & 4;
    SCOPED_TRACE("choice " + std::to_string(choice));
    Problem<double> p({.paired = true, .gate_heads = 3, .value_add = true}, random);
    const std::vector<double> inp8 = rounded(p.inp, false), weight8 = rounded(p.weight, false);
    Problem<double> plain = p;
    if (forward) plain.inp = inp8, plain.weight = weight8;
    plain.forward(HostExec{});
    Fp8Operands<double> operands;
    operands.use_in(p, forward, input_grad, weight_grad);
    p.forward(HostExec{});
    for (const auto& [got, expected] : {std::pair(&p.q, &plain.q), std::pair(&p.k, &plain.k), std::pair(&p.v, &plain.v)}) {
      for (size_t i = 0; i < got->size(); ++i) ASSERT_NEAR((*got)[i], (*expected)[i], 1e-12) << i;
    }
    const std::vector<double> dweight_before = p.dweight;
    p.backward(HostExec{});
    const std::vector<double>&gradient = p.raw, gradient8 = rounded(p.raw, true);
    const std::vector<double>&dy = input_grad ? gradient8 : gradient, &w = input_grad ? weight8 : p.weight;
    const std::vector<double>&dy_t = weight_grad ? gradient8 : gradient, &x = weight_grad ? inp8 : p.inp;
    for (int64_t c = 0; c < p.C; ++c) {
      for (int64_t n = 0; n < p.N; ++n) {
        double expected = 0;
        for (int64_t o = 0; o < 3 * p.C; ++o) expected += dy[n * 3 * p.C + o] * w[o * p.C + c];
        ASSERT_NEAR(p.dinp[n * p.C + c], expected, 1e-10);
      }
      for (int64_t o = 0; o < 3 * p.C; ++o) {
        double expected = dweight_before[o * p.C + c];
        for (int64_t n = 0; n < p.N; ++n) expected += dy_t[n * 3 * p.C + o] * x[n * p.C + c];
        ASSERT_NEAR(p.dweight[o * p.C + c], expected, 1e-10);
      }
    }
  }
}

TEST(SplitQkv, WithoutFp8ItIsTheSameProducts) {
  Random random = test_random();
  const HostExec exec{.round_bf16 = true};
  Problem<float> p({.key_shift = true}, random);
  p.forward(exec);
  Problem<float> q = p;
  p.backward(exec);
  affine_weight_grad_ref<float>(q.dweight.data(), p.raw.data(), q.inp.data(), q.N, q.C, 3 * q.C, exec);
  affine_input_grad_ref(q.dinp.data(), p.raw.data(), q.weight.data(), q.N, q.C, 3 * q.C, exec);
  EXPECT_TRUE(same_bits(p.dweight, q.dweight));
  EXPECT_TRUE(same_bits(p.dinp, q.dinp));
}

TEST(SplitQkv, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const Problem<float> start({.rows = 4,
                              .row_tokens = 33,
                              .H = 4,
                              .D = 16,
                              .paired = true,
                              .key_shift = true,
                              .gate_heads = 2,
                              .value_add = true,
                              .accumulate = true},
                             random);
  check_thread_counts([&](const HostExec& exec) {
    Problem<float> p = start;
    p.forward(exec);
    p.backward(exec);
    return Outputs{p.q, p.k, p.v, p.rstd, p.key_tail, p.raw, p.dinp, p.dweight, p.dvalue_embed, p.dvalue_gate};
  });
}

TEST(SplitQkv, RoundsActivationsAndTheirGradientsOnly) {
  Random random = test_random();
  Problem<float> exact({.rows = 2, .row_tokens = 9, .H = 2, .D = 16, .key_shift = true, .gate_heads = 1, .value_add = true},
                       random);
  exact.gate_stride = exact.num_gates;  // no elements that the op leaves alone
  exact.dvalue_gate.resize(static_cast<size_t>(exact.N * exact.num_gates));
  Problem<float> rounded = exact;
  exact.forward(HostExec{});
  exact.backward(HostExec{});
  rounded.forward(HostExec{.round_bf16 = true});
  rounded.backward(HostExec{.round_bf16 = true});
  check_rounded(rounded.q, exact.q);
  check_rounded(rounded.k, exact.k);
  check_rounded(rounded.v, exact.v);
  check_rounded(rounded.key_tail, exact.key_tail);
  check_rounded(rounded.raw, exact.raw);
  check_rounded(rounded.dinp, exact.dinp);
  check_rounded(rounded.dvalue_embed, exact.dvalue_embed);
  check_rounded(rounded.dvalue_gate, exact.dvalue_gate);
  EXPECT_FALSE(all_bf16(rounded.rstd));
  EXPECT_FALSE(all_bf16(rounded.dweight));
}

}  // namespace
}  // namespace speedrun::kernels

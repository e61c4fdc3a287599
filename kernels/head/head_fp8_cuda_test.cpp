// The FP8 head stage by stage, each from what the device itself made in the stage before, so that a wrong code is seen as one and
// not blurred by the flips of roundings that it would cause later.
#include "kernels/base/error.h"
#include "kernels/gemm/fp8_product_ref.h"
#include "kernels/head/head_loss.h"
#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;

struct Config {
  int64_t N, chunk;
  int C, V;
  Softcap softcap = Softcap::sigmoid;
  int loss_terms = 3;  // 0: plain cross-entropy
  bool prefix = true;
  int64_t row_tokens = 16;
  double grad_bound = 0.75;
  bool count = false;
};

std::string name(const Config& c) {
  return "N = " + std::to_string(c.N) + ", chunk = " + std::to_string(c.chunk) + ", C = " + std::to_string(c.C) +
         ", V = " + std::to_string(c.V) + ", soft-cap " + std::to_string(static_cast<int>(c.softcap)) + ", " +
         std::to_string(c.loss_terms) + " terms" + (c.prefix ? ", prefix" : "") + ", rows of " + std::to_string(c.row_tokens);
}

constexpr float kGradScale = 0.37f, kInpScale = 100.0f / 448, kWeightScale = 1.6f / 448, kRationalCap = 15;
constexpr LossWeights<bf16> kWeights{.next = {1, 0.4f, 0.15f}, .prefix = 0.2f};

struct Data {
  std::vector<bf16> inp;
  std::vector<e4m3> weight8, weight8_t;
  std::vector<int32_t> targets, prefix;
  std::vector<float> dweight;
};

Data make_data(const Config& c, Random& random) {
  Data data{.inp = random.normal_vector<bf16>(c.N * c.C),
            .weight8 = std::vector<e4m3>(static_cast<size_t>(int64_t{c.V} * c.C)),
            .weight8_t = {},
            .targets = random.index_vector(c.N, c.V),
            .prefix = random.index_vector(c.V, c.V),
            .dweight = random.normal_vector<float>(int64_t{c.V} * c.C, 0.1)};
  const double deviation = 3 / std::sqrt(c.C);
  for (e4m3& w : data.weight8) w = to_e4m3(static_cast<float>(deviation * random.normal()) / kWeightScale);
  data.weight8_t.resize(data.weight8.size());
  for (int64_t v = 0; v < c.V; ++v) {
    for (int64_t k = 0; k < c.C; ++k) data.weight8_t[k * c.V + v] = data.weight8[v * c.C + k];
  }
  for (int v = 0; v < c.V; v += 3) data.prefix[v] = -1;
  data.targets.front() = data.targets[1] = 1;  // the same target twice, and its own prefix
  data.prefix[1] = 1;
  data.targets.back() = c.V - 1;
  return data;
}

class HeadFp8CudaTest : public testing::CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && exec().compute_capability != 90) {
      GTEST_SKIP() << "compute capability " << exec().compute_capability << ": the FP8 head is for sm_90";
    }
  }

  // A problem on the device. Codes are kept as bytes.
  struct Head {
    Config config;
    DeviceBuffer<bf16> inp, logits, dinp;
    DeviceBuffer<uint8_t> weight8, weight8_t, inp8, inp8_t, grad8, grad8_t;
    DeviceBuffer<Fp8Scale> scales;  // inputs, weights, gradient
    DeviceBuffer<int32_t> targets, prefix;
    DeviceBuffer<LossWeights<bf16>> weights;
    DeviceBuffer<float> grad_scale, row_shift, loss, dweight;
  };

  static std::vector<uint8_t> bytes(const std::vector<e4m3>& codes) {
    std::vector<uint8_t> out(codes.size());
    std::memcpy(out.data(), codes.data(), codes.size());
    return out;
  }

  Head make(const Config& c, const Data& data) const {
    const int64_t inp_codes = c.chunk * c.C, grad_codes = c.chunk * c.V;
    return Head{.config = c,
                .inp = uploaded("inp", data.inp),
                .logits = poisoned<bf16>("logits", c.chunk * c.V),
                .dinp = poisoned<bf16>("dinp", c.N * c.C),
                .weight8 = uploaded("weight8", bytes(data.weight8)),
                .weight8_t = uploaded("weight8_t", bytes(data.weight8_t)),
                .inp8 = poisoned<uint8_t>("inp8", inp_codes),
                .inp8_t = poisoned<uint8_t>("inp8_t", inp_codes),
                .grad8 = poisoned<uint8_t>("grad8", grad_codes),
                .grad8_t = poisoned<uint8_t>("grad8_t", grad_codes),
                .scales = uploaded("scales", std::vector<Fp8Scale>{{.scale = kInpScale}, {.scale = kWeightScale}, {.scale = 0}}),
                .targets = uploaded("targets", data.targets),
                .prefix = uploaded("prefix", data.prefix),
                .weights = uploaded("loss weights", std::vector<LossWeights<bf16>>{kWeights}),
                .grad_scale = uploaded("grad_scale", std::vector<float>{kGradScale}),
                .row_shift = poisoned<float>("row_shift", c.chunk),
                .loss = poisoned<float>("loss", c.N),
                .dweight = uploaded("dweight", data.dweight)};
  }

  static HeadLoss<bf16> arguments(const Head& h, bool gradients) {
    const Config& c = h.config;
    Fp8Scale* const scales = h.scales.get();
    HeadLoss<bf16> args{.loss = h.loss.get(),
                        .dinp = nullptr,
                        .dweight = nullptr,
                        .dbias = nullptr,
                        .inp = h.inp.get(),
                        .weight = nullptr,
                        .bias = nullptr,
                        .targets = h.targets.get(),
                        .loss_weights = c.loss_terms > 0 ? h.weights.get() : nullptr,
                        .loss_terms = c.loss_terms,
                        .prefix = c.prefix ? h.prefix.get() : nullptr,
                        .row_tokens = c.row_tokens,
                        .grad_scale = h.grad_scale.get(),
                        .logits = h.logits.get(),
                        .scratch = nullptr,
                        .N = c.N,
                        .chunk = c.chunk,
                        .C = c.C,
                        .V = c.V,
                        .softcap = c.softcap,
                        .softcap_value = kRationalCap,
                        .fp8 = {.weight8 = reinterpret_cast<e4m3*>(h.weight8.get()),
                                .weight_scale = scales + 1,
                                .inp8 = reinterpret_cast<e4m3*>(h.inp8.get()),
                                .inp_scale = scales,
                                .grad_bound = c.grad_bound,
                                .count = c.count}};
    if (!gradients) return args;
    args.dinp = h.dinp.get();
    args.dweight = h.dweight.get();
    args.fp8.weight8_t = reinterpret_cast<e4m3*>(h.weight8_t.get());
    args.fp8.inp8_t = reinterpret_cast<e4m3*>(h.inp8_t.get());
    args.fp8.grad8 = reinterpret_cast<e5m2*>(h.grad8.get());
    args.fp8.grad8_t = reinterpret_cast<e5m2*>(h.grad8_t.get());
    args.fp8.row_shift = h.row_shift.get();
    args.fp8.grad_scale8 = scales + 2;
    return args;
  }

  template <class Fp8>
  static std::vector<Fp8> codes(const DeviceBuffer<uint8_t>& buffer, int64_t begin, int64_t count) {
    const std::vector<uint8_t> raw = buffer.download(begin, count);
    std::vector<Fp8> out(raw.size());
    std::memcpy(out.data(), raw.data(), raw.size());
    return out;
  }

  // Rows of a matrix of codes, one after the other.
  template <class Fp8>
  static std::vector<Fp8> code_rows(const DeviceBuffer<uint8_t>& buffer, const std::vector<int64_t>& rows, int64_t width) {
    std::vector<Fp8> out;
    for (const int64_t r : rows) {
      const std::vector<Fp8> row = codes<Fp8>(buffer, r * width, width);
      out.insert(out.end(), row.begin(), row.end());
    }
    return out;
  }

  static std::vector<int64_t> sampled(int64_t count, Random& random) {
    constexpr int64_t kAll = 128, kSampled = 48;
    std::vector<int64_t> rows;
    if (count <= kAll) {
      for (int64_t r = 0; r < count; ++r) rows.push_back(r);
    } else {
      rows = {0, 15, 16, count - 17, count - 16, count - 1};
      while (static_cast<int64_t>(rows.size()) < kSampled) rows.push_back(random.below(count));
    }
    return rows;
  }

  // got (M, N) against start + scale · a (M, K) · b (N, K)ᵀ: within `relative` of the result and `sums` of the sum of the products'
  // sizes, as tensor cores add FP8 products with some 14 bits (largest seen: 1.2 · 2^-11).
  template <class A, class Got>
  void check_product(const char* what, const std::vector<Got>& got, const std::vector<double>& start, std::vector<A> a,
                     std::vector<e4m3> b, float scale_a, float scale_b, int64_t M, int64_t N, int64_t K, double relative,
                     double sums) {
    std::vector<double> truth = start, sizes(truth.size());
    const auto product = [&](std::vector<double>& out, double beta) {
      fp8_product_ref(Fp8ProductRef<double, A>{.c = out.data(),
                                               .a = a.data(),
                                               .b = b.data(),
                                               .scale_a = scale_a,
                                               .scale_b = scale_b,
                                               .M = M,
                                               .N = N,
                                               .K = K,
                                               .beta = beta},
                      truth_exec());
    };
    product(truth, 1);
    for (A& code : a) code.bits &= 0x7f;
    for (e4m3& code : b) code.bits &= 0x7f;
    product(sizes, 0);
    const std::vector<double> found = testing::to_double(got);
    ASSERT_EQ(found.size(), truth.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i], truth[i], relative * std::abs(truth[i]) + sums * sizes[i] + 1e-30)
          << what << ' ' << i / N << ", " << i % N << " of the sampled rows (SPEEDRUN_TEST_SEED=" << testing::test_seed() << ")";
    }
  }

  struct Terms {
    std::vector<std::pair<int64_t, double>> columns;
    double total = 0;
  };
  static Terms terms_of(const Config& c, const Data& data, int64_t token) {
    if (c.loss_terms == 0) return {.columns = {{data.targets[token], 1.0}}, .total = 1};
    Terms terms;
    for (int k = 0; k < c.loss_terms; ++k) {
      const double weight = static_cast<double>(kWeights.next[k]);
      terms.total += weight;
      if (token % c.row_tokens + k < c.row_tokens) terms.columns.push_back({data.targets[token + k], weight});
    }
    const int32_t prefix = c.prefix ? data.prefix[data.targets[token]] : -1;
    if (prefix < 0) return terms;
    terms.total += static_cast<double>(kWeights.prefix);
    terms.columns.push_back({prefix, static_cast<double>(kWeights.prefix)});
    return terms;
  }

  // Loss and E5M2 gradient of one token from the device's own logits.
  void check_row(const Head& h, const Data& data, int64_t token, float loss, const std::vector<bf16>& logits,
                 const std::vector<e5m2>& grad) {
    const Config& c = h.config;
    const Terms terms = terms_of(c, data, token);
    std::vector<double> z(logits.size()), slope(logits.size(), 1);
    double largest = -1e300, total = 0;
    for (size_t v = 0; v < z.size(); ++v) {
      const double x = static_cast<double>(static_cast<float>(logits[v]));
      z[v] = x;
      if (c.softcap == Softcap::rational) {
        z[v] = kRationalCap * x / std::sqrt(x * x + kRationalCap * kRationalCap);
        slope[v] = std::pow(kRationalCap / std::sqrt(x * x + kRationalCap * kRationalCap), 3);
      } else if (c.softcap == Softcap::sigmoid) {
        const double sigma = 1 / (1 + std::exp(-(x + 5) / 7.5));
        z[v] = 23 * sigma;
        slope[v] = 23 / 7.5 * sigma * (1 - sigma);
      }
      largest = std::max(largest, z[v]);
    }
    for (const double x : z) total += std::exp(x - largest);
    const double lse = largest + std::log(total), units = 448 / c.grad_bound;
    double expected_loss = 0;
    std::vector<double> value(z.size()), tolerance(z.size());
    for (size_t v = 0; v < z.size(); ++v) value[v] = terms.total * std::exp(z[v] - lse);
    for (const auto& [column, weight] : terms.columns) {
      expected_loss += weight * (lse - z[column]);
      value[column] -= weight;
      tolerance[column] = 2e-5 * units;  // what cancels in S·softmax − w
    }
    ASSERT_NEAR(loss, expected_loss, 5e-5 * (1 + std::abs(expected_loss))) << "loss of token " << token;
    constexpr double kSmallestNormal = 0x1p-14, kBf16 = 0x1p-8;
    for (size_t v = 0; v < z.size(); ++v) {
      const double exact = value[v] * slope[v] * units, size = std::max(std::abs(exact), kSmallestNormal);
      const double half_spacing = std::ldexp(0.5, std::ilogb(size) - 2);
      if (std::abs(exact) > static_cast<double>(kE5m2Max)) {
        ASSERT_EQ(std::abs(to_float(grad[v])), kE5m2Max) << "token " << token << ", column " << v;
        continue;
      }
      ASSERT_NEAR(to_float(grad[v]), exact, half_spacing + kBf16 * std::abs(exact) + tolerance[v])
          << "gradient of token " << token << ", column " << v << " (SPEEDRUN_TEST_SEED=" << testing::test_seed() << ")";
    }
  }

  // Everything that the last chunk left behind.
  void check_stages(const Head& h, const Data& data, Random& random) {
    const Config& c = h.config;
    const int64_t begin = (c.N - 1) / c.chunk * c.chunk, count = c.N - begin, C = c.C, V = c.V;
    const std::vector<int64_t> rows = sampled(count, random), columns = sampled(V, random);
    const float grad_scale8 = h.scales.download()[2].scale;
    EXPECT_FLOAT_EQ(grad_scale8, static_cast<float>(c.grad_bound / 448) * kGradScale);

    const std::vector<e4m3> inp8 = codes<e4m3>(h.inp8, 0, count * C), inp8_t = codes<e4m3>(h.inp8_t, 0, count * C);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t k = 0; k < C; ++k) {
        const e4m3 expected = to_e4m3(static_cast<float>(data.inp[(begin + t) * C + k]) * (1 / kInpScale));
        ASSERT_EQ(inp8[t * C + k].bits, expected.bits) << "inp8 " << t << ", " << k;
        ASSERT_EQ(inp8_t[k * count + t].bits, expected.bits) << "inp8_t " << k << ", " << t;
      }
    }

    std::vector<bf16> logits, dinp;
    const std::vector<float> loss = h.loss.download();
    for (const int64_t t : rows) {
      const std::vector<bf16> row = h.logits.download(t * V, V);
      logits.insert(logits.end(), row.begin(), row.end());
      const std::vector<bf16> drow = h.dinp.download((begin + t) * C, C);
      dinp.insert(dinp.end(), drow.begin(), drow.end());
      check_row(h, data, begin + t, loss[begin + t], row, codes<e5m2>(h.grad8, t * V, V));
      if (HasFatalFailure()) return;
    }
    const int64_t num_rows = static_cast<int64_t>(rows.size()), num_columns = static_cast<int64_t>(columns.size());
    const double steps = std::ceil(static_cast<double>(C) / 32);
    check_product("logits", logits, std::vector<double>(logits.size()), code_rows<e4m3>(h.inp8, rows, C), data.weight8, kInpScale,
                  kWeightScale, num_rows, V, C, 0x1p-8, steps * 0x1p-13);
    check_product("dinp", dinp, std::vector<double>(dinp.size()), code_rows<e5m2>(h.grad8, rows, V), data.weight8_t, grad_scale8,
                  kWeightScale, num_rows, C, V, 0x1p-8, 0x1p-10);

    const std::vector<uint8_t> grad8 = h.grad8.download(0, count * V), grad8_t = h.grad8_t.download(0, count * V);
    constexpr int64_t kTile = 64;  // for the host's caches
    for (int64_t v0 = 0; v0 < V; v0 += kTile) {
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t v = v0; v < std::min(V, v0 + kTile); ++v)
          ASSERT_EQ(grad8[t * V + v], grad8_t[v * count + t]) << "grad8 of row " << t << ", column " << v << " and grad8_t";
      }
    }
    if (c.count) {
      uint32_t largest = 0, zeros = 0;
      for (const uint8_t code : grad8) largest += std::abs(to_float(e5m2{code})) == kE5m2Max, zeros += (code & 0x7f) == 0;
      const Fp8Scale tally = h.scales.download()[2];
      EXPECT_LE(tally.saturated, largest);
      EXPECT_EQ(tally.saturated > 0, largest > 0);
      EXPECT_EQ(tally.flushed, zeros);
    }
    if (begin > 0) return;
    std::vector<double> start;
    std::vector<float> dweight;
    for (const int64_t v : columns) {
      const std::vector<float> row = h.dweight.download(v * C, C);
      dweight.insert(dweight.end(), row.begin(), row.end());
      start.insert(start.end(), data.dweight.begin() + v * C, data.dweight.begin() + (v + 1) * C);
    }
    check_product("dweight", dweight, start, code_rows<e5m2>(h.grad8_t, columns, count), inp8_t, grad_scale8, kInpScale,
                  num_columns, C, count, 0x1p-20, 0x1p-10);
  }

  // The whole op against the reference: flips of roundings blur it, a wrong row, chunk or scale would be far off.
  void check_whole(const Head& h, const Data& data) {
    const Config& c = h.config;
    const std::vector<float> inp = testing::widen<float>(data.inp);
    std::vector<float> loss(c.N), dinp(inp.size()), dweight = data.dweight, logits(c.chunk * c.V);
    std::vector<e4m3> inp8(c.chunk * c.C), inp8_t(inp8.size());
    std::vector<e5m2> grad8(c.chunk * c.V), grad8_t(grad8.size());
    Fp8Scale inp_scale{.scale = kInpScale}, weight_scale{.scale = kWeightScale}, grad_scale8;
    const float grad_scale = kGradScale;
    const LossWeights<float> weights{.next = {kWeights.next[0], kWeights.next[1], kWeights.next[2]}, .prefix = kWeights.prefix};
    head_loss(HeadLoss<float>{.loss = loss.data(),
                              .dinp = dinp.data(),
                              .dweight = dweight.data(),
                              .dbias = nullptr,
                              .inp = inp.data(),
                              .weight = nullptr,
                              .bias = nullptr,
                              .targets = data.targets.data(),
                              .loss_weights = c.loss_terms > 0 ? &weights : nullptr,
                              .loss_terms = c.loss_terms,
                              .prefix = c.prefix ? data.prefix.data() : nullptr,
                              .row_tokens = c.row_tokens,
                              .grad_scale = &grad_scale,
                              .logits = logits.data(),
                              .scratch = nullptr,
                              .N = c.N,
                              .chunk = c.chunk,
                              .C = c.C,
                              .V = c.V,
                              .softcap = c.softcap,
                              .softcap_value = kRationalCap,
                              .fp8 = {.weight8 = data.weight8.data(),
                                      .weight8_t = data.weight8_t.data(),
                                      .weight_scale = &weight_scale,
                                      .inp8 = inp8.data(),
                                      .inp8_t = inp8_t.data(),
                                      .inp_scale = &inp_scale,
                                      .grad8 = grad8.data(),
                                      .grad8_t = grad8_t.data(),
                                      .grad_scale8 = &grad_scale8,
                                      .grad_bound = c.grad_bound}},
              baseline_exec());
    const auto distance = [](const std::vector<double>& got, const std::vector<float>& expected, const std::vector<float>& start) {
      double difference = 0, size = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        const double origin = start.empty() ? 0 : static_cast<double>(start[i]), truth = static_cast<double>(expected[i]);
        difference += (got[i] - truth) * (got[i] - truth);
        size += (truth - origin) * (truth - origin);
      }
      return std::sqrt(difference / size);
    };
    EXPECT_LT(distance(testing::to_double(h.loss.download()), loss, {}), 0.01) << "loss";
    EXPECT_LT(distance(testing::to_double(h.dinp.download()), dinp, {}), 0.1) << "dinp";
    EXPECT_LT(distance(testing::to_double(h.dweight.download()), dweight, data.dweight), 0.1) << "dweight";
  }

  void check(const Config& c) {
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    const Head first = make(c, data), second = make(c, data);
    head_loss(arguments(first, true), exec());
    run(Launch::captured, [&] { head_loss(arguments(second, true), exec()); });
    EXPECT_TRUE(testing::same_bits(first.loss.download(), second.loss.download())) << "loss";
    EXPECT_TRUE(testing::same_bits(first.dinp.download(), second.dinp.download())) << "dinp";
    EXPECT_TRUE(testing::same_bits(first.dweight.download(), second.dweight.download())) << "dweight";
    check_stages(first, data, random);
    if (c.N * c.V * c.C < int64_t{1} << 31) check_whole(first, data);
  }
};

TEST_F(HeadFp8CudaTest, EverySoftcapWithAnyTerms) {
  for (const Softcap softcap : {Softcap::sigmoid, Softcap::rational, Softcap::none}) {
    for (const int loss_terms : {0, 1, 2, 3}) {
      for (const bool prefix : {false, true})
        check({.N = 64, .chunk = 64, .C = 48, .V = 1040, .softcap = softcap, .loss_terms = loss_terms, .prefix = prefix});
    }
  }
}

// Blocks of columns that are not full, and so few columns that targets coincide.
TEST_F(HeadFp8CudaTest, RowLengths) {
  for (const int V : {16, 32, 112, 128, 144, 2064, 8192, 50304, 262144}) check({.N = 32, .chunk = 32, .C = 16, .V = V});
}

// Blocks of rows that are not full.
TEST_F(HeadFp8CudaTest, RowCounts) {
  for (const int N : {16, 112, 128, 144, 272}) check({.N = N, .chunk = N, .C = 16, .V = 272, .count = true});
}

// Borders of chunks inside of rows; the last chunk is shorter.
TEST_F(HeadFp8CudaTest, Chunks) {
  for (const int64_t chunk : {16, 32, 64, 80, 256}) check({.N = 144, .chunk = chunk, .C = 32, .V = 272, .row_tokens = 36});
  check({.N = 144, .chunk = 64, .C = 32, .V = 272, .row_tokens = 1});
  check({.N = 144, .chunk = 64, .C = 32, .V = 272, .row_tokens = 2});
  check({.N = 144, .chunk = 64, .C = 32, .V = 272, .row_tokens = 144});
}

// One bound so small that the targets' gradients saturate, one so large that most of the others vanish.
TEST_F(HeadFp8CudaTest, Counts) {
  for (const double bound : {1e-3, 0.75, 1e5}) {
    check({.N = 64, .chunk = 64, .C = 64, .V = 1040, .grad_bound = bound, .count = true});
  }
}

TEST_F(HeadFp8CudaTest, ProductionShape) { check({.N = 4096, .chunk = 4096, .C = 768, .V = 50304, .row_tokens = 2048}); }

TEST_F(HeadFp8CudaTest, LossAloneIsTheSame) {
  Random random = testing::test_random();
  const Config c{.N = 96, .chunk = 64, .C = 64, .V = 1040};
  const Data data = make_data(c, random);
  const Head with = make(c, data), without = make(c, data);
  head_loss(arguments(with, true), exec());
  head_loss(arguments(without, false), exec());
  const std::vector<float> expected = with.loss.download(), got = without.loss.download();
  for (size_t t = 0; t < got.size(); ++t) EXPECT_NEAR(got[t], expected[t], 1e-5f * (1 + std::abs(expected[t]))) << t;
}

// The stored bits depend on the logits alone.
TEST_F(HeadFp8CudaTest, StoredBitsDoNotDependOnTheGradientsScale) {
  Random random = testing::test_random();
  const Config c{.N = 64, .chunk = 64, .C = 64, .V = 1040};
  const Data data = make_data(c, random);
  const Head one = make(c, data);
  Head other = make(c, data);
  other.grad_scale.upload({kGradScale / 1024});
  head_loss(arguments(one, true), exec());
  head_loss(arguments(other, true), exec());
  EXPECT_TRUE(testing::same_bits(one.grad8.download(), other.grad8.download()));
  EXPECT_FLOAT_EQ(one.scales.download()[2].scale, 1024 * other.scales.download()[2].scale);
}

TEST_F(HeadFp8CudaTest, NanReachesTheLossAndItsRow) {
  Random random = testing::test_random();
  for (const Softcap softcap : {Softcap::sigmoid, Softcap::rational, Softcap::none}) {
    const Config c{.N = 16, .chunk = 16, .C = 16, .V = 1040, .softcap = softcap};
    Data data = make_data(c, random);
    data.inp[static_cast<size_t>(c.C)] = bf16(std::nanf(""));  // token 1
    const Head h = make(c, data);
    head_loss(arguments(h, true), exec());
    const std::vector<float> loss = h.loss.download();
    const std::vector<uint8_t> grad8 = h.grad8.download();
    for (int64_t t = 0; t < c.N; ++t) {
      EXPECT_EQ(std::isnan(loss[t]), t == 1) << "token " << t;
      for (int64_t v = 0; v < c.V; ++v)
        ASSERT_EQ(std::isnan(to_float(e5m2{grad8[t * c.V + v]})), t == 1) << "token " << t << ", column " << v;
    }
  }
}

TEST_F(HeadFp8CudaTest, RefusesWhatItDoesNotDo) {
  Random random = testing::test_random();
  const Config c{.N = 32, .chunk = 32, .C = 16, .V = 32};
  const Data data = make_data(c, random);
  const Head h = make(c, data);
  const auto refused = [&](const auto& change) {
    HeadLoss<bf16> args = arguments(h, true);
    change(args);
    EXPECT_THROW(head_loss(args, exec()), Error);
  };
  refused([](HeadLoss<bf16>& args) { args.N = 24; });
  refused([](HeadLoss<bf16>& args) { args.chunk = 24; });
  refused([](HeadLoss<bf16>& args) { args.V = 24; });
  refused([](HeadLoss<bf16>& args) { args.C = 8; });
  refused([](HeadLoss<bf16>& args) { args.row_tokens = 5; });
  refused([](HeadLoss<bf16>& args) { args.loss_terms = kMaxLossTerms + 1; });
  refused([&](HeadLoss<bf16>& args) { args.bias = h.inp.get(); });
  refused([](HeadLoss<bf16>& args) { args.fp8.row_shift = nullptr; });
}

}  // namespace
}  // namespace speedrun::kernels

// The fused up-projection on a Hopper GPU. Small cases first: they say where a wrong value came from. Operands that are small whole
// numbers make every sum exact, in E4M3 too, so that results must equal the formula bit for bit.
#include "kernels/relu2_mlp/relu2_up_sm90.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "kernels/relu2_mlp/relu2_up_layout.h"
#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;
using testing::same_bits;

template <class Operand>
Operand narrow(float value) {
  if constexpr (std::is_same_v<Operand, e4m3>) {
    return to_e4m3(value);
  } else {
    return Operand(value);
  }
}
float widen(e4m3 value) { return to_float(value); }
float widen(bf16 value) { return static_cast<float>(value); }

struct Shape {
  int64_t N;
  int C, F;
  int num_sms = 0;  // 0: the device's
  bool codes = true;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "N=" << s.N << " C=" << s.C << " F=" << s.F << " SMs=" << s.num_sms << " codes=" << s.codes;
}

template <class Operand>
struct Inputs {
  std::vector<Operand> inp, weight;
  float inp_scale = 1, weight_scale = 1;
  Fp8Scale post_scale;

  float scale() const { return inp_scale * weight_scale; }
};

// Whole numbers from −2 to 2 and −1 to 1: sums of 768 products stay far below 2^11. The same 4,096 tokens again and again.
template <class Operand>
Inputs<Operand> whole_numbers(const Shape& s, Random& random) {
  const int64_t fresh = std::min<int64_t>(s.N, 4096) * s.C;
  Inputs<Operand> in{.inp = std::vector<Operand>(static_cast<size_t>(s.N * s.C)),
                     .weight = std::vector<Operand>(static_cast<size_t>(int64_t{s.F} * s.C)),
                     .inp_scale = static_cast<float>(random.uniform(0.02, 0.05)),
                     .weight_scale = static_cast<float>(random.uniform(0.5, 2)),
                     .post_scale = {.scale = static_cast<float>(random.uniform(0.005, 0.02))}};
  for (int64_t i = 0; i < fresh; ++i) in.inp[static_cast<size_t>(i)] = narrow<Operand>(static_cast<float>(random.below(5) - 2));
  for (int64_t i = fresh; i < s.N * s.C; i += fresh) {
    std::copy_n(in.inp.begin(), std::min(fresh, s.N * s.C - i), in.inp.begin() + i);
  }
  for (Operand& w : in.weight) w = narrow<Operand>(static_cast<float>(random.below(3) - 1));
  return in;
}

struct Results {
  std::vector<bf16> post;
  std::vector<uint8_t> codes;
  Fp8Scale scale;
};

struct Rows {
  int64_t begin, count;
};

class Relu2UpCudaTest : public testing::CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    if (exec().compute_capability != 90) GTEST_SKIP() << "NO HOPPER GPU: this test checks nothing here";
    cuda_check(cudaHostAlloc(reinterpret_cast<void**>(&hang_report_), kReportWords * sizeof(uint32_t), cudaHostAllocMapped),
               "allocating the hang report");
  }
  void TearDown() override {
    if (hang_report_ != nullptr) cudaFreeHost(hang_report_);
    CudaTest::TearDown();
  }

  // Launches and waits; a kernel that hangs or fails is described.
  template <class Operand>
  void launch(const Relu2Up<Operand>& args, int num_sms, uint32_t jitter_seed = 0) {
    CudaExec on = exec();
    if (num_sms > 0) on.num_sms = num_sms;
    ASSERT_LE(on.num_sms * kRelu2UpWarps, kReportWords);
    std::fill_n(hang_report_, kReportWords, 0u);
    relu2_up_sm90(args, on, {.jitter_seed = jitter_seed, .watchdog_cycles = int64_t{1} << 32, .hang_report = hang_report_});
    const cudaError_t status = cudaStreamSynchronize(on.stream);
    ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status) << hangs();
  }

  template <class Operand>
  Results run(const Shape& s, const Inputs<Operand>& in, uint32_t jitter_seed = 0, Launch how = Launch::direct) {
    const auto inp = uploaded("inp", in.inp);
    const auto weight = uploaded("weight", in.weight);
    const auto scales = uploaded("scales", std::vector<float>{in.inp_scale, in.weight_scale});
    const auto post_scale = uploaded("post_scale", std::vector<Fp8Scale>{in.post_scale});
    const auto post = poisoned<bf16>("post", s.N * s.F);
    const auto codes = poisoned<uint8_t>("post8", s.codes ? s.N * s.F : 0);
    const Relu2Up<Operand> args{.post = post.get(),
                                .post8 = s.codes ? reinterpret_cast<e4m3*>(codes.get()) : nullptr,
                                .post_scale = post_scale.get(),
                                .inp = inp.get(),
                                .weight = weight.get(),
                                .inp_scale = scales.get(),
                                .weight_scale = scales.get() + 1,
                                .N = s.N,
                                .C = s.C,
                                .F = s.F};
    if (how == Launch::captured) {
      run_captured([&] { relu2_up_sm90(args, exec()); });
    } else {
      launch(args, s.num_sms, jitter_seed);
      if (HasFatalFailure()) return {};
    }
    return {.post = post.download(), .codes = codes.download(), .scale = post_scale.download()[0]};
  }

  // Every value of these rows against the formula.
  template <class Operand>
  void check_exact(const Shape& s, const Inputs<Operand>& in, const Results& got, const std::vector<Rows>& rows) {
    ASSERT_EQ(got.post.size(), static_cast<size_t>(s.N * s.F));
    std::vector<float> weight(in.weight.size());
    std::transform(in.weight.begin(), in.weight.end(), weight.begin(), [](Operand w) { return widen(w); });
    const float inverse_scale = 1.0f / in.post_scale.scale;
    std::vector<float> inp(static_cast<size_t>(s.C));
    for (const auto& [begin, count] : rows) {
      for (int64_t n = begin; n < begin + count; ++n) {
        for (int c = 0; c < s.C; ++c) inp[static_cast<size_t>(c)] = widen(in.inp[static_cast<size_t>(n * s.C + c)]);
        for (int f = 0; f < s.F; ++f) {
          float sum = 0;
          for (int c = 0; c < s.C; ++c) sum += inp[static_cast<size_t>(c)] * weight[static_cast<size_t>(int64_t{f} * s.C + c)];
          const float relu = std::max(static_cast<float>(bf16(sum * in.scale())), 0.0f);
          const bf16 post(relu * relu);
          const size_t at = static_cast<size_t>(n * s.F + f);
          ASSERT_EQ(got.post[at].bits, post.bits)
              << "post[" << n << ", " << f << "] = " << static_cast<float>(got.post[at]) << ", not " << static_cast<float>(post)
              << " (sum " << sum << ", scale " << in.scale() << ", SPEEDRUN_TEST_SEED=" << testing::test_seed() << ")";
          if (!s.codes) continue;
          const e4m3 code = to_e4m3(static_cast<float>(post) * inverse_scale);
          ASSERT_EQ(int{got.codes[at]}, int{code.bits})
              << "post8[" << n << ", " << f << "] stands for " << to_float(e4m3{got.codes[at]}) << ", not " << to_float(code)
              << " (post " << static_cast<float>(post) << ", SPEEDRUN_TEST_SEED=" << testing::test_seed() << ")";
        }
      }
    }
    uint32_t amax = in.post_scale.amax;
    for (const bf16 value : got.post) amax = std::max(amax, uint32_t{value.bits} << 16);
    EXPECT_EQ(got.scale.amax, amax);
    EXPECT_EQ(got.scale.scale, in.post_scale.scale);
  }

  template <class Operand>
  void check_origins(const Shape& s, int shift);
  template <class Operand>
  void check_real_numbers(double tolerance);

 private:
  static constexpr int kReportWords = 1 << 14;

  std::string hangs() const {
    static constexpr const char* kBarriers[] = {"?", "full", "empty", "turn", "weight"};
    std::ostringstream out;
    int count = 0;
    for (int w = 0; w < kReportWords; ++w) {
      const uint32_t word = hang_report_[w];
      if (word == 0) continue;
      if (++count > 24) continue;
      out << "\n  block " << w / kRelu2UpWarps << " warp " << w % kRelu2UpWarps << " waits for "
          << kBarriers[std::min(word >> 28, 4u)] << ", iteration " << (word & 0xfffffffu);
    }
    out << "\n  " << count << " warps gave up waiting";
    return out.str();
  }

  uint32_t* hang_report_ = nullptr;
};

// inp row m is 1 in channel (m + shift) % C alone, so that post[m, n] is the square of one weight; the weights spell their own row
// and channel in digits of base 16, one digit in a run. Tells for each output which weight it was made of.
template <class Operand>
void Relu2UpCudaTest::check_origins(const Shape& s, int shift) {
  std::ostringstream shape;
  shape << s << " shift=" << shift;
  SCOPED_TRACE(shape.str());
  constexpr int kDigits = 3;
  std::vector<int> row(static_cast<size_t>(s.N * s.F)), channel(row.size());
  std::vector<char> broken(row.size());
  for (int digit = 0; digit < 2 * kDigits; ++digit) {
    Inputs<Operand> in{.inp = std::vector<Operand>(static_cast<size_t>(s.N * s.C)),
                       .weight = std::vector<Operand>(static_cast<size_t>(int64_t{s.F} * s.C)),
                       .post_scale = {}};
    for (int64_t m = 0; m < s.N; ++m) in.inp[static_cast<size_t>(m * s.C + (m + shift) % s.C)] = narrow<Operand>(1);
    const int place = 4 * (digit % kDigits);
    for (int n = 0; n < s.F; ++n)
      for (int k = 0; k < s.C; ++k)
        in.weight[static_cast<size_t>(n * s.C + k)] =
            narrow<Operand>(static_cast<float>(1 + ((digit < kDigits ? n : k) >> place & 15)));
    const Results got = run(s, in);
    if (HasFatalFailure()) return;
    for (size_t i = 0; i < got.post.size(); ++i) {
      const float root = std::sqrt(static_cast<float>(got.post[i]));
      if (!(root >= 1 && root <= 16 && root == std::floor(root))) {
        broken[i] = 1;
        continue;
      }
      (digit < kDigits ? row : channel)[i] += (static_cast<int>(root) - 1) << place;
    }
  }
  int wrong = 0;
  std::ostringstream what;
  for (int64_t m = 0; m < s.N; ++m) {
    for (int n = 0; n < s.F; ++n) {
      const size_t i = static_cast<size_t>(m * s.F + n);
      const int k = static_cast<int>((m + shift) % s.C);
      if (!broken[i] && row[i] == n && channel[i] == k) continue;
      if (++wrong > 24) continue;
      what << "\n  post[" << m << ", " << n << "] ";
      if (broken[i]) {
        what << "is no square of one weight";
      } else {
        what << "comes from weight row " << row[i] << ", channel " << channel[i] << ", not from channel " << k;
      }
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << s.N * s.F << what.str();
}

TEST_F(Relu2UpCudaTest, OriginsOneTile) {
  for (const int shift : {0, 64, 31}) check_origins<e4m3>({.N = 64, .C = 128, .F = 256, .num_sms = 1}, shift);
}
TEST_F(Relu2UpCudaTest, OriginsOneTileBf16) {
  for (const int shift : {0, 31}) check_origins<bf16>({.N = 64, .C = 64, .F = 128, .num_sms = 1}, shift);
}
TEST_F(Relu2UpCudaTest, OriginsTwoLinesOfChannels) {
  check_origins<e4m3>({.N = 64, .C = 256, .F = 256, .num_sms = 1}, 100);
  check_origins<bf16>({.N = 64, .C = 128, .F = 128, .num_sms = 1}, 30);
}
TEST_F(Relu2UpCudaTest, OriginsTwoTilesSoBothGroups) {
  check_origins<e4m3>({.N = 128, .C = 128, .F = 256, .num_sms = 1}, 0);
  check_origins<bf16>({.N = 128, .C = 64, .F = 128, .num_sms = 1}, 0);
}
TEST_F(Relu2UpCudaTest, OriginsEveryChannel) {
  check_origins<e4m3>({.N = 768, .C = 768, .F = 512, .num_sms = 2}, 0);
  check_origins<e4m3>({.N = 768, .C = 768, .F = 3072}, 0);
  check_origins<bf16>({.N = 768, .C = 768, .F = 3072}, 0);
}

template <class Operand>
std::vector<Shape> shapes() {
  constexpr int kLine = 128 / sizeof(Operand), kPanel = 256 / sizeof(Operand);
  return {{1, kLine, kPanel, 1},
          {63, kLine, kPanel, 1},
          {65, kLine, kPanel, 1, false},
          {64, 3 * kLine, kPanel, 1},
          {200, 5 * kLine, 2 * kPanel, 2},
          {1000, kLine, kPanel},          // one copy of a tile: groups alternate at every stage
          {1000, 2 * kLine, 3 * kPanel},  // blocks with different numbers of tiles
          {129, 768, 3 * kPanel, 3, false},
          {2111, 768, 3072},
          {2111, 768, 3072, 0, false}};
}

template <class Operand>
class Relu2UpShapes : public Relu2UpCudaTest {};
using Operands = ::testing::Types<e4m3, bf16>;
TYPED_TEST_SUITE(Relu2UpShapes, Operands);

TYPED_TEST(Relu2UpShapes, WholeNumbersAreExact) {
  Random random(testing::test_seed());
  for (const Shape& s : shapes<TypeParam>()) {
    std::ostringstream shape;
    shape << s;
    SCOPED_TRACE(shape.str());
    Inputs<TypeParam> in = whole_numbers<TypeParam>(s, random);
    const Results got = this->run(s, in);
    if (this->HasFatalFailure()) return;
    this->check_exact(s, in, got, {{0, std::min<int64_t>(s.N, 130)}, {std::max<int64_t>(s.N - 70, 0), std::min<int64_t>(s.N, 70)}});
    if (this->HasFatalFailure()) return;
    // A maximum that is larger already stays.
    in.post_scale.amax = std::bit_cast<uint32_t>(1e9f);
    EXPECT_EQ(this->run(s, in).scale.amax, in.post_scale.amax);
  }
}

// Tokens that are no multiple of anything; rows at tile borders and at the end.
TYPED_TEST(Relu2UpShapes, ProductionShape) {
  Random random(testing::test_seed());
  const Shape s{.N = 16'421, .C = 768, .F = 3072};
  const Inputs<TypeParam> in = whole_numbers<TypeParam>(s, random);
  const Results got = this->run(s, in);
  if (this->HasFatalFailure()) return;
  this->check_exact(s, in, got, {{0, 10}, {60, 8}, {700, 10}, {8190, 6}, {16'380, 41}});
  if (this->HasFatalFailure()) return;
  for (const auto how : {Relu2UpCudaTest::Launch::direct, Relu2UpCudaTest::Launch::captured}) {
    const Results again = this->run(s, in, 0, how);
    EXPECT_TRUE(same_bits(again.post, got.post));
    EXPECT_TRUE(same_bits(again.codes, got.codes));
    EXPECT_EQ(again.scale.amax, got.scale.amax);
  }
}

// Offsets beyond 2^30 elements.
TEST_F(Relu2UpCudaTest, LargestMicroBatch) {
  Random random(testing::test_seed());
  const Shape s{.N = 393'216 + 5, .C = 768, .F = 3072};
  const Inputs<e4m3> in = whole_numbers<e4m3>(s, random);
  const Results got = run(s, in);
  if (HasFatalFailure()) return;
  check_exact(s, in, got, {{0, 4}, {349'520, 12}, {393'210, 11}});
}

// Warps that are late at barriers, in many ways: a missing wait shows as other bits, a missing arrival as a hang.
TYPED_TEST(Relu2UpShapes, JitterChangesNoBit) {
  constexpr int kLine = 128 / sizeof(TypeParam);
  Random random(testing::test_seed());
  for (const Shape& s : {Shape{.N = 5000, .C = 768, .F = 3072}, Shape{.N = 3000, .C = kLine, .F = 768},
                         Shape{.N = 1500, .C = 3 * kLine, .F = 256, .num_sms = 2}}) {
    std::ostringstream shape;
    shape << s;
    SCOPED_TRACE(shape.str());
    const Inputs<TypeParam> in = whole_numbers<TypeParam>(s, random);
    const Results still = this->run(s, in);
    if (this->HasFatalFailure()) return;
    this->check_exact(s, in, still, {{0, 65}, {s.N - 65, 65}});
    for (int i = 0; i < 8; ++i) {
      const uint32_t seed = static_cast<uint32_t>(random.bits()) | 1;
      const Results shaken = this->run(s, in, seed);
      if (this->HasFatalFailure()) return;
      EXPECT_TRUE(same_bits(shaken.post, still.post)) << "jitter seed " << seed;
      EXPECT_TRUE(same_bits(shaken.codes, still.codes)) << "jitter seed " << seed;
      EXPECT_EQ(shaken.scale.amax, still.scale.amax) << "jitter seed " << seed;
    }
  }
}

// Numbers as in training. The sum may be off by `tolerance` of the sum of magnitudes, and is then rounded to BF16.
template <class Operand>
void Relu2UpCudaTest::check_real_numbers(double tolerance) {
  Random random(testing::test_seed());
  const Shape s{.N = 300, .C = 768, .F = 3072};
  Inputs<Operand> in{.inp = std::vector<Operand>(static_cast<size_t>(s.N * s.C)),
                     .weight = std::vector<Operand>(static_cast<size_t>(int64_t{s.F} * s.C)),
                     .inp_scale = 1.0f / 16,
                     .weight_scale = 0.002f,
                     .post_scale = {.scale = 0.05f}};
  for (Operand& x : in.inp) x = narrow<Operand>(static_cast<float>(16 * random.normal()));
  for (Operand& w : in.weight) w = narrow<Operand>(static_cast<float>(20 * random.normal()));
  const Results got = run(s, in);
  if (HasFatalFailure()) return;
  double worst = 0;
  for (int64_t n = 0; n < s.N; n += 7) {
    for (int f = 0; f < s.F; ++f) {
      double sum = 0, magnitude = 0;
      for (int c = 0; c < s.C; ++c) {
        const double product = double{widen(in.inp[static_cast<size_t>(n * s.C + c)])} *
                               double{widen(in.weight[static_cast<size_t>(int64_t{f} * s.C + c)])};
        sum += product;
        magnitude += std::abs(product);
      }
      sum *= double{in.scale()};
      magnitude *= double{in.scale()};
      const size_t at = static_cast<size_t>(n * s.F + f);
      const double root = std::sqrt(double{static_cast<float>(got.post[at])}), relu = std::max(sum, 0.0);
      // Half an ulp of pre is up to 2^-8 of it; half an ulp of post too, and that is half as much of its root.
      const double rounding = relu * (0x1p-8 + 0x1p-9 + 0x1p-14);
      worst = std::max(worst, (std::abs(root - relu) - rounding) / magnitude);
      ASSERT_LE(std::abs(root - relu), rounding + 1.01 * tolerance * magnitude)
          << "post[" << n << ", " << f << "]: root " << root << ", expected " << relu << ", sum of magnitudes " << magnitude
          << " (SPEEDRUN_TEST_SEED=" << testing::test_seed() << ")";
      ASSERT_EQ(int{got.codes[at]}, int{to_e4m3(static_cast<float>(got.post[at]) * (1.0f / in.post_scale.scale)).bits})
          << "post8[" << n << ", " << f << "]";
    }
  }
  std::cout << "[   info   ] largest error beyond rounding: " << worst << " of the sum of magnitudes\n";
}

TEST_F(Relu2UpCudaTest, RealNumbersE4m3) { check_real_numbers<e4m3>(0x1p-10); }
// The tensor cores cut off what they add to an FP32 sum: 48 steps, one way.
TEST_F(Relu2UpCudaTest, RealNumbersBf16) { check_real_numbers<bf16>(0x1p-16); }

TEST_F(Relu2UpCudaTest, SaturatesAndKeepsNan) {
  const Shape s{.N = 70, .C = 128, .F = 256};
  Random random(testing::test_seed());
  Inputs<e4m3> in = whole_numbers<e4m3>(s, random);
  in.post_scale.scale = 1e-5f;
  const Results saturated = run(s, in);
  if (HasFatalFailure()) return;
  check_exact(s, in, saturated, {{0, s.N}});
  EXPECT_TRUE(std::any_of(saturated.codes.begin(), saturated.codes.end(), [](uint8_t code) { return code == to_e4m3(448).bits; }));

  constexpr int kRow = 66;
  in.inp[kRow * 128 + 5] = to_e4m3(std::numeric_limits<float>::quiet_NaN());
  const Results got = run(s, in);
  for (int64_t n = 0; n < s.N; ++n) {
    for (int f = 0; f < s.F; ++f) {
      const size_t at = static_cast<size_t>(n * s.F + f);
      ASSERT_EQ(std::isnan(static_cast<float>(got.post[at])), n == kRow) << n << ", " << f;
      ASSERT_EQ((got.codes[at] & 0x7f) == 0x7f, n == kRow) << n << ", " << f;
    }
  }
  EXPECT_GT(got.scale.amax, 0x7f800000u);
}

TEST_F(Relu2UpCudaTest, RefusesWhatItCannotDo) {
  const auto post = poisoned<bf16>("post", 64 * 256);
  auto refuses = [&](int C, int F, e4m3* post8, const std::string& words) {
    const Relu2Up<e4m3> args{.post = post.get(),
                             .post8 = post8,
                             .post_scale = nullptr,
                             .inp = reinterpret_cast<const e4m3*>(post.get()),
                             .weight = reinterpret_cast<const e4m3*>(post.get()),
                             .inp_scale = nullptr,
                             .weight_scale = nullptr,
                             .N = 1,
                             .C = C,
                             .F = F};
    try {
      relu2_up_sm90(args, exec());
      ADD_FAILURE() << "C=" << C << " F=" << F << " accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  refuses(64, 256, nullptr, "C must be a multiple of 128");
  refuses(896, 256, nullptr, "up to 768");
  refuses(128, 300, nullptr, "F a multiple of 256");
  refuses(128, 256, reinterpret_cast<e4m3*>(post.get()), "post8 needs post_scale");
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/gemm/gemm_ref.h"

#include "kernels/base/fast_math.h"
#include "kernels/gemm/affine_ref.h"
#include "kernels/gemm/fp8_product_ref.h"
#include "kernels/testing/gradient_check.h"
#include "kernels/testing/host_check.h"

namespace speedrun::kernels {
namespace {

using namespace speedrun::testing;

struct Case {
  int64_t M, N, K;
};

// Sizes around the register tile, the cache tile and the block of K.
constexpr Case kCases[] = {{1, 1, 1},    {3, 5, 7},    {8, 48, 16},  {9, 49, 17},    {4, 12, 255},  {5, 13, 256},
                           {7, 24, 257}, {64, 96, 64}, {65, 97, 33}, {130, 50, 300}, {257, 513, 9}, {300, 600, 70}};

template <class T>
void check_case(const Case& shape, bool transpose_a, bool transpose_b, T alpha, T beta, Random& random) {
  const auto [M, N, K] = shape;
  constexpr int64_t kPad = 3;  // leading dimensions larger than the rows
  const int64_t lda = (transpose_a ? M : K) + kPad, ldb = (transpose_b ? K : N) + kPad, ldc = N + kPad;
  const std::vector<T> a = random.normal_vector<T>((transpose_a ? K : M) * lda),
                       b = random.normal_vector<T>((transpose_b ? N : K) * ldb);
  std::vector<T> c = beta == 0 ? poisoned<T>(M * ldc) : random.normal_vector<T>(M * ldc);
  const std::vector<T> before = c;
  gemm_ref(GemmRef<T>{c.data(), a.data(), b.data(), M, N, K, lda, ldb, ldc, transpose_a, transpose_b, alpha, beta}, HostExec{});
  const double unit = sizeof(T) == 4 ? 6e-8 : 1.2e-16;
  for (int64_t i = 0; i < M; ++i) {
    for (int64_t j = 0; j < N; ++j) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < K; ++k) {
        const double term =
            static_cast<double>(transpose_a ? a[k * lda + i] : a[i * lda + k]) * (transpose_b ? b[j * ldb + k] : b[k * ldb + j]);
        sum += term;
        size += std::abs(term);
      }
      const double expected = alpha * sum + (beta == 0 ? 0 : beta * before[i * ldc + j]);
      const double bound = unit * (4 + std::sqrt(static_cast<double>(K))) * (std::abs(alpha) * size + std::abs(expected) + 1);
      ASSERT_NEAR(c[i * ldc + j], expected, bound)
          << M << "x" << N << "x" << K << " transposes " << transpose_a << transpose_b << " at " << i << "," << j;
    }
    for (int64_t j = N; j < ldc; ++j)
      ASSERT_TRUE(same_bits(std::vector<T>{c[i * ldc + j]}, std::vector<T>{before[i * ldc + j]})) << "wrote beyond a row";
  }
}

TEST(Gemm, EqualsNaiveLoops) {
  Random random = test_random();
  for (const Case& shape : kCases) {
    for (int transposes = 0; transposes < 4; ++transposes) {
      const bool a = transposes & 1, b = transposes & 2;
      check_case<float>(shape, a, b, 1, 0, random);
      check_case<float>(shape, a, b, -0.5f, 1.5f, random);
      check_case<double>(shape, a, b, 1, 1, random);
      check_case<double>(shape, a, b, 2, 0, random);
    }
  }
}

TEST(Gemm, NothingToSumLeavesBetaC) {
  std::vector<float> c{1, 2, 3, 4};
  const GemmRef<float> scaled{c.data(), nullptr, nullptr, 2, 2, 0, 1, 2, 2, false, false, 1, 0.5f};
  gemm_ref(scaled, HostExec{});
  EXPECT_EQ(c, (std::vector<float>{0.5f, 1, 1.5f, 2}));
  GemmRef<float> cleared = scaled;
  cleared.beta = 0;
  gemm_ref(cleared, HostExec{});
  EXPECT_EQ(c, std::vector<float>(4));
}

TEST(Gemm, SameBitsForAnyNumberOfThreads) {
  Random random = test_random();
  const int64_t M = 210, N = 130, K = 700;
  const std::vector<float> a = random.normal_vector<float>(M * K), b = random.normal_vector<float>(N * K),
                           start = random.normal_vector<float>(M * N);
  check_thread_counts([&](const HostExec& exec) {
    std::vector<float> c = start;
    gemm_ref(GemmRef<float>{c.data(), a.data(), b.data(), M, N, K, K, K, N, false, true, 1, 1}, exec);
    return Outputs{c};
  });
}

TEST(Affine, BiasAndResidualAreAddedBeforeTheOneRounding) {
  Random random = test_random();
  const int64_t N = 70, K = 33, O = 19;
  const std::vector<float> inp = random.normal_vector<float>(N * K), weight = random.normal_vector<float>(O * K),
                           bias = random.normal_vector<float>(O);
  const std::vector<float> residual = random.normal_vector<float>(N * O);
  std::vector<float> exact = poisoned<float>(N * O), rounded = residual;  // the second in place
  affine_ref(exact.data(), inp.data(), weight.data(), bias.data(), residual.data(), N, K, O, HostExec{});
  affine_ref(rounded.data(), inp.data(), weight.data(), bias.data(), rounded.data(), N, K, O, HostExec{.round_bf16 = true});
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_EQ(rounded[i], static_cast<float>(bf16(exact[i]))) << i;
}

template <class T>
struct ExpKernel {
  template <int W>
  SPEEDRUN_ALWAYS_INLINE static void run(T* out, const T* x, int64_t n) {
    using S = Simd<T, W>;
    for (int64_t i = 0; i < n; i += S::kLanes) store_lanes<S>(out + i, vector_exp<S>(load_lanes<S>(x + i, n - i)), n - i);
  }
};

TEST(FastMath, ExpIsWithinTwoUlp) {
  std::vector<float> x, y;
  for (double value = -87.3; value < 88.72; value += 0.000731) x.push_back(static_cast<float>(value));
  y.resize(x.size());
  simd_dispatch<ExpKernel<float>>(y.data(), static_cast<const float*>(x.data()), static_cast<int64_t>(x.size()));
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double truth = std::exp(static_cast<double>(x[i]));
    worst = std::max(worst, std::abs(y[i] - truth) / ulp(truth, 23));
  }
  EXPECT_LT(worst, 2);
}

TEST(FastMath, ExpOfSpecialValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x{0, -0.0f, kInfinity, -kInfinity, std::nanf(""), 200, -200, 88.73f, -87.5f};
  std::vector<float> y(x.size());
  simd_dispatch<ExpKernel<float>>(y.data(), x.data(), static_cast<int64_t>(x.size()));
  EXPECT_EQ(y[0], 1);
  EXPECT_EQ(y[1], 1);
  EXPECT_EQ(y[2], kInfinity);
  EXPECT_EQ(y[3], 0);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_EQ(y[5], kInfinity);
  EXPECT_EQ(y[6], 0);
  EXPECT_EQ(y[7], kInfinity);
  EXPECT_EQ(y[8], 0);
}

template <class A>
void check_fp8_product(Random& random, A (*encode)(float)) {
  const int64_t M = 5, N = 7, K = 19;
  std::vector<A> a(static_cast<size_t>(M * K));
  std::vector<e4m3> b(static_cast<size_t>(N * K));
  for (A& code : a) code = encode(static_cast<float>(random.normal()));
  for (e4m3& code : b) code = to_e4m3(static_cast<float>(random.normal()));
  for (const double beta : {0.0, 1.0}) {
    std::vector<double> c = beta == 0 ? poisoned<double>(M * N) : random.normal_vector<double>(M * N);
    const std::vector<double> before = c;
    fp8_product_ref(Fp8ProductRef<double, A>{c.data(), a.data(), b.data(), 0.25f, -3.0f, M, N, K, beta}, HostExec{});
    for (int64_t i = 0; i < M * N; ++i) {
      double expected = beta == 0 ? 0 : before[i];
      for (int64_t k = 0; k < K; ++k) expected += -0.75 * to_float(a[i / N * K + k]) * to_float(b[i % N * K + k]);
      EXPECT_NEAR(c[i], expected, 1e-12);
    }
  }
}

TEST(Fp8Product, EqualsNaiveLoops) {
  Random random = test_random();
  check_fp8_product<e4m3>(random, to_e4m3);
  check_fp8_product<e5m2>(random, to_e5m2);
}

// Every instruction set this CPU has gives the same function, not only the one that is chosen.
TEST(Simd, NarrowerInstructionSetsAgree) {
  Random random = test_random();
  const std::vector<float> x = random.normal_vector<float>(101, 5);
  for (const Isa isa : {Isa::sse2, Isa::avx2, Isa::avx512}) {
    if (isa > current_isa()) continue;
    std::vector<float> y(x.size());
    simd_run<ExpKernel<float>>(isa, y.data(), x.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const double truth = std::exp(static_cast<double>(x[i]));
      EXPECT_NEAR(y[i], truth, 2 * ulp(truth, 23)) << "instruction set " << static_cast<int>(isa);
    }
  }
}

}  // namespace
}  // namespace speedrun::kernels

#include "kernels/gemm/gemm_cuda.h"

#include <numbers>
#include <set>

#include "kernels/base/error.h"
#include "kernels/base/thread_pool.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/gemm/gemm_ref.h"
#include "kernels/gemm/gemm_tune.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/product_ulp.h"

namespace speedrun::kernels {
namespace {

using testing::DeviceBuffer;
using testing::Random;

struct Case {
  int64_t M, N, K;
  bool transpose_a = false, transpose_b = false, float_out = false, accumulate = false;
  Epilogue epilogue = Epilogue::none;
  int batch = 1;
  GemmType type_a = GemmType::bf16, type_b = GemmType::bf16;
  Accumulation accumulation = Accumulation::accurate;
  bool fp8() const { return is_fp8(type_a); }
};

std::string name(const Case& c) {
  return describe_gemm({.m = c.M,
                        .n = c.N,
                        .k = c.K,
                        .transpose_a = c.transpose_a,
                        .transpose_b = c.transpose_b,
                        .float_out = c.float_out,
                        .accumulate = c.accumulate,
                        .epilogue = c.epilogue,
                        .batch = c.batch,
                        .type_a = c.type_a,
                        .type_b = c.type_b,
                        .accumulation = c.accumulation});
}

// What the last term of the rule is an ulp of. FP8: the tensor core aligns the products of a step and the running sum to the
// largest of them and keeps some 13 bits below it; `accurate` moves the sum to FP32 every few steps.
testing::Ulp tolerance(const Case& c) {
  if (!c.float_out || c.accumulation == Accumulation::fast) return testing::Ulp::bf16;
  return c.fp8() ? static_cast<testing::Ulp>(10) : testing::product_ulp(c.K);
}

uint8_t fp8_code(GemmType type, bf16 value) {
  const float x = static_cast<float>(value);
  return type == GemmType::e4m3 ? to_e4m3(x).bits : to_e5m2(x).bits;
}

template <class T>
T gelu(T x) {
  return T(0.5) * x * (1 + std::tanh(std::sqrt(T(2) / std::numbers::pi_v<T>) * (x + T(0.044715) * x * x * x)));
}
template <class T>
T gelu_grad(T x) {
  const T scale = std::sqrt(T(2) / std::numbers::pi_v<T>);
  const T tanh = std::tanh(scale * (x + T(0.044715) * x * x * x));
  return T(0.5) * (1 + tanh) + T(0.5) * x * (1 - tanh * tanh) * scale * (1 + 3 * T(0.044715) * x * x);
}

// Operands of one case on the host; BF16 values (those of FP8 codes are BF16 numbers too), C as D's type holds them.
struct Data {
  std::vector<bf16> a, b, bias, aux;
  std::vector<float> c;
  float alpha = 1, beta = 0;
  float scale_a = 1, scale_b = 1;
};

void round_to_fp8(std::vector<bf16>& values, GemmType type) {
  for (bf16& value : values) {
    const uint8_t code = fp8_code(type, value);
    value = bf16(type == GemmType::e4m3 ? to_float(e4m3{code}) : to_float(e5m2{code}));
  }
}

Data make_data(const Case& c, Random& random) {
  Data data;
  data.a = random.normal_vector<bf16>(c.M * c.K * c.batch);
  data.b = random.normal_vector<bf16>(c.N * c.K * c.batch, 0.1);
  data.bias = random.normal_vector<bf16>(c.N);
  data.aux = random.normal_vector<bf16>(c.M * c.N);
  data.c = c.float_out ? random.normal_vector<float>(c.M * c.N * c.batch)
                       : testing::widen<float>(random.normal_vector<bf16>(c.M * c.N * c.batch));
  if (c.accumulate) data.alpha = -0.5f, data.beta = 0.75f;
  if (c.fp8()) {
    round_to_fp8(data.a, c.type_a);
    round_to_fp8(data.b, c.type_b);
    data.scale_a = 0.037f, data.scale_b = 11.5f;
  }
  return data;
}

template <class T>
struct Result {
  std::vector<T> d, aux;
};

template <class T>
Result<T> reference(const Case& c, const Data& data, const HostExec& exec) {
  const std::vector<T> a = testing::widen<T>(data.a), b = testing::widen<T>(data.b);
  Result<T> result;
  result.d.assign(data.c.begin(), data.c.end());
  result.aux = testing::widen<T>(data.aux);
  for (int i = 0; i < c.batch; ++i) {
    gemm_ref(GemmRef<T>{.c = result.d.data() + i * c.M * c.N,
                        .a = a.data() + i * c.M * c.K,
                        .b = b.data() + i * c.N * c.K,
                        .M = c.M,
                        .N = c.N,
                        .K = c.K,
                        .lda = c.transpose_a ? c.M : c.K,
                        .ldb = c.transpose_b ? c.K : c.N,
                        .ldc = c.N,
                        .transpose_a = c.transpose_a,
                        .transpose_b = c.transpose_b,
                        .alpha = T(data.alpha) * T(data.scale_a) * T(data.scale_b),
                        .beta = T(data.beta)},
             exec);
  }
  for (int64_t i = 0; i < c.M * c.N * c.batch; ++i) {
    T& x = result.d[static_cast<size_t>(i)];
    if (epilogue_has_bias(c.epilogue)) x += static_cast<float>(data.bias[static_cast<size_t>(i % c.N)]);
    if (c.epilogue == Epilogue::gelu_aux || c.epilogue == Epilogue::gelu_aux_bias) {
      x = exec.store(x);
      result.aux[static_cast<size_t>(i)] = x;
      x = gelu(x);
    } else if (c.epilogue == Epilogue::dgelu) {
      x *= gelu_grad(result.aux[static_cast<size_t>(i)]);
    }
    if (!c.float_out) x = exec.store(x);
  }
  return result;
}

class GemmCudaTest : public testing::CudaTest {
 protected:
  bool has_fp8() const { return exec().compute_capability >= 89; }

  // Runs the case on the device with D = C's buffer if it accumulates, poisoned otherwise; compares with the references.
  void check(const Case& c) {
    SCOPED_TRACE(name(c));
    Random random = testing::test_random();
    const Data data = make_data(c, random);
    if (c.float_out) {
      check_as<float>(c, data, data.c);
    } else {
      std::vector<bf16> narrow(data.c.size());
      std::transform(data.c.begin(), data.c.end(), narrow.begin(), [](float x) { return bf16(x); });
      check_as<bf16>(c, data, narrow);
    }
  }

 private:
  // A or B in device memory, in the case's type.
  class Operand {
   public:
    Operand(const GemmCudaTest& test, const char* name, const std::vector<bf16>& values, GemmType type, float scale)
        : type_(type),
          values_(test.uploaded(name, is_fp8(type) ? std::vector<bf16>(8) : values)),
          codes_(test.uploaded(name, codes(values, type))),
          scale_(test.uploaded("scale", std::vector<float>{scale})) {}
    GemmOperand get() const {
      switch (type_) {
        case GemmType::e4m3:
          return {reinterpret_cast<const e4m3*>(codes_.get()), scale_.get()};
        case GemmType::e5m2:
          return {reinterpret_cast<const e5m2*>(codes_.get()), scale_.get()};
        case GemmType::bf16:
          break;
      }
      return values_.get();
    }

   private:
    static std::vector<uint8_t> codes(const std::vector<bf16>& values, GemmType type) {
      if (!is_fp8(type)) return {};
      std::vector<uint8_t> result(values.size());
      std::transform(values.begin(), values.end(), result.begin(), [&](bf16 x) { return fp8_code(type, x); });
      return result;
    }

    GemmType type_;
    DeviceBuffer<bf16> values_;
    DeviceBuffer<uint8_t> codes_;
    DeviceBuffer<float> scale_;
  };

  template <class Out>
  void check_as(const Case& c, const Data& data, const std::vector<Out>& c_values) {
    const Operand a(*this, "a", data.a, c.type_a, data.scale_a), b(*this, "b", data.b, c.type_b, data.scale_b);
    const DeviceBuffer<bf16> bias = uploaded("bias", data.bias);
    DeviceBuffer<bf16> aux = uploaded("aux", data.aux);
    DeviceBuffer<Out> d = poisoned<Out>("d", c.M * c.N * c.batch);
    const GemmCuda args{.d = d.get(),
                        .a = a.get(),
                        .b = b.get(),
                        .c = c.accumulate ? d.get() : nullptr,
                        .M = c.M,
                        .N = c.N,
                        .K = c.K,
                        .transpose_a = c.transpose_a,
                        .transpose_b = c.transpose_b,
                        .float_out = c.float_out,
                        .alpha = data.alpha,
                        .beta = data.beta,
                        .epilogue = c.epilogue,
                        .bias = bias.get(),
                        .aux = aux.get(),
                        .batch = c.batch,
                        .stride_a = c.M * c.K,
                        .stride_b = c.N * c.K,
                        .stride_c = c.M * c.N,
                        .stride_d = c.M * c.N,
                        .accumulation = c.accumulation};
    const bool writes_aux = c.epilogue == Epilogue::gelu_aux || c.epilogue == Epilogue::gelu_aux_bias;
    const auto run = [&](bool captured) {
      if (c.accumulate) {
        d.upload(c_values);
      } else {
        d.poison();
      }
      if (writes_aux) aux.poison();
      if (captured) {
        run_captured([&] { gemm(args, exec()); });
      } else {
        gemm(args, exec());
      }
      return d.download();
    };
    const std::vector<Out> first = run(false);
    const std::vector<bf16> first_aux = aux.download();
    EXPECT_TRUE(testing::same_bits(first, run(false))) << "second run";
    EXPECT_TRUE(testing::same_bits(first, run(true))) << "in a graph";

    ThreadPool pool(0);
    const Result<double> truth = reference<double>(c, data, {.pool = &pool});
    const Result<float> baseline = reference<float>(c, data, {.pool = &pool, .round_bf16 = true});
    EXPECT_TRUE(testing::within_rule(first, truth.d, baseline.d, tolerance(c))) << "d";
    if (!writes_aux) return;
    EXPECT_TRUE(testing::within_rule(first_aux, truth.aux, baseline.aux)) << "aux";
  }
};

TEST_F(GemmCudaTest, AllTransposesAndTypes) {
  for (const bool transpose_a : {false, true}) {
    for (const bool transpose_b : {false, true}) {
      for (const bool float_out : {false, true}) {
        for (const bool accumulate : {false, true}) {
          check({.M = 136,
                 .N = 72,
                 .K = 264,
                 .transpose_a = transpose_a,
                 .transpose_b = transpose_b,
                 .float_out = float_out,
                 .accumulate = accumulate});
        }
      }
    }
  }
}

TEST_F(GemmCudaTest, OddSizesInTheFreeDimension) {
  check({.M = 1, .N = 8, .K = 8});
  check({.M = 1, .N = 768, .K = 768, .transpose_b = true});
  check({.M = 37, .N = 1000, .K = 88, .transpose_b = true});
  check({.M = 1000, .N = 24, .K = 2304});
  check({.M = 1, .N = 2304, .K = 24, .transpose_b = true, .accumulate = true});
  // Weight gradients: K is the number of tokens, any.
  check({.M = 40, .N = 136, .K = 1, .transpose_a = true, .float_out = true, .accumulate = true});
  check({.M = 40, .N = 136, .K = 1013, .transpose_a = true, .float_out = true, .accumulate = true});
}

TEST_F(GemmCudaTest, Epilogues) {
  for (const Epilogue epilogue : {Epilogue::bias, Epilogue::gelu_aux, Epilogue::gelu_aux_bias}) {
    check({.M = 136, .N = 264, .K = 72, .transpose_b = true, .epilogue = epilogue});
    check({.M = 37, .N = 3072, .K = 768, .transpose_b = true, .epilogue = epilogue});
  }
  check({.M = 136, .N = 264, .K = 72, .transpose_b = true, .accumulate = true, .epilogue = Epilogue::bias});
  check({.M = 136, .N = 264, .K = 72, .epilogue = Epilogue::dgelu});
  check({.M = 1000, .N = 3072, .K = 768, .epilogue = Epilogue::dgelu});
}

TEST_F(GemmCudaTest, Batches) {
  check({.M = 72, .N = 72, .K = 136, .transpose_b = true, .batch = 5});
  check({.M = 72, .N = 136, .K = 72, .accumulate = true, .batch = 5});
  check({.M = 72, .N = 136, .K = 72, .float_out = true, .batch = 3});
}

TEST_F(GemmCudaTest, ProductionWidths) {
  check({.M = 4096, .N = 2304, .K = 768, .transpose_b = true, .epilogue = Epilogue::bias});
  check({.M = 2048, .N = 768, .K = 3072, .transpose_b = true, .accumulate = true, .epilogue = Epilogue::bias});
}

// The key of a plan has no addresses in it: the bias and aux pointers of the current call must be the ones used.
TEST_F(GemmCudaTest, OnePlanServesOtherPointers) {
  Random random = testing::test_random();
  const int64_t M = 16, N = 24, K = 8;
  const DeviceBuffer<bf16> a = uploaded("a", random.normal_vector<bf16>(M * K)),
                           b = uploaded("b", random.normal_vector<bf16>(K * N));
  const DeviceBuffer<bf16> one = uploaded("one", std::vector<bf16>(N, bf16(1.0f))),
                           two = uploaded("two", std::vector<bf16>(N, bf16(1e4f)));
  const DeviceBuffer<bf16> d = poisoned<bf16>("d", M * N);
  GemmCuda args{.d = d.get(), .a = a.get(), .b = b.get(), .M = M, .N = N, .K = K, .epilogue = Epilogue::bias, .bias = one.get()};
  gemm(args, exec());
  args.bias = two.get();
  gemm(args, exec());
  for (const bf16 x : d.download()) EXPECT_GT(static_cast<float>(x), 5e3f);
}

TEST_F(GemmCudaTest, RefusesWhatItCannotDo) {
  const DeviceBuffer<bf16> x = poisoned<bf16>("x", 4096);
  const GemmCuda good{.d = x.get(), .a = x.get(), .b = x.get(), .M = 16, .N = 16, .K = 16};
  const auto refused = [&](const char* what, const auto& change) {
    GemmCuda args = good;
    change(args);
    try {
      gemm(args, exec());
      ADD_FAILURE() << what << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("gemm "), std::string::npos) << error.what();
    }
  };
  refused("M = 0", [](GemmCuda& args) { args.M = 0; });
  refused("N = 12", [](GemmCuda& args) { args.N = 12; });
  refused("K = 12", [](GemmCuda& args) { args.K = 12; });
  refused("a null operand", [](GemmCuda& args) { args.b = nullptr; });
  refused("a missing bias", [](GemmCuda& args) { args.epilogue = Epilogue::bias; });
  refused("a misaligned operand", [&](GemmCuda& args) { args.a = x.get() + 1; });
  refused("a float result with an epilogue",
          [&](GemmCuda& args) { args.epilogue = Epilogue::bias, args.bias = x.get(), args.float_out = true; });
}

TEST_F(GemmCudaTest, RefusesFp8ThatItCannotDo) {
  const DeviceBuffer<e4m3> x = poisoned<e4m3>("x", 4096);
  const DeviceBuffer<float> scale = uploaded("scale", std::vector<float>{1, 1});
  const DeviceBuffer<bf16> d = poisoned<bf16>("d", 4096);
  const GemmCuda good{
      .d = d.get(), .a = {x.get(), scale.get()}, .b = {x.get(), scale.get()}, .M = 16, .N = 16, .K = 16, .transpose_b = true};
  const auto refused = [&](const char* what, const char* words, const auto& change) {
    GemmCuda args = good;
    change(args);
    try {
      gemm(args, exec());
      ADD_FAILURE() << what << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  refused("a mixed product", "both operands", [&](GemmCuda& args) { args.a = d.get(); });
  refused("a product of two E5M2", "E5M2", [&](GemmCuda& args) {
    args.a = args.b = {reinterpret_cast<const e5m2*>(x.get()), scale.get()};
  });
  refused("B (K, N)", "B (N, K)", [](GemmCuda& args) { args.transpose_b = false; });
  refused("K = 24", "multiples of 16", [](GemmCuda& args) { args.K = 24; });
  refused("N = 24", "multiples of 16", [](GemmCuda& args) { args.N = 24; });
  refused("a missing scale", "null", [](GemmCuda& args) { args.b.scale = nullptr; });
  refused("a misaligned scale", "aligned", [](GemmCuda& args) { args.b.scale += 1; });
  refused("an epilogue", "epilogue", [&](GemmCuda& args) { args.epilogue = Epilogue::bias, args.bias = d.get(); });
}

// What the tuner prints must bring the algorithm back.
TEST_F(GemmCudaTest, AlgorithmsSurviveTheTable) {
  const LtHandle handle = make_lt_handle();
  const GemmKey key{.m = 4096, .n = 2304, .k = 768, .transpose_b = true, .epilogue = Epilogue::bias};
  const GemmDescriptors descriptors(key);
  const std::vector<cublasLtMatmulAlgo_t> candidates = gemm_candidates(handle.get(), descriptors, 64, SplitK::allowed);
  ASSERT_FALSE(candidates.empty());
  for (const cublasLtMatmulAlgo_t& candidate : candidates) {
    const GemmAlgorithm algorithm = describe_algorithm(candidate);
    std::string reason;
    const auto again = make_algorithm(handle.get(), descriptors, key, algorithm, reason);
    ASSERT_TRUE(again.has_value()) << "id " << algorithm.id << ", tile " << algorithm.tile << ": " << reason;
    EXPECT_EQ(describe_algorithm(*again), algorithm);
  }
  GemmAlgorithm nonsense = describe_algorithm(candidates.front());
  nonsense.tile = 60000;
  std::string reason;
  EXPECT_FALSE(make_algorithm(handle.get(), descriptors, key, nonsense, reason).has_value());
  EXPECT_FALSE(reason.empty());
}

// Sums over all tokens with few outputs are where K is split: they must repeat to the bit (check) and stay accurate.
TEST_F(GemmCudaTest, LongSums) {
  check({.M = 128, .N = 64, .K = 40000, .transpose_a = true, .float_out = true, .accumulate = true});
  check({.M = 768, .N = 768, .K = 32768, .transpose_a = true, .float_out = true, .accumulate = true});
  check({.M = 64, .N = 128, .K = 50304});
}

TEST_F(GemmCudaTest, Fp8TypesAndAccumulation) {
  if (!has_fp8()) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
  for (const auto& [type_a, type_b] : {std::pair(GemmType::e4m3, GemmType::e4m3), std::pair(GemmType::e5m2, GemmType::e4m3),
                                       std::pair(GemmType::e4m3, GemmType::e5m2)}) {
    for (const bool float_out : {false, true}) {
      for (const bool accumulate : {false, true}) {
        for (const Accumulation accumulation : {Accumulation::accurate, Accumulation::fast}) {
          check({.M = 128,
                 .N = 80,
                 .K = 272,
                 .transpose_b = true,
                 .float_out = float_out,
                 .accumulate = accumulate,
                 .type_a = type_a,
                 .type_b = type_b,
                 .accumulation = accumulation});
        }
      }
    }
  }
}

TEST_F(GemmCudaTest, Fp8TakesAnyNumberOfRows) {
  if (!has_fp8()) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
  for (const int64_t M : {1, 7, 37, 1000, 1023}) {
    for (const bool float_out : {false, true}) {
      check({.M = M,
             .N = 768,
             .K = 784,
             .transpose_b = true,
             .float_out = float_out,
             .type_a = GemmType::e4m3,
             .type_b = GemmType::e4m3,
             .accumulation = Accumulation::fast});
    }
  }
}

// Up, down, and the head's weight gradient, whose K is the tokens of a chunk.
TEST_F(GemmCudaTest, Fp8ProductionWidths) {
  if (!has_fp8()) GTEST_SKIP() << "this device has no FP8 products (compute capability below 8.9)";
  constexpr GemmType kE4m3 = GemmType::e4m3;
  check(
      {.M = 2048, .N = 3072, .K = 768, .transpose_b = true, .type_a = kE4m3, .type_b = kE4m3, .accumulation = Accumulation::fast});
  check(
      {.M = 2048, .N = 768, .K = 3072, .transpose_b = true, .type_a = kE4m3, .type_b = kE4m3, .accumulation = Accumulation::fast});
  check({.M = 4096,
         .N = 768,
         .K = 2064,
         .transpose_b = true,
         .float_out = true,
         .accumulate = true,
         .type_a = GemmType::e5m2,
         .type_b = kE4m3});
  check({.M = 256, .N = 768, .K = 50304, .transpose_b = true, .type_a = GemmType::e5m2, .type_b = kE4m3});
}

TEST_F(GemmCudaTest, NamesUntunedShapesOnce) {
  const DeviceBuffer<bf16> x = poisoned<bf16>("x", 4096);
  const GemmCuda args{.d = x.get(), .a = x.get() + 1024, .b = x.get() + 2048, .M = 24, .N = 16, .K = 8};
  gemm(args, exec());
  gemm(args, exec());
  ASSERT_EQ(exec().gemm->untuned().size(), 1u);
  EXPECT_NE(exec().gemm->untuned()[0].find("24x16x8"), std::string::npos) << exec().gemm->untuned()[0];
}

TEST(GemmTuning, RowsAreUniqueAndForProductionShapes) {
  std::set<std::string> seen;
  for (const GemmTuning& row : kGemmTuning) {
    const GemmKey key{.m = row.m,
                      .n = row.n,
                      .k = row.k,
                      .transpose_a = row.transpose_a,
                      .transpose_b = row.transpose_b,
                      .float_out = row.float_out,
                      .accumulate = row.accumulate,
                      .epilogue = row.epilogue,
                      .batch = row.batch,
                      .type_a = row.type_a,
                      .type_b = row.type_b,
                      .accumulation = row.accumulation};
    EXPECT_TRUE(seen.insert(std::to_string(row.compute_capability) + ' ' + describe_gemm(key)).second) << describe_gemm(key);
    EXPECT_EQ(find_tuning(key, row.compute_capability), &row);
  }
  EXPECT_FALSE(production_gemms().empty());
}

}  // namespace
}  // namespace speedrun::kernels

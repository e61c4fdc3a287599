#pragma once
// FP8 on the device against the reference: codes, scales and counts to the bit, given what the device stored in BF16; products by
// the tolerance rule, given the device's own codes.
#include "kernels/gemm/fp8_product_ref.h"
#include "kernels/gemm/projection_cuda.h"
#include "kernels/gemm/projection_fp8.h"
#include "kernels/testing/cuda_test.h"

namespace speedrun::testing {

using kernels::Fp8Copies;
using kernels::Fp8Scale;
using kernels::Fp8Scaling;

template <class Fp8>
::testing::AssertionResult same_codes(const std::vector<Fp8>& got, const std::vector<Fp8>& expected) {
  const auto is_nan = [](Fp8 code) { return std::isnan(to_float(code)); };
  if (got.size() != expected.size()) return ::testing::AssertionFailure() << "sizes " << got.size() << " and " << expected.size();
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i].bits != expected[i].bits && !(is_nan(got[i]) && is_nan(expected[i]))) {
      return ::testing::AssertionFailure() << "(SPEEDRUN_TEST_SEED=" << test_seed() << ") index " << i << " of " << got.size()
                                           << ": got code " << int{got[i].bits} << " (" << to_float(got[i]) << "), expected "
                                           << int{expected[i].bits} << " (" << to_float(expected[i]) << ")";
    }
  }
  return ::testing::AssertionSuccess();
}

inline void expect_same_scale(const Fp8Scale& got, const Fp8Scale& expected) {
  const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  EXPECT_TRUE(same(got.scale, expected.scale)) << "scale " << got.scale << ", expected " << expected.scale;
  const float amax = std::bit_cast<float>(got.amax), expected_amax = std::bit_cast<float>(expected.amax);
  EXPECT_TRUE(same(amax, expected_amax)) << "amax " << amax << ", expected " << expected_amax;
  EXPECT_EQ(got.saturated, expected.saturated);
  EXPECT_EQ(got.flushed, expected.flushed);
}

// A tensor in FP8 in device memory: which copies, and how scaled.
template <class Fp8>
class DeviceCopies {
 public:
  DeviceCopies(int64_t rows, int cols, bool codes, bool codes_t, Fp8Scaling scaling, const Fp8Scale& start, double start_margin,
               bool count, cudaStream_t stream)
      : rows_(rows),
        cols_(cols),
        start_(start),
        codes_("codes", codes ? rows * cols : 0, stream),
        codes_t_("turned codes", codes_t ? rows * cols : 0, stream),
        scale_("scale", std::vector<Fp8Scale>{start}, stream),
        args_{.codes = codes ? codes_.get() : nullptr,
              .codes_t = codes_t ? codes_t_.get() : nullptr,
              .scale = scale_.get(),
              .scaling = scaling,
              .start_margin = start_margin,
              .count = count} {}

  const Fp8Copies<Fp8>& args() const { return args_; }
  std::vector<Fp8> codes() const { return codes_.download(); }
  std::vector<Fp8> codes_t() const { return codes_t_.download(); }
  Fp8Scale scale() const { return scale_.download()[0]; }
  void reset() {
    codes_.poison();
    codes_t_.poison();
    scale_.upload({start_});
  }

  // As the reference stores `values`. count: how often a value was counted.
  void check(const char* what, const std::vector<bf16>& values, const kernels::HostExec& exec) const {
    SCOPED_TRACE(what);
    const std::vector<float> wide = widen<float>(values);
    std::vector<Fp8> expected(values.size()), expected_t(values.size());
    Fp8Scale expected_scale = start_;
    kernels::fp8_quantize(kernels::Fp8Quantize<float, Fp8>{.out = expected.data(),
                                                           .out_t = expected_t.data(),
                                                           .inp = wide.data(),
                                                           .scale = &expected_scale,
                                                           .rows = rows_,
                                                           .cols = cols_,
                                                           .scaling = args_.scaling,
                                                           .count = args_.count,
                                                           .start_margin = args_.start_margin},
                          exec);
    if (args_.codes != nullptr) {
      EXPECT_TRUE(same_codes(codes(), expected));
    }
    if (args_.codes_t != nullptr) {
      EXPECT_TRUE(same_codes(codes_t(), expected_t)) << "turned";
    }
    if (args_.codes == nullptr && args_.codes_t == nullptr) return;
    Fp8Scale got = scale();
    if (args_.scaling == Fp8Scaling::fixed) got.amax = expected_scale.amax;  // free
    expect_same_scale(got, expected_scale);
  }

 private:
  int64_t rows_;
  int cols_;
  Fp8Scale start_;
  DeviceBuffer<Fp8> codes_, codes_t_;
  DeviceBuffer<Fp8Scale> scale_;
  Fp8Copies<Fp8> args_;
};

// out (M, N) = a (M, K) · bᵀ (N, K) in BF16.
template <class A>
void expect_product(const char* what, const std::vector<bf16>& out, const std::vector<A>& a, float scale_a,
                    const std::vector<e4m3>& b, float scale_b, int64_t M, int64_t N, int64_t K, const kernels::HostExec& exec) {
  std::vector<double> product(out.size());
  kernels::fp8_product_ref(kernels::Fp8ProductRef<double, A>{product.data(), a.data(), b.data(), scale_a, scale_b, M, N, K}, exec);
  std::vector<bf16> rounded;
  for (const double x : product) rounded.emplace_back(static_cast<float>(x));
  EXPECT_TRUE(within_rule(out, product, rounded)) << what;
}

// out (M, N) = start + a (M, K) · bᵀ (N, K) in FP32, K tokens. The tensor core keeps about 13 bits of a product of FP8.
template <class A, class B>
void expect_weight_grad(const char* what, const std::vector<float>& out, const std::vector<float>& start, const std::vector<A>& a,
                        float scale_a, const std::vector<B>& b, float scale_b, int64_t M, int64_t N, int64_t K,
                        const kernels::HostExec& exec) {
  std::vector<double> truth(start.begin(), start.end());
  kernels::fp8_product_ref(kernels::Fp8ProductRef<double, A, B>{truth.data(), a.data(), b.data(), scale_a, scale_b, M, N, K, 1.0},
                           exec);
  constexpr Ulp kFp8 = static_cast<Ulp>(10);
  const std::vector<float> baseline(truth.begin(), truth.end());
  EXPECT_TRUE(within_rule(out, truth, baseline, kFp8)) << what;
}

struct ProjectionFp8Case {
  bool forward = true, input_grad = true, weight_grad = true;
  Fp8Scaling scaling = Fp8Scaling::current;
  bool known = true;  // delayed: the scales are there
  bool count = false;
};

inline std::string name(const ProjectionFp8Case& c) {
  return std::string("FP8") + (c.forward ? " forward" : "") + (c.input_grad ? " input" : "") + (c.weight_grad ? " weight" : "") +
         (c.scaling == Fp8Scaling::fixed     ? ", fixed"
          : c.scaling == Fp8Scaling::current ? ", current"
                                             : ", delayed") +
         (c.known ? "" : ", not known") + (c.count ? ", counted" : "");
}

// The FP8 operands of a layer on the device.
class DeviceProjectionFp8 {
 public:
  DeviceProjectionFp8(const std::vector<bf16>& weight, kernels::ProjectionSize size, const ProjectionFp8Case& c,
                      cudaStream_t stream)
      : size_(size),
        case_(c),
        weight8_(weight.size()),
        weight8_t_(weight.size()),
        weight_scale_(quantize(weight)),
        device_weight8_("weight8", weight8_, stream),
        device_weight8_t_("weight8_t", weight8_t_, stream),
        device_weight_scale_("weight scale", std::vector<Fp8Scale>{weight_scale_}, stream),
        inp_(size.N, size.K, c.forward, c.weight_grad, c.scaling, {.scale = c.known ? 0.004f : 0}, 2, c.count, stream),
        dout_(size.N, size.O, c.input_grad, c.weight_grad, c.scaling, {.scale = c.known ? 1e-5f : 0}, 4, c.count, stream) {}

  kernels::ProjectionFp8 args() const {
    return {.weight8 = case_.forward ? device_weight8_.get() : nullptr,
            .weight8_t = case_.input_grad ? device_weight8_t_.get() : nullptr,
            .weight_scale = device_weight_scale_.get(),
            .inp = inp_.args(),
            .dout = dout_.args()};
  }
  void reset() {
    inp_.reset();
    dout_.reset();
  }

  void check_forward(const std::vector<bf16>& out, const kernels::HostExec& exec) const {
    if (case_.forward)
      expect_product("out", out, inp_.codes(), inp_.scale().scale, weight8_, weight_scale_.scale, size_.N, size_.O, size_.K, exec);
  }
  // After a forward and a backward pass.
  void check_backward(const std::vector<bf16>& inp, const std::vector<bf16>& dout, const std::vector<bf16>& dinp,
                      const std::vector<float>& dweight_start, const std::vector<float>& dweight,
                      const kernels::HostExec& exec) const {
    if (case_.forward || case_.weight_grad) inp_.check("inp", inp, exec);
    if (case_.input_grad || case_.weight_grad) dout_.check("dout", dout, exec);
    if (case_.input_grad)
      expect_product("dinp", dinp, dout_.codes(), dout_.scale().scale, weight8_t_, weight_scale_.scale, size_.N, size_.K, size_.O,
                     exec);
    if (case_.weight_grad)
      expect_weight_grad("dweight", dweight, dweight_start, dout_.codes_t(), dout_.scale().scale, inp_.codes_t(),
                         inp_.scale().scale, size_.O, size_.K, size_.N, exec);
  }

 private:
  Fp8Scale quantize(const std::vector<bf16>& weight) {
    const std::vector<float> wide = widen<float>(weight);
    Fp8Scale scale;
    const kernels::Fp8WeightItem<float> item{weight8_.data(), weight8_t_.data(), wide.data(), &scale, size_.O, size_.K};
    kernels::fp8_weights(kernels::Fp8Weights<float>{&item, &item, 1, Fp8Scaling::current, false, nullptr}, kernels::HostExec{});
    return scale;
  }

  kernels::ProjectionSize size_;
  ProjectionFp8Case case_;
  std::vector<e4m3> weight8_, weight8_t_;
  Fp8Scale weight_scale_;
  DeviceBuffer<e4m3> device_weight8_, device_weight8_t_;
  DeviceBuffer<Fp8Scale> device_weight_scale_;
  DeviceCopies<e4m3> inp_;
  DeviceCopies<e5m2> dout_;
};

// What a layer may ask for, at sizes that its test names.
inline std::vector<ProjectionFp8Case> every_projection_fp8() {
  std::vector<ProjectionFp8Case> all;
  for (int choice = 1; choice < 8; ++choice) {
    for (const Fp8Scaling scaling : {Fp8Scaling::fixed, Fp8Scaling::current, Fp8Scaling::delayed})
      all.push_back({.forward = (choice & 1) != 0,
                     .input_grad = (choice & 2) != 0,
                     .weight_grad = (choice & 4) != 0,
                     .scaling = scaling,
                     .count = choice == 7});
  }
  all.push_back({.scaling = Fp8Scaling::delayed, .known = false});
  all.push_back({.forward = false, .scaling = Fp8Scaling::delayed, .known = false, .count = true});
  return all;
}

}  // namespace speedrun::testing

#pragma once
// An MLP with random inputs on the device, for the tests of its CUDA implementation.
#include <cmath>
#include <string>
#include <vector>

#include "kernels/relu2_mlp/relu2_mlp.h"
#include "kernels/testing/cuda_test.h"
#include "kernels/testing/fp8_check.h"

namespace speedrun::kernels {

struct Relu2MlpCase {
  int64_t N;
  int C, F;
  bool up8 = false, down8 = false;
  Fp8Scaling scaling = Fp8Scaling::delayed;
  bool fused_up = false, count = false;
};

inline std::string name(const Relu2MlpCase& c) {
  std::string text = "N = " + std::to_string(c.N) + ", C = " + std::to_string(c.C) + ", F = " + std::to_string(c.F);
  if (c.up8) text += ", FP8 up";
  if (c.down8) text += ", FP8 down";
  text += c.scaling == Fp8Scaling::fixed ? ", fixed" : c.scaling == Fp8Scaling::current ? ", current" : ", delayed";
  return text + (c.fused_up ? ", fused" : "") + (c.count ? ", counted" : "");
}

// Weights in E4M3 from the reference's pass.
struct Relu2MlpCodes {
  std::vector<e4m3> up, down_t;
  Fp8Scale up_scale, down_scale;
};

struct Relu2MlpData {
  std::vector<bf16> inp, dout, up, down, post;
  std::vector<float> dup, ddown;
  Relu2MlpCodes codes;
};

inline Relu2MlpData make_data(const Relu2MlpCase& c, testing::Random& random) {
  const int64_t weights = int64_t{c.C} * c.F;
  Relu2MlpData data{
      .inp = random.normal_vector<bf16>(c.N * c.C),
      .dout = random.normal_vector<bf16>(c.N * c.C, 1, 0.1),
      .up = random.normal_vector<bf16>(weights, 1 / std::sqrt(c.C)),
      .down = random.normal_vector<bf16>(weights, 1 / std::sqrt(c.F)),
      .post = random.normal_vector<bf16>(c.N * c.F),
      .dup = random.normal_vector<float>(weights),
      .ddown = random.normal_vector<float>(weights),
      .codes = {std::vector<e4m3>(static_cast<size_t>(weights)), std::vector<e4m3>(static_cast<size_t>(weights)), {}, {}}};
  for (bf16& post : data.post) post = bf16(std::max(static_cast<float>(post), 0.0f));
  const std::vector<float> up = testing::widen<float>(data.up), down = testing::widen<float>(data.down);
  Relu2MlpCodes& codes = data.codes;
  const Fp8WeightItem<float> items[] = {{codes.up.data(), nullptr, up.data(), &codes.up_scale, c.F, c.C},
                                        {nullptr, codes.down_t.data(), down.data(), &codes.down_scale, c.F, c.C}};
  fp8_weights(Fp8Weights<float>{items, items, 2, Fp8Scaling::current, false, nullptr}, HostExec{});
  return data;
}

template <class T>
struct Relu2MlpGradients {
  std::vector<T> dinp, dhidden, dup, ddown;
};

template <class T>
Relu2MlpGradients<T> backward_reference(const Relu2MlpCase& c, const Relu2MlpData& data, const HostExec& exec) {
  const auto inp = testing::widen<T>(data.inp), dout = testing::widen<T>(data.dout), up = testing::widen<T>(data.up),
             down = testing::widen<T>(data.down), post = testing::widen<T>(data.post);
  Relu2MlpGradients<T> result{.dinp = std::vector<T>(data.inp.size()),
                              .dhidden = std::vector<T>(data.post.size()),
                              .dup = {data.dup.begin(), data.dup.end()},
                              .ddown = {data.ddown.begin(), data.ddown.end()}};
  relu2_mlp_backward(Relu2MlpBackward<T>{result.dinp.data(), result.dup.data(), result.ddown.data(), result.dhidden.data(),
                                         dout.data(), inp.data(), post.data(), up.data(), down.data(), c.N, c.C, c.F},
                     exec);
  return result;
}

class Relu2MlpDeviceTest : public testing::CudaTest {
 protected:
  struct BackwardResults {
    std::vector<bf16> dinp, dhidden;
    std::vector<float> dup, ddown;
  };

  // What a backward pass reads and writes.
  class BackwardBuffers {
   public:
    BackwardBuffers(const Relu2MlpDeviceTest& test, const Relu2MlpCase& c, const Relu2MlpData& data)
        : inp_(test.uploaded("inp", data.inp)),
          dout_(test.uploaded("dout", data.dout)),
          up_(test.uploaded("up", data.up)),
          down_(test.uploaded("down", data.down)),
          post_(test.uploaded("post", data.post)),
          dinp_(test.poisoned<bf16>("dinp", c.N * c.C)),
          dhidden_(test.poisoned<bf16>("dhidden", c.N * c.F)),
          dup_(test.uploaded("dup", data.dup)),
          ddown_(test.uploaded("ddown", data.ddown)) {}

    Relu2MlpBackward<bf16> args(const Relu2MlpCase& c, const Relu2MlpBackwardFp8& fp8 = {}) const {
      return {.dinp = dinp_.get(),
              .dup_weight = dup_.get(),
              .ddown_weight = ddown_.get(),
              .dhidden = dhidden_.get(),
              .dout = dout_.get(),
              .inp = inp_.get(),
              .post = post_.get(),
              .up_weight = up_.get(),
              .down_weight = down_.get(),
              .N = c.N,
              .C = c.C,
              .F = c.F,
              .fp8 = fp8};
    }
    // As before a pass.
    void reset(const Relu2MlpData& data) {
      dinp_.poison();
      dhidden_.poison();
      dup_.upload(data.dup);
      ddown_.upload(data.ddown);
    }
    BackwardResults download() const {
      return {.dinp = dinp_.download(), .dhidden = dhidden_.download(), .dup = dup_.download(), .ddown = ddown_.download()};
    }

   private:
    testing::DeviceBuffer<bf16> inp_, dout_, up_, down_, post_, dinp_, dhidden_;
    testing::DeviceBuffer<float> dup_, ddown_;
  };
};

}  // namespace speedrun::kernels

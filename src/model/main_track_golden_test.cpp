// The Main Track's model against an independent implementation: losses and every gradient of a small model with every feature, as
// scripts/torch_oracle/make_main_track_golden.py wrote them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>

#include "kernels/base/error.h"
#include "src/core/file.h"
#include "src/model/every_feature_test.h"
#include "src/model/model.h"
#include "src/model/parameter_table.h"

namespace speedrun {
namespace {

// Of a tensor's norm. With FP8 a value near the middle between two codes may fall to either side.
constexpr double kTolerance = 1e-4, kFp8Tolerance = 1e-3;
constexpr float kDownGrowth = 1.5f;

struct Array {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

std::map<std::string, Array> read_arrays(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const auto number = [&] {
    uint32_t value = 0;
    file.read(reinterpret_cast<char*>(&value), sizeof value);
    require(file.good(), path, ": cannot be read or ends early");
    return value;
  };
  std::map<std::string, Array> arrays;
  for (uint32_t left = number(); left > 0; --left) {
    std::string name(number(), '\0');
    file.read(name.data(), static_cast<std::streamsize>(name.size()));
    Array& array = arrays[name];
    size_t count = 1;
    for (uint32_t rank = number(); rank > 0; --rank) count *= static_cast<size_t>(array.shape.emplace_back(number()));
    array.values.resize(count);
    file.read(reinterpret_cast<char*>(array.values.data()), static_cast<std::streamsize>(count * sizeof(float)));
  }
  require(file.good() && file.peek() == std::ifstream::traits_type::eof(), path, ": is damaged");
  return arrays;
}

// As make_main_track_golden.py has it.
Config golden_config() {
  Config config = every_feature_config();
  Config::Model& model = config.model;
  model.vocab_size = 195;
  model.width = 64;
  model.num_heads = 4;
  model.mlp_hidden = 40;
  model.smear_channels = 12;
  model.bigram_rows = 101;
  model.value_gate_channels = 6;
  model.gate_hidden = 16;
  model.dc_window = 5;
  return config;
}

class MainTrackGolden : public ::testing::Test {
 protected:
  void build(const Config& config) {
    arrays_ = read_arrays(std::string(SPEEDRUN_SOURCE_DIR) + "/src/model/testdata/main_track_golden.bin");
    const std::vector<float>&windows = values("stage/windows"), &next = values("stage/next_weights");
    const std::vector<float>& frequencies = values("stage/frequencies");
    const ModelStage stage{.window_short = static_cast<int64_t>(windows.at(0)),
                           .window_long = static_cast<int64_t>(windows.at(1)),
                           .attention_scale = static_cast<double>(values("stage/attention_scale").at(0)),
                           .rotary_frequencies = {frequencies.begin(), frequencies.end()},
                           .loss_terms = static_cast<int>(next.size()),
                           .prefix_loss = true};
    tokens_ = static_cast<int64_t>(values("tokens").size());
    device_ = make_cpu_device(2);
    parameters_ = std::make_unique<Parameters<float>>(parameter_table(config.model, config.optim));
    // Chunks of logits that cut rows.
    const ModelShape shape{.max_tokens = tokens_, .max_row_tokens = tokens_ / 2, .logits_chunk = 23};
    model_ = make_model<float>(config, shape, {stage}, *device_, *parameters_);
    parameters_->plan(plan_);
    model_->plan(plan_);
    arena_ = std::make_unique<Arena>(*device_, plan_);
    model_->prepare();
    for (int p = 0; p < parameters_->size(); ++p) {
      const ParameterSpec& spec = parameters_->spec(p);
      ASSERT_EQ(at("weight/" + spec.name).shape, spec.shape) << spec.name;
      parameters_->write_master(*device_, p, values("weight/" + spec.name));
    }
    fill(model_->tokens(), "tokens");
    fill(model_->targets(), "targets");
    fill(model_->doc_start(), "doc_start");
    fill(model_->prefix(), "prefix");
    std::copy(next.begin(), next.end(), weights_.next);
    weights_.prefix = values("stage/prefix_weight").at(0);
    grad_scale_ = values("stage/grad_scale").at(0);
    model_->derive_weights();
  }

  const Array& at(const std::string& name) const {
    const auto found = arrays_.find(name);
    require(found != arrays_.end(), "the golden file has no ", name);
    return found->second;
  }
  const std::vector<float>& values(const std::string& name) const { return at(name).values; }

  void fill(int32_t* to, const std::string& name) const {
    for (const float value : values(name)) *to++ = static_cast<int32_t>(value);
  }

  void set_tied(bool tied) { model_->set_pass({.tokens = tokens_, .row_tokens = tokens_ / 2, .stage = 0, .tied = tied}); }

  std::vector<float> losses() const { return {model_->losses(), model_->losses() + tokens_}; }

  void train(bool exact_scales = true) {
    model_->begin_step(exact_scales);
    model_->forward_backward(&grad_scale_, &weights_);
    model_->end_step(nullptr);
  }

  void grow_down_weights() {
    for (int p = 0; p < parameters_->size(); ++p) {
      const std::string& name = parameters_->spec(p).name;
      if (!name.ends_with("mlp.down.weight")) continue;
      std::vector<float> weights = values("weight/" + name);
      for (float& weight : weights) weight *= kDownGrowth;
      parameters_->write_master(*device_, p, weights);
    }
  }

  void expect_close(const std::vector<float>& found, const std::string& name, double tolerance = kTolerance) const {
    const std::vector<float>& wanted = values(name);
    ASSERT_EQ(found.size(), wanted.size()) << name;
    double norm = 0, error = 0, largest = 0;
    size_t worst = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double truth = static_cast<double>(wanted[i]), off = std::abs(static_cast<double>(found[i]) - truth);
      norm += truth * truth;
      error += off * off;
      if (off > largest) largest = off, worst = i;
    }
    ASSERT_GT(norm, 0) << name << " says nothing";
    EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm))
        << name << ": farthest off is element " << worst << ", " << found[worst] << " instead of " << wanted[worst];
  }

  std::map<std::string, Array> arrays_;
  MemoryPlan plan_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Parameters<float>> parameters_;
  std::unique_ptr<Model<float>> model_;
  std::unique_ptr<Arena> arena_;
  kernels::LossWeights<float> weights_;
  float grad_scale_ = 0;
  int64_t tokens_ = 0;
};

TEST_F(MainTrackGolden, LossesAndEveryGradient) {
  build(golden_config());
  set_tied(false);
  train();
  expect_close(losses(), "loss");
  for (int p = 0; p < parameters_->size(); ++p) {
    if (!parameters_->spec(p).frozen) expect_close(parameters_->read_grad(*device_, p), "grad/" + parameters_->spec(p).name);
  }
}

TEST_F(MainTrackGolden, HeadAndEmbeddingAsOneMatrix) {
  build(golden_config());
  set_tied(true);
  train();
  expect_close(losses(), "tied.loss");
  expect_close(parameters_->read_grad(*device_, parameters_->index("head.weight")), "tied.grad/head.weight");
}

TEST_F(MainTrackGolden, TwoStepsWithFp8) {
  Config config = golden_config();
  config.fp8.mlp_up = config.fp8.mlp_down = config.fp8.head = Precision::fp8;
  build(config);
  set_tied(false);
  train();
  expect_close(losses(), "fp8.0.loss", kFp8Tolerance);
  grow_down_weights();
  train(false);
  expect_close(losses(), "fp8.1.loss", kFp8Tolerance);
  for (const char* name : {"h.0.mlp.up.weight", "h.2.mlp.down.weight", "head.weight"})
    expect_close(parameters_->read_grad(*device_, parameters_->index(name)), std::string("fp8.grad/") + name, kFp8Tolerance);
}

TEST_F(MainTrackGolden, EvaluationIsPlainCrossEntropy) {
  build(golden_config());
  set_tied(false);
  model_->evaluate();
  expect_close(losses(), "eval.loss");
}

}  // namespace
}  // namespace speedrun

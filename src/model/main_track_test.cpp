// The Main Track's model in double on the CPU: every parameter's gradient against finite differences with every feature on, and
// with each one off; and what must not change a result.
#include "src/model/main_track.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <regex>

#include "src/core/random.h"
#include "src/model/every_feature_test.h"
#include "src/model/parameter_table.h"

namespace speedrun {
namespace {

constexpr int64_t kRow = 12, kTokens = 24;

std::vector<ModelStage> stages() {
  return {{.window_short = 4, .window_long = 6, .attention_scale = 0.7, .rotary_frequencies = {1.0, 0.03}, .prefix_loss = true}};
}

// A model with memory of its own, its parameters moved away from special points (zeros, equal values).
template <class T>
struct Instance {
  explicit Instance(const Config& config, bool training = true, bool tied = false, int threads = 2, double spread = 0.3)
      : device(make_cpu_device(threads)),
        parameters(parameter_table(config.model, config.optim), training),
        model(make_model<T>(config, {.max_tokens = kTokens, .max_row_tokens = kRow, .logits_chunk = 7, .training = training},
                            stages(), *device, parameters)) {
    parameters.plan(plan);
    model->plan(plan);
    arena = std::make_unique<Arena>(*device, plan);
    model->prepare();
    model->set_pass({.tokens = kTokens, .row_tokens = kRow, .stage = 0, .tied = tied});
    for (int p = 0; p < parameters.size(); ++p) {
      const ParameterSpec& spec = parameters.spec(p);
      if (spec.frozen) continue;
      std::vector<Acc<T>> master(static_cast<size_t>(spec.count()));
      const uint64_t stream = hash_of(spec.name);
      for (size_t i = 0; i < master.size(); ++i) {
        const double start = spec.init_values.empty() ? spec.init_mean : static_cast<double>(spec.init_values[i]);
        master[i] = static_cast<Acc<T>>(start + spread * random_normal(11, stream, i));
      }
      parameters.write_master(*device, p, master);
    }
    const int sign = parameters.index("bigram.sign");
    if (sign >= 0) {
      std::vector<Acc<T>> signs(static_cast<size_t>(parameters.spec(sign).count()));
      for (size_t i = 0; i < signs.size(); ++i) signs[i] = random_normal(13, 0, i) < 0 ? Acc<T>{-1} : Acc<T>{1};
      parameters.write_master(*device, sign, signs);
    }
    const auto vocabulary = static_cast<uint32_t>(config.model.vocab_size);
    for (int64_t t = 0; t < kTokens; ++t) {
      model->tokens()[t] = static_cast<int32_t>(philox(5, 0, static_cast<uint64_t>(t))[0] % vocabulary);
      model->targets()[t] = static_cast<int32_t>(philox(5, 1, static_cast<uint64_t>(t))[0] % vocabulary);
      const int64_t in_row = t % kRow;
      model->doc_start()[t] = static_cast<int32_t>(t - in_row + in_row / 5 * 5);
    }
    for (int64_t v = 0; v < config.model.padded_vocab_size(); ++v)
      model->prefix()[v] = v % 3 == 0 ? -1 : static_cast<int32_t>(v / 2);
    weights.next[0] = 1;
    weights.prefix = static_cast<Acc<T>>(0.3);
  }

  static uint64_t hash_of(const std::string& name) {
    uint64_t hash = 7;
    for (const char c : name) hash = hash * 31 + static_cast<unsigned char>(c);
    return hash;
  }

  double objective() {
    model->derive_weights();
    model->forward_backward(&scale, &weights);
    double sum = 0;
    for (int64_t t = 0; t < kTokens; ++t) sum += static_cast<double>(scale) * static_cast<double>(model->losses()[t]);
    return sum;
  }

  std::vector<double> evaluated() {
    model->derive_weights();
    model->evaluate();
    return {model->losses(), model->losses() + kTokens};
  }

  MemoryPlan plan;
  std::unique_ptr<Device> device;
  Parameters<T> parameters;
  std::unique_ptr<Model<T>> model;
  std::unique_ptr<Arena> arena;
  kernels::LossWeights<T> weights;
  Acc<T> scale = static_cast<Acc<T>>(0.7);
};

// directions: 1: a random direction through every element; more: single elements too.
void check_gradients(const Config& config, bool tied, int directions) {
  Instance<double> run(config, true, tied);
  run.objective();
  run.model->end_step(nullptr);
  std::vector<std::vector<double>> grads;
  for (int p = 0; p < run.parameters.size(); ++p) grads.push_back(run.parameters.read_grad(*run.device, p));
  for (int p = 0; p < run.parameters.size(); ++p) {
    const ParameterSpec& spec = run.parameters.spec(p);
    if (spec.frozen) continue;
    const std::vector<double>& grad = grads[static_cast<size_t>(p)];
    double norm = 0;
    for (const double g : grad) norm += g * g;
    if (tied && spec.name == "wte") {
      EXPECT_EQ(norm, 0) << "while they are one matrix, the head has the embedding's gradient";
      continue;
    }
    ASSERT_GT(norm, 0) << spec.name << " has no gradient at all";
    const std::vector<double> master = run.parameters.read_master(*run.device, p);
    for (int direction = 0; direction < directions; ++direction) {
      std::vector<double> u(master.size(), 0.0);
      if (direction == 0) {
        for (size_t i = 0; i < u.size(); ++i) u[i] = random_normal(77, static_cast<uint64_t>(p), i);
      } else {
        u[philox(78, static_cast<uint64_t>(p), static_cast<uint64_t>(direction))[0] % u.size()] = 1;
      }
      const double h = 1e-7;  // some directions bend strongly
      const auto at = [&](double step) {
        std::vector<double> moved = master;
        for (size_t i = 0; i < u.size(); ++i) moved[i] += step * u[i];
        run.parameters.write_master(*run.device, p, moved);
        return run.objective();
      };
      const double numeric = (at(h) - at(-h)) / (2 * h);
      run.parameters.write_master(*run.device, p, master);
      double analytic = 0;
      for (size_t i = 0; i < u.size(); ++i) analytic += grad[i] * u[i];
      EXPECT_NEAR(analytic, numeric, 2e-6 * std::max(1.0, std::abs(numeric))) << spec.name << ", direction " << direction;
    }
  }
}

TEST(MainTrack, EveryGradientAgreesWithFiniteDifferences) { check_gradients(every_feature_config(), false, 4); }

TEST(MainTrack, EveryGradientAgreesWhileHeadAndEmbeddingAreOne) { check_gradients(every_feature_config(), true, 1); }

struct Switch {
  const char* name;
  void (*off)(Config::Model& model);
};

class MainTrackSwitch : public ::testing::TestWithParam<Switch> {};

TEST_P(MainTrackSwitch, OffIsSmallerAndItsGradientsAgree) {
  Config config = every_feature_config();
  const Instance<double> on(config);
  GetParam().off(config.model);
  const Instance<double> off(config);
  EXPECT_LT(off.plan.total_bytes(), on.plan.total_bytes());
  check_gradients(config, false, 1);
}

constexpr Switch kSwitches[] = {
    {"Smear", [](Config::Model& m) { m.smear = false; }},
    {"Bigram", [](Config::Model& m) { m.bigram_rows = 0, m.bigram_sign_rows = 0; }},
    {"Signs", [](Config::Model& m) { m.bigram_sign_rows = 0; }},
    {"ValueEmbeddings",
     [](Config::Model& m) {
       for (auto& [l, layer] : m.layers) layer.value_embedding = false;
     }},
    {"X0", [](Config::Model& m) { m.x0_injection = false; }},
    {"ResidualLambdas", [](Config::Model& m) { m.residual_lambdas = false; }},
    {"WeightLambdas", [](Config::Model& m) { m.weight_lambdas = false; }},
    {"MuddGates", [](Config::Model& m) { m.mudd_gates = false; }},
    {"Mudd", [](Config::Model& m) { m.mudd = false; }},
    {"Xsa",
     [](Config::Model& m) {
       for (auto& [l, layer] : m.layers) layer.xsa = false;
     }},
    {"Gate",
     [](Config::Model& m) {
       for (auto& [l, layer] : m.layers) layer.gate = false;
     }},
    {"Dc", [](Config::Model& m) { m.layers[5].dc = false; }},
    {"PairedHeads",
     [](Config::Model& m) {
       for (auto& [l, layer] : m.layers) layer.paired_heads = false;
     }},
    {"KeyOffset",
     [](Config::Model& m) {
       for (auto& [l, layer] : m.layers) layer.key_offset = false;
     }},
    {"Skip", [](Config::Model& m) { m.layers[3].skip_from = -1; }},
};

INSTANTIATE_TEST_SUITE_P(Each, MainTrackSwitch, ::testing::ValuesIn(kSwitches),
                         [](const auto& test) { return std::string(test.param.name); });

// Switches that add memory instead: each layer its own attention input, attention in every layer.
TEST(MainTrack, GradientsAgreeWithOwnAttentionInputsAndAttentionEverywhere) {
  Config config = every_feature_config();
  for (auto& [l, layer] : config.model.layers) layer.input_from = -1;
  config.model.layers[3] = {.window = WindowKind::short_window};
  check_gradients(config, false, 1);
}

TEST(MainTrack, EvaluationWithoutGradientsGivesTheSameLosses) {
  Instance<float> training(every_feature_config(), true), inference(every_feature_config(), false);
  EXPECT_EQ(training.evaluated(), inference.evaluated());
}

TEST(MainTrack, SplitFromATiedCopyIsTheSameModel) {
  Instance<float> tied(every_feature_config(), true, true), split(every_feature_config(), true, false);
  split.parameters.write_master(*split.device, split.parameters.index("wte"),
                                split.parameters.read_master(*split.device, split.parameters.index("head.weight")));
  EXPECT_EQ(tied.evaluated(), split.evaluated());
}

// FP8 on weights near their start: far from it this small model is so bent that any rounding makes another model of it.
struct Fp8Step : Instance<float> {
  explicit Fp8Step(const Config& config) : Instance<float>(config, true, false, 2, 0.1) {}

  void run() {
    for (int p = 0; p < parameters.size(); ++p) {
      const ParameterSpec& spec = parameters.spec(p);
      if (!spec.frozen) std::fill_n(parameters.grad(spec.name), spec.count(), 0.0f);
    }
    model->derive_weights();
    model->begin_step(true);
    model->forward_backward(&scale, &weights);
    model->end_step(nullptr);
  }
};

double norm_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float x : values) sum += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(sum);
}

// ‖difference of the gradients‖ / ‖gradient‖ by parameter, and "all".
std::map<std::string, double> distances(Fp8Step& plain, Fp8Step& fp8) {
  std::map<std::string, double> result;
  double all = 0, off = 0;
  for (int p = 0; p < plain.parameters.size(); ++p) {
    const ParameterSpec& spec = plain.parameters.spec(p);
    if (spec.frozen) continue;
    const std::vector<float> expected = plain.parameters.read_grad(*plain.device, p);
    std::vector<float> difference = fp8.parameters.read_grad(*fp8.device, p);
    for (size_t i = 0; i < difference.size(); ++i) difference[i] -= expected[i];
    const double size = norm_of(expected), error = norm_of(difference);
    all += size * size, off += error * error;
    result[spec.name] = error / size;
  }
  result["all"] = std::sqrt(off / all);
  return result;
}

bool is_layer_matrix(const std::string& name) { return name.starts_with("h.") && name.ends_with(".weight"); }

struct Fp8Choice {
  Precision Config::Fp8::*choice;
  const char* only;  // part of the names of the parameters that it may change; null: any
};

constexpr Fp8Choice kFp8Choices[] = {{&Config::Fp8::mlp_up, nullptr},
                                     {&Config::Fp8::mlp_down, nullptr},
                                     {&Config::Fp8::head, nullptr},
                                     {&Config::Fp8::mlp_grad_inp, nullptr},
                                     {&Config::Fp8::mlp_grad_weight, ".mlp."},
                                     {&Config::Fp8::qkv, nullptr},
                                     {&Config::Fp8::qkv_grad_inp, nullptr},
                                     {&Config::Fp8::qkv_grad_weight, "h.*attn.(qk|v)"},
                                     {&Config::Fp8::out, nullptr},
                                     {&Config::Fp8::out_grad_inp, nullptr},
                                     {&Config::Fp8::out_grad_weight, ".attn.out."}};

// Each choice does something, and a choice of weight gradients nothing elsewhere.
TEST(MainTrack, EveryFp8ChoiceMovesItsGradientsALittle) {
  Fp8Step plain(every_feature_config());
  plain.run();
  for (const ScalingKind scaling : {ScalingKind::current, ScalingKind::delayed}) {
    for (const Fp8Choice& each : kFp8Choices) {
      SCOPED_TRACE("choice " + std::to_string(&each - kFp8Choices));
      Config config = every_feature_config();
      config.fp8.*each.choice = Precision::fp8;
      config.fp8.backward_scaling = scaling;
      Fp8Step fp8(config);
      fp8.run();
      for (const auto& [name, distance] : distances(plain, fp8)) {
        if (name == "all") {
          EXPECT_GT(distance, 1e-4);
          EXPECT_LT(distance, 0.06);
        } else if (each.only != nullptr && name != "lambda.weight" && !std::regex_search(name, std::regex(each.only))) {
          EXPECT_EQ(distance, 0) << name;
        } else if (is_layer_matrix(name)) {
          EXPECT_LT(distance, 0.12) << name;
        }
      }
    }
  }
}

TEST(MainTrack, GradientsWithFp8EverywhereStayNear) {
  Fp8Step plain(every_feature_config());
  plain.run();
  for (const ScalingKind scaling : {ScalingKind::current, ScalingKind::delayed}) {
    SCOPED_TRACE(scaling == ScalingKind::current ? "current" : "delayed");
    Config config = every_feature_config();
    for (const Fp8Choice& each : kFp8Choices) config.fp8.*each.choice = Precision::fp8;
    config.fp8.backward_scaling = scaling;
    config.fp8.warn_saturated = 0.5;
    Fp8Step fp8(config);
    for (int step = 0; step < 3; ++step) {
      fp8.run();
      for (const auto& [name, distance] : distances(plain, fp8)) {
        if (name == "all" || is_layer_matrix(name)) {
          EXPECT_LT(distance, name == "all" ? 0.08 : 0.18) << name << ", step " << step;
        }
      }
    }
    // Every tensor is counted, once a token or step; few values are lost, but where gradients lie far apart.
    const std::vector<Fp8Losses> losses = fp8.model->take_fp8_losses(3 * kTokens, 3);
    EXPECT_EQ(losses.size(), size_t{6} * 6 + 5 * 6 + 3);
    for (const Fp8Losses& each : losses) {
      EXPECT_EQ(each.saturated, 0) << each.name;
      EXPECT_LT(each.flushed, each.values / 4) << each.name;
    }
    EXPECT_EQ(fp8.evaluated(), plain.evaluated()) << "no FP8 in evaluation";
  }
}

// What a checkpoint holds is all that a step depends on.
TEST(MainTrack, DelayedScalesAreState) {
  Config config = every_feature_config();
  for (const Fp8Choice& each : kFp8Choices) config.fp8.*each.choice = Precision::fp8;
  config.fp8.backward_scaling = ScalingKind::delayed;
  Fp8Step first(config), second(config);
  first.run();
  const std::vector<StateTensor> from = first.model->state(), to = second.model->state();
  ASSERT_EQ(from.size(), 1u);
  std::memcpy(to[0].data, from[0].data, static_cast<size_t>(from[0].count));
  first.run();
  second.run();
  for (int p = 0; p < first.parameters.size(); ++p) {
    if (first.parameters.spec(p).frozen) continue;
    EXPECT_EQ(first.parameters.read_grad(*first.device, p), second.parameters.read_grad(*second.device, p));
  }
  Fp8Step fresh(config);
  fresh.run();
  second.model->reset_state();
  second.run();
  EXPECT_EQ(distances(fresh, second)["all"], 0) << "as at the start";
}

TEST(MainTrack, LayoutIsTheRecords) {
  Config::Model model;
  model.num_layers = 11;
  model.num_heads = 6;
  model.bigram_rows = 377280;
  model.x0_injection = model.mudd_gates = model.mudd = true;
  for (const int l : {1, 3, 4, 7}) model.layers[l].xsa = true;
  for (const int l : {3, 10}) model.layers[l].gate = true;
  model.layers[6] = {.attention = false, .skip_from = 3};
  model.layers[10].dc = true;
  const GateLayout layout = gate_layout(model);
  EXPECT_EQ(layout.pre.columns(), 26);
  EXPECT_EQ(layout.post.columns(), 41);
  EXPECT_EQ(layout.mix.columns(), 14);
  EXPECT_EQ(layout.out.columns(), 5);
  EXPECT_EQ(layout.layers[3].gate, 12);
  EXPECT_EQ(layout.layers[2].bigram, 23);
  EXPECT_EQ(layout.layers[9].x0, 26);
  EXPECT_EQ(layout.layers[6].skip, 28);
  EXPECT_EQ(layout.layers[10].w2, 35);
  EXPECT_FLOAT_EQ(layout.post.initial[12], 0.25f);
}

}  // namespace
}  // namespace speedrun

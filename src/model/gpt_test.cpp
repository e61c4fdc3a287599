// The whole model in double on the CPU: every parameter's gradient against finite differences, for both architectures, with
// documents, windows and ragged chunks; and what must not change a result.
#include "src/model/gpt.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/base/dtype.h"
#include "src/core/random.h"
#include "src/model/parameter_table.h"

namespace speedrun {
namespace {

Config::Model tiny_gpt2() {
  Config::Model model;
  model.vocab_size = 37;
  model.vocab_padding = 8;
  model.num_layers = 2;
  model.width = 12;
  model.num_heads = 3;
  model.mlp_hidden = 20;
  model.max_positions = 9;
  return model;
}

Config::Model tiny_optimization_track() {
  Config::Model model = tiny_gpt2();
  model.width = 16;
  model.num_heads = 2;
  model.norm = NormKind::rmsnorm;
  model.norm_eps = 0x1p-23;
  model.embedding_norm = true;
  model.positions = PositionKind::rotary;
  model.qk_norm = true;
  model.attention_scale = 0.4;
  model.activation = ActivationKind::relu2;
  model.tied_head = false;
  model.head_bias = true;
  model.softcap = SoftcapKind::rational;
  model.softcap_value = 3;
  model.init = InitKind::zero_projections;
  return model;
}

std::vector<ParameterSpec> table_of(const Config::Model& model) { return parameter_table(model, Config::Optim{}); }

Config config_of(const Config::Model& model) {
  Config config;
  config.model = model;
  return config;
}

struct Shape {
  int64_t tokens, row_tokens, logits_chunk;
  bool training;
};

// A model with memory of its own, its parameters moved away from special points (zeros, equal values).
template <class T>
struct Instance {
  Instance(const Config::Model& model, const Shape& shape, int threads = 2, double spread = 0.3)
      : device(make_cpu_device(threads)),
        parameters(table_of(model)),
        gpt(config_of(model),
            {.max_tokens = shape.tokens,
             .max_row_tokens = shape.row_tokens,
             .logits_chunk = shape.logits_chunk,
             .training = shape.training},
            {ModelStage{.window_short = model.window_short, .window_long = model.window_long}}, *device, parameters) {
    MemoryPlan plan;
    parameters.plan(plan);
    gpt.plan(plan);
    arena = std::make_unique<Arena>(*device, plan);
    gpt.prepare();
    gpt.set_pass({.tokens = shape.tokens, .row_tokens = shape.row_tokens});
    for (int p = 0; p < parameters.size(); ++p) {
      const ParameterSpec& spec = parameters.spec(p);
      std::vector<Acc<T>> master(static_cast<size_t>(spec.count()));
      for (size_t i = 0; i < master.size(); ++i)
        master[i] = static_cast<Acc<T>>(spec.init_mean + spread * random_normal(11, static_cast<uint64_t>(p), i));
      parameters.write_master(*device, p, master);
    }
    const int64_t vocabulary = model.vocab_size;
    for (int64_t t = 0; t < shape.tokens; ++t) {
      gpt.tokens()[t] = static_cast<int32_t>(philox(5, 0, static_cast<uint64_t>(t))[0] % static_cast<uint32_t>(vocabulary));
      gpt.targets()[t] = static_cast<int32_t>(philox(5, 1, static_cast<uint64_t>(t))[0] % static_cast<uint32_t>(vocabulary));
      // Documents of 4 tokens inside rows, cut at row starts.
      const int64_t in_row = t % shape.row_tokens;
      gpt.doc_start()[t] = static_cast<int32_t>(t - in_row + in_row / 4 * 4);
    }
  }

  double objective(double scale) {
    gpt.evaluate();
    double sum = 0;
    for (int64_t t = 0; t < gpt.pass().tokens; ++t) sum += scale * static_cast<double>(gpt.losses()[t]);
    return sum;
  }

  std::unique_ptr<Device> device;
  Parameters<T> parameters;
  Gpt<T> gpt;
  std::unique_ptr<Arena> arena;
};

void check_every_gradient(const Config::Model& model) {
  const Shape shape{.tokens = 18, .row_tokens = 9, .logits_chunk = 7, .training = true};
  Instance<double> run(model, shape);
  const double scale = 0.7;
  run.gpt.forward_backward(&scale, nullptr);
  for (int p = 0; p < run.parameters.size(); ++p) {
    const ParameterSpec& spec = run.parameters.spec(p);
    const std::vector<double> grad = run.parameters.read_grad(*run.device, p);
    std::vector<double> master = run.parameters.read_master(*run.device, p);
    double norm = 0;
    for (const double g : grad) norm += g * g;
    ASSERT_GT(norm, 0) << spec.name << " has no gradient at all";
    // Along a random direction (sees every element), and along three single elements.
    for (int direction = 0; direction < 4; ++direction) {
      std::vector<double> u(master.size(), 0.0);
      if (direction == 0) {
        for (size_t i = 0; i < u.size(); ++i) u[i] = random_normal(77, static_cast<uint64_t>(p), i);
      } else {
        u[philox(78, static_cast<uint64_t>(p), static_cast<uint64_t>(direction))[0] % u.size()] = 1;
      }
      const double h = 1e-6;
      const auto at = [&](double step) {
        std::vector<double> moved = master;
        for (size_t i = 0; i < u.size(); ++i) moved[i] += step * u[i];
        run.parameters.write_master(*run.device, p, moved);
        return run.objective(scale);
      };
      const double numeric = (at(h) - at(-h)) / (2 * h);
      run.parameters.write_master(*run.device, p, master);
      double analytic = 0;
      for (size_t i = 0; i < u.size(); ++i) analytic += grad[i] * u[i];
      EXPECT_NEAR(analytic, numeric, 1e-6 * std::max(1.0, std::abs(numeric))) << spec.name << ", direction " << direction;
    }
  }
}

TEST(Gpt, EveryGradientOfGpt2MatchesFiniteDifferences) { check_every_gradient(tiny_gpt2()); }

TEST(Gpt, EveryGradientOfTheOptimizationTrackMatchesFiniteDifferences) { check_every_gradient(tiny_optimization_track()); }

TEST(Gpt, EveryGradientWithWindowsAndSigmoidSoftcapMatchesFiniteDifferences) {
  Config::Model model = tiny_optimization_track();
  model.softcap = SoftcapKind::sigmoid;
  model.window_short = 2;
  model.window_long = 3;
  model.layers[0].window = WindowKind::short_window;
  model.layers[1].window = WindowKind::long_window;
  check_every_gradient(model);
}

TEST(Gpt, GradientsAddUpOverMicroBatches) {
  const Config::Model model = tiny_gpt2();
  const Shape whole{.tokens = 36, .row_tokens = 9, .logits_chunk = 36, .training = true};
  const Shape half{.tokens = 18, .row_tokens = 9, .logits_chunk = 5, .training = true};
  Instance<double> a(model, whole), b(model, half);
  const double scale = 1;
  a.gpt.forward_backward(&scale, nullptr);
  for (int part = 0; part < 2; ++part) {
    for (int64_t t = 0; t < 18; ++t) {
      b.gpt.tokens()[t] = a.gpt.tokens()[part * 18 + t];
      b.gpt.targets()[t] = a.gpt.targets()[part * 18 + t];
      b.gpt.doc_start()[t] = a.gpt.doc_start()[part * 18 + t] - part * 18;
    }
    b.gpt.forward_backward(&scale, nullptr);
  }
  for (int p = 0; p < a.parameters.size(); ++p) {
    const auto ga = a.parameters.read_grad(*a.device, p), gb = b.parameters.read_grad(*b.device, p);
    for (size_t i = 0; i < ga.size(); ++i)
      ASSERT_NEAR(ga[i], gb[i], 1e-11 * std::max(1.0, std::abs(ga[i]))) << a.parameters.spec(p).name << " " << i;
  }
}

TEST(Gpt, SameBitsForAnyNumberOfThreads) {
  const Config::Model model = tiny_optimization_track();
  const Shape shape{.tokens = 90, .row_tokens = 9, .logits_chunk = 33, .training = true};
  Instance<float> a(model, shape, 1), b(model, shape, 3);
  const float scale = 1;
  a.gpt.forward_backward(&scale, nullptr);
  b.gpt.forward_backward(&scale, nullptr);
  for (int p = 0; p < a.parameters.size(); ++p) {
    EXPECT_EQ(a.parameters.read_grad(*a.device, p), b.parameters.read_grad(*b.device, p)) << a.parameters.spec(p).name;
  }
}

TEST(Gpt, AnInferenceModelSharesLayersBuffersAndGivesTheSameLosses) {
  for (const Config::Model& model : {tiny_gpt2(), tiny_optimization_track()}) {
    Shape shape{.tokens = 18, .row_tokens = 9, .logits_chunk = 18, .training = true};
    Instance<float> a(model, shape);
    shape.training = false;
    Instance<float> b(model, shape);
    a.gpt.evaluate();
    b.gpt.evaluate();
    for (int t = 0; t < 18; ++t) EXPECT_EQ(a.gpt.losses()[t], b.gpt.losses()[t]);
  }
}

TEST(Gpt, LogitsOfATokenExplainItsLoss) {
  const Config::Model model = tiny_optimization_track();
  Instance<double> run(model, {.tokens = 18, .row_tokens = 9, .logits_chunk = 4, .training = true});
  const std::vector<float> logits = run.gpt.logits_at(11);
  run.gpt.evaluate();
  double sum = 0;
  for (const float z : logits) sum += std::exp(static_cast<double>(z));
  EXPECT_NEAR(std::log(sum) - static_cast<double>(logits[static_cast<size_t>(run.gpt.targets()[11])]), run.gpt.losses()[11], 1e-5);
}

TEST(Gpt, TokensSeeNothingBeyondTheirDocument) {
  const Config::Model model = tiny_optimization_track();
  Instance<double> run(model, {.tokens = 9, .row_tokens = 9, .logits_chunk = 9, .training = true});
  run.gpt.evaluate();
  const std::vector<double> before(run.gpt.losses(), run.gpt.losses() + 9);
  run.gpt.tokens()[2] = (run.gpt.tokens()[2] + 1) % 37;  // in the first document (tokens 0..3)
  run.gpt.evaluate();
  for (int t = 0; t < 9; ++t) {
    if (t == 2 || t == 3) {
      EXPECT_NE(run.gpt.losses()[t], before[static_cast<size_t>(t)]) << t;
    } else {
      EXPECT_EQ(run.gpt.losses()[t], before[static_cast<size_t>(t)]) << t;
    }
  }
}

TEST(ParameterTable, HasTheSizesOfTheKnownModels) {
  Config::Model model;  // GPT-2 124M, vocabulary padded
  int64_t count = 0;
  for (const ParameterSpec& spec : table_of(model)) count += spec.count();
  EXPECT_EQ(count, 124475904);  // as llm.c prints it
  model = tiny_optimization_track();
  model.vocab_size = 50257, model.vocab_padding = 128, model.num_layers = 12, model.width = 768, model.num_heads = 6,
  model.mlp_hidden = 3072;
  count = 0;
  for (const ParameterSpec& spec : table_of(model)) count += spec.count();
  EXPECT_EQ(count, 162354816);
}

}  // namespace
}  // namespace speedrun

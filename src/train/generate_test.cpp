// Choosing tokens from made-up logits, and generating with a model that has learned a sequence.
#include "src/train/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "src/train/data_setup.h"
#include "src/train/saved_model.h"
#include "src/train/test_run.h"

namespace speedrun {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

TEST(ChooseToken, TemperatureZeroTakesTheLargestAndTiesGoToTheLowerId) {
  const GenerateOptions greedy{.temperature = 0, .top_k = 0};
  EXPECT_EQ(choose_token({1, 3, 2}, 3, greedy, 0), 1);
  EXPECT_EQ(choose_token({1, 3, 3, 3}, 4, greedy, 7), 1);
  EXPECT_EQ(choose_token({-5, -4, -4}, 3, greedy, 0), 1);
  EXPECT_EQ(choose_token({0, 0, 0}, 3, {.temperature = 0, .top_k = 2, .seed = 9}, 3), 0);
}

TEST(ChooseToken, TopOneIsTheLargestAtAnyTemperature) {
  for (uint64_t draw = 0; draw < 50; ++draw) {
    EXPECT_EQ(choose_token({1, 3, 2}, 3, {.temperature = 100, .top_k = 1}, draw), 1);
    EXPECT_EQ(choose_token({3, 3, 2}, 3, {.temperature = 100, .top_k = 1}, draw), 0);
  }
}

TEST(ChooseToken, TopKRestrictsTheChoice) {
  const std::vector<float> logits = {0.1f, 0.5f, 0.4f, 0.2f, 0.3f};
  std::set<int32_t> chosen;
  for (uint64_t draw = 0; draw < 500; ++draw) chosen.insert(choose_token(logits, 5, {.temperature = 5, .top_k = 3}, draw));
  EXPECT_EQ(chosen, (std::set<int32_t>{1, 2, 4}));
  for (const int all : {0, 5, 1000}) {
    chosen.clear();
    for (uint64_t draw = 0; draw < 500; ++draw) chosen.insert(choose_token(logits, 5, {.temperature = 5, .top_k = all}, draw));
    EXPECT_EQ(chosen.size(), 5u) << "top_k " << all;
  }
}

TEST(ChooseToken, TheDistributionIsTheSoftmaxAtTheTemperature) {
  const std::vector<float> logits = {0, 1, -1, 2};
  constexpr int kDraws = 40000;
  for (const double temperature : {0.5, 1.0, 2.0}) {
    std::vector<double> expected, counts(logits.size());
    double sum = 0;
    for (const float logit : logits) sum += expected.emplace_back(std::exp(static_cast<double>(logit) / temperature));
    const GenerateOptions options{.temperature = temperature, .top_k = 0, .seed = 5};
    for (uint64_t draw = 0; draw < kDraws; ++draw) ++counts[static_cast<size_t>(choose_token(logits, 4, options, draw))];
    for (size_t id = 0; id < logits.size(); ++id) {
      const double p = expected[id] / sum, deviation = std::sqrt(p * (1 - p) / kDraws);
      EXPECT_NEAR(counts[id] / kDraws, p, 5 * deviation) << "id " << id << " at temperature " << temperature;
    }
  }
}

TEST(ChooseToken, TheSeedAndTheDrawDecideAlone) {
  const std::vector<float> logits(100, 0.0f);
  const auto sequence = [&](uint64_t seed) {
    std::vector<int32_t> ids;
    for (uint64_t draw = 0; draw < 30; ++draw) ids.push_back(choose_token(logits, 100, {.top_k = 0, .seed = seed}, draw));
    return ids;
  };
  EXPECT_EQ(sequence(1), sequence(1));
  EXPECT_NE(sequence(1), sequence(2));
  const std::vector<int32_t> ids = sequence(1);
  EXPECT_GT(std::set<int32_t>(ids.begin(), ids.end()).size(), 10u) << "all draws gave the same number";
}

TEST(ChooseToken, PaddingIdsAreNeverChosen) {
  std::vector<float> logits(16, 0.0f);
  for (size_t id = 10; id < logits.size(); ++id) logits[id] = 50;
  logits[12] = kNan;  // nothing reads them
  EXPECT_EQ(choose_token(logits, 10, {.temperature = 0}, 0), 0);
  for (uint64_t draw = 0; draw < 300; ++draw) EXPECT_LT(choose_token(logits, 10, {.temperature = 3, .top_k = 0}, draw), 10);
}

TEST(ChooseToken, MinusInfinityIsNeverChosen) {
  const std::vector<float> logits = {-kInfinity, 1, -kInfinity, 0};
  for (const double temperature : {0.0, 1e-300, 0.7, 1e300}) {
    for (uint64_t draw = 0; draw < 100; ++draw) {
      const int32_t id = choose_token(logits, 4, {.temperature = temperature, .top_k = 0}, draw);
      EXPECT_TRUE(id == 1 || id == 3) << id << " at temperature " << temperature;
    }
  }
}

TEST(ChooseToken, LogitsThatAreNotFiniteAreAnErrorAndNotAChoice) {
  for (const std::vector<float>& logits :
       {std::vector<float>{0, kNan, 1}, {kInfinity, 0, 0}, {-kInfinity, -kInfinity, -kInfinity}}) {
    for (const double temperature : {0.0, 0.8}) {
      try {
        choose_token(logits, 3, {.temperature = temperature}, 0);
        ADD_FAILURE() << "chosen from " << logits[0] << ", " << logits[1] << ", " << logits[2];
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::non_finite) << error.what();
      }
    }
  }
}

TEST(ChooseToken, ExtremeTemperaturesStayDefined) {
  const std::vector<float> logits = {1e30f, -1e30f, 0};
  for (uint64_t draw = 0; draw < 20; ++draw) {
    EXPECT_EQ(choose_token(logits, 3, {.temperature = 1e-308}, draw), 0);
    EXPECT_LT(choose_token(logits, 3, {.temperature = 1e308}, draw), 3);
  }
}

// A model of rows of 32 tokens on which 60 steps have been trained, or none.
class Generate : public ::testing::Test {
 protected:
  void SetUp() override {
    config_path_ = write_test_config(folder_.path(), optimization_track_patch());
    config_ = load_config(config_path_);
  }
  std::unique_ptr<Engine> untrained() {
    device_ = make_cpu_device(2);
    auto engine = make_engine(config_, *device_, {.micro_batch_tokens = 32, .evaluation_row_tokens = 32, .training = false});
    engine->warm_up();
    engine->initialize(4);
    // The initial projections and head are zero, with which neither context nor token matters: give them values.
    uint64_t stream = 0;
    for (const StateEntry& entry : engine->state()) {
      if (entry.shape.size() != 2) continue;
      std::vector<std::byte> bytes = entry.read();
      ++stream;
      for (size_t i = 0; i < bytes.size() / 4; ++i) {
        const auto value = static_cast<float>(0.5 * random_normal(8, stream, i));
        std::memcpy(bytes.data() + 4 * i, &value, 4);
      }
      entry.write(bytes);
    }
    return engine;
  }
  std::vector<int32_t> text(Engine& engine, const GenerateOptions& options, const std::vector<int32_t>& context) {
    std::vector<int32_t> ids;
    generate(engine, config_, options, context, [&](int32_t id) {
      ids.push_back(id);
      return true;
    });
    return ids;
  }

  TestFolder folder_;
  std::filesystem::path config_path_;
  Config config_;
  std::unique_ptr<Device> device_;
};

TEST_F(Generate, TheSameSeedGivesTheSameText) {
  const auto engine = untrained();
  const GenerateOptions options{.tokens = 40, .temperature = 1, .top_k = 0, .seed = 3};
  const std::vector<int32_t> first = text(*engine, options, {299, 1, 2});
  EXPECT_EQ(first.size(), 40u);
  EXPECT_EQ(text(*engine, options, {299, 1, 2}), first);
  for (const int32_t id : first) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, kTestVocabulary);
  }
  GenerateOptions other = options;
  other.seed = 4;
  EXPECT_NE(text(*engine, other, {299, 1, 2}), first);
}

TEST_F(Generate, GreedyTextIsTheArgmaxOfTheLogitsAfterEachToken) {
  const auto engine = untrained();
  std::vector<int32_t> context = {299, 5, 6};
  const std::vector<int32_t> ids = text(*engine, {.tokens = 5, .temperature = 0}, context);
  for (const int32_t id : ids) {
    const std::vector<float> logits = engine->next_logits(context);
    EXPECT_EQ(id, std::max_element(logits.begin(), logits.begin() + kTestVocabulary) - logits.begin());
    context.push_back(id);
  }
}

TEST_F(Generate, OfALongContextTheLastRowCounts) {
  const auto engine = untrained();
  std::vector<int32_t> row, longer;
  for (int i = 0; i < 100; ++i) longer.push_back(i % 40);
  row.assign(longer.end() - 32, longer.end());
  const GenerateOptions options{.tokens = 10, .temperature = 1, .seed = 2};
  const std::vector<int32_t> ids = text(*engine, options, longer);
  EXPECT_EQ(ids.size(), 10u);
  EXPECT_EQ(ids, text(*engine, options, row));
  row.erase(row.begin(), row.begin() + 16);
  EXPECT_NE(ids, text(*engine, options, row)) << "the context does not matter at all";
}

TEST_F(Generate, EmitStopsIt) {
  const auto engine = untrained();
  int calls = 0;
  generate(*engine, config_, {.tokens = 100}, {299}, [&](int32_t) { return ++calls < 3; });
  EXPECT_EQ(calls, 3);
  generate(*engine, config_, {.tokens = 0}, {299}, [&](int32_t) { return ++calls < 100; });
  EXPECT_EQ(calls, 3);
}

TEST_F(Generate, OptionsOutOfRangeAreRefusedByTheirFlag) {
  const auto engine = untrained();
  const auto refused = [&](const GenerateOptions& options) { return refusal_of([&] { text(*engine, options, {299}); }); };
  EXPECT_NE(refused({.tokens = -1}).find("--tokens -1"), std::string::npos);
  EXPECT_NE(refused({.temperature = -0.5}).find("--temperature -0.5"), std::string::npos);
  EXPECT_NE(refused({.temperature = std::nan("")}).find("--temperature nan"), std::string::npos);
  EXPECT_NE(refused({.temperature = std::numeric_limits<double>::infinity()}).find("--temperature inf"), std::string::npos);
  EXPECT_NE(refused({.top_k = -1}).find("--top-k -1"), std::string::npos);
}

TEST_F(Generate, ATrainedModelWritesWhatItsDataLooksLike) {
  Log log;
  train({.config = load_config(config_path_, {"schedule.steps=150", "data.repeat=5", "eval.every=0", "checkpoint.every=0"}),
         .config_name = "test",
         .resume = {},
         .dry_run = false,
         .gradients_file = {}},
        log);
  const SavedModel model = open_saved_model(folder_.path() / "runs" / "r", {}, SavedModelUse::generation, log);
  // In the data 15 of 16 tokens are their predecessor plus 1 or 2 (modulo 40).
  std::vector<int32_t> ids = {3, 5, 6, 8, 9};
  const size_t given = ids.size();
  for (const int32_t id : text(*model.engine, {.tokens = 60, .temperature = 0.5, .top_k = 5}, ids)) ids.push_back(id);
  int expected = 0;
  for (size_t i = given; i < ids.size(); ++i) {
    const int32_t step = (ids[i] - ids[i - 1] + 40) % 40;
    expected += step == 1 || step == 2;
  }
  EXPECT_GE(expected, 45) << "of 60";
}

}  // namespace
}  // namespace speedrun

// Keys that contradict each other, stages, and what the Main Track's model allows.
#include <gtest/gtest.h>

#include <filesystem>

#include "kernels/base/error.h"
#include "src/config/config_fields.h"
#include "src/config/config_io.h"
#include "src/config/test_config.h"

namespace speedrun {
namespace {

TEST_F(ConfigTest, ImpossibleCombinations) {
  const auto refused = [&](const std::vector<std::string>& overrides, const std::string& keys) {
    const std::string message = refusal("{}", overrides);
    EXPECT_EQ(message.find("test.json: "), 0u) << overrides[0] << ": " << message;
    EXPECT_NE(message.find(keys), std::string::npos) << overrides[0] << ": " << message;
  };
  refused({"model.num_heads=7"}, "model.width = 768 must be a multiple of model.num_heads = 7");
  refused({"model.positions=rotary", "model.width=60", "model.num_heads=4"}, "even head size");
  refused({"model.positions=rotary", "model.rotary_fraction=0.3"}, "model.rotary_fraction = 0.3");
  refused({"model.positions=rotary", "model.rotary_fraction=0.03125"}, "model.rotary_fraction = 0.03125");
  refused({"model.window_short=9", "model.window_long=8"}, "model.window_short = 9");
  refused({"model.init=zero_projections"}, "model.tied_head");
  refused({"train.batch_tokens=1000"}, "train.batch_tokens = 1000 must be a multiple of train.seq_len = 1024");
  refused({"eval.tokens=1000"}, "eval.tokens = 1000 must be a multiple of train.seq_len = 1024");
  refused({"train.seq_len=2048"}, "model.max_positions = 1024 is too small for train.seq_len = 2048");
  refused({"train.micro_batch_tokens=1536"}, "train.micro_batch_tokens = 1536 must be a multiple of train.seq_len = 1024");
  refused({"train.micro_batch_tokens=3072"}, "train.batch_tokens = 524288 must be a multiple of train.micro_batch_tokens = 3072");
  refused({"data.reader=documents", "data.document_rows=7"}, "must be a multiple of data.document_rows = 7");
  refused({"data.reader=documents"}, "model.max_positions = 1024 is too small for the row length 65536");
  refused({"optim.vector.optimizer=muon"}, "optim.vector.optimizer = muon");
  refused({"optim.head.lr=1"}, "optim.head differs from optim.embedding");
  refused({"schedule.lr.shape=linear", "schedule.lr.warmup_steps=600", "schedule.lr.cooldown_steps=600"},
          "schedule.lr.warmup_steps + schedule.lr.cooldown_steps = 1200 must not exceed schedule.steps = 1000");
  refused({"schedule.lr.cooldown_steps=600"}, "schedule.lr.shape = constant");
  refused({"schedule.momentum.warmup_steps=600", "schedule.momentum.cooldown_steps=401"}, "schedule.momentum.warmup_steps");
  refused({"schedule.steps=1000000000", "schedule.scale=2"}, "schedule.scale = 2");
  refused({"run.dir="}, "run.dir is empty");
  for (const std::string name : {".", "..", "a/b", "/a", "../a"}) refused({"run.name=" + name}, "run.name = " + name + " must be");
  refused({"run.name=a\nb"}, "run.name holds control characters");

  EXPECT_EQ(refusal("{}", {"optim.head.lr=1", "optim.embedding.lr=1"}), "accepted") << "the same values are no contradiction";
  EXPECT_EQ(refusal("{}", {"schedule.steps=0"}), "accepted");
  EXPECT_EQ(refusal("{}", {"model.positions=rotary", "data.reader=documents"}), "accepted");
}

TEST_F(ConfigTest, ImpossibleExtrapolations) {
  const auto refused = [&](std::vector<std::string> overrides, const std::string& message) {
    EXPECT_EQ(refusal("{}", overrides), "test.json: " + message);
    overrides.push_back("extrapolation.method=none");
    EXPECT_EQ(refusal("{}", overrides), "accepted") << "switched off, keys contradict nothing";
  };
  const auto accepted = [&](std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), "schedule.steps=100");
    EXPECT_EQ(refusal("{}", overrides), "accepted") << overrides[1];
  };
  refused({"extrapolation.method=rre", "extrapolation.start=1001"},
          "extrapolation.start = 1001 must not exceed schedule.steps = 1000");
  refused({"extrapolation.method=ema", "extrapolation.stop=1001"},
          "extrapolation.stop = 1001 must not exceed schedule.steps = 1000");
  refused({"extrapolation.method=ema", "extrapolation.start=7", "extrapolation.stop=7"},
          "extrapolation.start = 7 and extrapolation.stop = 7 leave nothing to average: start must be smaller");
  refused({"extrapolation.method=average", "extrapolation.start=1000"},
          "extrapolation.start = 1000 and schedule.steps = 1000 leave nothing to average: start must be smaller");
  for (const std::string method : {"rre", "rre_suffix", "mpe", "anderson"}) {
    refused({"extrapolation.method=" + method, "extrapolation.history=2"},
            "extrapolation.history = 2 is too short for this extrapolation.method: at least 3 snapshots");
  }
  refused({"extrapolation.method=rre", "extrapolation.snapshot_every=2"},
          "extrapolation.every = 5 must be a multiple of extrapolation.snapshot_every = 2: a jump starts from a snapshot");
  refused({"extrapolation.method=rre", "extrapolation.start=11", "extrapolation.stop=14"},
          "extrapolation.start = 11 and extrapolation.stop = 14 leave no room for a jump: extrapolation.history = 4 snapshots are "
          "there after update 15 at the earliest");
  refused({"extrapolation.method=rre", "extrapolation.apply=readout", "extrapolation.reset_momentum=true"},
          "extrapolation.reset_momentum = true needs extrapolation.apply = weights: a read-out leaves training alone");
  EXPECT_EQ(refusal("{}", {"extrapolation.methd=rre"}),
            "--set extrapolation.methd=rre: unknown key \"extrapolation.methd\"; nearest valid key: \"extrapolation.method\"");
  EXPECT_EQ(refusal("{}", {"extrapolation.num_snapshots=4"}),
            "--set extrapolation.num_snapshots=4: unknown key \"extrapolation.num_snapshots\"; nearest valid key: "
            "\"extrapolation.history\"");
  EXPECT_EQ(refusal("{}", {"extrapolation.history=9"}).find("--set extrapolation.history=9: extrapolation.history"), 0u);

  accepted({"extrapolation.method=linear", "extrapolation.history=2"});
  accepted({"extrapolation.method=rre", "extrapolation.start=11", "extrapolation.stop=15"});
  accepted({"extrapolation.method=rre", "extrapolation.every=6", "extrapolation.snapshot_every=3"});
  accepted({"extrapolation.method=average", "extrapolation.snapshot_every=3", "extrapolation.history=2"});
  accepted({"extrapolation.method=ema", "extrapolation.start=99"});
}

TEST_F(ConfigTest, StageKeys) {
  const Config config = load(R"({"model": {"architecture": "main_track", "norm": "rmsnorm", "norm_gain": false,
    "embedding_norm": true, "positions": "rotary", "qk_norm": true, "activation": "relu2", "bias": false, "tied_head": false,
    "init": "zero_projections"}, "schedule": {"steps": 0, "stages": {"1": {"steps": 2}, "0": {"steps": 3, "mtp_start": [1, 0.5]}}}})",
                             {"schedule.stages.0.mtp_end=[1, 0]", "schedule.stages.1.batch_tokens=1024"});
  ASSERT_EQ(config.schedule.stages.size(), 2u);
  EXPECT_EQ(config.schedule.stages.at(0).mtp_start, (NumberList{1, 0.5}));
  EXPECT_EQ(config.schedule.stages.at(0).mtp_end, (NumberList{1, 0}));
  EXPECT_EQ(config.schedule.stages.at(1).batch_tokens, 1024);
  EXPECT_EQ(load(dump_config(config)), config);
  const std::vector<KeyChange> changes = changed_keys(Config{}, config);
  EXPECT_TRUE(std::any_of(changes.begin(), changes.end(), [](const KeyChange& change) {
    return change.key == "schedule.stages.0.mtp_end" && change.before == "[1.0]" && change.after == "[1.0,0.0]";
  }));
  EXPECT_EQ(
      refusal("{}", {"schedule.stages.0.step=3"}),
      "--set schedule.stages.0.step=3: unknown key \"schedule.stages.0.step\"; nearest valid key: \"schedule.stages.0.steps\"");
  EXPECT_EQ(refusal("{}", {"schedule.stages.0=3"}),
            "--set schedule.stages.0=3: schedule.stages.0 is a group of keys: set one of them");
  for (const std::string list : {"3", "[[1]]", "[\"a\"]", "[1, -1]"}) {
    EXPECT_EQ(refusal("{}", {"schedule.stages.0.mtp_start=" + list})
                  .find("--set schedule.stages.0.mtp_start=" + list + ": schedule.stages.0.mtp_start: expected a "),
              0u)
        << list;
  }
}

class MainTrackConfig : public ConfigTest {
 protected:
  const std::string path_ = std::string(SPEEDRUN_SOURCE_DIR) + "/configs/main_track.json";
  std::string outcome(const std::vector<std::string>& overrides) const {
    return speedrun::refusal_of([&] { load_config(path_, overrides); });
  }
  void refused(const std::vector<std::string>& overrides, const std::string& part) const {
    const std::string message = outcome(overrides);
    EXPECT_EQ(message.find(path_ + ": "), 0u) << overrides[0] << ": " << message;
    EXPECT_NE(message.find(part), std::string::npos) << overrides[0] << ": " << message;
  }
};

TEST_F(MainTrackConfig, EveryFeatureCanBeSwitchedOffByItself) {
  for (const std::string off : {"model.smear=false",
                                "model.bigram_rows=0",
                                "model.bigram_sign_rows=0",
                                "model.x0_injection=false",
                                "model.residual_lambdas=false",
                                "model.weight_lambdas=false",
                                "model.mudd_gates=false",
                                "model.mudd=false",
                                "model.tied_until_split=false",
                                "schedule.split_step=0",
                                "model.yarn=false",
                                "model.layers.0.paired_heads=false",
                                "model.layers.3.key_offset=false",
                                "model.layers.1.value_embedding=false",
                                "model.layers.1.xsa=false",
                                "model.layers.3.gate=false",
                                "model.layers.10.dc=false",
                                "model.layers.8.input_from=-1",
                                "model.layers.6.skip_from=-1",
                                "fp8.mlp_up=bf16",
                                "fp8.mlp_down=bf16",
                                "fp8.head=bf16",
                                "fp8.mlp_grad_inp=fp8",
                                "fp8.mlp_grad_weight=fp8",
                                "fp8.qkv=fp8",
                                "fp8.qkv_grad_inp=fp8",
                                "fp8.qkv_grad_weight=fp8",
                                "fp8.out=fp8",
                                "fp8.out_grad_inp=fp8",
                                "fp8.out_grad_weight=fp8",
                                "fp8.backward_scaling=delayed",
                                "schedule.stages.3.steps=0",
                                "data.reader=rows",
                                "optim.matrix.optimizer=muon",
                                "optim.down.optimizer=adam",
                                "eval.row_tokens=0",
                                "train.micro_batch_tokens=49152",
                                "schedule.steps=1285",
                                "train.reduction=sum"}) {
    EXPECT_EQ(outcome({off}), "accepted") << off;
  }
}

TEST_F(MainTrackConfig, ImpossibleCombinations) {
  for (const std::string key : {"model.norm=layernorm", "model.norm_gain=true", "model.embedding_norm=false",
                                "model.positions=learned", "model.rotary_fraction=1", "model.qk_norm=false",
                                "model.activation=gelu", "model.bias=true", "model.head_bias=true", "model.init=gpt2"}) {
    refused({key}, "model.architecture = main_track needs " + key.substr(0, key.find('=')));
  }
  refused({"fp8.backward_scaling=fixed"}, "fp8.backward_scaling = fixed");
  refused({"model.tied_head=true", "model.init=gpt2"}, "model.tied_head = false");
  refused({"model.max_positions=2048"}, "model.max_positions = 2048 needs model.architecture = gpt; here it is main_track");
  refused({"optim.vector.lr=1"}, "optim.vector.lr = 1.0 needs model.architecture = gpt");
  refused({"model.num_heads=3"}, "paired_heads = true needs an even number of heads; model.num_heads is 3");
  refused({"model.width=780"}, "model.rotary_fraction = 0.5 of head size 130 makes 32.5 rotating pairs");
  refused({"model.layers.11.xsa=true"}, "model.layers.11 does not exist");
  refused({"model.layers.8.input_from=8"}, "model.layers.8.input_from = 8 must be an earlier layer");
  refused({"model.layers.9.input_from=6"}, "model.layers.9.input_from = 6 differs from another layer's, 7");
  refused({"model.layers.6.skip_from=7"}, "model.layers.6.skip_from = 7 must be an earlier layer");
  refused({"model.layers.5.skip_from=2"}, "model.layers.5.skip_from = 2 is for layers without attention");
  refused({"model.layers.6.xsa=true"}, "model.layers.6.xsa = true needs attention");
  refused({"model.layers.6.input_from=2"}, "model.layers.6.input_from = 2 needs attention");
  for (const std::string feature : {"xsa", "key_offset"})
    refused({"model.layers.0." + feature + "=true"}, "model.layers.0.paired_heads and model.layers.0." + feature + " exclude");
  refused({"model.layers.10.paired_heads=true", "model.layers.10.key_offset=false"}, "paired_heads and model.layers.10.dc");
  refused({"model.layers.3.dc=true"}, "only the last layer, 10, can have DC attention");
  refused({"model.mudd_early=7"}, "mudd_early < mudd_late < last layer");
  refused({"model.mudd_late=10"}, "mudd_early < mudd_late < last layer");
  refused({"model.layers.10.attention=false", "model.layers.10.dc=false", "model.layers.10.gate=false",
           "model.layers.10.value_embedding=false", "model.layers.10.key_offset=false", "model.layers.10.input_from=-1"},
          "model.mudd mixes into the last layer's attention");
  refused({"model.mudd_gate_split=11"}, "model.mudd_gate_split = 11 must be one of the layers 1 to 10");
  refused({"model.bigram_rows=1"}, "model.bigram_rows = 1");
  refused({"model.smear_channels=769"}, "model.smear_channels = 769");
  refused({"optim.embedding.every=1"}, "optim.embedding and optim.head must have the same");
  refused({"optim.embedding.every=3", "optim.head.every=3"}, "optim.head.every = 1 or 2, found 3");
  refused({"optim.bigram.optimizer=normuon"}, "optim.bigram.optimizer = normuon: Muon is for hidden matrices");
  refused({"schedule.steps=1000"}, "schedule.steps = 1000 is not the sum of the stages' steps, 1285");
  refused({"schedule.stages.5.steps=1"}, "schedule.stages.4 is missing");
  refused({"schedule.stages.0.steps=0", "schedule.stages.1.steps=0", "schedule.stages.2.steps=0", "schedule.stages.3.steps=0"},
          "have no steps");
  refused({"schedule.stages.1.batch_tokens=262145"},
          "schedule.stages.1.batch_tokens = 262145 must be a multiple of data.document_rows");
  refused({"schedule.stages.1.mtp_end=[1]"}, "must be of the same length; they have 2 and 1");
  refused({"schedule.stages.1.mtp_start=[]"}, "expected 1 to 3");
  refused({"schedule.stages.1.mtp_start=[1, 1, 1, 1]"}, "mtp_start has 4 numbers");
  refused({"schedule.stages.2.mtp_start=[0.5]"}, "schedule.stages.2.mtp_start: the weight of the only term of the loss must be 1");
  refused({"schedule.stages.1.window_short=900"}, "schedule.stages.1.window_short = 900 must not exceed");
  refused({"schedule.stages.1.window_long=0", "schedule.stages.1.window_short=0"}, "set schedule.stages.1.window_long");
  refused({"eval.final_window_short=2561"}, "eval.final_window_short = 2561 must not exceed");
  refused({"schedule.split_step=846"}, "schedule.split_step = 846 must be odd");
  refused({"schedule.split_step=1285"}, "schedule.split_step = 1285 must be below the sum of the stages' steps = 1285");
  refused({"schedule.split_step=845", "extrapolation.method=ema", "extrapolation.parameters=all", "extrapolation.start=845"},
          "extrapolation.parameters = all: at schedule.split_step = 845");
  EXPECT_EQ(
      outcome({"schedule.split_step=845", "extrapolation.method=ema", "extrapolation.parameters=all", "extrapolation.start=846"}),
      "accepted");
  refused({"schedule.lr.hold_steps=600"}, "schedule.lr.hold_steps = 1362 must not exceed the sum of the stages' steps = 1285");
  refused({"eval.row_tokens=1000"}, "eval.tokens = 10485760 must be a multiple of eval.row_tokens = 1000");
  refused({"train.micro_batch_tokens=16384"}, "train.micro_batch_tokens = 16384 must be at least the row length 49152");
  EXPECT_NE(outcome({"fp8.grad_margin=0"}).find("fp8.grad_margin: expected a value in the range > 0"), std::string::npos);
  EXPECT_NE(outcome({"model.dc_window=257"}).find("model.dc_window: expected a value in the range 1..256"), std::string::npos);
}

TEST_F(MainTrackConfig, NothingOfItWithTheOtherArchitecture) {
  for (const std::string key :
       {"model.smear=true", "model.bigram_rows=100", "model.x0_injection=true", "model.mudd=true", "model.yarn=true",
        "model.tied_until_split=true", "model.layers.3.xsa=true", "model.layers.3.attention=false", "optim.bigram.lr=1",
        "optim.down.optimizer=normuon", "schedule.stages.0.prefix_end=0.5", "schedule.split_step=5", "fp8.head=fp8"}) {
    const std::string message = refusal("{}", {key});
    EXPECT_EQ(message.find("test.json: " + key.substr(0, key.find('=')) + " = "), 0u) << message;
    EXPECT_NE(message.find("needs model.architecture = main_track; here it is gpt"), std::string::npos) << message;
  }
  EXPECT_EQ(refusal("{}", {"optim.matrix.optimizer=normuon", "train.reduction=row_mean", "optim.vector.optimizer=adam"}),
            "accepted");
}

TEST_F(ConfigTest, HeadSizesOfCuda) {
  Config config;
  EXPECT_NO_THROW(validate_for_cuda(config, "test"));
  config.model.num_heads = 24;
  EXPECT_THROW(validate_for_cuda(config, "test"), InputError);
  EXPECT_NO_THROW(validate(config, "test")) << "the CPU takes any";
}

// A sum over tokens in FP8 needs whole sixteens of them.
TEST_F(MainTrackConfig, RowsOfFp8WeightGradientsOnCuda) {
  const auto outcome_on_cuda = [](const std::vector<std::string>& settings) -> std::string {
    try {
      Config config = load_config(std::filesystem::path(SPEEDRUN_SOURCE_DIR) / "configs/main_track_tiny.json", settings);
      validate_for_cuda(config, "test.json");
    } catch (const InputError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(outcome_on_cuda({"fp8.qkv_grad_weight=fp8"}), "accepted");
  Config config = load_config(std::filesystem::path(SPEEDRUN_SOURCE_DIR) / "configs/main_track_tiny.json");
  for (auto& [index, stage] : config.schedule.stages) stage.batch_tokens = int64_t{config.data.document_rows} * 24;
  EXPECT_NO_THROW(validate_for_cuda(config, "test.json"));
  config.fp8.out = config.fp8.qkv_grad_inp = Precision::fp8;
  EXPECT_NO_THROW(validate_for_cuda(config, "test.json"));
  config.fp8.mlp_grad_weight = Precision::fp8;
  try {
    validate_for_cuda(config, "test.json");
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("need rows of a multiple of 16 tokens; the row length 24"), std::string::npos)
        << error.what();
  }
  EXPECT_NO_THROW(validate(config, "test.json")) << "the CPU takes any";
}

}  // namespace
}  // namespace speedrun

// Weight extrapolation in the engine's steps: what arrives with their results, state that another run, or another number of ranks,
// goes on from, and read-outs that training does not notice.
#include <cmath>
#include <cstring>
#include <map>

#include "fmt/format.h"
#include "src/dist/collective_checks_test.h"
#include "src/train/data_setup.h"
#include "src/train/engine.h"
#include "src/train/test_run.h"

namespace speedrun {
namespace {

constexpr int kSteps = 20;

using State = std::map<std::string, std::vector<std::byte>>;

struct Part {  // of a run
  int first = 0, end = kSteps;
  const State* loaded = nullptr;
  bool restart = false;  // without the history in `loaded`
};

struct Outcome {
  State state;  // on rank 0
  std::vector<double> losses;
  std::map<int, kernels::JumpReport> jumps, readouts;  // by completed updates
};

// A run's engine on one of the ranks.
class EngineRun {
 public:
  explicit EngineRun(Config config, Control* control = nullptr)
      : config_(std::move(config)), control_(control), device_(make_cpu_device(1)) {
    if (control != nullptr) communicator_ = make_communicator(*control, *device_, false);
    engine_ = make_engine(config_, *device_,
                          {.micro_batch_tokens = 128,
                           .evaluation_row_tokens = eval_row_tokens(config_),
                           .control = control_,
                           .communicator = communicator_.get()});
    engine_->warm_up();
    engine_->initialize(7);
  }

  void load(const State& state, int completed, bool restart) {
    for (const StateEntry& entry : engine_->state()) {
      if (restart && entry.name.starts_with(kExtrapolationPrefix)) continue;
      const auto found = state.find(entry.name);
      require(found != state.end(), "no ", entry.name);
      entry.write(found->second);
    }
    if (restart) engine_->restart_extrapolation(completed);
  }

  Outcome run(const Part& part) {
    if (part.loaded != nullptr) load(*part.loaded, part.first, part.restart);
    const std::unique_ptr<Reader> reader = make_train_reader(config_, train_reader_options(config_));
    Outcome outcome;
    StepRows rows;
    for (int step = 0; step < part.end; ++step) {
      if (step < part.first) {
        reader->skip(step_shape(config_, step));
        continue;
      }
      reader->next(step_shape(config_, step), rank(), control_ == nullptr ? 1 : control_->size(), rows);
      engine_->submit_step(step, rows);
      const StepResult result = *engine_->wait_result();
      require(result.finite && result.step == step, "step ", step);
      outcome.losses.push_back(result.loss);
      if (result.jump) outcome.jumps[step + 1] = *result.jump;
      const uint64_t weights = engine_->weights_hash();
      kernels::JumpReport report;
      if (!engine_->begin_readout(step + 1, &report)) continue;
      outcome.readouts[step + 1] = report;
      require(rank() != 0 || engine_->weights_hash() != weights, "nothing to read out");
      engine_->end_readout();
      require(rank() != 0 || engine_->weights_hash() == weights, "a read-out left something");
    }
    outcome.state = state();
    return outcome;
  }

  State state() {
    State state;
    for (const StateEntry& entry : engine_->state()) state[entry.name] = entry.read();
    return state;
  }
  const Engine& engine() const { return *engine_; }

 private:
  int rank() const { return control_ == nullptr ? 0 : control_->rank(); }

  Config config_;
  Control* control_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<Engine> engine_;
};

State without_extrapolation(State state) {
  std::erase_if(state, [](const auto& entry) { return entry.first.starts_with(kExtrapolationPrefix); });
  return state;
}

class ExtrapolationInTheEngine : public ::testing::TestWithParam<const char*> {
 protected:
  Config config(const std::vector<std::string>& keys) const {
    nlohmann::json patch = main_track_patch();
    if (std::string(GetParam()) == "optimization_track") {
      patch = optimization_track_patch();
      patch.merge_patch({{"model", {{"width", 32}, {"mlp_hidden", 64}}}});  // matrices that are cut between ranks
    }
    std::vector<std::string> all = {"extrapolation.start=3", "extrapolation.stop=18", "extrapolation.history=3"};
    all.insert(all.end(), keys.begin(), keys.end());
    return load_config(write_test_config(folder_.path(), patch), all);
  }
  // The larger model, slow on a CPU, takes the first ones alone.
  template <class T>
  std::vector<T> some(std::vector<T> all) const {
    if (std::string(GetParam()) == "main_track") all.resize(1);
    return all;
  }
  TestFolder folder_;
};

TEST_P(ExtrapolationInTheEngine, JumpsArriveWithTheirSteps) {
  const Outcome off = EngineRun(config({})).run({});
  EXPECT_TRUE(off.jumps.empty());
  for (const std::string& method : some<std::string>({"rre", "rre_suffix", "mpe", "anderson", "linear"})) {
    EngineRun run(config({"extrapolation.method=" + method, "extrapolation.parameters=all_but_tables"}));
    EXPECT_EQ(run.engine().extrapolation_note().find(method + ", updates 3 to 18, a jump every 5 updates"), 0u)
        << run.engine().extrapolation_note();
    const Outcome on = run.run({});
    ASSERT_EQ(on.jumps.size(), 3u);
    for (const int n : {5, 10, 15}) {
      const kernels::JumpReport& report = on.jumps.at(n);
      EXPECT_EQ(report.refusal, kernels::JumpRefusal::none) << method << " " << n;
      EXPECT_EQ(report.differences, 2);
      EXPECT_GT(report.jump, 0);
      EXPECT_LE(report.capped_jump, 0.001);
    }
    // Up to the first jump it is the run without.
    EXPECT_TRUE(std::equal(on.losses.begin(), on.losses.begin() + 5, off.losses.begin())) << method;
    EXPECT_NE(on.losses[5], off.losses[5]) << method;
  }
}

TEST_P(ExtrapolationInTheEngine, OffAndReadOutsHaveTheSameTraining) {
  const Outcome off = EngineRun(config({})).run({});
  EXPECT_EQ(EngineRun(config({})).engine().extrapolation_note(), "");
  for (const auto& [method, readouts] : some<std::pair<std::string, size_t>>({{"rre", 3}, {"ema", 15}, {"average", 15}})) {
    const Outcome on = EngineRun(config({"extrapolation.method=" + method, "extrapolation.apply=readout"})).run({});
    EXPECT_EQ(on.readouts.size(), readouts) << method;
    EXPECT_TRUE(on.jumps.empty());
    EXPECT_EQ(on.losses, off.losses) << method;
    EXPECT_EQ(without_extrapolation(on.state), off.state) << method;
    EXPECT_GT(on.state.size(), off.state.size());
  }
}

TEST_P(ExtrapolationInTheEngine, ResumedInAHistoryIsNotInterrupted) {
  for (const std::string& method : some<std::string>({"rre_suffix", "ema", "average"})) {
    const Config with = config({"extrapolation.method=" + method});
    const Outcome whole = EngineRun(with).run({});
    for (const int cut : some<int>({13, 3, 4, 10})) {
      const Outcome before = EngineRun(with).run({.end = cut});
      const Outcome after = EngineRun(with).run({.first = cut, .loaded = &before.state});
      EXPECT_EQ(after.state, whole.state) << method << ", resumed after " << cut;
    }
  }
}

// A run that branches off where the history begins, from a run that knows nothing of it.
TEST_P(ExtrapolationInTheEngine, ABranchIsTheRunThatAlwaysHadTheKeys) {
  const Outcome trunk = EngineRun(config({})).run({.end = 3});
  for (const std::string& method : some<std::string>({"rre", "ema"})) {
    const Config with = config({"extrapolation.method=" + method});
    const Outcome whole = EngineRun(with).run({});
    const Outcome branch = EngineRun(with).run({.first = 3, .loaded = &trunk.state, .restart = true});
    EXPECT_EQ(without_extrapolation(branch.state), without_extrapolation(whole.state)) << method;
    EXPECT_EQ(branch.jumps.size(), whole.jumps.size());
  }
}

TEST_P(ExtrapolationInTheEngine, ResettingTheMomentumChangesWhatComesAfter) {
  const std::vector<std::string> keys = {"extrapolation.method=rre", "extrapolation.stop=7"};
  const Outcome kept = EngineRun(config(keys)).run({.end = 5});
  std::vector<std::string> more = keys;
  more.push_back("extrapolation.reset_momentum=true");
  const Outcome reset = EngineRun(config(more)).run({.end = 5});
  ASSERT_EQ(kept.state.size(), reset.state.size());
  int zeroed = 0;
  for (const auto& [name, bytes] : kept.state) {
    const std::vector<std::byte>& after = reset.state.at(name);
    const bool moment = name.starts_with("muon.momentum/") || (name.starts_with("adam.m/") && after != bytes);
    if (!moment) {
      EXPECT_EQ(after, bytes) << name;
      continue;
    }
    EXPECT_NE(after, bytes) << name;
    EXPECT_EQ(after, std::vector<std::byte>(bytes.size())) << name;
    ++zeroed;
  }
  EXPECT_GT(zeroed, 1);
}

// State of one rank, loaded by several, is the same history; what they make of it is to rounding what one makes.
TEST_P(ExtrapolationInTheEngine, RanksGoOnWithTheHistoryOfOne) {
  for (const std::string& method : some<std::string>({"rre_suffix", "average"})) {
    const Config with = config({"extrapolation.method=" + method});
    const Outcome before = EngineRun(with).run({.end = 8});
    const Outcome whole = EngineRun(with).run({.first = 8, .loaded = &before.state});
    for (const int ranks : some<int>({2, 4})) {
      EXPECT_TRUE(testing::run_ranks(ranks, 120, [&](Control& control) {
        EngineRun run(with, &control);
        run.load(before.state, 8, false);
        const State loaded = run.state();
        if (control.rank() == 0) {
          for (const auto& [name, bytes] : before.state)
            require(!name.starts_with(kExtrapolationPrefix) || loaded.at(name) == bytes, name, " differs after loading");
        }
        const Outcome after = run.run({.first = 8});
        require(after.jumps.size() == whole.jumps.size() && !after.jumps.empty(), after.jumps.size(), " jumps");
        for (const auto& [n, report] : whole.jumps) {
          const double ratio = after.jumps.at(n).jump / report.jump;
          require(std::abs(ratio - 1) < 0.05, "the jump after update ", n, " is ", ratio, " of that on one rank");
        }
        for (size_t i = 0; i < whole.losses.size(); ++i)
          require(std::abs(after.losses[i] - whole.losses[i]) < 2e-3, "losses ", after.losses[i], " and ", whole.losses[i]);
      }));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tracks, ExtrapolationInTheEngine, ::testing::Values("optimization_track", "main_track"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace speedrun

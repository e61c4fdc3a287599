// Several CPU ranks: a bigram table whose touched rows alone travel against one that is summed as a whole, bit for bit.
#include <cstring>
#include <optional>

#include "fmt/format.h"
#include "src/dist/collective_checks_test.h"
#include "src/train/data_setup.h"
#include "src/train/engine.h"
#include "src/train/test_run.h"
#include "src/train/touched_rows.h"

namespace speedrun {
namespace {

constexpr double kLimit_s = 200;
constexpr int kSteps = 20;  // four stages; head and embedding part in the twelfth

struct State {  // on rank 0
  std::vector<std::pair<std::string, std::vector<std::byte>>> tensors;
};

struct Run {
  int64_t touched_rows = 0;        // capacity; 0: chosen by the engine
  int64_t micro_batch = 512;       // at most
  int first = 0, end = kSteps;     // steps
  const State* resumed = nullptr;  // on every rank
};

class Ranks {
 public:
  Ranks(Control& control, Config config)
      : control_(control),
        config_(std::move(config)),
        device_(make_cpu_device(1)),
        communicator_(make_communicator(control, *device_, false)) {}

  State run(bool sparse, const Run& run) {
    config_.dist.sparse_tables = sparse;
    const auto engine = make_engine(config_, *device_,
                                    {.micro_batch_tokens = run.micro_batch,
                                     .evaluation_row_tokens = eval_row_tokens(config_),
                                     .control = &control_,
                                     .communicator = communicator_.get(),
                                     .touched_rows = run.touched_rows});
    engine->warm_up();
    engine->initialize(7);
    if (run.resumed != nullptr) {
      const std::vector<StateEntry> entries = engine->state();
      require(entries.size() == run.resumed->tensors.size(), "other state");
      for (size_t i = 0; i < entries.size(); ++i) entries[i].write(run.resumed->tensors[i].second);
    }
    const std::unique_ptr<Reader> reader = make_train_reader(config_, train_reader_options(config_));
    StepRows rows;
    for (int step = 0; step < run.end; ++step) {
      if (step < run.first) {
        reader->skip(step_shape(config_, step));
        continue;
      }
      reader->next(step_shape(config_, step), control_.rank(), control_.size(), rows);
      engine->submit_step(step, rows);
      require(engine->wait_result()->finite, "step ", step, " is not finite");
    }
    sums = engine->table_sums();
    State state;
    for (const StateEntry& entry : engine->state()) state.tensors.emplace_back(entry.name, entry.read());
    return state;
  }

  void require_same_state(const State& sparse, const State& dense) const {
    if (control_.rank() != 0) return;
    require(sparse.tensors.size() == dense.tensors.size() && !sparse.tensors.empty(), "other tensors");
    for (size_t i = 0; i < sparse.tensors.size(); ++i)
      require(sparse.tensors[i] == dense.tensors[i], sparse.tensors[i].first, " differs");
  }

  // Rank 0's, on every rank.
  void share(State& state) {
    for (auto& [name, bytes] : state.tensors) {
      uint64_t size = bytes.size();
      communicator_->fork();
      communicator_->broadcast(&size, sizeof size, CommType::bytes, 0);
      bytes.resize(size);
      if (size > 0) communicator_->broadcast(bytes.data(), static_cast<int64_t>(size), CommType::bytes, 0);
      communicator_->join();
    }
  }

  TableSums sums;  // of the last run

 private:
  Control& control_;
  Config config_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Communicator> communicator_;
};

class SparseTable : public ::testing::TestWithParam<int> {
 protected:
  void on_ranks(const std::function<void(Ranks&)>& body) {
    const TestFolder folder;
    nlohmann::json patch = main_track_patch();
    // The smallest table that is cut between the ranks.
    patch.merge_patch({{"model", {{"width", 32}, {"mlp_hidden", 64}, {"bigram_rows", 4096}}}});
    const std::filesystem::path config = write_test_config(folder.path(), patch);
    EXPECT_TRUE(testing::run_ranks(GetParam(), kLimit_s, [&](Control& control) {
      Ranks ranks(control, load_config(config, {}));
      body(ranks);
    }));
  }
};

// As many updates as every second of the steps; the stages' capacities suffice.
TEST_P(SparseTable, HasTheBitsOfTheDenseSum) {
  on_ranks([](Ranks& ranks) {
    const State sparse = ranks.run(true, {});
    require(ranks.sums.sparse == kSteps / 2 && ranks.sums.dense == 0, "sparse ", ranks.sums.sparse, ", dense ", ranks.sums.dense);
    const State dense = ranks.run(false, {});
    require(ranks.sums.sparse == 0 && ranks.sums.dense == 0, "sparse, though dist.sparse_tables is off");
    ranks.require_same_state(sparse, dense);
  });
}

TEST_P(SparseTable, HasThemWithSeveralMicroBatches) {
  on_ranks([](Ranks& ranks) {
    const State sparse = ranks.run(true, {.micro_batch = 1});  // a row each
    require(ranks.sums.sparse == kSteps / 2, "sparse ", ranks.sums.sparse, ", dense ", ranks.sums.dense);
    ranks.require_same_state(sparse, ranks.run(false, {.micro_batch = 1}));
  });
}

// A capacity that suffices for some steps only.
TEST_P(SparseTable, SumsAllRowsWhereTheCapacityIsTooSmall) {
  on_ranks([size = GetParam()](Ranks& ranks) {
    const State dense = ranks.run(false, {});
    const State mixed = ranks.run(true, {.touched_rows = size == 2 ? 60 : 24});
    require(ranks.sums.sparse > 0 && ranks.sums.dense > 0, "sparse ", ranks.sums.sparse, ", dense ", ranks.sums.dense);
    ranks.require_same_state(mixed, dense);
    const State never = ranks.run(true, {.touched_rows = 1});
    require(ranks.sums.sparse == 0 && ranks.sums.dense == kSteps / 2, "sparse ", ranks.sums.sparse, ", dense ", ranks.sums.dense);
    ranks.require_same_state(never, dense);
  });
}

// In the middle of two steps of one update the rows of the first step are not known after a resume, while rank 0 has the sum of
// their gradients.
TEST_P(SparseTable, SumsAllRowsAfterAResume) {
  on_ranks([](Ranks& ranks) {
    State saved = ranks.run(true, {.end = 7});
    require(ranks.sums.sparse == 3 && ranks.sums.dense == 0, "sparse ", ranks.sums.sparse, ", dense ", ranks.sums.dense);
    ranks.share(saved);
    const State sparse = ranks.run(true, {.first = 7, .resumed = &saved});
    require(ranks.sums.sparse == 6 && ranks.sums.dense == 1, "sparse ", ranks.sums.sparse, ", dense ", ranks.sums.dense);
    ranks.require_same_state(sparse, ranks.run(false, {.first = 7, .resumed = &saved}));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SparseTable, ::testing::Values(2, 4),
                         [](const auto& test) { return fmt::format("{}", test.param); });

// The table of the Main Track: fewer bytes in every stage and for every number of ranks, and room for what text was measured to
// touch (the most of 60 pairs of steps).
TEST(TouchedRowsCapacity, SufficesForMeasuredText) {
  struct Case {
    int ranks;
    int64_t batch_tokens, rows_per_owner;
  };
  for (const Case& c :
       {Case{2, 131072, 34541}, Case{4, 131072, 10321}, Case{8, 131072, 2896}, Case{2, 262144, 56940}, Case{4, 262144, 17377},
        Case{8, 262144, 5081}, Case{2, 393216, 74167}, Case{4, 393216, 23396}, Case{8, 393216, 7092}}) {
    SparseRowsShape shape{.V = 377280, .C = 768, .ranks = c.ranks};
    shape.rows_per_owner = touched_rows_capacity(shape, c.batch_tokens / c.ranks * 2);
    EXPECT_GT(static_cast<double>(shape.rows_per_owner), 1.05 * static_cast<double>(c.rows_per_owner)) << c.ranks << " ranks";
    EXPECT_LT(static_cast<double>(shape.rows_per_owner), 1.3 * static_cast<double>(c.rows_per_owner)) << c.ranks << " ranks";
    EXPECT_LT(2 * sparse_rows_bytes(shape), dense_rows_bytes(shape)) << c.ranks << " ranks, " << c.batch_tokens << " tokens";
  }
}

TEST(TouchedRowsCapacity, IsNoneWhereTheTableIsFewerBytes) {
  EXPECT_EQ(touched_rows_capacity({.V = 4096, .C = 32, .ranks = 2}, 1 << 20), 0);
  EXPECT_GT(touched_rows_capacity({.V = 4096, .C = 32, .ranks = 2}, 256), 0);
}

}  // namespace
}  // namespace speedrun

// The fused up-projection's arithmetic: every output is computed by exactly one block, operands lie where the tensor cores read
// them, and the barriers let nobody through too early.
#include "kernels/relu2_mlp/relu2_up_layout.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/testing/random.h"

namespace speedrun::kernels {
namespace {

TEST(Relu2UpSchedule, EveryTileOnceAndShareDiffersByOne) {
  for (const int num_sms : {1, 12, 13, 131, 132}) {
    for (const int panels : {1, 2, 7, 12}) {
      for (const int64_t N : {1, 63, 64, 65, 704, 705, 16'421}) {
        if (panels > num_sms) continue;
        const Relu2UpSchedule schedule = Relu2UpSchedule::make(N, 256 * panels, 256, num_sms);
        SCOPED_TRACE("N=" + std::to_string(N) + " panels=" + std::to_string(panels) + " SMs=" + std::to_string(num_sms));
        EXPECT_EQ(schedule.panels, panels);
        EXPECT_LE(schedule.panels * schedule.groups, num_sms);
        std::vector<int> seen(static_cast<size_t>((N + 63) / 64));
        int least = schedule.token_tiles, most = 0;
        for (int group = 0; group < schedule.groups; ++group) {
          const int tiles = schedule.num_tiles(group);
          least = std::min(least, tiles), most = std::max(most, tiles);
          for (int index = 0; index < tiles; ++index) ++seen.at(static_cast<size_t>(schedule.tile(group, index)));
        }
        for (const int times : seen) ASSERT_EQ(times, 1);
        EXPECT_GE(least, 1);
        EXPECT_LE(most - least, 1);
      }
    }
  }
}

template <int kPanel>
void check_panel() {
  using Panel = Relu2UpPanel<kPanel>;
  // The copy engine walks a box of (2 rows, 4, kGroups) innermost first; copy i starts at row 2i of the 8.
  std::set<int> rows;
  for (int i = 0; i < Panel::kCopies; ++i) {
    int column = i * Panel::kCopyRows;
    for (int g = 0; g < Panel::kGroups; ++g)
      for (int t = 0; t < 4; ++t)
        for (int e = 0; e < 2; ++e, ++column) {
          EXPECT_EQ(Panel::row(column), 32 * g + 8 * t + (2 * i + e)) << "column " << column;
          rows.insert(Panel::row(column));
        }
  }
  EXPECT_EQ(rows.size(), size_t{kPanel});
  // Accumulator 4j + 2·half + e of a thread with lane % 4 = t is column 8j + 2t + e of row lane / 4 + 8·half.
  for (int t = 0; t < 4; ++t) {
    std::set<int> accumulators;
    for (int half = 0; half < 2; ++half)
      for (int g = 0; g < Panel::kGroups; ++g)
        for (int i = 0; i < 4; ++i)
          for (int e = 0; e < 2; ++e) {
            const int a = Panel::accumulator(g, i, half) + e;
            EXPECT_EQ(a / 2 % 2, half);
            EXPECT_EQ(Panel::row(8 * (a / 4) + 2 * t + a % 2), 32 * g + 8 * t + 2 * i + e);
            accumulators.insert(a);
          }
    EXPECT_EQ(accumulators.size(), size_t{kPanel / 2});
  }
}

TEST(Relu2UpPanel, ThreadsHoldNeighbouringOutputs) {
  check_panel<256>();
  check_panel<128>();
}

// A block as actors that do one thing at a time in any order a real one could: the copying thread, the copies under way, and eight
// computing warps whose products read a stage until they are waited for.
class BlockModel {
 public:
  BlockModel(int tiles, int k_blocks, bool with_turns, uint64_t seed) : random_(seed) {
    for (int stage = 0; stage < kStages; ++stage) {
      barriers_[full(stage)] = {.arrivals = 1};
      barriers_[empty(stage)] = {.arrivals = 4};
    }
    for (int group = 0; group < 2; ++group) barriers_[turn(group)] = {.arrivals = 4};
    std::vector<Step> copying;
    for (int i = 0; i < tiles * k_blocks; ++i) {
      copying.push_back({Step::wait, empty(stage(i)), Relu2UpRing::empty_parity(static_cast<uint32_t>(i))});
      copying.push_back({Step::copy, full(stage(i)), 0, i});
    }
    actors_.push_back(copying);
    for (int warp = 0; warp < 8; ++warp) {
      const int group = warp / 4;
      std::vector<Step> steps;
      for (int index = group; index < tiles; index += 2) {
        if (with_turns) steps.push_back({Step::wait, turn(group), Relu2UpRing::turn_parity(static_cast<uint32_t>(index))});
        for (int k = 0; k < k_blocks; ++k) {
          const int i = index * k_blocks + k;
          steps.push_back({Step::wait, full(stage(i)), Relu2UpRing::full_parity(static_cast<uint32_t>(i))});
          steps.push_back({Step::read, 0, 0, i});
          if (k > 0) release(steps, i - 1);
        }
        steps.push_back({Step::arrive, turn(group ^ 1)});
        release(steps, index * k_blocks + k_blocks - 1);
      }
      actors_.push_back(steps);
    }
    contents_.fill(-1);
  }

  // Empty, or what went wrong.
  std::string run() {
    std::vector<size_t> at(actors_.size());
    for (;;) {
      std::vector<int> ready;
      bool finished = under_way_.empty();
      for (size_t a = 0; a < actors_.size(); ++a) {
        if (at[a] == actors_[a].size()) continue;
        finished = false;
        const Step& step = actors_[a][at[a]];
        if (step.what != Step::wait || barriers_[step.barrier].phase % 2 != step.parity) ready.push_back(static_cast<int>(a));
      }
      if (finished) return "";
      for (size_t c = 0; c < under_way_.size(); ++c) ready.push_back(-1 - static_cast<int>(c));
      if (ready.empty()) return "nobody can go on";
      const int chosen = ready[static_cast<size_t>(random_.below(static_cast<int64_t>(ready.size())))];
      if (chosen < 0) {
        const int iteration = under_way_[static_cast<size_t>(-1 - chosen)];
        under_way_.erase(under_way_.begin() + (-1 - chosen));
        contents_[static_cast<size_t>(stage(iteration))] = iteration;
        Barrier& barrier = barriers_[full(stage(iteration))];
        --barrier.copies;
        complete(barrier);
        continue;
      }
      const Step& step = actors_[static_cast<size_t>(chosen)][at[static_cast<size_t>(chosen)]++];
      Barrier& barrier = barriers_[step.barrier];
      if (step.what == Step::read && contents_[static_cast<size_t>(stage(step.iteration))] != step.iteration) {
        return "iteration " + std::to_string(step.iteration) + " finds " +
               std::to_string(contents_[static_cast<size_t>(stage(step.iteration))]);
      }
      if (step.what == Step::copy) {
        contents_[static_cast<size_t>(stage(step.iteration))] = -1;
        under_way_.push_back(step.iteration);
        ++barrier.copies;
      }
      if (step.what == Step::copy || step.what == Step::arrive) {
        ++barrier.arrived;
        complete(barrier);
      }
    }
  }

 private:
  static constexpr int kStages = Relu2UpRing::kStages;
  struct Step {
    enum What { wait, arrive, copy, read } what;
    int barrier = 0;
    uint32_t parity = 0;
    int iteration = 0;
  };
  struct Barrier {
    int arrivals = 0, arrived = 0, copies = 0;
    uint32_t phase = 0;
  };

  static int stage(int iteration) { return static_cast<int>(Relu2UpRing::stage(static_cast<uint32_t>(iteration))); }
  static int full(int s) { return s; }
  static int empty(int s) { return kStages + s; }
  static int turn(int group) { return 2 * kStages + group; }
  static void complete(Barrier& barrier) {
    if (barrier.arrived < barrier.arrivals || barrier.copies > 0) return;
    barrier.arrived = 0;
    ++barrier.phase;
  }
  static void release(std::vector<Step>& steps, int iteration) {
    steps.push_back({Step::read, 0, 0, iteration});
    steps.push_back({Step::arrive, empty(stage(iteration))});
  }

  testing::Random random_;
  std::map<int, Barrier> barriers_;
  std::vector<std::vector<Step>> actors_;
  std::vector<int> under_way_;
  std::array<int, kStages> contents_{};
};

TEST(Relu2UpRing, NobodyReadsTheWrongCopyOrWaitsForEver) {
  for (const int k_blocks : {1, 2, 3, 4, 5, 6, 12}) {
    for (const int tiles : {1, 2, 3, 8}) {
      for (uint64_t seed = 0; seed < 20; ++seed) {
        ASSERT_EQ(BlockModel(tiles, k_blocks, true, testing::test_seed() + seed).run(), "")
            << "k_blocks=" << k_blocks << " tiles=" << tiles << " seed=" << testing::test_seed() + seed;
      }
    }
  }
}

// The model can tell: without turns a parity is mistaken for the one before last.
TEST(Relu2UpRing, TurnsAreNeeded) {
  int mistakes = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) mistakes += !BlockModel(4, 6, false, testing::test_seed() + seed).run().empty();
  EXPECT_GT(mistakes, 0);
}

}  // namespace
}  // namespace speedrun::kernels

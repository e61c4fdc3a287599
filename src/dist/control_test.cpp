// Control of several processes as long as nothing goes wrong; control_failure_test.cpp has the rest.
#include "src/dist/control.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>

#include "src/dist/control_thread.h"
#include "src/dist/test_ranks.h"

namespace speedrun {
namespace {

constexpr ControlOptions kOptions{.connect_s = 20, .heartbeat_s = 2, .progress_s = 0};

Bytes random_bytes(uint32_t seed, size_t most) {
  std::mt19937 random(seed);
  Bytes bytes(random() % (most + 1));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Returns 0, or the number of the check that failed.
int check_collectives(const World& world) {
  const std::unique_ptr<Control> control = make_control(world, kOptions);
  for (uint32_t round = 0; round < 40; ++round) {
    const auto seed_of = [&](int rank) { return 1000 * round + static_cast<uint32_t>(rank); };
    const size_t most = round % 4 == 0 ? 300000 : round % 4 == 1 ? 0 : 100;
    const std::vector<Bytes> all = control->gather(random_bytes(seed_of(world.rank), most));
    if (all.size() != (world.rank == 0 ? static_cast<size_t>(world.size) : world.size == 1 ? 1 : 0)) return 1;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank] != random_bytes(seed_of(static_cast<int>(rank)), most)) return 2;
    }
    if (control->broadcast(random_bytes(seed_of(world.rank), most)) != random_bytes(seed_of(0), most)) return 3;
    if (round % 3 == 0) control->barrier();
    // Not the same in another order.
    const auto term_of = [](int rank) { return rank == 0 ? 1e16 : 0.7 * rank; };
    double sum = 0;
    for (int rank = 0; rank < world.size; ++rank) sum += term_of(rank);
    const double got = control->sum(term_of(world.rank));
    if (std::memcmp(&got, &sum, sizeof sum) != 0) return 4;
    if (control->any(false)) return 5;
    if (!control->any(world.rank == static_cast<int>(round) % world.size)) return 6;
  }
  return 0;
}

TEST(Control, CollectivesOfRandomMessages) {
  for (const int size : {1, 2, 5}) {
    SCOPED_TRACE(size);
    TestRanks ranks(size, check_collectives);
    expect_good_end(ranks, size);
  }
}

TEST(Control, BarrierWaitsForAll) {
  struct Shared {
    std::atomic<int> arrived = 0;
  };
  const SharedMemory<Shared> shared;
  TestRanks ranks(4, [&](const World& world) {
    const std::unique_ptr<Control> control = make_control(world, kOptions);
    for (int round = 1; round <= 30; ++round) {
      if ((world.rank + round) % 4 == 0) usleep(3000);
      ++shared->arrived;
      control->barrier();
      if (shared->arrived < 4 * round) return 1;
      control->barrier();  // nobody is in the next round before all have looked
    }
    return 0;
  });
  expect_good_end(ranks, 4);
}

TEST(Control, LongMessagesDoNotKeepHeartbeatsBack) {
  TestRanks ranks(3, [](const World& world) {
    const std::unique_ptr<Control> control = make_control(world, {.connect_s = 20, .heartbeat_s = 2, .progress_s = 0});
    const size_t bytes = size_t{64} << 20;
    const std::vector<Bytes> all = control->gather(Bytes(bytes, static_cast<std::byte>(world.rank + 1)));
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank] != Bytes(bytes, static_cast<std::byte>(rank + 1))) return 1;
    }
    return control->broadcast(Bytes(world.rank == 0 ? bytes : 0, std::byte{7})) == Bytes(bytes, std::byte{7}) ? 0 : 2;
  });
  expect_good_end(ranks, 3);
}

TEST(Control, RanksEndInAnyOrder) {
  for (int late = 0; late < 3; ++late) {
    TestRanks ranks(3, [&](const World& world) {
      const std::unique_ptr<Control> control = make_control(world, kOptions);
      control->gather(Bytes(1 << 20));  // still on its way when the others say goodbye
      usleep(world.rank == late ? 400000 : world.rank * 50000);
      return 0;
    });
    expect_good_end(ranks, 3);
  }
}

TEST(Control, MemberMayComeFirst) {
  TestRanks ranks(3, [](const World& world) {
    if (world.rank == 0) usleep(300000);
    const std::unique_ptr<Control> control = make_control(world, kOptions);
    control->barrier();
    return 0;
  });
  expect_good_end(ranks, 3);
}

TEST(Control, NamesAndIPv6) {
  for (const char* address : {"localhost", "::1"}) {
    if (address == std::string("::1") && !std::filesystem::exists("/proc/net/if_inet6")) continue;
    SCOPED_TRACE(address);
    TestRanks ranks(2, [&](World world) {
      world.address = address;
      make_control(world, kOptions)->barrier();
      return 0;
    });
    expect_good_end(ranks, 2);
  }
}

TEST(Control, FiftyStartsAndStopsAtOnePort) {
  const int port = unused_port();
  for (int cycle = 0; cycle < 50; ++cycle) {
    const int size = 2 + cycle % 2;
    TestRanks ranks(
        size,
        [](const World& world) {
          make_control(world, kOptions)->barrier();
          return 0;
        },
        port);
    expect_good_end(ranks, size);
    if (::testing::Test::HasFailure()) return;
  }
}

long entries_of(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

TEST(Control, LeavesNoDescriptorOrThread) {
  TestRanks ranks(2, [](const World& world) {
    make_control(world, kOptions)->barrier();  // a sanitizer may start a thread of its own at the first
    const long descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
    for (int cycle = 0; cycle < 50; ++cycle) make_control(world, kOptions)->barrier();
    return entries_of("/proc/self/fd") == descriptors && entries_of("/proc/self/task") == threads ? 0 : 1;
  });
  expect_good_end(ranks, 2);
}

// ---------------------------------------------------------------- the common stop

struct Steps {
  std::array<std::atomic<int>, 4> returned;  // by rank: the last step that stop_after has answered
  std::array<std::atomic<int>, 4> last;      // by rank: the last step done
  std::array<std::atomic<int>, 4> signal;
};

// Ranks at random speeds, none more than `ahead` steps before another, as their GPUs' collectives keep them.
int run_steps(const World& world, const SharedMemory<Steps>& steps, int ahead, int asker, int asked_at, uint32_t seed) {
  const std::unique_ptr<Control> control = make_control(world, kOptions);
  std::mt19937 random(seed + static_cast<uint32_t>(world.rank));
  const bool slow = random() % 2 == 0;
  for (int step = 0; step < 5000; ++step) {
    for (int other = 0; other < world.size; ++other) {
      while (steps->returned[other] < step - ahead - 1) usleep(10);
    }
    if ((world.rank == asker || asker < 0) && step == asked_at) control->request_stop(10 + world.rank);
    const int last = control->stop_after(step, ahead);
    if (last >= 0 && step > last) return 2;
    steps->last[world.rank] = step;
    steps->returned[world.rank] = step;
    if (step == last) {
      steps->signal[world.rank] = control->stop_signal();
      return 0;
    }
    if (slow || random() % 16 == 0) usleep(static_cast<useconds_t>(random() % 300));
  }
  return 1;  // nobody stopped
}

TEST(Control, AllStopAfterTheSameStep) {
  const int size = 4;
  for (uint32_t run = 0; run < 24; ++run) {
    const int ahead = std::array{0, 1, 2, 7}[run % 4];
    const int asker = static_cast<int>(run / 4) % (size + 1) - 1;  // -1: all of them
    const int asked_at = run % 3 == 0 ? 0 : static_cast<int>(run * 7);
    SCOPED_TRACE(testing::Message() << "run " << run << ", ahead " << ahead << ", asked by rank " << asker << " at step "
                                    << asked_at);
    const SharedMemory<Steps> steps;
    for (std::atomic<int>& each : steps->returned) each = -1;
    TestRanks ranks(size, [&](const World& world) { return run_steps(world, steps, ahead, asker, asked_at, 100 * run); });
    expect_good_end(ranks, size);
    for (int rank = 1; rank < size; ++rank) {
      EXPECT_EQ(steps->last[rank], steps->last[0]) << "rank " << rank;
      EXPECT_EQ(steps->signal[rank], steps->signal[0]) << "rank " << rank;
    }
    EXPECT_GE(steps->last[0], asked_at);
    if (asker >= 0) {
      EXPECT_EQ(steps->signal[0], 10 + asker);
    }
  }
}

TEST(Control, OneRankStopsAfterTheStepItAsksWith) {
  const std::unique_ptr<Control> control = make_control(World(), kOptions);
  EXPECT_EQ(control->stop_after(3, 2), -1);
  EXPECT_EQ(control->stop_signal(), 0);
  control->request_stop(15);
  control->request_stop(2);
  EXPECT_EQ(control->stop_after(4, 2), 4);
  EXPECT_EQ(control->stop_after(5, 2), 4);
  EXPECT_EQ(control->stop_signal(), 15);
}

}  // namespace
}  // namespace speedrun

// Collectives of CPU processes against serial results, bit for bit.
#include "src/dist/communicator.h"

#include "src/dist/collective_checks_test.h"
#include "src/dist/shared_memory_communicator.h"

namespace speedrun {
namespace {

using testing::CollectiveChecks;
using testing::run_ranks;
using testing::Values;

constexpr double kLimit_s = 120;

// One element, fewer than eight ranks, odd, and one more than a rank's buffer holds.
template <class T>
std::vector<int64_t> counts() {
  return {1, 5, 1001, 8008, static_cast<int64_t>(kSharedMemoryChunk / sizeof(T)) + 1};
}

class CommunicatorOfRanks : public ::testing::TestWithParam<int> {
 protected:
  void on_ranks(const std::function<void(CollectiveChecks&)>& body) {
    EXPECT_TRUE(run_ranks(GetParam(), kLimit_s, [&](Control& control) {
      const std::unique_ptr<Device> device = make_cpu_device(1);
      const std::unique_ptr<Communicator> communicator = make_communicator(control, *device, false);
      require(communicator->rank() == control.rank() && communicator->size() == control.size(), communicator->describe());
      CollectiveChecks checks(*communicator, *device, Values::reals);
      body(checks);
      require(communicator->error().empty(), communicator->error());
    }));
  }

  // Twice: the same bits in every run.
  template <class T>
  void check_type() {
    on_ranks([](CollectiveChecks& checks) {
      for (const int64_t count : counts<T>()) {
        checks.all_operations<T>(count, 10);
        checks.all_operations<T>(count, 10);
      }
    });
  }
};

TEST_P(CommunicatorOfRanks, Float) { check_type<float>(); }
TEST_P(CommunicatorOfRanks, Double) { check_type<double>(); }
TEST_P(CommunicatorOfRanks, Bf16) { check_type<bf16>(); }
TEST_P(CommunicatorOfRanks, Integers) { check_type<uint32_t>(); }
TEST_P(CommunicatorOfRanks, Bytes) { check_type<uint8_t>(); }

// Operations of one and two barriers in turn: a buffer that is used again too early shows.
TEST_P(CommunicatorOfRanks, ManySmallOperationsInARow) {
  on_ranks([](CollectiveChecks& checks) {
    for (int round = 0; round < 300; ++round) {
      checks.all_reduce<float>(1 + round % 9, round);
      checks.broadcast<double>(2, round);
      checks.all_gather<uint8_t>(5, round);
      checks.group(round);
      checks.all_to_all<float>(3, round);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommunicatorOfRanks, ::testing::Values(1, 2, 3, 4, 8), ::testing::PrintToStringParamName());

// Returns what `call` throws.
std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}

void require_text(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "expected '", part, "' in '", text, "'");
}

TEST(Communicator, EmptyDataIsNotTouched) {
  EXPECT_TRUE(run_ranks(2, kLimit_s, [](Control& control) {
    const std::unique_ptr<Communicator> communicator = make_shared_memory_communicator(control);
    communicator->fork();
    communicator->all_reduce(nullptr, 0, CommType::f32, ReduceOp::sum);
    communicator->reduce_scatter(nullptr, 0, CommType::f32);
    communicator->all_gather(nullptr, 0, CommType::bytes);
    communicator->broadcast(nullptr, 0, CommType::u32, 1);
    communicator->all_to_all(nullptr, nullptr, 0, CommType::f64);
    communicator->join();
  }));
}

TEST(Communicator, RanksThatCallDifferentOperationsAllSayWhich) {
  EXPECT_TRUE(run_ranks(3, kLimit_s, [](Control& control) {
    const std::unique_ptr<Communicator> communicator = make_shared_memory_communicator(control);
    std::vector<float> data(300);
    communicator->fork();
    communicator->all_reduce(data.data(), 100, CommType::f32, ReduceOp::sum);
    const std::string text = thrown([&] {
      if (control.rank() == 2) {
        communicator->all_gather(data.data(), 100, CommType::f32);
      } else {
        communicator->all_reduce(data.data(), 100, CommType::f32, ReduceOp::sum);
      }
    });
    require_text(text, "rank 0 calls all_reduce of 100 f32, rank 2 calls all_gather of 100 f32");
  }));
}

TEST(Communicator, RefusesCallsThatNoRankCanMean) {
  EXPECT_TRUE(run_ranks(1, kLimit_s, [](Control& control) {
    const std::unique_ptr<Device> device = make_cpu_device(1);
    const std::unique_ptr<Communicator> communicator = make_communicator(control, *device, false);
    float data[2] = {};
    require_text(thrown([&] { communicator->all_gather(data, 1, CommType::f32); }), "outside fork()");
    require_text(thrown([&] { communicator->join(); }), "without fork()");
    require_text(thrown([&] { communicator->group_start(); }), "outside fork()");
    communicator->fork();
    require_text(thrown([&] { communicator->all_reduce(data, 1, CommType::u32, ReduceOp::sum); }), "no sum of u32");
    require_text(thrown([&] { communicator->all_reduce(data, 1, CommType::f32, ReduceOp::max); }), "no maximum of f32");
    require_text(thrown([&] { communicator->reduce_scatter(data, 1, CommType::bytes); }), "no sum of bytes");
    require_text(thrown([&] { communicator->broadcast(data, 1, CommType::f32, 1); }), "root = 1");
    require_text(thrown([&] { communicator->all_gather(data, -1, CommType::f32); }), "count = -1");
    communicator->group_start();
    require_text(thrown([&] { communicator->group_start(); }), "in a group");
    require_text(thrown([&] { communicator->join(); }), "in a group");
    require_text(thrown([&] { communicator->fork(); }), "in a group");
    communicator->group_end();
    require_text(thrown([&] { communicator->group_end(); }), "no group_start");
    communicator->join();
    require_text(thrown([&] { communicator->all_gather(data, 1, CommType::f32); }), "outside fork()");
  }));
}

TEST(Communicator, CpuRanksOfSeveralHostsAreRefused) {
  TestRanks ranks(2, [](World world) {
    world.local_size = 1;
    const std::unique_ptr<Control> control = make_control(world, ControlOptions{});
    const std::unique_ptr<Device> device = make_cpu_device(1);
    const std::string text = thrown([&] { make_communicator(*control, *device, false); });
    require_text(text, "only 1 of 2 ranks are on rank " + std::to_string(world.rank) + "'s");
    control->barrier();
    return 0;
  });
  expect_good_end(ranks, 2);
}

// Ranks that wait for a dead one are ended by the control plane.
TEST(Communicator, NobodyWaitsForARankThatIsKilled) {
  TestRanks ranks(3, [](const World& world) {
    const std::unique_ptr<Control> control =
        make_control(world, ControlOptions{.connect_s = 20, .heartbeat_s = 2, .progress_s = 0});
    const std::unique_ptr<Communicator> communicator = make_shared_memory_communicator(*control);
    std::vector<float> data(300'000);
    communicator->fork();
    for (int round = 0;; ++round) {
      if (world.rank == 1 && round == 5) raise(SIGKILL);
      communicator->all_reduce(data.data(), 300'000, CommType::f32, ReduceOp::sum);
    }
    return 0;
  });
  ASSERT_TRUE(ranks.wait(60)) << ranks.errors();
  EXPECT_EQ(ranks.code(1), 128 + SIGKILL);
  EXPECT_NE(ranks.code(0), 0);
  EXPECT_NE(ranks.code(2), 0);
  EXPECT_NE(ranks.errors().find("rank 1"), std::string::npos) << ranks.errors();
}

// The name in /dev/shm is gone while the ranks still use the memory.
TEST(Communicator, LeavesNoSharedMemoryBehind) {
  EXPECT_TRUE(run_ranks(2, kLimit_s, [](Control& control) {
    const std::unique_ptr<Communicator> communicator = make_shared_memory_communicator(control);
    control.barrier();
    const std::string pattern = "/dev/shm/speedrun-" + std::to_string(getpid()) + "-*";
    require(control.rank() != 0 || system(("ls " + pattern + " >/dev/null 2>&1").c_str()) != 0, pattern, " still exists");
  }));
}

}  // namespace
}  // namespace speedrun

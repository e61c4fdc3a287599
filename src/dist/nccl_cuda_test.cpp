// The collectives over NCCL against serial results, direct and in a graph: ranks that share one GPU, and one GPU each where there
// are several. NCCL_DEBUG=INFO shows what NCCL does.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "src/dist/collective_checks_test.h"
#include "src/dist/nccl_library.h"
#include "src/dist/sparse_rows_checks_test.h"

namespace speedrun {
namespace {

using testing::CollectiveChecks;
using testing::DeviceVector;
using testing::rank_values;
using testing::require_same;
using testing::run_ranks;
using testing::Values;

constexpr double kLimit_s = 400;  // eight ranks take turns on one GPU

// Asked in a process of its own: one that has touched CUDA cannot fork ranks.
int count_gpus() {
  const pid_t process = ::fork();
  if (process == 0) {
    int count = 0;
    _exit(cudaGetDeviceCount(&count) == cudaSuccess ? count : 0);
  }
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

// Prints from rank 0 what has been done and how long it took.
class Progress {
 public:
  explicit Progress(int rank) : rank_(rank) {}
  void done(const std::string& what) {
    const auto now = std::chrono::steady_clock::now();
    const double ms = std::chrono::duration<double, std::milli>(now - last_).count();
    if (rank_ == 0) std::cout << "[  rank 0  ] " << what << " (" << ms << " ms)" << std::endl;
    last_ = now;
  }

 private:
  int rank_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

struct Rank {
  Control& control;
  Device& device;
  Communicator& communicator;
  Progress& progress;
  int rank() const { return control.rank(); }
  int size() const { return control.size(); }
};

template <class T>
void check_type(Rank& r) {
  CollectiveChecks checks(r.communicator, r.device, Values::small_integers);
  for (const int64_t count : {1, 5, 1001, (1 << 19) + 3}) {
    checks.all_operations<T>(count, 10);
    r.progress.done(std::string("all operations of ") + std::to_string(count) + " " + comm_type_name(comm_type<T>()));
  }
}

// Sums of reals: not the serial order, but the same bits on every rank and in every run.
void check_reals(Rank& r) {
  constexpr int64_t kCount = 300'007;
  const auto all = testing::all_values<float>(Values::reals, r.size(), 20, kCount);
  std::vector<float> first;
  for (int run = 0; run < 2; ++run) {
    const DeviceVector<float> data(r.device, all[static_cast<size_t>(r.rank())]);
    r.communicator.fork();
    r.communicator.all_reduce(data.get(), kCount, CommType::f32, ReduceOp::sum);
    r.communicator.join();
    const std::vector<float> got = data.download();
    if (run == 0) first = got;
    require_same(got, first, "second run of an all_reduce of reals");
  }
  const std::vector<float> serial = testing::serial_reduction(all);
  for (size_t i = 0; i < first.size(); ++i) {
    const double bound = static_cast<double>(r.size()) * r.size() * 0x1p-23;  // of sums of numbers below 1
    require(std::abs(static_cast<double>(first[i]) - serial[i]) <= bound, "all_reduce of reals: element ", i, ": got ", first[i],
            ", serial ", serial[i]);
  }
  const auto bytes = reinterpret_cast<const std::byte*>(first.data());
  const auto results = r.control.gather({bytes, bytes + first.size() * sizeof(float)});
  for (size_t other = 1; other < results.size(); ++other)
    require(results[other] == results[0], "all_reduce of reals: the bits of rank ", other, " differ from rank 0's");
  r.progress.done("sums of reals: same bits on all ranks and in two runs");
}

// A graph with copies around two forks, replayed with other inputs each time.
void check_graph(Rank& r) {
  constexpr int64_t kSums = 100'003, kSlice = 1'001;
  constexpr int kReplays = 20;
  const auto own = static_cast<size_t>(r.rank());
  Device& device = r.device;
  Communicator& communicator = r.communicator;
  const std::vector<float> zeros(kSums), zero_slices(static_cast<size_t>(kSlice * r.size()));
  const DeviceVector<float> sum_input(device, zeros), sum(device, zeros), sum_output(device, zeros);
  const DeviceVector<uint32_t> maximum_input(device, std::vector<uint32_t>(7)), maximum(device, std::vector<uint32_t>(7));
  const DeviceVector<float> slice_input(device, zero_slices), slices(device, zero_slices), received(device, zero_slices);
  const std::unique_ptr<Graph> graph = device.capture([&] {
    device.copy(sum.get(), sum_input.get(), sum.bytes());
    communicator.fork();
    communicator.all_reduce(sum.get(), kSums, CommType::f32, ReduceOp::sum);
    device.copy(maximum.get(), maximum_input.get(), maximum.bytes());  // beside the sum
    device.copy(slices.get(), slice_input.get(), slices.bytes());
    communicator.fork();
    communicator.group_start();
    communicator.all_reduce(maximum.get(), 7, CommType::u32, ReduceOp::max);
    communicator.reduce_scatter(slices.get(), kSlice, CommType::f32);
    communicator.group_end();
    communicator.all_gather(slices.get(), kSlice, CommType::f32);  // of the sums: every rank has all of them
    communicator.all_to_all(slice_input.get(), received.get(), kSlice, CommType::f32);
    communicator.join();
    device.copy(sum_output.get(), sum.get(), sum.bytes());
  });
  r.progress.done("graph captured");
  for (int replay = 0; replay < kReplays; ++replay) {
    const auto sums = testing::all_values<float>(Values::small_integers, r.size(), 1000 + replay, kSums);
    const auto maxima = testing::all_values<uint32_t>(Values::small_integers, r.size(), 2000 + replay, 7);
    const auto pieces = testing::all_values<float>(Values::small_integers, r.size(), 3000 + replay, kSlice * r.size());
    std::vector<float> exchanged;
    for (const auto& piece : pieces) {
      const auto begin = piece.begin() + r.rank() * kSlice;
      exchanged.insert(exchanged.end(), begin, begin + kSlice);
    }
    // A rank that comes late must not meet the operations of another replay.
    if (replay % r.size() == r.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    device.copy_in(sum_input.get(), sums[own].data(), sum_input.bytes());
    device.copy_in(maximum_input.get(), maxima[own].data(), maximum_input.bytes());
    device.copy_in(slice_input.get(), pieces[own].data(), slice_input.bytes());
    graph->launch();
    const std::string at = " in replay " + std::to_string(replay);
    require_same(sum_output.download(), testing::serial_reduction(sums), "all_reduce" + at);
    require_same(maximum.download(), testing::serial_reduction(maxima), "all_reduce in a group" + at);
    require_same(slices.download(), testing::serial_reduction(pieces), "reduce_scatter and all_gather" + at);
    require_same(received.download(), exchanged, "all_to_all" + at);
  }
  r.progress.done(std::to_string(kReplays) + " replays");

  // Launched one after the other without waiting, and a direct operation between: each sees the result of the one before.
  const DeviceVector<double> grows(device, std::vector<double>(1001, 1.0));
  const auto add = [&] {
    communicator.fork();
    communicator.all_reduce(grows.get(), 1001, CommType::f64, ReduceOp::sum);
    communicator.join();
  };
  const std::unique_ptr<Graph> growing = device.capture(add);
  growing->launch();
  growing->launch();
  add();
  growing->launch();
  // The capture's own first run was the first of five.
  require_same(grows.download(), std::vector<double>(1001, std::pow(r.size(), 5)), "replays in a row");
  r.progress.done("replays in a row");
}

void check_rank(Control& control, int ordinal, bool ranks_share_gpu) {
  setenv("NCCL_DEBUG", "WARN", 0);
  Progress progress(control.rank());
  const std::unique_ptr<Device> device = make_cuda_device(ordinal);
  progress.done("device " + std::to_string(ordinal) + ": " + device->name());
  const std::unique_ptr<Communicator> communicator = make_communicator(control, *device, ranks_share_gpu);
  progress.done("connected: " + communicator->describe());
  require(communicator->rank() == control.rank() && communicator->size() == control.size(), "rank or size differ");
  Rank rank{control, *device, *communicator, progress};
  check_type<float>(rank);
  check_type<double>(rank);
  check_type<bf16>(rank);
  check_type<uint32_t>(rank);
  check_type<uint8_t>(rank);
  CollectiveChecks checks(*communicator, *device, Values::small_integers);
  for (int round = 0; round < 10; ++round) checks.group(round);
  progress.done("ten groups");
  check_reals(rank);
  check_graph(rank);
  testing::check_sparse_rows<bf16>(*communicator, *device, 5'003, 64, 700);
  progress.done("sparse rows");
  require(communicator->error().empty(), communicator->error());
}

class NcclOfRanks : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    gpus_ = count_gpus();
    if (gpus_ == 0) GTEST_SKIP() << "NO GPU: this test checks nothing here";
  }
  int gpus_ = 0;
};

TEST_P(NcclOfRanks, SharingOneGpu) {
  EXPECT_TRUE(run_ranks(GetParam(), kLimit_s, [](Control& control) { check_rank(control, 0, true); }));
}

TEST_P(NcclOfRanks, OneGpuEach) {
  if (gpus_ < GetParam()) GTEST_SKIP() << GetParam() << " GPUs are needed, this host has " << gpus_;
  EXPECT_TRUE(run_ranks(GetParam(), kLimit_s, [](Control& control) { check_rank(control, control.rank(), false); }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclOfRanks, ::testing::Values(2, 4, 8), ::testing::PrintToStringParamName());

// A rank that fails while the others wait for it ends at once, without waiting for the collective under way.
TEST(Nccl, ARankThatFailsDoesNotWaitForTheOthers) {
  if (count_gpus() == 0) GTEST_SKIP() << "NO GPU: this test checks nothing here";
  TestRanks ranks(2, [](const World& world) -> int {
    const std::unique_ptr<Control> control = make_control(world, ControlOptions{});
    const std::unique_ptr<Device> device = make_cuda_device(0);
    const DeviceVector<float> data(*device, std::vector<float>(1000));
    const std::unique_ptr<Communicator> communicator = make_communicator(*control, *device, true);
    const auto sum = [&] {
      communicator->fork();
      communicator->all_reduce(data.get(), 1000, CommType::f32, ReduceOp::sum);
      communicator->join();
    };
    sum();  // the first one connects the ranks, and waits for them while it does
    device->synchronize();
    if (world.rank == 1) std::this_thread::sleep_for(std::chrono::hours(1));
    sum();
    control->fail("ended with a collective under way", 1);
    std::_Exit(1);
  });
  EXPECT_TRUE(ranks.wait(120)) << "still waiting";
  EXPECT_NE(ranks.errors().find("ended with a collective under way"), std::string::npos) << ranks.errors();
}

TEST(Nccl, AMissingLibraryIsReportedWithTheWayOut) {
  try {
    open_nccl("libnccl_of_nobody.so");
    FAIL() << "opened";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("libnccl_of_nobody.so"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("libnccl2"), std::string::npos) << error.what();
  }
  EXPECT_THROW(open_nccl("libm.so.6"), InputError);
}

// Needs the library but no GPU.
TEST(Nccl, TheLibraryHasEveryFunction) {
  NcclLibrary nccl{};
  try {
    nccl = open_nccl();
  } catch (const InputError& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_EQ(nccl.version().substr(0, 2), "2.") << nccl.version();
  EXPECT_STREQ(nccl.get_error_string(ncclSuccess), "no error");
}

}  // namespace
}  // namespace speedrun

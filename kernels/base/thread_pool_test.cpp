#include "kernels/base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace speedrun {
namespace {

class ThreadPoolOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolOf, ::testing::Values(1, 2, 3, 8));

TEST_P(ThreadPoolOf, HasTheThreadsAskedFor) { EXPECT_EQ(ThreadPool(GetParam()).num_threads(), GetParam()); }

TEST_P(ThreadPoolOf, RunsEveryIndexOnceAndReturnsAfterTheLast) {
  ThreadPool pool(GetParam());
  for (const int64_t count : {0, 1, 2, 7, 8, 9, 1000}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
      pool.run(count, [&](int64_t index) { ++calls.at(static_cast<size_t>(index)); });
      for (const auto& n : calls) ASSERT_EQ(n, 1);
    }
  }
}

TEST_P(ThreadPoolOf, ResultsArriveWithoutFurtherSynchronisation) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> squares(5000);
  for (int64_t round = 0; round < 50; ++round) {
    pool.run(static_cast<int64_t>(squares.size()), [&](int64_t i) { squares[static_cast<size_t>(i)] = i * i + round; });
    for (size_t i = 0; i < squares.size(); ++i) ASSERT_EQ(squares[i], static_cast<int64_t>(i * i) + round);
  }
}

TEST_P(ThreadPoolOf, CountsBelowOneDoNothing) {
  ThreadPool pool(GetParam());
  for (const int64_t count : {int64_t{0}, int64_t{-1}, int64_t{-1} << 40})
    pool.run(count, [](int64_t) { FAIL() << "there is no index to run"; });
}

TEST_P(ThreadPoolOf, AnExceptionIsRethrownAndThePoolGoesOn) {
  ThreadPool pool(GetParam());
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (const int64_t count : {1, 50}) {
      std::atomic<int> running = 0;
      try {
        pool.run(count, [&](int64_t index) {
          ++running;
          const bool bad = index == count / 2;
          --running;
          if (bad) throw std::runtime_error("index " + std::to_string(index));
        });
        FAIL() << "the exception was lost";
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(error.what(), "index " + std::to_string(count / 2));
      }
      EXPECT_EQ(running, 0) << "a body was still running when run() ended";
    }
    std::atomic<int> calls = 0;
    pool.run(30, [&](int64_t) { ++calls; });
    ASSERT_EQ(calls, 30);
  }
}

TEST_P(ThreadPoolOf, OfManyExceptionsOneIsRethrown) {
  ThreadPool pool(GetParam());
  EXPECT_THROW(pool.run(100, [](int64_t index) { throw std::out_of_range(std::to_string(index)); }), std::out_of_range);
}

TEST_P(ThreadPoolOf, IsDestroyedIdleWithoutEverRunning) {
  for (int i = 0; i < 20; ++i) ThreadPool pool(GetParam());
}

TEST(ThreadPool, ZeroMeansAllHardwareThreads) { EXPECT_GE(ThreadPool(0).num_threads(), 1); }

}  // namespace
}  // namespace speedrun

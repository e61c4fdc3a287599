// launch_ranks starts this very program again, which then plays the part that SPEEDRUN_TEST_PART names.
#include "src/dist/launcher.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <thread>

#include "src/core/file.h"
#include "src/core/test_folder.h"
#include "src/dist/control.h"
#include "src/dist/fault.h"
#include "src/dist/test_ranks.h"

namespace speedrun {
namespace {

volatile std::sig_atomic_t signals_seen = 0;

// The part of a rank; its value is the exit code. `folder`: for what the test wants to see.
int play(const std::string& part, const std::string& folder) {
  const World world = world_from_environment();
  std::ofstream(folder + "/" + std::to_string(world.rank) + ".pid") << getpid() << std::endl;
  if (part == "five") {  // rank 1 ends before there is any control plane
    if (world.rank == 1) return 5;
    sleep(1000);
  }
  fault_point(FaultPlace::init, 0, world.rank);
  const ControlOptions options{.connect_s = 20, .heartbeat_s = 2, .progress_s = 0};
  const std::unique_ptr<Control> control = make_control(world, options);
  control->barrier();
  std::ofstream(folder + "/" + std::to_string(world.rank) + ".ready") << "ready" << std::endl;
  if (part == "fail") {
    if (world.rank == 1) {
      control->fail("loss is not finite at step 3", 3);
      return 3;
    }
    sleep(1000);
  } else if (part == "steps") {
    for (int step = 0; step < 3; ++step) {
      fault_point(FaultPlace::step, step, world.rank);
      control->barrier();
    }
  } else if (part == "signal") {
    for (int step = 0;; ++step) {
      if (signals_seen != 0) control->request_stop(SIGTERM);
      const int last = control->stop_after(step, 0);
      control->barrier();
      if (last >= 0 && step == last) break;
      usleep(1000);
    }
  } else if (part == "hang") {
    for (;;) sleep(1000);
  } else if (part == "environment") {
    const bool good = world.size == 3 && world.local_rank == world.rank && world.local_size == 3 && world.launched_here;
    return good ? 0 : 1;
  }
  return 0;
}

// launch_ranks in a process of its own, for it handles signals.
class Launched {
 public:
  Launched(int ranks, const std::string& part, const std::string& fault = "", double grace_s = 10) : ranks_(ranks) {
    pid_ = fork();
    if (pid_ != 0) return;
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    errors_.become_standard_error();
    setenv("SPEEDRUN_TEST_PART", part.c_str(), 1);
    setenv("SPEEDRUN_FAULT", fault.c_str(), 1);
    int code = 99;
    try {
      code = launch_ranks(ranks, {"launcher_test", folder_.path().string()}, grace_s);
    } catch (const Error& error) {
      print_cause(error.what());
    }
    _exit(code);
  }
  ~Launched() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  // Exit code or 128 + signal; -1: still running after a long time.
  int wait() {
    int status = 0;
    for (const double end_s = monotonic_s() + 30; monotonic_s() < end_s; usleep(2000)) {
      if (waitpid(pid_, &status, WNOHANG) != pid_) continue;
      pid_ = -1;
      return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
    return -1;
  }
  bool wait_until_all_have(const char* file) const {
    for (const double end_s = monotonic_s() + 30; monotonic_s() < end_s; usleep(2000)) {
      int there = 0;
      for (int rank = 0; rank < ranks_; ++rank) there += std::filesystem::exists(path(rank, file)) ? 1 : 0;
      if (there == ranks_) return true;
    }
    return false;
  }
  // How many of the ranks' processes are still there, after a moment for the system to end them.
  int left_over() const {
    int alive = 0;
    for (const double end_s = monotonic_s() + 10; monotonic_s() < end_s; usleep(2000)) {
      alive = 0;
      for (int rank = 0; rank < ranks_; ++rank) {
        std::ifstream file(path(rank, ".pid"));
        pid_t pid = 0;
        if (file >> pid && kill(pid, 0) == 0) ++alive;
      }
      if (alive == 0) break;
    }
    return alive;
  }
  void send_signal(int signal) const { kill(pid_, signal); }
  void send_signal_to_ranks(int signal) const {
    for (int rank = 0; rank < ranks_; ++rank) {
      pid_t pid = 0;
      if (std::ifstream(path(rank, ".pid")) >> pid) kill(pid, signal);
    }
  }
  std::string errors() const { return errors_.text(); }

 private:
  std::string path(int rank, const char* file) const { return (folder_.path() / (std::to_string(rank) + file)).string(); }
  const int ranks_;
  TestFolder folder_;
  SharedText errors_;
  pid_t pid_;
};

void expect_cause(const Launched& launched, int rank, const std::string& cause = "") {
  const std::vector<std::string> lines = lines_of(launched.errors());
  ASSERT_EQ(lines.size(), 1U) << launched.errors();
  EXPECT_EQ(lines[0].rfind("speedrun: rank " + std::to_string(rank), 0), 0U) << lines[0];
  EXPECT_NE(lines[0].find(cause), std::string::npos) << lines[0];
}

TEST(Launcher, RanksKnowWhoTheyAre) {
  Launched launched(3, "environment");
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_EQ(launched.errors(), "");
}

TEST(Launcher, FiftyRunsInARow) {
  for (int run = 0; run < 50; ++run) {
    Launched launched(2 + run % 2, "steps");
    ASSERT_EQ(launched.wait(), 0) << launched.errors();
    ASSERT_EQ(launched.errors(), "");
    ASSERT_EQ(launched.left_over(), 0);
  }
}

TEST(Launcher, ReturnsTheCodeOfTheFirstFailureAndEndsTheRest) {
  Launched launched(3, "five", "", 0.3);
  EXPECT_EQ(launched.wait(), 5);
  EXPECT_EQ(launched.left_over(), 0);
}

TEST(Launcher, ToldFailure) {
  Launched launched(3, "fail");
  EXPECT_EQ(launched.wait(), 3);
  expect_cause(launched, 1, "loss is not finite at step 3");
  EXPECT_EQ(launched.left_over(), 0);
}

TEST(Launcher, KilledRankIsNamedOnce) {
  for (const char* place : {"init:0", "step:1"}) {
    for (int rank = 0; rank < 3; ++rank) {
      const std::string fault = std::to_string(rank) + ":" + place + ":kill";
      SCOPED_TRACE(fault);
      Launched launched(3, "steps", fault, 1);
      const int code = launched.wait();
      EXPECT_GT(code, 0);
      expect_cause(launched, rank);
      EXPECT_EQ(launched.left_over(), 0);
    }
  }
}

TEST(Launcher, StoppedRankIsNamedOnceAndKilled) {
  for (int rank = 0; rank < 3; ++rank) {
    SCOPED_TRACE(rank);
    Launched launched(3, "steps", std::to_string(rank) + ":step:1:stop");
    EXPECT_GT(launched.wait(), 0);
    expect_cause(launched, rank, "no sign of life");
    EXPECT_EQ(launched.left_over(), 0);
  }
}

TEST(Launcher, RankStoppedBeforeItKnowsTheOthers) {
  for (const int rank : {0, 1}) {
    Launched launched(2, "steps", std::to_string(rank) + ":init:0:stop", 1);
    EXPECT_EQ(launched.wait(), 1);
    expect_cause(launched, rank, "stopped for 1 s");
    EXPECT_EQ(launched.left_over(), 0);
  }
}

TEST(Launcher, AllRanksStopped) {
  Launched launched(3, "hang", "", 1);
  ASSERT_TRUE(launched.wait_until_all_have(".ready"));
  launched.send_signal_to_ranks(SIGSTOP);
  EXPECT_EQ(launched.wait(), 1);
  // Whichever the system stopped first.
  const std::vector<std::string> lines = lines_of(launched.errors());
  ASSERT_EQ(lines.size(), 1U) << launched.errors();
  EXPECT_NE(lines[0].find("stopped for 1 s"), std::string::npos) << lines[0];
  EXPECT_EQ(launched.left_over(), 0);
}

// As a batch system suspends a job: the launcher stops last and wakes first, and finds its limit exceeded.
TEST(Launcher, PauseOfEverythingIsNoFailure) {
  Launched launched(3, "signal", "", 1);
  ASSERT_TRUE(launched.wait_until_all_have(".ready"));
  launched.send_signal_to_ranks(SIGSTOP);
  usleep(50000);
  launched.send_signal(SIGSTOP);
  usleep(1500000);
  launched.send_signal(SIGCONT);
  usleep(50000);
  launched.send_signal_to_ranks(SIGCONT);
  launched.send_signal(SIGTERM);
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_EQ(launched.errors(), "");
}

TEST(Launcher, SignalReachesAllRanks) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Launched launched(3, "signal");
    ASSERT_TRUE(launched.wait_until_all_have(".ready"));
    launched.send_signal(signal);
    EXPECT_EQ(launched.wait(), 0);
    EXPECT_EQ(launched.errors(), "");
  }
}

TEST(Launcher, ItsOwnDeathEndsTheRanks) {
  Launched launched(3, "hang");
  ASSERT_TRUE(launched.wait_until_all_have(".ready"));
  launched.send_signal(SIGKILL);
  EXPECT_EQ(launched.wait(), 128 + SIGKILL);
  EXPECT_EQ(launched.left_over(), 0);
}

}  // namespace
}  // namespace speedrun

int main(int argc, char** argv) {
  const char* part = std::getenv("SPEEDRUN_TEST_PART");
  if (part != nullptr && argc == 2) {
    for (const int signal : {SIGTERM, SIGINT}) std::signal(signal, [](int) { speedrun::signals_seen = 1; });
    try {
      return speedrun::play(part, argv[1]);
    } catch (const speedrun::Error& error) {
      speedrun::print_cause(error.what());
      return static_cast<int>(error.code());
    }
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

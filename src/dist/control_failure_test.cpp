// Whatever happens to one rank: all processes end, with a code that is not 0, and one line names the rank.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <list>
#include <memory>
#include <thread>

#include "src/dist/control.h"
#include "src/dist/control_thread.h"
#include "src/dist/process_id.h"
#include "src/dist/test_ranks.h"

namespace speedrun {
namespace {

constexpr ControlOptions kOptions{.connect_s = 20, .heartbeat_s = 2, .progress_s = 0};
constexpr double kLimitSeconds = 25;

[[noreturn]] void hang() {
  for (;;) pause();
}

enum class Death { kill, crash, exit, failure, error, stop };
constexpr std::array kSuddenDeaths = {Death::kill, Death::crash, Death::exit, Death::failure, Death::error};

// What the victim does; returns its exit code where it does return.
int die(Death death, Control& control) {
  switch (death) {
    case Death::kill:
      kill(getpid(), SIGKILL);
      break;
    case Death::crash:
      signal(SIGSEGV, SIG_DFL);
      raise(SIGSEGV);
      break;
    case Death::exit:
      _exit(9);
    case Death::stop:
      kill(getpid(), SIGSTOP);
      break;
    case Death::failure:
      control.fail("loss is\nnot finite", 3);
      return 3;
    case Death::error:
      throw std::bad_alloc();
  }
  hang();
}

std::string sign_of(Death death) {
  switch (death) {
    case Death::failure:
      return "loss is not finite";
    case Death::error:
      return "ended by an error";
    case Death::stop:
      return "no sign of life for 2 s";
    default:
      return "killed or crashed: its connection closed";
  }
}

// Exactly one line, of this rank.
void expect_cause(const std::string& errors, int rank, const std::string& cause) {
  const std::vector<std::string> lines = lines_of(errors);
  ASSERT_EQ(lines.size(), 1U) << errors;
  EXPECT_EQ(lines[0].rfind("speedrun: rank " + std::to_string(rank), 0), 0U) << errors;
  EXPECT_NE(lines[0].find(cause), std::string::npos) << errors;
}

// Of several runs of three ranks at once, the n-th is ended by rank n.
void expect_each_to_be_the_cause(std::list<TestRanks>& runs, const std::string& cause) {
  int victim = 0;
  for (TestRanks& ranks : runs) {
    ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
    for (int rank = 0; rank < 3; ++rank) EXPECT_NE(ranks.code(rank), 0) << "rank " << rank;
    expect_cause(ranks.errors(), victim++, cause);
  }
}

struct Scenario {
  Scenario(Death the_death, int the_victim, bool in_barrier) : death(the_death), victim(the_victim) {
    ranks = std::make_unique<TestRanks>(3, [=](const World& world) {
      try {
        const std::unique_ptr<Control> control = make_control(world, kOptions);
        control->barrier();
        if (world.rank == the_victim) return die(the_death, *control);
        if (in_barrier) control->barrier();
        hang();
      } catch (const std::bad_alloc&) {
        return 1;  // the hub has said it
      }
    });
  }
  void check() {
    SCOPED_TRACE(testing::Message() << "rank " << victim << ": " << sign_of(death));
    ASSERT_TRUE(ranks->wait(kLimitSeconds)) << ranks->errors();
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_NE(ranks->code(rank), 0) << "rank " << rank;
      if (death == Death::failure) {
        EXPECT_EQ(ranks->code(rank), 3) << "rank " << rank;
      }
    }
    expect_cause(ranks->errors(), victim, sign_of(death));
  }
  Death death;
  int victim;
  std::unique_ptr<TestRanks> ranks;
};

TEST(ControlFailure, AnyRankDiesWhileOthersWaitForIt) {
  for (const Death death : kSuddenDeaths) {
    for (int victim = 0; victim < 3; ++victim) Scenario(death, victim, true).check();
  }
}

TEST(ControlFailure, AnyRankDiesWhileOthersHang) {
  for (const Death death : kSuddenDeaths) {
    for (int victim = 0; victim < 3; ++victim) Scenario(death, victim, false).check();
  }
}

TEST(ControlFailure, AnyRankIsStopped) {
  std::list<Scenario> scenarios;  // each takes the limit of a heartbeat: together
  for (int victim = 0; victim < 3; ++victim) {
    scenarios.emplace_back(Death::stop, victim, false);
    scenarios.emplace_back(Death::stop, victim, true);
  }
  for (Scenario& scenario : scenarios) {
    scenario.check();
    EXPECT_EQ(scenario.ranks->code(scenario.victim), 128 + SIGKILL);
  }
}

TEST(ControlFailure, AnyRankDiesBeforeAllHaveCome) {
  std::list<TestRanks> runs;
  for (int victim = 0; victim < 3; ++victim) {
    // The last rank never comes; the victim dies while it waits for it.
    runs.emplace_back(4, [=](const World& world) {
      if (world.rank == 3) return 0;
      std::thread killer;
      if (world.rank == victim) {
        killer = std::thread([] {
          usleep(1500000);
          kill(getpid(), SIGKILL);
        });
      }
      make_control(world, kOptions);
      return 1;
    });
  }
  expect_each_to_be_the_cause(runs, "its connection closed");
}

// Its work is done, but it would never end.
TEST(ControlFailure, RankStoppedAfterItsGoodbye) {
  TestRanks ranks(2, [](const World& world) {
    const std::unique_ptr<Control> control = make_control(world, kOptions);
    std::thread stopper;
    if (world.rank == 1) {
      stopper = std::thread([] {
        usleep(300000);
        kill(getpid(), SIGSTOP);
      });
      stopper.detach();
    } else {
      usleep(1000000);
    }
    return 0;
  });
  ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
  EXPECT_NE(ranks.code(0), 0);
  EXPECT_EQ(ranks.code(1), 128 + SIGKILL);
  expect_cause(ranks.errors(), 1, "no sign of life for 2 s");
}

TEST(ControlFailure, NamesRanksThatDoNotCome) {
  TestRanks ranks(5, [](const World& world) {
    if (world.rank == 2 || world.rank == 4) return 0;
    make_control(world, {.connect_s = 3, .heartbeat_s = 2, .progress_s = 0});
    return 9;
  });
  ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
  for (const int rank : {0, 1, 3}) EXPECT_EQ(ranks.code(rank), 1);
  EXPECT_NE(ranks.errors().find("ranks 2, 4: did not come within 3 s"), std::string::npos) << ranks.errors();
  EXPECT_EQ(lines_of(ranks.errors()).size(), 1U) << ranks.errors();
}

TEST(ControlFailure, SaysWhereRankZeroWasExpected) {
  TestRanks ranks(2, [](const World& world) {
    if (world.rank == 1) make_control(world, {.connect_s = 0.5, .heartbeat_s = 2, .progress_s = 0});
    return 0;
  });
  ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
  EXPECT_EQ(ranks.code(1), 1);
  EXPECT_NE(ranks.errors().find("did not answer within 0.5 s: Connection refused"), std::string::npos) << ranks.errors();
}

TEST(ControlFailure, ContradictionsAtTheStartNameTheRank) {
  TestRanks wrong_size(2, [](World world) {
    if (world.rank == 1) world.size = 4;
    make_control(world, kOptions);
    return 0;
  });
  TestRanks twice(4, [](World world) {
    if (world.rank == 3) return 0;
    if (world.rank == 2) world.rank = 1;
    make_control(world, kOptions);
    return 0;
  });
  ASSERT_TRUE(wrong_size.wait(kLimitSeconds));
  EXPECT_EQ(wrong_size.code(0), 1);
  EXPECT_EQ(wrong_size.code(1), 1);
  EXPECT_NE(wrong_size.errors().find("has WORLD_SIZE=4 where rank 0 has 2"), std::string::npos) << wrong_size.errors();
  ASSERT_TRUE(twice.wait(kLimitSeconds));
  EXPECT_EQ(twice.code(0), 1);
  EXPECT_NE(twice.errors().find("there is a rank 1 already"), std::string::npos) << twice.errors();
}

TEST(ControlFailure, StrangersAtThePortDoNoHarm) {
  TestRanks ranks(3, [](const World& world) {
    if (world.rank == 0) {
      make_control(world, kOptions)->barrier();
      return 0;
    }
    if (world.rank == 1) {
      const Socket stranger = connect_to(world.address, world.port, monotonic_s() + 10);
      const Socket silent = connect_to(world.address, world.port, monotonic_s() + 10);
      const std::string words = "GET / HTTP/1.1\r\nHost: here\r\n\r\n";
      if (send(stranger.descriptor(), words.data(), words.size(), MSG_NOSIGNAL) < 0) return 1;
      setenv(kJobVariable, "another", 1);
      try {
        make_control(world, kOptions);
        return 2;
      } catch (const Error& error) {
        if (std::string(error.what()).find("another run") == std::string::npos) return 3;
      }
      setenv(kJobVariable, "", 1);
    } else {
      usleep(300000);
    }
    make_control(world, kOptions)->barrier();
    return 0;
  });
  expect_good_end(ranks, 3);
}

TEST(ControlFailure, FailureOfSeveralRanksIsToldOnce) {
  TestRanks ranks(4, [](const World& world) {
    const std::unique_ptr<Control> control = make_control(world, kOptions);
    control->barrier();
    if (world.rank == 3) hang();
    control->fail("rank-made message", 3);
    return 3;
  });
  ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(ranks.code(rank), 3) << "rank " << rank;
  EXPECT_EQ(lines_of(ranks.errors()).size(), 1U) << ranks.errors();
}

TEST(ControlFailure, RankThatHangsAfterItsFailureIsEnded) {
  std::list<TestRanks> runs;
  for (int victim = 0; victim < 2; ++victim) {
    runs.emplace_back(2, [=](const World& world) -> int {
      const std::unique_ptr<Control> control = make_control(world, kOptions);
      if (world.rank == victim) control->fail("out of memory", 1);
      hang();
    });
  }
  int victim = 0;
  for (TestRanks& ranks : runs) {
    ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
    EXPECT_EQ(ranks.code(0), 1);
    EXPECT_EQ(ranks.code(1), 1);
    expect_cause(ranks.errors(), victim++, "out of memory");
  }
}

TEST(ControlFailure, CrashComesBeforeWhatOtherRanksTellOfIt) {
  for (const int teller : {0, 1}) {
    struct Shared {
      std::atomic<bool> dying = false;
    };
    const SharedMemory<Shared> shared;
    TestRanks ranks(3, [&](const World& world) {
      const std::unique_ptr<Control> control = make_control(world, kOptions);
      control->barrier();
      if (world.rank == 2) {
        shared->dying = true;
        kill(getpid(), SIGKILL);
      }
      if (world.rank != teller) hang();
      while (!shared->dying) usleep(100);
      control->fail("NCCL: connection closed by remote peer", 1);
      return 1;
    });
    ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
    expect_cause(ranks.errors(), 2, "killed or crashed");
  }
}

TEST(ControlFailure, MainThreadWithoutProgress) {
  std::list<TestRanks> runs;
  for (int victim = 0; victim < 3; ++victim) {
    runs.emplace_back(3, [=](const World& world) {
      const std::unique_ptr<Control> control = make_control(world, {.connect_s = 20, .heartbeat_s = 2, .progress_s = 2});
      for (int step = 0; step < 25; ++step) {
        usleep(100000);
        control->progress();
      }
      if (world.rank == victim) hang();
      control->barrier();  // waiting for the victim is no lack of progress
      return 0;
    });
  }
  expect_each_to_be_the_cause(runs, "no progress for 2 s");
}

TEST(ControlFailure, WaitOutsideForARankWithoutProgress) {
  // Rank 1 stands still; the others, one of which has made no progress for longer, wait for it in a transport. Or all wait.
  const auto wait_for = [](Control& control) {
    const OutsideWait waiting(control);
    hang();
  };
  for (const bool all : {false, true}) {
    TestRanks ranks(3, [=](const World& world) {
      const std::unique_ptr<Control> control = make_control(world, {.connect_s = 20, .heartbeat_s = 2, .progress_s = 2});
      if (world.rank != 1 || all) wait_for(*control);
      usleep(500000);
      control->progress();
      hang();
      return 0;
    });
    ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
    for (int rank = 0; rank < 3; ++rank) EXPECT_NE(ranks.code(rank), 0) << "rank " << rank;
    if (all) {
      EXPECT_NE(ranks.errors().find("no progress for 4 s"), std::string::npos) << ranks.errors();
    } else {
      expect_cause(ranks.errors(), 1, "no progress for 2 s");
    }
  }
}

TEST(ControlFailure, DifferentCallsAreFoundOut) {
  TestRanks ranks(2, [](const World& world) {
    const std::unique_ptr<Control> control = make_control(world, kOptions);
    try {
      if (world.rank == 0) {
        control->barrier();
      } else {
        control->gather({});
        hang();
      }
    } catch (const Error& error) {
      control->fail(error.what(), 1);
    }
    return 1;
  });
  ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
  expect_cause(ranks.errors(), 0, "rank 1 is in a gather (its call 1) where rank 0 is in a barrier (its call 1)");
}

TEST(ControlFailure, WaitingForARankThatHasEnded) {
  TestRanks ranks(2, [](const World& world) {
    const std::unique_ptr<Control> control = make_control(world, kOptions);
    if (world.rank == 1) return 0;
    try {
      control->barrier();
    } catch (const Error& error) {
      control->fail(error.what(), 1);
    }
    return 1;
  });
  ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
  EXPECT_EQ(ranks.code(0), 1);
  EXPECT_EQ(ranks.code(1), 1);
  expect_cause(ranks.errors(), 0, "rank 1 has ended while rank 0 waits for it in a barrier");
}

TEST(ControlFailure, EndWithoutGoodbyeIsAFailure) {
  TestRanks ranks(2, [](const World& world) {
    Control* control = make_control(world, kOptions).release();
    control->barrier();
    if (world.rank == 1) _exit(0);
    hang();
    return 0;
  });
  ASSERT_TRUE(ranks.wait(kLimitSeconds)) << ranks.errors();
  EXPECT_EQ(ranks.code(0), 1);
  expect_cause(ranks.errors(), 1, "its connection closed");
}

// A whole run that was suspended (a shell's Ctrl-Z) goes on as if nothing had been.
TEST(ControlFailure, AllStoppedAndContinued) {
  struct Shared {
    std::atomic<int> here = 0;
    std::atomic<bool> go_on = false;
  };
  const SharedMemory<Shared> shared;
  TestRanks ranks(3, [&](const World& world) {
    const std::unique_ptr<Control> control = make_control(world, kOptions);
    ++shared->here;
    while (!shared->go_on) usleep(1000);
    usleep(300000);
    control->barrier();
    return 0;
  });
  for (int i = 0; i < 20000 && shared->here < 3; ++i) usleep(1000);
  for (int rank = 0; rank < 3; ++rank) ranks.send_signal(rank, SIGSTOP);
  usleep(3000000);
  shared->go_on = true;
  for (int rank = 0; rank < 3; ++rank) ranks.send_signal(rank, SIGCONT);
  expect_good_end(ranks, 3);
}

TEST(ProcessId, KillsOnlyTheProcessItMeans) {
  struct Shared {
    std::atomic<uint64_t> start_time = 0;
  };
  const SharedMemory<Shared> shared;
  const pid_t pid = fork();
  if (pid == 0) {
    shared->start_time = this_process().start_time;
    hang();
  }
  while (shared->start_time == 0) usleep(100);
  const ProcessId own = this_process();
  EXPECT_EQ(own.pid, getpid());
  EXPECT_FALSE(own.pid_space.empty());
  kill_if_here(own);  // not oneself
  ProcessId process = own;
  process.pid = pid;
  process.start_time = 1;  // an earlier process with this number
  kill_if_here(process);
  process.start_time = shared->start_time;
  process.pid_space = "of another host";
  kill_if_here(process);
  usleep(50000);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, WNOHANG), 0) << "a process was killed that was not meant";
  process.pid_space = own.pid_space;
  kill(pid, SIGSTOP);
  kill_if_here(process);
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFSIGNALED(status));
}

}  // namespace
}  // namespace speedrun

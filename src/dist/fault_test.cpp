#include "src/dist/fault.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <new>

#include "src/core/test_refusal.h"

namespace speedrun {
namespace {

// What a process with this SPEEDRUN_FAULT comes to that visits steps 0 to 2 as rank 1: a wait status.
int status_with(const char* fault) {
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("SPEEDRUN_FAULT", fault, 1);
    try {
      fault_point(FaultPlace::init, 0, 1);
      for (int step = 0; step < 3; ++step) fault_point(FaultPlace::step, step, 1);
    } catch (const InputError&) {
      _exit(2);
    } catch (const Error&) {
      _exit(40);
    } catch (const std::bad_alloc&) {
      _exit(41);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, WUNTRACED);
  if (WIFSTOPPED(status)) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  return status;
}

TEST(Fault, HappensAtItsPlace) {
  EXPECT_EQ(status_with(""), 0);
  EXPECT_EQ(WTERMSIG(status_with("1:step:2:kill")), SIGKILL);
  EXPECT_EQ(WTERMSIG(status_with("1:init:0:term")), SIGTERM);
  const int stopped = status_with("1:step:0:stop");
  EXPECT_TRUE(WIFSTOPPED(stopped));
  EXPECT_EQ(WEXITSTATUS(status_with("1:step:1:exit")), 1);
  EXPECT_EQ(WEXITSTATUS(status_with("1:step:1:throw")), 40);
  EXPECT_EQ(WEXITSTATUS(status_with("1:step:1:memory")), 41);
}

TEST(Fault, OtherRanksStepsAndPlacesAreSafe) {
  for (const char* fault : {"0:step:2:kill", "1:step:3:kill", "1:init:1:kill", "1:validation:0:kill", "1:checkpoint:0:kill"})
    EXPECT_EQ(status_with(fault), 0) << fault;
}

TEST(Fault, NamesWhatIsMalformed) {
  const auto refusal = [](const char* text) { return refusal_of([&] { parse_fault(text); }); };
  EXPECT_NE(refusal("1:step:2").find("3 parts"), std::string::npos);
  EXPECT_NE(refusal("1:step:2:kill:").find("5 parts"), std::string::npos);
  EXPECT_NE(refusal("x:step:2:kill").find("RANK \"x\""), std::string::npos);
  EXPECT_NE(refusal("-1:step:2:kill").find("RANK"), std::string::npos);
  EXPECT_NE(refusal("1:stp:2:kill").find("PLACE \"stp\" is none of init, step, validation, checkpoint"), std::string::npos);
  EXPECT_NE(refusal("1:step::kill").find("COUNT"), std::string::npos);
  EXPECT_NE(refusal("1:step:2:die").find("KIND \"die\""), std::string::npos);
  EXPECT_EQ(WEXITSTATUS(status_with("nonsense")), 2);
  const Fault fault = parse_fault("3:checkpoint:7:hang");
  EXPECT_EQ(fault.rank, 3);
  EXPECT_EQ(fault.place, FaultPlace::checkpoint);
  EXPECT_EQ(fault.count, 7);
  EXPECT_EQ(fault.kind, FaultKind::hang);
}

TEST(Fault, SaysWhetherOneIsSet) {
  unsetenv("SPEEDRUN_FAULT");
  EXPECT_EQ(active_fault(), "");
  setenv("SPEEDRUN_FAULT", "1:step:3:kill", 1);
  EXPECT_EQ(active_fault(), "1:step:3:kill");
  unsetenv("SPEEDRUN_FAULT");
}

}  // namespace
}  // namespace speedrun

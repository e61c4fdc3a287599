#pragma once
// Failures on order, for tests of what the other ranks do then: SPEEDRUN_FAULT="RANK:PLACE:COUNT:KIND", for example 1:step:3:kill.
#include <cstdint>
#include <string>

namespace speedrun {

enum class FaultPlace { init, step, validation, checkpoint };
enum class FaultKind {
  kill,    // SIGKILL
  stop,    // SIGSTOP: alive, but does nothing
  exit,    // ends the process without a word, exit code 1
  error,   // "throw": an Error
  memory,  // std::bad_alloc
  term,    // SIGTERM, as from a batch system
  hang     // the calling thread waits for ever
};

struct Fault {
  int rank = 0;
  FaultPlace place = FaultPlace::init;
  int64_t count = 0;
  FaultKind kind = FaultKind::kill;
};

// Throws InputError naming SPEEDRUN_FAULT, the part that is wrong and what it may be.
Fault parse_fault(const std::string& text);

// A place where a rank may fail. `count`: the number of the step at FaultPlace::step, of the visit from 0 elsewhere. Costs nothing
// where SPEEDRUN_FAULT is not set; throws InputError for a malformed one, at the first call of the process.
void fault_point(FaultPlace place, int64_t count, int rank);

// What SPEEDRUN_FAULT says, for the log; empty where it is not set.
std::string active_fault();

}  // namespace speedrun

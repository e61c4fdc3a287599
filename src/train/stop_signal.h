#pragma once
// SIGINT and SIGTERM: the first asks the loop to stop after the current step and save, a second one, a second or more later, ends
// the process at once.

namespace speedrun {

class StopSignal {
 public:
  StopSignal();   // installs the handlers
  ~StopSignal();  // restores the former ones
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  static int received();  // signal number; 0: none
};

}  // namespace speedrun

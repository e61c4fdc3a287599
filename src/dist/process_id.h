#pragma once
// A process of any host, told apart from one that has its number later.
#include <cstdint>
#include <string>

#include "src/dist/message.h"

namespace speedrun {

struct ProcessId {
  int64_t pid = 0;
  uint64_t start_time = 0;  // of /proc/PID/stat, clock ticks since the host started
  std::string host;         // its name, for the user
  std::string pid_space;    // of two processes with the same one, each can kill the other by its pid: boot and PID namespace
};

ProcessId this_process();
std::string describe(const ProcessId& process);  // "pid 4711 on host xyz"

// SIGKILL, which ends a stopped process too; does nothing for a process of another host or one that has ended.
void kill_if_here(const ProcessId& process);

void write_process(MessageWriter& writer, const ProcessId& process);
ProcessId read_process(MessageReader& reader);

}  // namespace speedrun

#include "src/dist/process_id.h"

#include <unistd.h>

#include <array>
#include <csignal>
#include <fstream>
#include <sstream>

#include "fmt/format.h"

namespace speedrun {
namespace {

// 0: there is no such process.
uint64_t start_time_of(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::stringstream content;
  content << file.rdbuf();
  // The second field is the program's name in brackets, which may hold anything; the start is the 22nd.
  const std::string text = content.str();
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  uint64_t start_time = 0;
  fields >> start_time;
  return start_time;
}

}  // namespace

ProcessId this_process() {
  ProcessId process;
  process.pid = getpid();
  process.start_time = start_time_of(process.pid);
  std::array<char, 256> text{};
  gethostname(text.data(), text.size() - 1);
  process.host = text.data();
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  text.fill(0);
  if (readlink("/proc/self/ns/pid", text.data(), text.size() - 1) < 0) return process;
  if (!boot.empty()) process.pid_space = boot + " " + text.data();
  return process;
}

std::string describe(const ProcessId& process) { return fmt::format("pid {} on host {}", process.pid, process.host); }

void kill_if_here(const ProcessId& process) {
  const ProcessId here = this_process();
  if (process.pid <= 1 || process.pid == here.pid || process.start_time == 0) return;
  if (here.pid_space.empty() || process.pid_space != here.pid_space) return;
  if (start_time_of(process.pid) == process.start_time) kill(static_cast<pid_t>(process.pid), SIGKILL);
}

void write_process(MessageWriter& writer, const ProcessId& process) {
  writer.number(process.pid).number(process.start_time).text(process.host).text(process.pid_space);
}

ProcessId read_process(MessageReader& reader) {
  ProcessId process;
  process.pid = reader.number<int64_t>();
  process.start_time = reader.number<uint64_t>();
  process.host = reader.text();
  process.pid_space = reader.text();
  return process;
}

}  // namespace speedrun

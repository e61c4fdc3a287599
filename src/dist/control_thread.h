#pragma once
// The thread of every process that talks to the other ranks, watches them and ends the process when a rank has failed. Hub: rank
// 0's, connected to all others. Member: the others', connected to the hub alone.
#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/dist/connection.h"
#include "src/dist/control_state.h"
#include "src/dist/process_id.h"

namespace speedrun {

class ControlThread {
 public:
  explicit ControlThread(ControlState& state);
  virtual ~ControlThread() = default;
  void run();  // until the main thread closes, or the connection does not come about, or the process ends

 protected:
  virtual void pass() = 0;                                     // one round: read, think, write
  virtual std::vector<pollfd> awaited() const = 0;             // what a round has to react to
  virtual void forgive_silence() = 0;                          // of all others
  virtual void end_by_own_error(const std::string& what) = 0;  // this thread's: a bug, no memory

  double now() const { return now_s_; }
  void wait(const std::vector<pollfd>& descriptors, double seconds) const;
  bool heartbeat_due();  // true once per interval
  double progress_limit_s() const;
  bool main_thread_stalled() const;
  std::vector<ControlState::Post> take_posts();
  void refuse_connection(const std::string& line, int exit_code);  // for make_control to throw; ends run()
  void finish() { done_ = true; }
  bool finished() const { return done_; }
  // After fail(): lets it return; the main thread then has the time of a heartbeat's limit to end the process.
  [[noreturn]] void end_after_own_failure(int exit_code);
  static pollfd awaited_of(const Connection& connection);
  std::string rank_line(int rank, const std::optional<ProcessId>& process, const std::string& what) const;

  ControlState& state_;

 private:
  double now_s_, heartbeat_s_ = 0, progress_floor_s_ = 0;
  bool done_ = false;
};

std::unique_ptr<ControlThread> make_hub(ControlState& state);  // throws Error if it cannot listen
std::unique_ptr<ControlThread> make_member(ControlState& state);

constexpr const char* kListenVariable = "SPEEDRUN_LISTEN_SOCKET";  // the hub's listening socket, opened by the launcher
constexpr const char* kJobVariable = "SPEEDRUN_JOB";               // any text; the ranks of one run have the same

// The first message of a member.
struct Hello {
  static constexpr uint64_t kMagic = 0x6e75726465657073;  // "speedrun"
  static constexpr uint32_t kVersion = 1;
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t rank = 0, size = 0;
  ProcessId process;
  std::string job;
};
Bytes write_hello(const Hello& hello);
Hello read_hello(const Bytes& body);
std::string job_of_environment();

}  // namespace speedrun

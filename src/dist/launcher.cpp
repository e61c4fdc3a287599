#include "src/dist/launcher.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <ctime>
#include <random>
#include <utility>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/dist/cause.h"
#include "src/dist/control_thread.h"
#include "src/dist/socket.h"

extern char** environ;

namespace speedrun {
namespace {

constexpr const char* kAddress = "127.0.0.1";
constexpr double kParts = 10;  // of grace_s, in which a stop is timed

struct Child {
  int rank = 0;
  pid_t pid = -1;
  bool ended = false;
  bool stopped = false;      // by a signal
  double stopped_for_s = 0;  // of this process's own time
};

using Pipe = std::array<Socket, 2>;  // reading and writing end, closed in programs that this one starts

Pipe open_pipe() {
  int ends[2];
  require(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "pipe: ", std::strerror(errno));
  return {Socket(ends[0]), Socket(ends[1])};
}

// SIGINT, SIGTERM and SIGCHLD are waited for instead of handled, while this lives.
class AwaitedSignals {
 public:
  AwaitedSignals() {
    sigemptyset(&awaited_);
    for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&awaited_, signal);
    sigprocmask(SIG_BLOCK, &awaited_, &former_);
  }
  ~AwaitedSignals() { sigprocmask(SIG_SETMASK, &former_, nullptr); }
  AwaitedSignals(const AwaitedSignals&) = delete;
  AwaitedSignals& operator=(const AwaitedSignals&) = delete;

  const sigset_t& former() const { return former_; }
  int next(double seconds) const {  // 0: none came
    const double whole = std::floor(seconds);
    const timespec limit{static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
    return std::max(0, sigtimedwait(&awaited_, nullptr, &limit));
  }

 private:
  sigset_t awaited_, former_;
};

std::string random_job() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

std::vector<std::string> environment_of(const std::vector<std::pair<std::string, std::string>>& ours) {
  std::vector<std::string> all;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string entry = *each;
    const std::string name = entry.substr(0, entry.find('='));
    // An outer torchrun's word about its port is not ours.
    if (name == "TORCHELASTIC_USE_AGENT_STORE") continue;
    if (std::none_of(ours.begin(), ours.end(), [&](const auto& own) { return own.first == name; })) all.push_back(entry);
  }
  for (const auto& [name, value] : ours) all.push_back(name + "=" + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

void keep_open_in_program(int descriptor) { fcntl(descriptor, F_SETFD, 0); }

class Launch {
 public:
  Launch(int ranks, const std::vector<std::string>& arguments, double grace_s);
  ~Launch() { kill_all(); }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  int wait();

 private:
  void start(int rank, int ranks, std::vector<std::string> arguments);
  void reap();
  void ended(const Child& child, int status);
  void end_of_patience();
  void fail(int exit_code);
  bool may_tell() const;
  double next_limit_s() const;
  void kill_all();
  bool running() const;

  AwaitedSignals signals_;
  Socket listener_ = listen_on(kAddress, 0);  // rank 0's, open before any rank runs, so that nobody else can have the port
  Pipe cause_ = open_pipe();                  // cause.h
  const std::string job_ = random_job();
  const int port_ = port_of(listener_);
  const double grace_s_;
  std::vector<Child> children_;
  int exit_code_ = 0;
  double kill_s_ = 0;  // when what is left is killed; 0: nothing has failed
};

Launch::Launch(int ranks, const std::vector<std::string>& arguments, double grace_s) : grace_s_(grace_s) {
  require(write(cause_[1].descriptor(), "", 1) == 1, "pipe: ", std::strerror(errno));
  try {
    for (int rank = 0; rank < ranks; ++rank) start(rank, ranks, arguments);
  } catch (const Error&) {
    kill_all();
    throw;
  }
  listener_.close();
}

void Launch::start(int rank, int ranks, std::vector<std::string> arguments) {
  std::vector<std::string> environment = environment_of({{"RANK", std::to_string(rank)},
                                                         {"WORLD_SIZE", std::to_string(ranks)},
                                                         {"LOCAL_RANK", std::to_string(rank)},
                                                         {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
                                                         {"MASTER_ADDR", kAddress},
                                                         {"MASTER_PORT", std::to_string(port_)},
                                                         {"SPEEDRUN_LAUNCHED", "1"},
                                                         {kJobVariable, job_},
                                                         {kCauseVariable, std::to_string(cause_[0].descriptor())},
                                                         {kListenVariable, std::to_string(listener_.descriptor())}});
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
  Pipe problem = open_pipe();  // the child's errno if the program does not start
  const pid_t parent = getpid();
  const pid_t pid = fork();
  require(pid >= 0, "rank ", rank, " cannot be started: ", std::strerror(errno));
  if (pid == 0) {
    // Only system calls from here: the process may have had other threads.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // gone before prctl
    sigprocmask(SIG_SETMASK, &signals_.former(), nullptr);
    keep_open_in_program(cause_[0].descriptor());
    if (rank == 0) keep_open_in_program(listener_.descriptor());
    execve("/proc/self/exe", argv.data(), envp.data());
    const int error = errno;
    if (write(problem[1].descriptor(), &error, sizeof error) < 0) _exit(126);
    _exit(127);
  }
  children_.push_back({rank, pid});
  // Closed by the child's exec or end.
  fcntl(problem[0].descriptor(), F_SETFL, 0);
  problem[1].close();
  int error = 0;
  if (read(problem[0].descriptor(), &error, sizeof error) == sizeof error)
    throw Error(fmt::format("rank {} cannot be started: /proc/self/exe: {}", rank, std::strerror(error)));
}

bool Launch::running() const {
  return std::any_of(children_.begin(), children_.end(), [](const Child& child) { return !child.ended; });
}

int Launch::wait() {
  while (running()) {
    const double before_s = monotonic_s();
    const int signal = signals_.next(std::max(0.0, next_limit_s() - before_s));
    // Where this process was stopped too, by a shell's Ctrl-Z or a batch system, a part at most has passed.
    const double passed_s = std::min(monotonic_s() - before_s, grace_s_ / kParts);
    for (Child& child : children_) child.stopped_for_s += child.stopped ? passed_s : 0;
    if (signal == SIGINT || signal == SIGTERM) {
      for (const Child& child : children_) {
        if (!child.ended) kill(child.pid, signal);
      }
    }
    reap();
    end_of_patience();
  }
  return exit_code_;
}

// What ended at about the same time is seen in the order of the ranks. A signal is a cause, an exit code beside it its consequence.
void Launch::reap() {
  std::vector<std::pair<const Child*, int>> by_exit;
  for (Child& child : children_) {
    int status = 0;
    if (child.ended || waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) != child.pid) continue;
    if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
      child.stopped = WIFSTOPPED(status);
      child.stopped_for_s = 0;
      continue;
    }
    child.ended = true;
    if (WIFSIGNALED(status)) {
      ended(child, status);
    } else {
      by_exit.emplace_back(&child, status);
    }
  }
  for (const auto& [child, status] : by_exit) ended(*child, status);
}

void Launch::ended(const Child& child, int status) {
  const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  const int code = signal != 0 ? 128 + signal : WEXITSTATUS(status);
  if (code == 0 || kill_s_ > 0) return;
  if (signal != 0 && may_tell())
    print_cause(fmt::format("rank {} (pid {}): ended by signal {} ({})", child.rank, child.pid, signal, strsignal(signal)));
  fail(code);
}

void Launch::fail(int exit_code) {
  exit_code_ = exit_code;
  kill_s_ = monotonic_s() + grace_s_;
}

bool Launch::may_tell() const {
  char token;
  return read(cause_[0].descriptor(), &token, 1) == 1;
}

double Launch::next_limit_s() const {
  double limit_s = kill_s_ > 0 ? kill_s_ : monotonic_s() + 3600;
  const bool any_stopped =
      std::any_of(children_.begin(), children_.end(), [](const Child& child) { return !child.ended && child.stopped; });
  return any_stopped ? std::min(limit_s, monotonic_s() + grace_s_ / kParts) : limit_s;
}

// A rank that is stopped while this process runs, before it knows the others, or beside all others, is seen by nobody else.
void Launch::end_of_patience() {
  for (const Child& child : children_) {
    if (child.ended || !child.stopped || child.stopped_for_s < grace_s_ || kill_s_ > 0) continue;
    if (may_tell()) print_cause(fmt::format("rank {} (pid {}): stopped for {:g} s", child.rank, child.pid, grace_s_));
    fail(static_cast<int>(ExitCode::failure));
    return kill_all();
  }
  if (kill_s_ > 0 && monotonic_s() >= kill_s_) kill_all();
}

void Launch::kill_all() {
  for (Child& child : children_) {
    if (child.ended) continue;
    kill(child.pid, SIGKILL);
    while (waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    child.ended = true;
  }
}

}  // namespace

int launch_ranks(int ranks, const std::vector<std::string>& arguments, double grace_s) {
  Launch launch(ranks, arguments, grace_s);
  return launch.wait();
}

}  // namespace speedrun

#pragma once
// Tests with several ranks: each a process forked from the test, which must have no other thread then. What still runs at a limit
// is killed and fails the test, so that a bug never hangs it.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "src/dist/cause.h"
#include "src/dist/socket.h"
#include "src/dist/world.h"

namespace speedrun {

// Below the range from which systems give ports to outgoing connections.
inline int unused_port() {
  static int next = 10000 + getpid() * 37 % 20000;
  for (;;) {
    next = next < 30000 ? next + 1 : 10000;
    try {
      return port_of(listen_on("127.0.0.1", next));
    } catch (const Error&) {
      // Somebody's.
    }
  }
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t start = 0, end; (end = text.find('\n', start)) != std::string::npos; start = end + 1)
    lines.push_back(text.substr(start, end - start));
  return lines;
}

// What several processes write, one behind the other.
class SharedText {
 public:
  SharedText() : descriptor_(memfd_create("speedrun_test", 0)) {}
  ~SharedText() { close(descriptor_); }
  SharedText(const SharedText&) = delete;
  SharedText& operator=(const SharedText&) = delete;
  void become_standard_error() const { dup2(descriptor_, STDERR_FILENO); }
  std::string text() const {
    std::string all(static_cast<size_t>(lseek(descriptor_, 0, SEEK_END)), ' ');
    EXPECT_EQ(pread(descriptor_, all.data(), all.size(), 0), static_cast<ssize_t>(all.size()));
    return all;
  }

 private:
  int descriptor_;
};

// One object of type T in memory that all ranks share. T: atomics.
template <class T>
class SharedMemory {
 public:
  SharedMemory() : object_(new (mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) T()) {}
  ~SharedMemory() { munmap(object_, sizeof(T)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  T* operator->() const { return object_; }

 private:
  T* object_;
};

class TestRanks {
 public:
  using Work = std::function<int(const World&)>;

  // Runs `work` in `size` processes. Its value is the exit code; an Error is printed as main does.
  TestRanks(int size, const Work& work) : TestRanks(size, work, unused_port()) {}
  TestRanks(int size, const Work& work, int port) {
    for (int rank = 0; rank < size; ++rank) {
      World world;
      world.rank = world.local_rank = rank;
      world.size = world.local_size = size;
      world.address = "127.0.0.1";
      world.port = port;
      const pid_t pid = fork();
      if (pid == 0) become_rank(world, work);
      pids_.push_back(pid);
    }
    statuses_.resize(pids_.size());
  }
  ~TestRanks() {
    for (const pid_t pid : pids_) {
      if (pid > 0) kill(pid, SIGKILL);
      if (pid > 0) waitpid(pid, nullptr, 0);
    }
  }
  TestRanks(const TestRanks&) = delete;
  TestRanks& operator=(const TestRanks&) = delete;

  // True if all ended within `limit_s`.
  bool wait(double limit_s = 30) {
    for (const double end_s = monotonic_s() + limit_s; monotonic_s() < end_s; usleep(2000)) {
      bool running = false;
      for (size_t rank = 0; rank < pids_.size(); ++rank) {
        if (pids_[rank] > 0 && waitpid(pids_[rank], &statuses_[rank], WNOHANG) == pids_[rank]) pids_[rank] = -1;
        running = running || pids_[rank] > 0;
      }
      if (!running) return true;
    }
    return false;
  }

  void send_signal(int rank, int signal) const { kill(pids_[rank], signal); }
  // Exit code, or 128 + signal.
  int code(int rank) const {
    const int status = statuses_[rank];
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  std::string errors() const { return errors_.text(); }

 private:
  [[noreturn]] void become_rank(const World& world, const Work& work) {
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    errors_.become_standard_error();
    int code = 0;
    try {
      code = work(world);
    } catch (const Error& error) {
      print_cause(error.what());
      code = static_cast<int>(error.code());
    } catch (const std::exception& error) {
      print_cause(error.what());
      code = 1;
    }
    _exit(code);
  }

  std::vector<pid_t> pids_;  // -1: has ended
  std::vector<int> statuses_;
  SharedText errors_;
};

// All ended by themselves without a word and with 0.
inline void expect_good_end(TestRanks& ranks, int size) {
  ASSERT_TRUE(ranks.wait(60)) << ranks.errors();
  for (int rank = 0; rank < size; ++rank) EXPECT_EQ(ranks.code(rank), 0) << "rank " << rank << "\n" << ranks.errors();
  EXPECT_EQ(ranks.errors(), "");
}

}  // namespace speedrun

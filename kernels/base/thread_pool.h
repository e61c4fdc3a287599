#pragma once
// A fixed set of threads for the CPU references.
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace speedrun {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // the calling thread counts as one; 0: all hardware threads
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs body(index) for index = 0..count-1, each exactly once, and returns when all have returned. An exception in a body is
  // rethrown here. The split into indices is the caller's, so results cannot depend on the number of threads.
  void run(int64_t count, const std::function<void(int64_t)>& body);

 private:
  void work();

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t count_ = 0, next_ = 0, active_ = 0;
  uint64_t generation_ = 0;
  std::exception_ptr failure_;
  bool stop_ = false;
};

}  // namespace speedrun

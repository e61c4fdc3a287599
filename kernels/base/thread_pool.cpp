#include "kernels/base/thread_pool.h"

#include <algorithm>
#include <exception>

namespace speedrun {

ThreadPool::ThreadPool(int num_threads) {
  int total = num_threads > 0 ? num_threads : static_cast<int>(std::thread::hardware_concurrency());
  total = std::max(total, 1);
  for (int i = 1; i < total; ++i) {
    workers_.emplace_back([this] {
      uint64_t seen = 0;
      for (;;) {
        {
          std::unique_lock lock(mutex_);
          wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
          if (stop_) return;
          seen = generation_;
        }
        work();
      }
    });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// Takes indices until none is left; called by every thread of the pool.
void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  while (body_ != nullptr && next_ < count_) {
    const int64_t index = next_++;
    const std::function<void(int64_t)>& body = *body_;
    ++active_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      body(index);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    --active_;
    if (failure && !failure_) {
      failure_ = failure;
      next_ = count_;
    }
  }
  if (active_ == 0) done_.notify_all();
}

void ThreadPool::run(int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 0) return;
  if (workers_.empty() || count == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    next_ = 0;
    failure_ = nullptr;
    ++generation_;
  }
  wake_.notify_all();
  work();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return next_ >= count_ && active_ == 0; });
  body_ = nullptr;
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace speedrun

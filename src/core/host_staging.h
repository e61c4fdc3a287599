#pragma once
// Large copies between a device and ordinary host memory. A GPU copies fast only from and to pinned memory, so they go through two
// pinned buffers: one is on its way while the host fills or empties the other. The CPU copies without a detour.
#include <cstddef>
#include <functional>
#include <memory>

#include "src/core/device.h"

namespace speedrun {

// Synchronous: what was to be copied is there at return. For one thread.
class HostStaging {
 public:
  static constexpr size_t kBufferBytes = size_t{4} << 20;

  explicit HostStaging(Device& device) : device_(device) {}

  void copy_out(void* host, const void* device, size_t bytes);
  void copy_in(void* device, const void* host, size_t bytes);

  // For data that changes its form on the way: elements 0 … count−1 in chunks first … first + n − 1 of at most `at_once`, which fit
  // a buffer. `enqueue` issues the device's copies of a chunk, `take` and `fill` are the host's part.
  using Chunk = std::function<void(std::byte* buffer, size_t first, size_t n)>;
  void out(size_t count, size_t at_once, const Chunk& enqueue, const Chunk& take);
  void in(size_t count, size_t at_once, const Chunk& fill, const Chunk& enqueue);

 private:
  void allocate();  // at the first use: not every run copies

  Device& device_;
  HostBuffer<std::byte> buffers_[2];
  std::unique_ptr<Event> passed_[2];  // the device is done with the buffer
};

}  // namespace speedrun

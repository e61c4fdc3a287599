#include "src/core/host_staging.h"

#include <algorithm>
#include <cstring>

namespace speedrun {

void HostStaging::allocate() {
  if (passed_[0]) return;
  for (int b = 0; b < 2; ++b) {
    buffers_[b] = HostBuffer<std::byte>(device_, kBufferBytes);
    passed_[b] = device_.make_event();
  }
}

void HostStaging::out(size_t count, size_t at_once, const Chunk& enqueue, const Chunk& take) {
  allocate();
  const size_t chunks = (count + at_once - 1) / at_once;
  const auto with_chunk = [&](size_t chunk, const Chunk& use) {
    const size_t first = chunk * at_once;
    use(buffers_[chunk % 2].data(), first, std::min(at_once, count - first));
  };
  for (size_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      with_chunk(chunk, enqueue);
      passed_[chunk % 2]->record();
    }
    if (chunk > 0) {
      passed_[(chunk - 1) % 2]->wait();
      with_chunk(chunk - 1, take);
    }
  }
}

void HostStaging::in(size_t count, size_t at_once, const Chunk& fill, const Chunk& enqueue) {
  allocate();
  for (size_t first = 0, chunk = 0; first < count; first += at_once, ++chunk) {
    std::byte* buffer = buffers_[chunk % 2].data();
    const size_t n = std::min(at_once, count - first);
    passed_[chunk % 2]->wait();
    fill(buffer, first, n);
    enqueue(buffer, first, n);
    passed_[chunk % 2]->record();
  }
  for (const auto& event : passed_) event->wait();
}

void HostStaging::copy_out(void* host, const void* device, size_t bytes) {
  if (!device_.is_cuda()) {
    device_.copy_out(host, device, bytes);
    return;
  }
  auto* to = static_cast<std::byte*>(host);
  const auto* from = static_cast<const std::byte*>(device);
  out(
      bytes, kBufferBytes, [&](std::byte* buffer, size_t first, size_t n) { device_.copy_out(buffer, from + first, n); },
      [&](const std::byte* buffer, size_t first, size_t n) { std::memcpy(to + first, buffer, n); });
}

void HostStaging::copy_in(void* device, const void* host, size_t bytes) {
  if (!device_.is_cuda()) {
    device_.copy_in(device, host, bytes);
    return;
  }
  auto* to = static_cast<std::byte*>(device);
  const auto* from = static_cast<const std::byte*>(host);
  in(
      bytes, kBufferBytes, [&](std::byte* buffer, size_t first, size_t n) { std::memcpy(buffer, from + first, n); },
      [&](const std::byte* buffer, size_t first, size_t n) { device_.copy_in(to + first, buffer, n); });
}

}  // namespace speedrun

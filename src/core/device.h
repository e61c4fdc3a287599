#pragma once
// Where a run computes: the CPU, or one CUDA GPU. All work on a device is issued in order to one queue; on CUDA every call below
// but allocate, capture and synchronize is asynchronous. On the CPU everything happens at once and a graph is the function itself.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "kernels/base/error.h"
#include "kernels/base/exec.h"
#include "kernels/base/thread_pool.h"

namespace speedrun {

// Work recorded once and replayed every step.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch() = 0;
};

// A point in the queue that the host can ask about.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record() = 0;
  virtual bool done() = 0;  // true if never recorded
  virtual void wait() = 0;  // blocks the host
};

struct MemoryInfo {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual bool is_cuda() const = 0;
  virtual std::string name() const = 0;        // "NVIDIA H200", "CPU (2 threads)"
  virtual double peak_bf16_flops() const = 0;  // datasheet's dense BF16 rate; 0: unknown
  virtual MemoryInfo memory() const = 0;
  virtual std::optional<double> energy_joules() const { return std::nullopt; }  // counter of the whole card; empty: not measured

  virtual void* allocate(size_t bytes) = 0;  // device memory, zeroed, 256-byte aligned; throws Error
  virtual void free(void* memory) = 0;
  virtual void* allocate_host(size_t bytes) = 0;  // host memory that asynchronous copies may use
  virtual void free_host(void* memory) = 0;

  virtual void copy_in(void* device, const void* host, size_t bytes) = 0;  // host memory must stay until the queue has passed
  virtual void copy_out(void* host, const void* device, size_t bytes) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;  // device to device
  virtual void zero(void* device, size_t bytes) = 0;
  virtual void synchronize() = 0;

  virtual std::unique_ptr<Event> make_event() = 0;
  virtual std::unique_ptr<Graph> capture(std::function<void()> body) = 0;

  virtual const kernels::HostExec& host_exec() const;  // throws Error on a CUDA device
  virtual const kernels::CudaExec& cuda_exec() const;  // throws Error on the CPU

  template <class T>
  const kernels::Exec<T>& exec() const {
    if constexpr (std::is_same_v<T, bf16>) {
      return cuda_exec();
    } else {
      return host_exec();
    }
  }
};

std::unique_ptr<Device> make_cpu_device(int threads, bool round_bf16 = false);
// Throws InputError with one line when there is no driver, no such GPU, or the driver is older than the toolkit needs.
std::unique_ptr<Device> make_cuda_device(int ordinal);

// True if this build has CUDA and the machine a usable GPU; `why_not` (if given) receives one line otherwise.
bool cuda_available(std::string* why_not = nullptr);

struct BuildInfo {
  std::string version, commit, cuda, cublas, nccl, architectures;
};
BuildInfo build_info();  // works without a driver or GPU

// Owns a buffer made by Device::allocate_host.
template <class T>
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(Device& device, size_t count)
      : device_(&device), data_(static_cast<T*>(device.allocate_host(count * sizeof(T)))), count_(count) {}
  HostBuffer(HostBuffer&& other) noexcept { swap(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~HostBuffer() {
    if (data_ != nullptr) device_->free_host(data_);
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  void swap(HostBuffer& other) {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }
  Device* device_ = nullptr;
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace speedrun

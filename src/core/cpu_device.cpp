#include <sys/sysinfo.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "fmt/format.h"
#include "src/core/device.h"

namespace speedrun {
namespace {

class CpuGraph : public Graph {
 public:
  explicit CpuGraph(std::function<void()> body) : body_(std::move(body)) {}
  void launch() override { body_(); }

 private:
  std::function<void()> body_;
};

class CpuEvent : public Event {
 public:
  void record() override {}
  bool done() override { return true; }
  void wait() override {}
};

class CpuDevice : public Device {
 public:
  CpuDevice(int threads, bool round_bf16) : pool_(threads), exec_{&pool_, round_bf16} {}

  bool is_cuda() const override { return false; }
  std::string name() const override { return fmt::format("CPU ({} threads)", pool_.num_threads()); }
  double peak_bf16_flops() const override { return 0; }
  MemoryInfo memory() const override {
    struct sysinfo info {};
    sysinfo(&info);
    const size_t unit = info.mem_unit;
    // Page cache counts as free enough: it is given back under pressure.
    return {(info.freeram + info.bufferram) * unit + cached_bytes(), info.totalram * unit};
  }

  void* allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (memory == nullptr) throw Error(fmt::format("out of memory: {} bytes", bytes));
    std::memset(memory, 0, bytes);
    return memory;
  }
  void free(void* memory) override { std::free(memory); }
  void* allocate_host(size_t bytes) override { return allocate(bytes); }
  void free_host(void* memory) override { std::free(memory); }

  void copy_in(void* device, const void* host, size_t bytes) override { copy(device, host, bytes); }
  void copy_out(void* host, const void* device, size_t bytes) override { copy(host, device, bytes); }
  // Nothing may come with null, which memcpy and memset do not take.
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void zero(void* device, size_t bytes) override {
    if (bytes > 0) std::memset(device, 0, bytes);
  }
  void synchronize() override {}

  std::unique_ptr<Event> make_event() override { return std::make_unique<CpuEvent>(); }
  std::unique_ptr<Graph> capture(std::function<void()> body) override { return std::make_unique<CpuGraph>(std::move(body)); }
  const kernels::HostExec& host_exec() const override { return exec_; }

 private:
  static size_t cached_bytes() {
    FILE* file = std::fopen("/proc/meminfo", "r");
    if (file == nullptr) return 0;
    char line[256];
    unsigned long kib = 0;
    while (std::fgets(line, sizeof line, file) != nullptr) {
      if (std::sscanf(line, "Cached: %lu kB", &kib) == 1) break;
    }
    std::fclose(file);
    return size_t{kib} * 1024;
  }

  ThreadPool pool_;
  kernels::HostExec exec_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(int threads, bool round_bf16) { return std::make_unique<CpuDevice>(threads, round_bf16); }

}  // namespace speedrun

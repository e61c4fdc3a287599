#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <ostream>

#include "kernels/base/cuda_check.h"
#include "kernels/bench/bench.h"
#include "kernels/bench/nvml_cuda.h"
#include "kernels/fp8/fp8_types.h"
#include "kernels/gemm/gemm_cuda.h"

namespace speedrun::kernels {
namespace {

class Event {
 public:
  Event() { cuda_check(cudaEventCreate(&event_), "creating an event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream), "recording an event"); }
  void wait() { cuda_check(cudaEventSynchronize(event_), "waiting for a bench"); }
  double ms_since(const Event& start) const {
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, start.event_, event_), "reading a time");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

struct Measured {
  double ms = 0;  // of one call
  std::optional<double> mhz, watts, joules;
};

// Keeps the device busy: a batch of calls is always queued behind the one being waited for.
Measured measure(const BenchCase& bench, cudaStream_t stream, double seconds, const Nvml& nvml) {
  constexpr int kWarmUpCalls = 3;
  constexpr double kBatchMs = 25;
  Event start, warm, batch_end[2];
  for (int i = 0; i < kWarmUpCalls; ++i) bench.run();
  start.record(stream);
  bench.run();
  warm.record(stream);
  warm.wait();
  const int64_t batch = std::clamp<int64_t>(static_cast<int64_t>(kBatchMs / std::max(warm.ms_since(start), 1e-3)), 1, 5000);
  auto enqueue = [&](Event& end) {
    for (int64_t i = 0; i < batch; ++i) bench.run();
    end.record(stream);
  };

  // The first quarter only brings the card to its sustained clock.
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  Event first;
  const Event* last = nullptr;
  std::optional<double> energy_begin;
  double clock_sum = 0, energy_seconds = 0;
  int64_t calls = 0, clock_samples = 0;
  bool counting = false;
  enqueue(batch_end[0]);
  for (int turn = 0;; turn ^= 1) {
    const bool enough = counting && elapsed() >= 1.25 * seconds;
    if (enough) {
      batch_end[turn].wait();
      last = &batch_end[turn];
      break;
    }
    if (!counting && elapsed() >= 0.25 * seconds) {
      counting = true;
      first.record(stream);
      energy_begin = nvml.energy_joules();
      energy_seconds = elapsed();
    }
    enqueue(batch_end[turn ^ 1]);
    if (counting) calls += batch;
    batch_end[turn].wait();
    if (const auto mhz = nvml.sm_mhz(); mhz && counting) {
      clock_sum += *mhz;
      ++clock_samples;
    }
  }
  const std::optional<double> energy_end = nvml.energy_joules();
  energy_seconds = elapsed() - energy_seconds;

  Measured result;
  result.ms = last->ms_since(first) / static_cast<double>(calls);
  if (clock_samples > 0) result.mhz = clock_sum / static_cast<double>(clock_samples);
  if (energy_begin && energy_end && energy_seconds > 0) {
    result.watts = (*energy_end - *energy_begin) / energy_seconds;
    result.joules = *result.watts * result.ms * 1e-3;
  }
  return result;
}

std::string number(std::optional<double> value, const char* format) {
  if (!value) return "-";
  char text[32];
  std::snprintf(text, sizeof text, format, *value);
  return text;
}

}  // namespace

void bench_table(const std::string& title, const std::vector<BenchCase>& cases, const CudaExec& exec, double seconds,
                 std::ostream& out) {
  require(seconds > 0 && std::isfinite(seconds), "bench: ", seconds, " seconds a case must be positive");
  size_t width = 4;
  for (const BenchCase& bench : cases) width = std::max(width, bench.name.size());
  char line[256];
  auto row = [&](const std::string& name, const std::string& ms, const std::string& tflops, const std::string& tbs,
                 const std::string& mhz, const std::string& watts, const std::string& joules, const std::string& ratio,
                 const std::string& floor) {
    std::snprintf(line, sizeof line, "%-*s %10s %8s %7s %6s %6s %9s %7s %7s\n", static_cast<int>(std::min<size_t>(width, 120)),
                  name.c_str(), ms.c_str(), tflops.c_str(), tbs.c_str(), mhz.c_str(), watts.c_str(), joules.c_str(), ratio.c_str(),
                  floor.c_str());
    out << line << std::flush;
  };
  out << title << '\n';
  row("case", "ms", "TFLOP/s", "TB/s", "MHz", "W", "J", "x first", "% floor");
  int device = 0;
  cuda_check(cudaGetDevice(&device), "current device");
  const Nvml nvml(device);
  double first_ms = 0;
  for (const BenchCase& bench : cases) {
    const Measured m = measure(bench, exec.stream, seconds, nvml);
    if (first_ms == 0) first_ms = m.ms;
    auto rate = [&](double amount) { return amount > 0 ? std::optional(amount / (m.ms * 1e-3) * 1e-12) : std::nullopt; };
    row(bench.name, number(m.ms, "%.4f"), number(rate(bench.flops), "%.1f"), number(rate(bench.bytes), "%.3f"),
        number(m.mhz, "%.0f"), number(m.watts, "%.0f"), number(m.joules, "%.3g"), number(m.ms / first_ms, "%.2f"),
        number(bench.floor_ms > 0 ? std::optional(100 * bench.floor_ms / m.ms) : std::nullopt, "%.0f"));
  }
  out << '\n';
}

struct BenchDevice::Impl {
  cudaStream_t stream = nullptr;
  std::unique_ptr<GemmPlans> plans;
  CudaExec exec;
};

BenchDevice::BenchDevice() : impl_(std::make_unique<Impl>()) {
  cuda_check(cudaSetDevice(0), "bench needs a GPU");
  cuda_check(cudaStreamCreateWithFlags(&impl_->stream, cudaStreamNonBlocking), "creating a stream");
  CudaExec& exec = impl_->exec;
  int major = 0, minor = 0;
  cuda_check(cudaDeviceGetAttribute(&exec.num_sms, cudaDevAttrMultiProcessorCount, 0), "multiprocessor count");
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "compute capability");
  cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "compute capability");
  exec.compute_capability = 10 * major + minor;
  exec.stream = impl_->stream;
  impl_->plans = std::make_unique<GemmPlans>(impl_->stream);
  exec.gemm = impl_->plans.get();
}

BenchDevice::~BenchDevice() {
  impl_->plans.reset();
  cudaStreamDestroy(impl_->stream);
}

const CudaExec& BenchDevice::exec() const { return impl_->exec; }

namespace {

// Copies and fills go over the default stream, which the bench's own stream does not wait for.
void finish_uploads() { cuda_check(cudaDeviceSynchronize(), "bench: preparing data"); }

}  // namespace

void BenchBuffer::Free::operator()(void* pointer) const { cudaFree(pointer); }

BenchBuffer::BenchBuffer(size_t bytes) {
  void* pointer = nullptr;
  cuda_check(cudaMalloc(&pointer, bytes), "bench: allocating ", bytes, " bytes");
  data_.reset(pointer);
}

BenchBuffer BenchBuffer::copy_of(const void* host, size_t bytes) {
  BenchBuffer buffer(bytes);
  cuda_check(cudaMemcpy(buffer.data_.get(), host, bytes, cudaMemcpyHostToDevice), "bench: uploading ", bytes, " bytes");
  finish_uploads();
  return buffer;
}

BenchBuffer BenchBuffer::zeroed(size_t bytes) {
  BenchBuffer buffer(bytes);
  cuda_check(cudaMemset(buffer.data_.get(), 0, bytes), "bench: zeroing ", bytes, " bytes");
  finish_uploads();
  return buffer;
}

namespace {

// A value as T stores it.
template <class T>
T narrow(float value) {
  if constexpr (std::is_same_v<T, e4m3>) {
    return to_e4m3(value);
  } else if constexpr (std::is_same_v<T, e5m2>) {
    return to_e5m2(value);
  } else {
    return static_cast<T>(value);
  }
}

// Approximately normal (a sum of four uniforms) and cheap: gigabytes are filled on the host. The pattern of a megaelement repeats.
template <class T>
std::vector<T> random_pattern(int64_t count, double deviation) {
  std::vector<T> values(static_cast<size_t>(count));
  uint64_t state = 0x2545f4914f6cdd1du;
  for (T& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>((state >> (16 * i)) & 0xffffu);
    value = narrow<T>(static_cast<float>(deviation * (sum / 65536.0 - 2.0) * std::sqrt(3.0)));
  }
  return values;
}

constexpr int64_t kPattern = 1 << 20;

}  // namespace

template <class T>
BenchBuffer BenchBuffer::repeated_pattern(int64_t count, double deviation) {
  BenchBuffer buffer(static_cast<size_t>(count) * sizeof(T));
  const std::vector<T> pattern = random_pattern<T>(std::min(count, kPattern), deviation);
  for (int64_t done = 0; done < count; done += kPattern) {
    const size_t bytes = static_cast<size_t>(std::min(kPattern, count - done)) * sizeof(T);
    cuda_check(cudaMemcpy(buffer.as<T>() + done, pattern.data(), bytes, cudaMemcpyHostToDevice), "bench: uploading a pattern");
  }
  finish_uploads();
  return buffer;
}

BenchBuffer BenchBuffer::normal_bf16(int64_t count, double deviation) { return repeated_pattern<bf16>(count, deviation); }
BenchBuffer BenchBuffer::normal_f32(int64_t count, double deviation) { return repeated_pattern<float>(count, deviation); }
BenchBuffer BenchBuffer::normal_e4m3(int64_t count, double deviation) { return repeated_pattern<e4m3>(count, deviation); }
BenchBuffer BenchBuffer::normal_e5m2(int64_t count, double deviation) { return repeated_pattern<e5m2>(count, deviation); }

BenchCase bench_copy(size_t bytes, const CudaExec& exec) {
  auto from = std::make_shared<BenchBuffer>(BenchBuffer::normal_bf16(static_cast<int64_t>(bytes / sizeof(bf16))));
  auto to = std::make_shared<BenchBuffer>(BenchBuffer::zeroed(bytes));
  const cudaStream_t stream = exec.stream;
  auto run = [from, to, bytes, stream] {
    cuda_check(cudaMemcpyAsync(to->as<void>(), from->as<void>(), bytes, cudaMemcpyDeviceToDevice, stream), "bench: copy");
  };
  return {"device copy", run, 0, 2.0 * static_cast<double>(bytes)};
}

}  // namespace speedrun::kernels

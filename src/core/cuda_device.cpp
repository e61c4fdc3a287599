#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <array>

#include "fmt/format.h"
#include "kernels/bench/nvml_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "src/core/device.h"
#include "version.h"

namespace speedrun {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(fmt::format("CUDA: {} failed: {}", what, cudaGetErrorString(status)));
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

class CudaGraph : public Graph {
 public:
  CudaGraph(cudaGraphExec_t exec, cudaStream_t stream) : exec_(exec), stream_(stream) {}
  ~CudaGraph() override { cudaGraphExecDestroy(exec_); }
  void launch() override { check(cudaGraphLaunch(exec_, stream_), "graph launch"); }

 private:
  cudaGraphExec_t exec_;
  cudaStream_t stream_;
};

class CudaEvent : public Event {
 public:
  explicit CudaEvent(cudaStream_t stream) : stream_(stream) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "event creation");
  }
  ~CudaEvent() override { cudaEventDestroy(event_); }
  void record() override { check(cudaEventRecord(event_, stream_), "event record"); }
  bool done() override {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check(status, "event query");
    return true;
  }
  void wait() override { check(cudaEventSynchronize(event_), "event wait"); }

 private:
  cudaStream_t stream_;
  cudaEvent_t event_ = nullptr;
};

// Datasheet's dense BF16 rate, FLOP/s, by the driver's name of the GPU.
double datasheet_bf16_flops(const std::string& name) {
  struct Row {
    const char* name;
    double tflops;
  };
  // The first row whose name occurs in the driver's wins, so longer names stand before their prefixes.
  static constexpr std::array<Row, 16> kRows = {{{"H100 PCIe", 756},
                                                 {"H100", 989},
                                                 {"H200", 989},
                                                 {"GH200", 989},
                                                 {"H800", 989},
                                                 {"B200", 2250},
                                                 {"A100", 312},
                                                 {"A800", 312},
                                                 {"L40S", 362},
                                                 {"L4", 121},
                                                 {"A10", 125},
                                                 {"RTX 5090", 209.5},
                                                 {"RTX 4090", 165.2},
                                                 {"RTX 4080", 97.5},
                                                 {"RTX 3090", 71},
                                                 {"A6000", 155}}};
  for (const Row& row : kRows) {
    if (name.find(row.name) != std::string::npos) return row.tflops * 1e12;
  }
  return 0;
}

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) : nvml_(ordinal) {
    check(cudaSetDevice(ordinal), "device choice");
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, ordinal), "device properties");
    name_ = properties.name;
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream creation");
    plans_ = std::make_unique<kernels::GemmPlans>(stream_);
    exec_ = {stream_, properties.multiProcessorCount, properties.major * 10 + properties.minor, plans_.get()};
  }
  ~CudaDevice() override {
    cudaStreamSynchronize(stream_);
    plans_.reset();
    cudaStreamDestroy(stream_);
  }

  bool is_cuda() const override { return true; }
  std::string name() const override { return name_; }
  double peak_bf16_flops() const override { return datasheet_bf16_flops(name_); }
  std::optional<double> energy_joules() const override { return nvml_.energy_joules(); }
  MemoryInfo memory() const override {
    MemoryInfo info;
    check(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), "memory query");
    return info;
  }

  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, bytes);
    if (status != cudaSuccess)
      throw Error(fmt::format("CUDA: out of memory: {:.2f} GB: {}", static_cast<double>(bytes) * 1e-9, cudaGetErrorString(status)));
    check(cudaMemsetAsync(memory, 0, bytes, stream_), "memset");
    return memory;
  }
  void free(void* memory) override { cudaFree(memory); }
  void* allocate_host(size_t bytes) override {
    void* memory = nullptr;
    check(cudaMallocHost(&memory, bytes), "pinned host allocation");
    return memory;
  }
  void free_host(void* memory) override { cudaFreeHost(memory); }

  void copy_in(void* device, const void* host, size_t bytes) override {
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "copy to device");
  }
  void copy_out(void* host, const void* device, size_t bytes) override {
    check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "copy from device");
  }
  void copy(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "copy on device");
  }
  void zero(void* device, size_t bytes) override { check(cudaMemsetAsync(device, 0, bytes, stream_), "memset"); }
  void synchronize() override { check(cudaStreamSynchronize(stream_), "synchronisation"); }

  std::unique_ptr<Event> make_event() override { return std::make_unique<CudaEvent>(stream_); }

  // The body runs once uncaptured first: libraries create plans and kernels are loaded outside the capture. The caller resets
  // state.
  std::unique_ptr<Graph> capture(std::function<void()> body) override {
    body();
    synchronize();
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "graph capture");
    cudaGraph_t graph = nullptr;
    try {
      body();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph), "end of graph capture");
    cudaGraphExec_t exec = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "graph instantiation");
    return std::make_unique<CudaGraph>(exec, stream_);
  }

  const kernels::CudaExec& cuda_exec() const override { return exec_; }

 private:
  kernels::Nvml nvml_;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<kernels::GemmPlans> plans_;
  kernels::CudaExec exec_;
};

}  // namespace

bool cuda_available(std::string* why_not) {
  int driver = 0, count = 0;
  std::string reason;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    reason = "no NVIDIA driver is installed";
  } else if (const cudaError_t status = cudaGetDeviceCount(&count); status == cudaErrorInsufficientDriver) {
    reason = fmt::format("the NVIDIA driver serves CUDA {} but this build needs CUDA {}: update the driver", version_text(driver),
                         version_text(CUDART_VERSION));
  } else if (status != cudaSuccess || count == 0) {
    reason = fmt::format("no CUDA GPU is visible ({}); see CUDA_VISIBLE_DEVICES", cudaGetErrorString(status));
  }
  cudaGetLastError();
  if (why_not != nullptr) *why_not = reason;
  return reason.empty();
}

std::unique_ptr<Device> make_cuda_device(int ordinal) {
  std::string reason;
  if (!cuda_available(&reason)) throw InputError("train.device: " + reason + "; or set train.device=cpu");
  int count = 0;
  check(cudaGetDeviceCount(&count), "device count");
  if (ordinal >= count)
    throw InputError(
        fmt::format("train.device_ordinal: {} but only {} GPUs are visible (see CUDA_VISIBLE_DEVICES)", ordinal, count));
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "device properties");
  if (properties.major < 8) {
    throw InputError(
        fmt::format("train.device: {} has compute capability {}.{}; 8.0 (A100) or newer is needed; or set train.device=cpu",
                    properties.name, properties.major, properties.minor));
  }
  return std::make_unique<CudaDevice>(ordinal);
}

BuildInfo build_info() {
  // NCCL is opened at run time: a single GPU needs none.
  std::string nccl = "not found";
  if (void* library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL); library != nullptr) {
    using GetVersion = int (*)(int*);
    if (const auto get_version = reinterpret_cast<GetVersion>(dlsym(library, "ncclGetVersion")); get_version != nullptr) {
      int version = 0;
      get_version(&version);
      nccl = fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
    }
    dlclose(library);
  }
  const size_t cublas = cublasLtGetVersion();
  return {kVersion,
          kCommit,
          version_text(CUDART_VERSION),
          fmt::format("{}.{}.{}", cublas / 10000, cublas / 100 % 100, cublas % 100),
          nccl,
          kArchitectures};
}

}  // namespace speedrun

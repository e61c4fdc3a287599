#pragma once
// Fixture and buffers of tests that run on a GPU. Without one they skip and say so.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/cuda_check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "kernels/base/thread_pool.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/random.h"

namespace speedrun::testing {

using kernels::cuda_check;

// Device memory of `size` elements between two guards of 1,024 elements. Guards and fresh contents are all ones bits: NaN as bf16,
// float and double, −1 as an integer, so that a read of unwritten or foreign memory shows in the result. A write into a guard fails
// the test when the buffer is downloaded or destroyed. Copies go over the given stream and wait for it.
template <class T>
class DeviceBuffer {
 public:
  static constexpr int64_t kGuard = 1024;

  DeviceBuffer(std::string name, int64_t size, cudaStream_t stream) : name_(std::move(name)), size_(size), stream_(stream) {
    cuda_check(cudaMalloc(reinterpret_cast<void**>(&base_), bytes(size_ + 2 * kGuard)), "allocating ", name_, ", ", size_,
               " elements");
    cuda_check(cudaMemsetAsync(base_, 0xff, bytes(size_ + 2 * kGuard), stream_), "poisoning ", name_);
  }
  DeviceBuffer(std::string name, const std::vector<T>& values, cudaStream_t stream)
      : DeviceBuffer(std::move(name), static_cast<int64_t>(values.size()), stream) {
    upload(values);
  }
  ~DeviceBuffer() {
    if (base_ == nullptr) return;
    if (cudaStreamSynchronize(stream_) == cudaSuccess) check_guards();
    cudaFree(base_);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : name_(std::move(other.name_)), size_(other.size_), stream_(other.stream_), base_(std::exchange(other.base_, nullptr)) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* get() const { return base_ + kGuard; }
  int64_t size() const { return size_; }

  void poison() { cuda_check(cudaMemsetAsync(get(), 0xff, bytes(size_), stream_), "poisoning ", name_); }
  void zero() { cuda_check(cudaMemsetAsync(get(), 0, bytes(size_), stream_), "zeroing ", name_); }

  void upload(const std::vector<T>& values) {
    ASSERT_EQ(static_cast<int64_t>(values.size()), size_) << name_;
    if (values.empty()) return;
    cuda_check(cudaMemcpyAsync(get(), values.data(), bytes(size_), cudaMemcpyHostToDevice, stream_), "uploading ", name_);
    cuda_check(cudaStreamSynchronize(stream_), "uploading ", name_);
  }

  std::vector<T> download() const { return download(0, size_); }

  // `count` elements from `begin` on: a few rows of a large result.
  std::vector<T> download(int64_t begin, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    cuda_check(cudaStreamSynchronize(stream_), "kernels before the download of ", name_);
    if (count > 0)
      cuda_check(cudaMemcpy(values.data(), get() + begin, bytes(count), cudaMemcpyDeviceToHost), "downloading ", name_);
    check_guards();
    return values;
  }

 private:
  static size_t bytes(int64_t count) { return static_cast<size_t>(count) * sizeof(T); }

  void check_guards() const {
    for (const bool after : {false, true}) {
      std::vector<uint8_t> guard(bytes(kGuard));
      const T* begin = after ? base_ + kGuard + size_ : base_;
      if (cudaMemcpy(guard.data(), begin, guard.size(), cudaMemcpyDeviceToHost) != cudaSuccess)
        return;  // an earlier error, reported there
      const auto changed = std::find_if(guard.begin(), guard.end(), [](uint8_t byte) { return byte != 0xff; });
      if (changed != guard.end()) {
        ADD_FAILURE() << "write outside " << name_ << " (" << size_ << " elements): element "
                      << (changed - guard.begin()) / static_cast<int64_t>(sizeof(T)) + (after ? size_ : -kGuard);
      }
    }
  }

  std::string name_;
  int64_t size_ = 0;
  cudaStream_t stream_ = nullptr;
  T* base_ = nullptr;
};

// Has a stream of its own (not the default one, so that a kernel launched on the wrong stream shows), cuBLASLt plans and the
// CudaExec.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
      GTEST_SKIP() << "NO GPU: this test checks nothing here (" << cudaGetErrorString(status) << ", " << count << " devices)";
    }
    (void)test_seed();
    cuda_check(cudaSetDevice(0), "selecting device 0");
    cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    int major = 0, minor = 0;
    cuda_check(cudaDeviceGetAttribute(&exec_.num_sms, cudaDevAttrMultiProcessorCount, 0), "multiprocessor count");
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "compute capability");
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "compute capability");
    exec_.compute_capability = 10 * major + minor;
    exec_.stream = stream_;
    plans_ = std::make_unique<kernels::GemmPlans>(stream_);
    exec_.gemm = plans_.get();
  }

  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    plans_.reset();
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }

  const kernels::CudaExec& exec() const { return exec_; }

  // The reference without rounding (truth) and with BF16 stores (baseline), on all host threads.
  kernels::HostExec truth_exec() { return {.pool = &pool_, .round_bf16 = false}; }
  kernels::HostExec baseline_exec() { return {.pool = &pool_, .round_bf16 = true}; }

  template <class T>
  DeviceBuffer<T> poisoned(const std::string& name, int64_t size) const {
    return DeviceBuffer<T>(name, size, stream_);
  }
  template <class T>
  DeviceBuffer<T> uploaded(const std::string& name, const std::vector<T>& values) const {
    return DeviceBuffer<T>(name, values, stream_);
  }

  // How a test launches an op: directly, or captured into a graph that is then launched, where an allocation or synchronisation
  // inside fails. Kernels are loaded and GEMM plans made by a first direct run, so a capture comes second; same inputs, same bits
  // either way.
  enum class Launch { direct, captured };
  void run(Launch launch, const std::function<void()>& body) const {
    if (launch == Launch::captured) return run_captured(body);
    body();
  }

  void run_captured(const std::function<void()>& body) const {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t runnable = nullptr;
    cuda_check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning a capture");
    body();
    cuda_check(cudaStreamEndCapture(stream_, &graph), "capturing a graph");
    cuda_check(cudaGraphInstantiate(&runnable, graph, 0), "instantiating a graph");
    cuda_check(cudaGraphLaunch(runnable, stream_), "launching a graph");
    cuda_check(cudaStreamSynchronize(stream_), "running a graph");
    cuda_check(cudaGraphExecDestroy(runnable), "destroying a graph");
    cuda_check(cudaGraphDestroy(graph), "destroying a graph");
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<kernels::GemmPlans> plans_;
  kernels::CudaExec exec_;
  ThreadPool pool_{0};
};

}  // namespace speedrun::testing

#include "kernels/gemm/gemm_cuda.h"

#include <map>

#include "kernels/base/cuda_check.h"
#include "kernels/gemm/gemm_plan.h"

namespace speedrun::kernels {
namespace {

struct DeviceFree {
  void operator()(void* p) const { cudaFree(p); }
};

struct Plan {
  GemmDescriptors descriptors;
  cublasLtMatmulAlgo_t algo;
};

}  // namespace

struct GemmPlans::Impl {
  explicit Impl(CUstream_st* plan_stream) : stream(plan_stream) {}

  CUstream_st* stream;
  LtHandle handle = make_lt_handle();
  std::unique_ptr<void, DeviceFree> workspace;
  int compute_capability = 0, multiprocessors = 0;
  std::map<GemmKey, Plan> plans;
  std::vector<std::string> untuned;

  // Weight gradients of small matrices: so few outputs that most multiprocessors would have nothing to do, and sums over all
  // tokens. 64 × 768 outputs over 393,216 tokens take 8.6 ms whole and 0.16 ms with K split in 22.
  bool has_long_sums(const GemmKey& key) const {
    constexpr int64_t kTile = 128, kLong = 4096;
    const int64_t tiles = (key.m + kTile - 1) / kTile * ((key.n + kTile - 1) / kTile) * key.batch;
    return 2 * tiles <= multiprocessors && key.k >= kLong;
  }

  const Plan& make_plan(const GemmKey& key) {
    if (is_fp8(key.type_a) && compute_capability < 89) {
      throw Error("gemm " + describe_gemm(key) + ": FP8 needs a GPU of compute capability 8.9 or later, this one has " +
                  std::to_string(compute_capability / 10) + '.' + std::to_string(compute_capability % 10));
    }
    GemmDescriptors descriptors(key);
    std::string note = "not in the table";
    if (const GemmTuning* row = find_tuning(key, compute_capability)) {
      std::string reason;
      if (const auto algo = make_algorithm(handle.get(), descriptors, key, row->algorithm, reason)) {
        return plans.emplace(key, Plan{std::move(descriptors), *algo}).first->second;
      }
      note = "its row in the table is refused: " + reason;
    }
    // The first answer is wanted; more are asked for only if it is dropped. Some FP8 shapes have answers with a split K alone.
    std::vector<cublasLtMatmulAlgo_t> candidates;
    const bool long_sums = has_long_sums(key);
    for (const SplitK split : {long_sums ? SplitK::allowed : SplitK::none, long_sums ? SplitK::none : SplitK::allowed}) {
      for (const int asked : {1, 8, 64}) {
        if (candidates.empty()) candidates = gemm_candidates(handle.get(), descriptors, asked, split);
      }
    }
    if (candidates.empty()) throw Error("gemm " + describe_gemm(key) + ": cuBLASLt has no algorithm for it");
    untuned.push_back(describe_gemm(key) + " (" + note + ")");
    return plans.emplace(key, Plan{std::move(descriptors), candidates.front()}).first->second;
  }
};

GemmPlans::GemmPlans(CUstream_st* stream) : impl_(std::make_unique<Impl>(stream)) {
  void* workspace = nullptr;
  cuda_check(cudaMalloc(&workspace, kWorkspaceBytes), "gemm: workspace of ", kWorkspaceBytes, " bytes");
  impl_->workspace.reset(workspace);
  int device = 0, major = 0, minor = 0;
  cuda_check(cudaGetDevice(&device), "gemm: current device");
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "gemm: compute capability");
  cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "gemm: compute capability");
  impl_->compute_capability = 10 * major + minor;
  cuda_check(cudaDeviceGetAttribute(&impl_->multiprocessors, cudaDevAttrMultiProcessorCount, device), "gemm: multiprocessors");
}

GemmPlans::~GemmPlans() = default;

void GemmPlans::run(const GemmCuda& args) {
  const GemmKey key = gemm_key(args);
  const auto found = impl_->plans.find(key);
  const Plan& plan = found != impl_->plans.end() ? found->second : impl_->make_plan(key);
  launch_gemm(impl_->handle.get(), plan.descriptors, key, plan.algo, args, impl_->workspace.get(), impl_->stream);
}

std::vector<std::string> GemmPlans::untuned() const { return impl_->untuned; }

void gemm(const GemmCuda& args, const CudaExec& exec) {
  require(exec.gemm != nullptr, "gemm: CudaExec has no GemmPlans");
  exec.gemm->run(args);
}

}  // namespace speedrun::kernels

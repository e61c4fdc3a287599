#include "kernels/gemm/gemm_tune.h"

#include <algorithm>
#include <cstdio>
#include <ostream>

#include "kernels/base/cuda_check.h"
#include "kernels/bench/bench.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kC = 768, kF = 3072, kV = 50304;
constexpr int64_t kGates = 64;  // hidden width of the Main Track's gate nets
// A row of the last stage; the steps of its stages; what one of 2, 4 or 8 ranks has of them.
constexpr int64_t kMainTrackTokens[] = {49152, 131072, 262144, 393216, 65536, 196608, 32768, 98304, 16384};
constexpr int64_t kChunk = 16384;  // tokens whose logits the engine holds at once

struct Layer {
  int64_t K, O;
  Epilogue forward;
  bool residual;
};

// out = inp · weightᵀ, dinp = dout · weight, dweight += doutᵀ · inp
GemmKey forward(int64_t N, const Layer& layer) {
  return {.m = N, .n = layer.O, .k = layer.K, .transpose_b = true, .accumulate = layer.residual, .epilogue = layer.forward};
}
GemmKey input_grad(int64_t N, const Layer& layer) { return {.m = N, .n = layer.K, .k = layer.O}; }
GemmKey weight_grad(int64_t N, const Layer& layer) {
  return {.m = layer.O, .n = layer.K, .k = N, .transpose_a = true, .float_out = true, .accumulate = true};
}

// FP8: A (m, k) in `type_a`, B (n, k) in E4M3.
GemmKey fp8(int64_t m, int64_t n, int64_t k, GemmType type_a, Accumulation accumulation) {
  return {.m = m, .n = n, .k = k, .transpose_b = true, .type_a = type_a, .type_b = GemmType::e4m3, .accumulation = accumulation};
}
// A sum over k tokens of an activation and a gradient, to FP32. The gradient is A, or B.
GemmKey fp8_weight_grad(int64_t m, int64_t n, int64_t k, GemmType type_a) {
  GemmKey key = fp8(m, n, k, type_a, Accumulation::accurate);
  key.type_b = type_a == GemmType::e4m3 ? GemmType::e5m2 : GemmType::e4m3;
  key.float_out = key.accumulate = true;
  return key;
}

// The Main Track's layer: no biases; its products in BF16 and in FP8.
void add_main_track_layer(std::vector<GemmKey>& products, int64_t N) {
  const auto plain = [](int64_t K, int64_t O) { return Layer{.K = K, .O = O, .forward = Epilogue::none, .residual = false}; };
  for (const Layer& layer : {plain(kC, 3 * kC), plain(kC, kC), plain(kC, kF), plain(kC, kGates)}) {
    products.push_back(forward(N, layer));
    products.push_back(input_grad(N, layer));  // of up: the down product has its shape
    products.push_back(weight_grad(N, layer));
  }
  GemmKey gate_input_grad = input_grad(N, plain(kC, kGates));
  gate_input_grad.accumulate = true;
  products.push_back(gate_input_grad);
  products.push_back(fp8(N, kF, kC, GemmType::e4m3, Accumulation::fast));
  products.push_back(fp8(N, kC, kF, GemmType::e4m3, Accumulation::fast));
  products.push_back(fp8(N, kF, kC, GemmType::e5m2, Accumulation::accurate));
  products.push_back(fp8(N, kC, kF, GemmType::e5m2, Accumulation::accurate));
  for (const GemmType type_a : {GemmType::e4m3, GemmType::e5m2}) products.push_back(fp8_weight_grad(kF, kC, N, type_a));
  for (const int64_t O : {3 * kC, kC}) {
    products.push_back(fp8(N, O, kC, GemmType::e4m3, Accumulation::fast));
    products.push_back(fp8(N, kC, O, GemmType::e5m2, Accumulation::accurate));
    products.push_back(fp8_weight_grad(O, kC, N, GemmType::e5m2));
  }
}

// The Main Track's head in FP8 on a chunk of tokens.
void add_fp8_head(std::vector<GemmKey>& products, int64_t chunk) {
  products.push_back(fp8(chunk, kV, kC, GemmType::e4m3, Accumulation::fast));
  products.push_back(fp8(chunk, kC, kV, GemmType::e5m2, Accumulation::accurate));
  products.push_back(fp8_weight_grad(kV, kC, chunk, GemmType::e5m2));
}

// One round of the Newton-Schulz iteration on `batch` matrices (m, n): XXᵀ, A·A + A, B·X + X.
void add_muon(std::vector<GemmKey>& products, int64_t m, int64_t n, int batch) {
  const int64_t gram = m * m, matrix = m * n;
  products.push_back({.m = m,
                      .n = m,
                      .k = n,
                      .transpose_b = true,
                      .batch = batch,
                      .stride_a = matrix,
                      .stride_b = matrix,
                      .stride_c = gram,
                      .stride_d = gram});
  products.push_back({.m = m,
                      .n = m,
                      .k = m,
                      .accumulate = true,
                      .batch = batch,
                      .stride_a = gram,
                      .stride_b = gram,
                      .stride_c = gram,
                      .stride_d = gram});
  if (m == n) return;  // then X <- aX + BX has the shape of B = bA + cA²
  products.push_back({.m = m,
                      .n = n,
                      .k = m,
                      .accumulate = true,
                      .batch = batch,
                      .stride_a = gram,
                      .stride_b = matrix,
                      .stride_c = matrix,
                      .stride_d = matrix});
}

class TimingEvent {
 public:
  TimingEvent() { cuda_check(cudaEventCreate(&event_), "gemm tuning: event"); }
  ~TimingEvent() { cudaEventDestroy(event_); }
  TimingEvent(const TimingEvent&) = delete;
  TimingEvent& operator=(const TimingEvent&) = delete;
  void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream), "gemm tuning: event"); }
  double ms_since(const TimingEvent& start) const {
    cuda_check(cudaEventSynchronize(event_), "gemm tuning: a product failed");
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, start.event_, event_), "gemm tuning: time");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Milliseconds of one product in a run of about `budget_ms`.
double time_product(cublasLtHandle_t handle, const GemmDescriptors& descriptors, const GemmKey& key,
                    const cublasLtMatmulAlgo_t& algo, GemmOperands& operands, void* workspace, double budget_ms,
                    cudaStream_t stream) {
  const auto launch = [&] { launch_gemm(handle, descriptors, key, algo, operands.next(), workspace, stream); };
  TimingEvent start, warm, end;
  launch();
  start.record(stream);
  launch();
  warm.record(stream);
  const int count = std::clamp(static_cast<int>(budget_ms / std::max(warm.ms_since(start), 1e-3)), 3, 1000);
  start.record(stream);
  for (int i = 0; i < count; ++i) launch();
  end.record(stream);
  return end.ms_since(start) / count;
}

const char* text(bool value) { return value ? "true" : "false"; }

}  // namespace

std::vector<GemmKey> production_gemms(const std::vector<int64_t>& tokens) {
  const Layer qkv{.K = kC, .O = 3 * kC, .forward = Epilogue::bias, .residual = false};
  const Layer out{.K = kC, .O = kC, .forward = Epilogue::bias, .residual = true};
  const Layer up{.K = kC, .O = kF, .forward = Epilogue::bias, .residual = false};
  const Layer up_gelu{.K = kC, .O = kF, .forward = Epilogue::gelu_aux_bias, .residual = false};
  const Layer down{.K = kF, .O = kC, .forward = Epilogue::bias, .residual = true};
  const Layer head{.K = kC, .O = kV, .forward = Epilogue::bias, .residual = false};
  const Layer head_no_bias{.K = kC, .O = kV, .forward = Epilogue::none, .residual = false};
  std::vector<GemmKey> products;
  for (const int64_t N : tokens.empty() ? std::vector<int64_t>{65536, 131072, 262144, 524288} : tokens) {
    for (const Layer& layer : {qkv, out, up, down}) {
      products.push_back(forward(N, layer));
      products.push_back(input_grad(N, layer));
      products.push_back(weight_grad(N, layer));
    }
    products.push_back(forward(N, up_gelu));
    GemmKey down_gelu = input_grad(N, down);
    down_gelu.epilogue = Epilogue::dgelu;
    products.push_back(down_gelu);
  }
  products.push_back(forward(kChunk, head));
  products.push_back(forward(kChunk, head_no_bias));
  products.push_back(input_grad(kChunk, head));
  products.push_back(weight_grad(kChunk, head));
  add_muon(products, kC, kC, 48);
  add_muon(products, kC, kF, 12);
  // The Main Track's banks: pairs of Q or K heads, V and O, MLP.
  add_muon(products, 256, kC, 60);
  add_muon(products, kC, kC, 20);
  add_muon(products, kC, kF, 22);
  // Of one of two ranks.
  add_muon(products, 256, kC, 30);
  add_muon(products, kC, kC, 10);
  add_muon(products, kC, kF, 11);
  for (const int64_t N : tokens.empty() ? std::vector<int64_t>(std::begin(kMainTrackTokens), std::end(kMainTrackTokens)) : tokens)
    add_main_track_layer(products, N);
  add_fp8_head(products, kChunk);
  std::vector<GemmKey> unique;
  for (const GemmKey& key : products) {
    if (std::find(unique.begin(), unique.end(), key) == unique.end()) unique.push_back(key);
  }
  return unique;
}

double gemm_flops(const GemmKey& key) {
  return 2.0 * static_cast<double>(key.m) * static_cast<double>(key.n) * static_cast<double>(key.k) * key.batch;
}

struct GemmOperands::Impl {
  std::vector<BenchBuffer> buffers;
  std::vector<GemmCuda> sets;
  size_t current = 0;
};

GemmOperands::GemmOperands(const GemmKey& key) : impl_(std::make_unique<Impl>()) {
  constexpr int64_t kRotationBytes = 200 << 20;  // beyond 3 x 60 MB of L2
  constexpr int64_t kMaxSets = 8;
  const int64_t batch = key.batch, d_count = key.m * key.n * batch;
  const int64_t bytes = (is_fp8(key.type_a) ? 1 : 2) * (key.m * key.k + key.n * key.k) * batch + (key.float_out ? 4 : 2) * d_count;
  const int64_t sets = std::clamp<int64_t>((kRotationBytes + bytes - 1) / bytes, 1, kMaxSets);
  const auto own = [&](BenchBuffer buffer) { return impl_->buffers.emplace_back(std::move(buffer)).as<void>(); };
  const float* scale = static_cast<const float*>(own(BenchBuffer::normal_f32(1, 0.01)));
  const auto random = [&](int64_t count) { return static_cast<bf16*>(own(BenchBuffer::normal_bf16(count))); };
  const auto operand = [&](GemmType type, int64_t count) -> GemmOperand {
    if (type == GemmType::e4m3) return {static_cast<const e4m3*>(own(BenchBuffer::normal_e4m3(count))), scale};
    if (type == GemmType::e5m2) return {static_cast<const e5m2*>(own(BenchBuffer::normal_e5m2(count))), scale};
    return random(count);
  };
  const bf16* bias = epilogue_has_bias(key.epilogue) ? random(key.n) : nullptr;
  for (int64_t i = 0; i < sets; ++i) {
    GemmCuda set{.d = nullptr,
                 .a = operand(key.type_a, key.m * key.k * batch),
                 .b = operand(key.type_b, key.n * key.k * batch),
                 .M = key.m,
                 .N = key.n,
                 .K = key.k,
                 .transpose_a = key.transpose_a,
                 .transpose_b = key.transpose_b,
                 .float_out = key.float_out,
                 .alpha = key.accumulate ? 1e-3f : 1.0f,  // sums over thousands of runs stay finite
                 .beta = key.accumulate ? 0.5f : 0.0f,
                 .epilogue = key.epilogue,
                 .bias = bias,
                 .aux = epilogue_has_aux(key.epilogue) ? random(d_count) : nullptr,
                 .batch = key.batch,
                 .stride_a = key.stride_a,
                 .stride_b = key.stride_b,
                 .stride_c = key.stride_c,
                 .stride_d = key.stride_d,
                 .accumulation = key.accumulation};
    if (key.float_out) {
      set.d = impl_->buffers.emplace_back(BenchBuffer::normal_f32(d_count)).as<float>();
    } else {
      set.d = random(d_count);
    }
    if (key.accumulate) set.c = set.d;
    impl_->sets.push_back(set);
  }
}

GemmOperands::~GemmOperands() = default;

const GemmCuda& GemmOperands::next() {
  impl_->current = (impl_->current + 1) % impl_->sets.size();
  return impl_->sets[impl_->current];
}

void tune_gemms(const std::vector<GemmKey>& products, const CudaExec& exec, std::ostream& out) {
  constexpr int kAsked = 24, kFinalists = 3;
  constexpr double kFirstMs = 8, kFinalMs = 50;
  const LtHandle handle = make_lt_handle();
  const BenchBuffer workspace = BenchBuffer::zeroed(GemmPlans::kWorkspaceBytes);
  for (const GemmKey& key : products) {
    if (find_tuning(key, exec.compute_capability) != nullptr) continue;
    const GemmDescriptors descriptors(key);
    GemmOperands operands(key);
    struct Candidate {
      cublasLtMatmulAlgo_t algo;
      double ms;
    };
    std::vector<Candidate> candidates;
    const auto time = [&](const cublasLtMatmulAlgo_t& algo, double budget_ms) {
      return time_product(handle.get(), descriptors, key, algo, operands, workspace.as<void>(), budget_ms, exec.stream);
    };
    for (const cublasLtMatmulAlgo_t& algo : gemm_candidates(handle.get(), descriptors, kAsked, SplitK::allowed)) {
      candidates.push_back({algo, time(algo, kFirstMs)});
    }
    if (candidates.empty()) {
      out << "    // " << describe_gemm(key) << ": no algorithm with a fixed order of sums\n";
      continue;
    }
    const cublasLtMatmulAlgo_t heuristic = candidates.front().algo;
    const size_t tried = candidates.size();
    std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& x, const Candidate& y) { return x.ms < y.ms; });
    candidates.resize(std::min<size_t>(kFinalists, tried));
    for (Candidate& candidate : candidates) candidate.ms = time(candidate.algo, kFinalMs);
    const double heuristic_ms = time(heuristic, kFinalMs);
    const Candidate& best =
        *std::min_element(candidates.begin(), candidates.end(), [](const Candidate& x, const Candidate& y) { return x.ms < y.ms; });
    const GemmAlgorithm algorithm = describe_algorithm(best.algo);
    char fp8[128] = "";
    if (is_fp8(key.type_a)) {
      std::snprintf(fp8, sizeof fp8, ".type_a = GemmType::%s, .type_b = GemmType::%s, .accumulation = Accumulation::%s, ",
                    type_name(key.type_a), type_name(key.type_b), key.accumulation == Accumulation::fast ? "fast" : "accurate");
    }
    char line[640];
    std::snprintf(
        line, sizeof line,
        "    {.compute_capability = %d, .m = %lld, .n = %lld, .k = %lld, .transpose_a = %s, .transpose_b = %s, .float_out = %s, "
        ".accumulate = %s, .epilogue = Epilogue::%s, .batch = %d, %s"
        ".algorithm = {.id = %d, .tile = %u, .stages = %u, .swizzle = %u, "
        ".custom = %u, .inner_shape = %u, .cluster_shape = %u, .split_k = %d}},  // %.4f ms, %.0f TFLOP/s; heuristic %.4f ms; best "
        "of %zu\n",
        exec.compute_capability, static_cast<long long>(key.m), static_cast<long long>(key.n), static_cast<long long>(key.k),
        text(key.transpose_a), text(key.transpose_b), text(key.float_out), text(key.accumulate), epilogue_name(key.epilogue),
        key.batch, fp8, algorithm.id, algorithm.tile, algorithm.stages, algorithm.swizzle, algorithm.custom, algorithm.inner_shape,
        algorithm.cluster_shape, algorithm.split_k, best.ms, gemm_flops(key) / (best.ms * 1e-3) * 1e-12, heuristic_ms, tried);
    out << line << std::flush;
  }
}

}  // namespace speedrun::kernels

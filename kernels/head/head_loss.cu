// Head on CUDA: per chunk of tokens a product makes the logits, one kernel turns them into losses and, in place, into dlogits,
// and two products and a column sum take these further. FP8: this kernel finds the loss and each row's sum, that of
// head_fp8_gradient.cu writes the gradient, in both layouts.
// Layout    logits (chunk, V) bf16, V % 8 == 0; all pointers 16-byte aligned.
// Work      a block of 512 threads per row. The row is read once and kept in shared memory (V·2 bytes; two blocks fit a Hopper
//           SM at V = 50,304); each thread keeps only what it reads again itself. Rows that do not fit are read a second time
//           from L2. All columns take the softmax's part of the gradient alone; the few target columns are written again at the
//           end.
// Traffic   reads and writes N·V elements once (loss only: reads); the products and the bias gradient move 4·N·V more.
// Numerics  FP32 in units of log2; a running maximum with rescaling per thread (none for the sigmoid soft-cap, which bounds z),
//           then one fixed tree over the block: safe for any soft-cap, bitwise reproducible. One rounding of dlogits at the
//           store.
#include "kernels/base/column_sum_cuda.h"
#include "kernels/base/launch.cuh"
#include "kernels/gemm/projection_cuda.h"
#include "kernels/head/head_fp8_cuda.h"
#include "kernels/head/head_row.cuh"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kBatch = 4;  // 16-byte loads in flight per thread

struct RowLoss {
  float* loss;   // (rows)
  bf16* logits;  // (rows, V); becomes dlogits
  LossTerms terms;
  int64_t first;  // token of row 0
  const float* grad_scale;
  float* shift;  // (rows) = log2(S·units) − log2 Σ 2^z, or null
  float units;
  int V;
  float softcap_value;
};

// A term with its capped logit (in units of log2), for all threads to see.
struct SeenTerm {
  Term term;
  float z;
};

template <Softcap kCap, bool kGradients, bool kStaged>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) row_loss(const RowLoss p) {
  extern __shared__ uint4 staged_row[];  // (V / 8) if kStaged
  __shared__ float partials[kThreads / kWarpSize];
  __shared__ SeenTerm seen[kTermSlots];
  const int64_t row_idx = blockIdx.x;
  bf16* const row = p.logits + row_idx * p.V;
  const int num_vectors = p.V / kVec;
  const int slot = threadIdx.x;  // of the first kTermSlots threads
  const int target = slot < kTermSlots ? p.terms.target(p.first + row_idx, slot) : -1;

  // log2 Σ 2^z over the row. A thread stages exactly the vectors that it reads again below: no barrier needed for them.
  RunningSum<kCap> running;
  for (int base = threadIdx.x; base < num_vectors; base += kThreads * kBatch) {
    uint4 raw[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kThreads < num_vectors) raw[j] = load16(row + int64_t{base + j * kThreads} * kVec);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kThreads >= num_vectors) break;
      if constexpr (kStaged) staged_row[base + j * kThreads] = raw[j];
      float x[kVec];
      Capped capped[kVec];
      unpack8(raw[j], x);
      cap8<kCap>(x, p.softcap_value, capped);
      running.add(capped);
    }
  }
  Term term;
  Capped target_logit{};  // read before anyone overwrites it (barriers below)
  if (slot < kTermSlots) {
    term = loss_term(p.terms, target, slot);
    if (term.column >= 0) target_logit = cap<kCap>(static_cast<float>(row[term.column]), p.softcap_value);
    seen[slot] = {term, target_logit.z};
  }
  float max = 0.0f;
  if constexpr (!kBounded<kCap>) max = block_max<kThreads>(running.max, partials);
  const float sum = block_sum<kThreads>(running.sum * ptx::ex2_approx_ftz(running.max - max), partials);
  const float log_sum = max + log2f(sum);
  float loss = 0, softmax_weight = 0, weight = 0;  // S, and the weight of this thread's target column
#pragma unroll
  for (int i = 0; i < kTermSlots; ++i) {
    loss += seen[i].term.weight * ((log_sum - seen[i].z) * kLn2);
    softmax_weight += seen[i].term.softmax_weight;
    if (seen[i].term.column == term.column) weight += seen[i].term.weight;
  }
  if (threadIdx.x == 0) {
    p.loss[row_idx] = loss;
    if (p.shift != nullptr) p.shift[row_idx] = log2f(softmax_weight * p.units) - log_sum;
  }
  if constexpr (!kGradients) return;

  const float scale = *p.grad_scale, softmax_scale = scale * softmax_weight;
#pragma unroll 2
  for (int vector = threadIdx.x; vector < num_vectors; vector += kThreads) {
    uint4 raw;
    if constexpr (kStaged) {
      raw = staged_row[vector];
    } else {
      raw = load16(row + int64_t{vector} * kVec);
    }
    float x[kVec];
    Capped capped[kVec];
    unpack8(raw, x);
    cap8<kCap>(x, p.softcap_value, capped);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = softmax_scale * capped[i].slope * ptx::ex2_approx_ftz(capped[i].z - log_sum);
    store8(row + int64_t{vector} * kVec, x);
  }
  __syncthreads();  // the softmax's part of the target columns is written before it is replaced; equal columns by equal values
  if (slot < kTermSlots && term.column >= 0) {
    row[term.column] = bf16(scale * target_logit.slope * (softmax_weight * ptx::ex2_approx_ftz(target_logit.z - log_sum) - weight));
  }
}

constexpr int kCapThreads = 256;

template <Softcap kCap>
__global__ void __launch_bounds__(kCapThreads) cap_logits(bf16* logits, int64_t num_vectors, float softcap_value) {
  const int64_t vector = int64_t{blockIdx.x} * kCapThreads + threadIdx.x;
  if (vector >= num_vectors) return;
  float x[kVec];
  load8(logits + vector * kVec, x);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = cap<kCap>(x[i], softcap_value).z * kLn2;
  store8(logits + vector * kVec, x);
}

template <Softcap kCap>
void launch_row_loss(const RowLoss& args, int64_t rows, bool gradients, const CudaExec& exec) {
  const unsigned grid = grid_size(rows, "head");
  if (!gradients) {
    row_loss<kCap, false, false><<<grid, kThreads, 0, exec.stream>>>(args);
  } else {
    int device = 0, limit = 0;
    cuda_check(cudaGetDevice(&device), "head: current device");
    cuda_check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "head: shared memory limit");
    const int64_t row_bytes = int64_t{args.V} * 2,
                  static_bytes = sizeof(float) * kThreads / kWarpSize + sizeof(SeenTerm) * kTermSlots;
    if (row_bytes + static_bytes <= limit) {
      allow_dynamic_smem(row_loss<kCap, true, true>, static_cast<int>(row_bytes), "head");
      row_loss<kCap, true, true><<<grid, kThreads, static_cast<size_t>(row_bytes), exec.stream>>>(args);
    } else {
      row_loss<kCap, true, false><<<grid, kThreads, 0, exec.stream>>>(args);
    }
  }
  check_launch("head: loss of ", rows, " rows, V = ", args.V);
}

void check(int C, int V, Softcap softcap, double softcap_value) {
  require(C > 0 && C % kVec == 0 && V > 0 && V % kVec == 0, "head: C = ", C, ", V = ", V, " must be positive multiples of 8");
  require(softcap != Softcap::rational || softcap_value > 0, "head: the rational soft-cap's value ", softcap_value,
          " must be positive");
}

void check(const HeadLoss<bf16>& args) {
  check(args.C, args.V, args.softcap, args.softcap_value);
  require(args.N > 0 && args.chunk > 0, "head: N = ", args.N, ", chunk = ", args.chunk, " must be positive");
  require(args.loss_weights == nullptr ||
              (args.loss_terms >= 1 && args.loss_terms <= kMaxLossTerms && args.row_tokens > 0 && args.N % args.row_tokens == 0),
          "head: ", args.loss_terms, " loss terms (at most ", kMaxLossTerms, ") in rows of ", args.row_tokens, " of ", args.N,
          " tokens");
}

// Losses of a chunk's tokens and, with gradients, dlogits in place of the logits; in FP8 what their pass needs.
void chunk_loss(const HeadLoss<bf16>& args, const LossTerms& terms, int64_t begin, int64_t count, bool gradients,
                const CudaExec& exec) {
  const RowLoss rows{.loss = args.loss + begin,
                     .logits = args.logits,
                     .terms = terms,
                     .first = begin,
                     .grad_scale = args.grad_scale,
                     .shift = gradients ? args.fp8.row_shift : nullptr,
                     .units = gradient_units(args.fp8),
                     .V = args.V,
                     .softcap_value = static_cast<float>(args.softcap_value)};
  const bool in_place = gradients && args.fp8.weight8 == nullptr;
  dispatch_softcap(args.softcap, [&](auto softcap) { launch_row_loss<softcap()>(rows, count, in_place, exec); });
}

}  // namespace

void head_loss(const HeadLoss<bf16>& args, const CudaExec& exec) {
  check(args);
  const LossTerms terms{.targets = args.targets,
                        .weights = args.loss_weights,
                        .prefix = args.prefix,
                        .row_tokens = args.row_tokens,
                        .count = args.loss_terms};
  const bool gradients = args.dinp != nullptr, in_fp8 = args.fp8.weight8 != nullptr;
  if (in_fp8) check_head_fp8(args, exec);
  for (int64_t begin = 0; begin < args.N; begin += args.chunk) {
    const ProjectionSize size{.N = std::min(args.chunk, args.N - begin), .K = args.C, .O = args.V};
    const bf16* inp = args.inp + begin * args.C;
    if (in_fp8) {
      head_fp8_logits(args, begin, size, exec);
    } else {
      project(args.logits, inp, args.weight, args.bias, nullptr, size, exec);
    }
    chunk_loss(args, terms, begin, size.N, gradients, exec);
    if (!gradients) continue;
    if (in_fp8) {
      head_fp8_codes(args, terms, begin, size.N, exec);
      head_fp8_gradients(args, begin, size, exec);
      continue;
    }
    if (args.dbias) column_sum(args.dbias, args.logits, args.scratch, size.N, args.V, exec);
    project_weight_grad(args.dweight, args.logits, inp, size, exec);
    project_input_grad(args.dinp + begin * args.C, args.logits, args.weight, nullptr, size, exec);
  }
}

void head_logits(const HeadLogits<bf16>& args, const CudaExec& exec) {
  check(args.C, args.V, args.softcap, args.softcap_value);
  project(args.logits, args.inp, args.weight, args.bias, nullptr, {.N = args.N, .K = args.C, .O = args.V}, exec);
  if (args.softcap == Softcap::none) return;
  const int64_t num_vectors = args.N * args.V / kVec;
  dispatch_softcap(args.softcap, [&](auto softcap) {
    cap_logits<softcap()><<<grid_size(ceil_div(num_vectors, kCapThreads), "head"), kCapThreads, 0, exec.stream>>>(
        args.logits, num_vectors, static_cast<float>(args.softcap_value));
  });
  check_launch("head: soft-cap of ", args.N, " x ", args.V, " logits");
}

}  // namespace speedrun::kernels

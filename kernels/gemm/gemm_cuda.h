#pragma once
// BF16 and FP8 matrix products through cuBLASLt: D = alpha · op(A) · op(B) + beta · C (+ epilogue), row-major, FP32 accumulation.
// Plans (descriptors and algorithm) are made once per shape and cached; algorithms come from the checked-in table in gemm_tuning.h
// (made by `speedrun bench gemm --tune`), and for shapes outside it from the heuristic's first answer, which is remembered for the
// log. Deterministic: the same shape on the same device always takes the same algorithm, whatever the addresses, and where K is
// split (weight gradients: few outputs, long sums) the parts are stored in FP32 and added in a fixed order, never by counters in
// the output.
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/exec.h"
#include "kernels/fp8/fp8_types.h"

namespace speedrun::kernels {

// bias           D + bias of each column
// gelu_aux       aux = D;        D = gelu(D), tanh form
// gelu_aux_bias  aux = D + bias; D = gelu(D + bias)
// dgelu          D = D · gelu'(aux)
enum class Epilogue : int { none, bias, gelu_aux, gelu_aux_bias, dgelu };

enum class GemmType : int { bf16, e4m3, e5m2 };
inline bool is_fp8(GemmType type) { return type != GemmType::bf16; }

// A or B: BF16, or FP8 with its scale (real value = stored · scale), one float in device memory, 16-byte aligned.
struct GemmOperand {
  GemmOperand() = default;
  GemmOperand(const bf16* values) : data(values) {}  // not explicit: .a = pointer
  GemmOperand(const e4m3* values, const float* values_scale) : data(values), scale(values_scale), type(GemmType::e4m3) {}
  GemmOperand(const e5m2* values, const float* values_scale) : data(values), scale(values_scale), type(GemmType::e5m2) {}

  const void* data = nullptr;
  const float* scale = nullptr;
  GemmType type = GemmType::bf16;
};

// How FP8 products add up: `fast` leaves sums in the tensor core's own shorter accumulator, `accurate` moves them to FP32 registers
// every few steps. Fast is for forward products.
enum class Accumulation : int { accurate, fast };

// Pointers are 16-byte aligned; the contiguous dimension of A, B and D is a multiple of 8 (the other one is free).
// FP8 (sm_89 and later): both operands, at most one of them E5M2; A (M, K) and B (N, K), that is transpose_b alone; K and N
// multiples of 16, M free; no epilogue, batch 1.
struct GemmCuda {
  void* d;                  // (M, N) bf16 or float
  GemmOperand a;            // transpose_a ? (K, M) : (M, K)
  GemmOperand b;            // transpose_b ? (N, K) : (K, N)
  const void* c = nullptr;  // (M, N), D's type; null: beta 0. May alias d
  int64_t M = 0, N = 0, K = 0;
  bool transpose_a = false, transpose_b = false;
  bool float_out = false;  // D and C are FP32 (weight gradients); else BF16
  float alpha = 1, beta = 0;
  Epilogue epilogue = Epilogue::none;                              // other than none: bf16 D only
  const bf16* bias = nullptr;                                      // (N)
  bf16* aux = nullptr;                                             // (M, N) gelu's input, written by gelu_aux*, read by dgelu
  int batch = 1;                                                   // strided batch; epilogue none
  int64_t stride_a = 0, stride_b = 0, stride_c = 0, stride_d = 0;  // elements
  Accumulation accumulation = Accumulation::accurate;              // of FP8
};

// One per device and stream. Not thread-safe. Creating a plan may allocate on the host: every shape is run once before graphs are
// captured.
class GemmPlans {
 public:
  explicit GemmPlans(CUstream_st* stream);  // on the current device; allocates the workspace there
  ~GemmPlans();
  GemmPlans(const GemmPlans&) = delete;
  GemmPlans& operator=(const GemmPlans&) = delete;

  void run(const GemmCuda& args);            // asynchronous; throws Error with the shape
  std::vector<std::string> untuned() const;  // shapes that took the heuristic's answer and why, for the log
  static constexpr size_t kWorkspaceBytes = 32u << 20;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

void gemm(const GemmCuda& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// What stands behind GemmPlans and the tuner: the key of a product, its cuBLASLt descriptors, and algorithms as plain numbers.
// cuBLASLt is column-major. A row-major matrix is the column-major transpose with the same memory, so D = op(A)·op(B) is computed
// as Dᵀ = op(B)ᵀ·op(A)ᵀ: B is the library's first operand, its rows are our N columns (and its "bias along rows" our bias along N).
#include <cublasLt.h>

#include <compare>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/gemm_tuning.h"

namespace speedrun::kernels {

// All that a plan depends on. Not the addresses: descriptors ask for 16-byte alignment, which every call guarantees.
struct GemmKey {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false, float_out = false, accumulate = false;
  Epilogue epilogue = Epilogue::none;
  int batch = 1;
  int64_t stride_a = 0, stride_b = 0, stride_c = 0, stride_d = 0;
  GemmType type_a = GemmType::bf16, type_b = GemmType::bf16;
  Accumulation accumulation = Accumulation::accurate;
  auto operator<=>(const GemmKey&) const = default;
};

GemmKey gemm_key(const GemmCuda& args);         // throws Error on shapes and pointers that are not supported
std::string describe_gemm(const GemmKey& key);  // "16384x2304x768 NT bf16 bias", "16384x768x3072 NT e4m3·e4m3 bf16 fast"
const char* epilogue_name(Epilogue epilogue);   // as in the enum
const char* type_name(GemmType type);           // as in the enum
bool epilogue_has_bias(Epilogue epilogue);
bool epilogue_has_aux(Epilogue epilogue);

template <auto Destroy>
struct LtDelete {
  template <class T>
  void operator()(T* handle) const {
    Destroy(handle);
  }
};
using LtHandle = std::unique_ptr<std::remove_pointer_t<cublasLtHandle_t>, LtDelete<cublasLtDestroy>>;
using LtMatmulDesc = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulDesc_t>, LtDelete<cublasLtMatmulDescDestroy>>;
using LtLayout = std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>, LtDelete<cublasLtMatrixLayoutDestroy>>;
using LtPreference = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>, LtDelete<cublasLtMatmulPreferenceDestroy>>;

LtHandle make_lt_handle();

struct GemmDescriptors {
  explicit GemmDescriptors(const GemmKey& key);

  LtMatmulDesc op;
  LtLayout a, b, d;  // row-major roles; C shares D's layout
  LtLayout c;        // only where C's batch stride differs from D's
  cublasLtMatrixLayout_t c_layout() const { return c ? c.get() : d.get(); }
};

// Split-K with its parts added in a step of their own sums in a fixed order too. The tuning table may choose it; the heuristic is
// asked for it where sums are long and outputs few.
enum class SplitK { none, allowed };

// The heuristic's candidates with a fixed order of sums, best first; at most `limit` are asked for.
std::vector<cublasLtMatmulAlgo_t> gemm_candidates(cublasLtHandle_t handle, const GemmDescriptors& descriptors, int limit,
                                                  SplitK split);

GemmAlgorithm describe_algorithm(const cublasLtMatmulAlgo_t& algo);
// Empty, with the reason, if this library, device or shape does not take it.
std::optional<cublasLtMatmulAlgo_t> make_algorithm(cublasLtHandle_t handle, const GemmDescriptors& descriptors, const GemmKey& key,
                                                   const GemmAlgorithm& algorithm, std::string& reason);
const GemmTuning* find_tuning(const GemmKey& key, int compute_capability);  // null: not in the table

void launch_gemm(cublasLtHandle_t handle, const GemmDescriptors& descriptors, const GemmKey& key, const cublasLtMatmulAlgo_t& algo,
                 const GemmCuda& args, void* workspace, CUstream_st* stream);

}  // namespace speedrun::kernels

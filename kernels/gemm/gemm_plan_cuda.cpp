#include "kernels/gemm/gemm_plan.h"

#include <algorithm>
#include <sstream>

#include "kernels/base/cuda_check.h"
#include "kernels/base/error.h"

namespace speedrun::kernels {
namespace {

constexpr uint32_t kAlignmentBytes = 16;

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kAlignmentBytes == 0; }

template <class Value>
void set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  cublas_check(cublasLtMatmulDescSetAttribute(op, attribute, &value, sizeof value), "gemm: product attribute ",
               static_cast<int>(attribute));
}
template <class Value>
void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const Value& value) {
  cublas_check(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof value), "gemm: layout attribute ",
               static_cast<int>(attribute));
}
template <class Value>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const Value& value) {
  cublas_check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), "gemm: preference ",
               static_cast<int>(attribute));
}
template <class Value>
Value get(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  Value value{};
  size_t written = 0;
  cublas_check(cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof value, &written), "gemm: algorithm attribute ",
               static_cast<int>(attribute));
  return value;
}

// A row-major (rows, cols) matrix as cuBLASLt's column-major (cols, rows).
LtLayout make_layout(cudaDataType_t type, int64_t rows, int64_t cols, int batch, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  cublas_check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(cols), static_cast<uint64_t>(rows), cols),
               "gemm: layout");
  LtLayout owner(layout);
  if (batch > 1) {
    set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
    set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  }
  return owner;
}

cublasLtEpilogue_t lt_epilogue(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::none:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::gelu_aux:
      return CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::gelu_aux_bias:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::dgelu:
      return CUBLASLT_EPILOGUE_DGELU;
  }
  throw Error("gemm: unknown epilogue " + std::to_string(static_cast<int>(epilogue)));
}

// The only schemes whose order of sums is fixed by construction.
uint32_t reduction_scheme(int split_k) {
  return static_cast<uint32_t>(split_k > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE);
}

cudaDataType_t lt_type(GemmType type) {
  switch (type) {
    case GemmType::bf16:
      return CUDA_R_16BF;
    case GemmType::e4m3:
      return CUDA_R_8F_E4M3;
    case GemmType::e5m2:
      return CUDA_R_8F_E5M2;
  }
  throw Error("gemm: unknown type " + std::to_string(static_cast<int>(type)));
}

cudaDataType_t out_type(const GemmKey& key) { return key.float_out ? CUDA_R_32F : CUDA_R_16BF; }

}  // namespace

const char* epilogue_name(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::none:
      return "none";
    case Epilogue::bias:
      return "bias";
    case Epilogue::gelu_aux:
      return "gelu_aux";
    case Epilogue::gelu_aux_bias:
      return "gelu_aux_bias";
    case Epilogue::dgelu:
      return "dgelu";
  }
  return "unknown";
}

const char* type_name(GemmType type) {
  switch (type) {
    case GemmType::bf16:
      return "bf16";
    case GemmType::e4m3:
      return "e4m3";
    case GemmType::e5m2:
      return "e5m2";
  }
  return "unknown";
}

bool epilogue_has_bias(Epilogue epilogue) { return epilogue == Epilogue::bias || epilogue == Epilogue::gelu_aux_bias; }
bool epilogue_has_aux(Epilogue epilogue) {
  return epilogue == Epilogue::gelu_aux || epilogue == Epilogue::gelu_aux_bias || epilogue == Epilogue::dgelu;
}

std::string describe_gemm(const GemmKey& key) {
  std::ostringstream text;
  text << key.m << 'x' << key.n << 'x' << key.k << ' ' << (key.transpose_a ? 'T' : 'N') << (key.transpose_b ? 'T' : 'N') << ' ';
  if (is_fp8(key.type_a) || is_fp8(key.type_b)) text << type_name(key.type_a) << "·" << type_name(key.type_b) << ' ';
  text << (key.float_out ? "f32" : "bf16");
  if (key.accumulation == Accumulation::fast) text << " fast";
  if (key.accumulate) text << " accumulate";
  if (key.epilogue != Epilogue::none) text << ' ' << epilogue_name(key.epilogue);
  if (key.batch != 1) text << " batch " << key.batch;
  return text.str();
}

GemmKey gemm_key(const GemmCuda& args) {
  GemmKey key{.m = args.M,
              .n = args.N,
              .k = args.K,
              .transpose_a = args.transpose_a,
              .transpose_b = args.transpose_b,
              .float_out = args.float_out,
              .accumulate = args.c != nullptr && args.beta != 0,
              .epilogue = args.epilogue,
              .batch = args.batch,
              .type_a = args.a.type,
              .type_b = args.b.type};
  const bool fp8 = is_fp8(key.type_a) || is_fp8(key.type_b);
  if (fp8) key.accumulation = args.accumulation;
  if (args.batch > 1) {
    key.stride_a = args.stride_a, key.stride_b = args.stride_b, key.stride_d = args.stride_d;
    key.stride_c = key.accumulate ? args.stride_c : args.stride_d;
  }
  const int64_t a_columns = key.transpose_a ? key.m : key.k;
  const int64_t b_columns = key.transpose_b ? key.k : key.n;
  const bool has_bias = epilogue_has_bias(key.epilogue), has_aux = epilogue_has_aux(key.epilogue);
  const char* problem = nullptr;
  if (key.m <= 0 || key.n <= 0 || key.k <= 0 || key.batch <= 0) {
    problem = "every dimension must be positive";
  } else if (a_columns % 8 != 0 || b_columns % 8 != 0 || key.n % 8 != 0) {
    problem = "the contiguous dimension of A, B and D must be a multiple of 8";
  } else if (fp8 && !(is_fp8(key.type_a) && is_fp8(key.type_b) && (key.type_a == GemmType::e4m3 || key.type_b == GemmType::e4m3))) {
    problem = "FP8 needs both operands in FP8, at most one of them in E5M2";
  } else if (fp8 && (key.transpose_a || !key.transpose_b || key.k % 16 != 0 || key.n % 16 != 0)) {
    problem = "FP8 needs A (M, K) and B (N, K) with K and N multiples of 16";
  } else if (fp8 && (key.epilogue != Epilogue::none || key.batch != 1)) {
    problem = "FP8 has no epilogue and batch 1";
  } else if (!args.d || !args.a.data || !args.b.data || (fp8 && (!args.a.scale || !args.b.scale)) || (has_bias && !args.bias) ||
             (has_aux && !args.aux)) {
    problem = "an operand is null";
  } else if (!aligned(args.d) || !aligned(args.a.data) || !aligned(args.b.data) || !aligned(args.a.scale) ||
             !aligned(args.b.scale) || !aligned(args.c) || (has_bias && !aligned(args.bias)) || (has_aux && !aligned(args.aux))) {
    problem = "pointers must be 16-byte aligned";
  } else if (key.epilogue != Epilogue::none && (key.float_out || key.batch != 1)) {
    problem = "an epilogue needs a bf16 result and batch 1";
  } else if (key.batch > 1 && (key.stride_a % 8 != 0 || key.stride_b % 8 != 0 || key.stride_c % 8 != 0 || key.stride_d % 8 != 0)) {
    problem = "batch strides must be multiples of 8";
  }
  if (problem) throw Error("gemm " + describe_gemm(key) + ": " + problem);
  return key;
}

LtHandle make_lt_handle() {
  cublasLtHandle_t handle = nullptr;
  cublas_check(cublasLtCreate(&handle), "gemm: cuBLASLt handle");
  return LtHandle(handle);
}

GemmDescriptors::GemmDescriptors(const GemmKey& key) {
  cublasLtMatmulDesc_t desc = nullptr;
  cublas_check(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "gemm: product");
  op.reset(desc);
  // Our B is the library's A. Its memory read column-major is already transposed: op(B)ᵀ is "no transpose" unless transpose_b.
  set(desc, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
  set(desc, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
  set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(lt_epilogue(key.epilogue)));
  // The heuristic reads the alignment off these addresses, never what they point to.
  const void* const any_aligned = reinterpret_cast<const void*>(uintptr_t{kAlignmentBytes});
  if (epilogue_has_bias(key.epilogue)) {
    set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, any_aligned);
    set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(CUDA_R_16BF));
  }
  if (epilogue_has_aux(key.epilogue)) {
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, any_aligned);
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
  }
  if (is_fp8(key.type_a)) {
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, any_aligned);
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, any_aligned);
    set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(key.accumulation == Accumulation::fast));
  }
  a = key.transpose_a ? make_layout(lt_type(key.type_a), key.k, key.m, key.batch, key.stride_a)
                      : make_layout(lt_type(key.type_a), key.m, key.k, key.batch, key.stride_a);
  b = key.transpose_b ? make_layout(lt_type(key.type_b), key.n, key.k, key.batch, key.stride_b)
                      : make_layout(lt_type(key.type_b), key.k, key.n, key.batch, key.stride_b);
  d = make_layout(out_type(key), key.m, key.n, key.batch, key.stride_d);
  if (key.stride_c != key.stride_d) c = make_layout(out_type(key), key.m, key.n, key.batch, key.stride_c);
}

std::vector<cublasLtMatmulAlgo_t> gemm_candidates(cublasLtHandle_t handle, const GemmDescriptors& descriptors, int limit,
                                                  SplitK split) {
  cublasLtMatmulPreference_t raw = nullptr;
  cublas_check(cublasLtMatmulPreferenceCreate(&raw), "gemm: preference");
  const LtPreference preference(raw);
  set(raw, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{GemmPlans::kWorkspaceBytes});
  set(raw, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(split == SplitK::allowed ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE));
  for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(raw, attribute, kAlignmentBytes);
  }
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(limit));
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, descriptors.op.get(), descriptors.b.get(), descriptors.a.get(), descriptors.c_layout(),
                                     descriptors.d.get(), raw, limit, results.data(), &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
  cublas_check(status, "gemm: heuristic");
  std::vector<cublasLtMatmulAlgo_t> candidates;
  for (int i = 0; i < found; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<size_t>(i)];
    if (result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > GemmPlans::kWorkspaceBytes) continue;
    const int split_k = get<int32_t>(result.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
    if (split == SplitK::none && split_k > 1) continue;
    if (get<uint32_t>(result.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) != reduction_scheme(split_k)) continue;
    candidates.push_back(result.algo);
  }
  return candidates;
}

GemmAlgorithm describe_algorithm(const cublasLtMatmulAlgo_t& algo) {
  return {.id = get<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID),
          .tile = get<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
          .stages = get<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
          .swizzle = get<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
          .custom = get<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
          .inner_shape = get<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
          .cluster_shape = get<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
          .split_k = get<int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM)};
}

std::optional<cublasLtMatmulAlgo_t> make_algorithm(cublasLtHandle_t handle, const GemmDescriptors& descriptors, const GemmKey& key,
                                                   const GemmAlgorithm& algorithm, std::string& reason) {
  cublasLtMatmulAlgo_t algo{};
  cublasStatus_t status = cublasLtMatmulAlgoInit(handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, lt_type(key.type_b), lt_type(key.type_a),
                                                 out_type(key), out_type(key), algorithm.id, &algo);
  const auto configure = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, const auto& value) {
    if (status == CUBLAS_STATUS_SUCCESS) status = cublasLtMatmulAlgoConfigSetAttribute(&algo, attribute, &value, sizeof value);
  };
  configure(CUBLASLT_ALGO_CONFIG_TILE_ID, algorithm.tile);
  configure(CUBLASLT_ALGO_CONFIG_STAGES_ID, algorithm.stages);
  configure(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, int32_t{algorithm.split_k});
  configure(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, reduction_scheme(algorithm.split_k));
  configure(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, algorithm.swizzle);
  configure(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, algorithm.custom);
  configure(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, algorithm.inner_shape);
  configure(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, algorithm.cluster_shape);
  if (status == CUBLAS_STATUS_SUCCESS) {
    cublasLtMatmulHeuristicResult_t result{};
    status = cublasLtMatmulAlgoCheck(handle, descriptors.op.get(), descriptors.b.get(), descriptors.a.get(), descriptors.c_layout(),
                                     descriptors.d.get(), &algo, &result);
    if (status == CUBLAS_STATUS_SUCCESS && result.workspaceSize > GemmPlans::kWorkspaceBytes) {
      reason = "it wants " + std::to_string(result.workspaceSize) + " bytes of workspace";
      return std::nullopt;
    }
  }
  if (status != CUBLAS_STATUS_SUCCESS) {
    reason = cublasLtGetStatusName(status);
    return std::nullopt;
  }
  return algo;
}

const GemmTuning* find_tuning(const GemmKey& key, int compute_capability) {
  const auto match = std::find_if(kGemmTuning.begin(), kGemmTuning.end(), [&](const GemmTuning& row) {
    return row.compute_capability == compute_capability && row.m == key.m && row.n == key.n && row.k == key.k &&
           row.transpose_a == key.transpose_a && row.transpose_b == key.transpose_b && row.float_out == key.float_out &&
           row.accumulate == key.accumulate && row.epilogue == key.epilogue && row.batch == key.batch && row.type_a == key.type_a &&
           row.type_b == key.type_b && row.accumulation == key.accumulation;
  });
  return match == kGemmTuning.end() ? nullptr : match;
}

void launch_gemm(cublasLtHandle_t handle, const GemmDescriptors& descriptors, const GemmKey& key, const cublasLtMatmulAlgo_t& algo,
                 const GemmCuda& args, void* workspace, CUstream_st* stream) {
  if (epilogue_has_bias(key.epilogue))
    set(descriptors.op.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(args.bias));
  if (epilogue_has_aux(key.epilogue))
    set(descriptors.op.get(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(args.aux));
  if (is_fp8(key.type_a)) {
    set(descriptors.op.get(), CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(args.b.scale));
    set(descriptors.op.get(), CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(args.a.scale));
  }
  const float beta = key.accumulate ? args.beta : 0.0f;
  const void* c = key.accumulate ? args.c : args.d;
  const cublasStatus_t status = cublasLtMatmul(handle, descriptors.op.get(), &args.alpha, args.b.data, descriptors.b.get(),
                                               args.a.data, descriptors.a.get(), &beta, c, descriptors.c_layout(), args.d,
                                               descriptors.d.get(), &algo, workspace, GemmPlans::kWorkspaceBytes, stream);
  if (status != CUBLAS_STATUS_SUCCESS) cublas_check(status, "gemm ", describe_gemm(key));
}

}  // namespace speedrun::kernels

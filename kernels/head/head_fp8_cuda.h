#pragma once
// The parts of head_loss that differ in FP8, each for the `count` tokens from `begin` on. Internal to the head.
#include "kernels/gemm/projection_cuda.h"
#include "kernels/head/head_loss.h"

namespace speedrun::kernels {

struct LossTerms;  // head_row.cuh

// A cluster of blocks holds whole rows of logits in shared memory, each block all rows of a part of the columns.
inline constexpr int kFp8ClusterRows = 16;
inline constexpr int kFp8Cluster = 16;  // blocks; beyond the portable 8, but every sm_90 takes it

// Vectors of 8 columns of a row that one block holds, at most, and the bytes of all rows.
SPEEDRUN_HD constexpr int fp8_block_vectors(int V) { return (V / 8 + kFp8Cluster - 1) / kFp8Cluster; }
constexpr int64_t fp8_block_bytes(int V) { return int64_t{kFp8ClusterRows} * fp8_block_vectors(V) * 16; }

void check_head_fp8(const HeadLoss<bf16>& args, const CudaExec& exec);  // throws Error on what FP8 does not do

// inp8, inp8_t with gradients, logits.
void head_fp8_logits(const HeadLoss<bf16>& args, int64_t begin, ProjectionSize size, const CudaExec& exec);

// loss, grad8, grad8_t and grad_scale8 from the logits (head_fp8_sm90.cu).
void head_fp8_loss(const HeadLoss<bf16>& args, const LossTerms& terms, int64_t begin, int64_t count, const CudaExec& exec);

// dinp and dweight.
void head_fp8_gradients(const HeadLoss<bf16>& args, int64_t begin, ProjectionSize size, const CudaExec& exec);

}  // namespace speedrun::kernels

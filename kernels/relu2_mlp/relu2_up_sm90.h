#pragma once
// The MLP's up-projection with its whole epilogue in one Hopper kernel:
//   pre = bf16(inp · weightᵀ · (inp_scale · weight_scale)),   post = bf16(max(pre, 0)²),   post8 = e4m3(post · (1 / post_scale))
// and the maximum of post. Sums in FP32 by the tensor cores (of E4M3 operands with about 14 bits, of BF16 operands fully); the two
// scales are multiplied first. Everything after pre gives the same bits as the element-wise kernel (relu2_epilogue.cuh).
// Cost: 2·N·C·F FLOPs; reads N·C + F·C operands, writes N·F BF16 and, if wanted, N·F E4M3.
#include "kernels/base/exec.h"
#include "kernels/fp8/fp8.h"

namespace speedrun::kernels {

// Operand: e4m3 or bf16. All pointers to device memory, 16-byte aligned; buffers do not overlap.
template <class Operand>
struct Relu2Up {
  bf16* post;                 // (N, F) =
  e4m3* post8;                // (N, F) =, or null
  Fp8Scale* post_scale;       // scale is read for post8, amax raised to the maximum of post; null (then post8 too): neither
  const Operand* inp;         // (N, C)
  const Operand* weight;      // (F, C)
  const float* inp_scale;     // or null: 1
  const float* weight_scale;  // or null: 1
  int64_t N;
  int C, F;
};

// What only tests change.
struct Relu2UpTesting {
  // Not 0: warps sleep for random times before they wait at barriers and before they arrive. The result must not change by a bit.
  uint32_t jitter_seed = 0;
  // A wait that lasts longer ends the kernel with an illegal-address error: a mistake costs an error, not a hung device.
  int64_t watchdog_cycles = int64_t{1} << 35;
  // Or null: (blocks, kRelu2UpWarps) zeros in host memory the device can write: a warp whose wait was stopped leaves
  // barrier << 28 | iteration; barriers: 1 operand arrived, 2 stage is free, 3 turn, 4 weight arrived.
  uint32_t* hang_report = nullptr;
};
inline constexpr int kRelu2UpWarps = 12;

// Whether the kernel takes these shapes on this device: sm_90; rows of inp whole 128-byte lines, C <= 768; F a multiple of 256
// (BF16: 128) and no more such panels than multiprocessors.
template <class Operand>
constexpr bool relu2_up_sm90_takes(int C, int F, const CudaExec& exec) {
  constexpr int kBytes = sizeof(Operand), kPanel = 256 / kBytes;
  return exec.compute_capability == 90 && C > 0 && C <= 768 && C * kBytes % 128 == 0 && F > 0 && F % kPanel == 0 &&
         F / kPanel <= exec.num_sms;
}

void relu2_up_sm90(const Relu2Up<e4m3>& args, const CudaExec& exec, const Relu2UpTesting& testing = {});
void relu2_up_sm90(const Relu2Up<bf16>& args, const CudaExec& exec, const Relu2UpTesting& testing = {});

}  // namespace speedrun::kernels

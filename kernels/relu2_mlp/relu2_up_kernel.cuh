#pragma once
// Up-projection with relu² and FP8 epilogue on Hopper (relu2_up_sm90.h): post = max(inp · weightᵀ, 0)², its E4M3 copy and maximum.
// Layout    row-major. In shared memory, rows of 128 bytes in the 128-byte swizzle: a whole panel of the weight, 256 rows of E4M3
//           (BF16: 128) x C, 192 KB at C = 768, rows in the order of Relu2UpPanel; four stages of 64 tokens x 128 bytes of inp.
// Work      one block of three warp groups per multiprocessor keeps its panel and takes its share of token tiles
//           (Relu2UpSchedule). One thread of the last group copies tiles of inp into the stages. The other two groups take tiles in
//           turn, each a 64 x panel product in registers: while one does its epilogue, the other keeps the tensor cores busy.
// Barriers  full[stage]: the copy engine -> the group whose tile it is. empty[stage]: that group's 4 warps -> the copying thread.
//           turn[group]: the other group has seen all its stages arrive. Without it a group could ask for a stage a round ahead of
//           the copies, and the parity would be right already. weight[k]: once, the panel's k-th 128 bytes of every row.
// Traffic   N·C + 3·N·F bytes to and from device memory (E4M3 with copy); N = 393,216, C = 768, F = 3,072: 3.9 GB. A panel is read
//           once a block, inp by F / 256 blocks at about the same time, so from L2.
// Numerics  FP32 accumulators; per output a fixed order of sums; the maximum is over unsigned integers: the same bits every run.
// Stores    from registers: a thread holds 8 neighbouring outputs, four lanes 64 bytes of a row in whole 32-byte sectors.
#include "kernels/base/launch.cuh"
#include "kernels/base/tensor_map.h"
#include "kernels/fp8/fp8_tally.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/setmaxnreg.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/relu2_mlp/relu2_epilogue.cuh"
#include "kernels/relu2_mlp/relu2_up_layout.h"
#include "kernels/relu2_mlp/relu2_up_sm90.h"

namespace speedrun::kernels::relu2_up {

template <class Operand>
struct Product;
template <>
struct Product<e4m3> {
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  static __device__ __forceinline__ void add(float (&acc)[128], uint64_t a, uint64_t b, bool accumulate) {
    ptx::wgmma_m64n256k32_e4m3(acc, a, b, accumulate);
  }
};
template <>
struct Product<bf16> {
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  static __device__ __forceinline__ void add(float (&acc)[64], uint64_t a, uint64_t b, bool accumulate) {
    ptx::wgmma_m64n128k16_bf16(acc, a, b, accumulate);
  }
};

inline constexpr int kGroupWarps = 4, kGroups = 2;  // warps of a warp group; warp groups that compute
inline constexpr int kThreads = kRelu2UpWarps * kWarpSize;
static_assert(kRelu2UpWarps == (kGroups + 1) * kGroupWarps);
// Registers of a thread, multiples of 8; a warp of each group shares a quarter of the multiprocessor's, 512 a lane.
inline constexpr int kCopyRegisters = 40, kComputeRegisters = 232;
static_assert(kGroups * kComputeRegisters + kCopyRegisters <= 512);
inline constexpr int kTileTokens = Relu2UpSchedule::kTileTokens;
inline constexpr int kStages = Relu2UpRing::kStages;
inline constexpr int kLine = 128;      // bytes of K in a stage and in a block of the panel
inline constexpr int kStepBytes = 32;  // bytes of K in one instruction
inline constexpr int kStageBytes = kTileTokens * kLine;
inline constexpr int kPrefetchTiles = 2;  // tiles between the fetch into L2 and the one into a stage

template <class Operand>
struct Tile {
  static constexpr int kPanel = 256 / static_cast<int>(sizeof(Operand));
  using Panel = Relu2UpPanel<kPanel>;
  static constexpr int kLineElements = kLine / static_cast<int>(sizeof(Operand));
  static constexpr int kMaxBlocks = 768 / kLineElements;
  static constexpr int kPanelBlockBytes = kPanel * kLine;
  static constexpr int kAccumulators = kPanel / 2;
  static constexpr int kBarriers = 2 * kStages + kGroups + kMaxBlocks;
  static constexpr int kSharedBytes = kMaxBlocks * kPanelBlockBytes + kStages * kStageBytes + 8 * kBarriers;
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory; swizzled parts come first and are multiples of 1,024.
template <class Operand>
struct Shared {
  uint32_t base;

  using T = Tile<Operand>;
  __device__ __forceinline__ uint32_t panel_block(int k) const { return base + k * T::kPanelBlockBytes; }
  __device__ __forceinline__ uint32_t stage(uint32_t s) const { return panel_block(T::kMaxBlocks) + s * kStageBytes; }
  __device__ __forceinline__ uint32_t full(uint32_t s) const { return stage(kStages) + 8 * s; }
  __device__ __forceinline__ uint32_t empty(uint32_t s) const { return full(kStages) + 8 * s; }
  __device__ __forceinline__ uint32_t turn(int group) const { return empty(kStages) + 8 * group; }
  __device__ __forceinline__ uint32_t weight(int k) const { return turn(kGroups) + 8 * k; }
};

struct Params {
  bf16* post;
  e4m3* post8;
  Fp8Scale* post_scale;
  const float* inp_scale;
  const float* weight_scale;
  int64_t N;
  int F;
  int k_blocks;  // C in units of 128 bytes
  Relu2UpSchedule schedule;
  Relu2UpTesting testing;
};

enum class Barrier : uint32_t { full = 1, empty = 2, turn = 3, weight = 4 };

// Of this warp in the grid.
__device__ __forceinline__ uint32_t grid_warp() {
  return (blockIdx.y * gridDim.x + blockIdx.x) * kRelu2UpWarps + threadIdx.x / kWarpSize;
}

// Ends the kernel with an illegal-address error. A trap instruction anywhere would make ptxas (13.0) allocate every role's
// registers by the cap at entry instead of by setmaxnreg.
__device__ __forceinline__ void stop() { asm volatile("st.global.u32 [%0], %1;" ::"l"(uint64_t{0}), "r"(0) : "memory"); }

// Test only: sleeps up to 2 µs at every fourth barrier, the same for all lanes of a warp.
__device__ __forceinline__ void jitter(const Params& p, Barrier barrier, uint32_t iteration) {
  if (p.testing.jitter_seed == 0) return;
  uint32_t x = p.testing.jitter_seed + 0x9e3779b9u * grid_warp();
  x = (x ^ x >> 16 ^ iteration) * 0x7feb352du + static_cast<uint32_t>(barrier);
  x = (x ^ x >> 15) * 0x846ca68bu;
  x ^= x >> 16;
  if (x % 4 == 0) __nanosleep(x >> 2 & 2047);
}

__device__ __forceinline__ void arrive(const Params& p, uint32_t address, Barrier barrier, uint32_t iteration) {
  jitter(p, barrier, iteration);
  if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(address);
  __syncwarp();
}

__device__ __forceinline__ void wait(const Params& p, uint32_t address, uint32_t parity, Barrier barrier, uint32_t iteration) {
  jitter(p, barrier, iteration);
  if (ptx::mbarrier_try_wait_parity(address, parity)) return;
  const int64_t begin = clock64();
  bool reported = false;
  while (!ptx::mbarrier_try_wait_parity(address, parity)) {
    const int64_t waited = clock64() - begin;
    if (waited > p.testing.watchdog_cycles && !reported) {
      reported = true;
      if (p.testing.hang_report != nullptr) {
        p.testing.hang_report[grid_warp()] = static_cast<uint32_t>(barrier) << 28 | iteration;
        __threadfence_system();
      }
    }
    // Time for the others to report.
    if (waited > p.testing.watchdog_cycles + p.testing.watchdog_cycles / 4) stop();
  }
}

// One thread: the panel, then every tile of inp, in the order in which the groups take them.
template <class Operand>
__device__ __forceinline__ void copy_tiles(const Params& p, const CUtensorMap& inp, const CUtensorMap& weight,
                                           const Shared<Operand>& shared) {
  using T = Tile<Operand>;
  ptx::prefetch_tensormap(inp);
  ptx::prefetch_tensormap(weight);
  const int panel = static_cast<int>(blockIdx.x), share = static_cast<int>(blockIdx.y), num_tiles = p.schedule.num_tiles(share);
  uint32_t iteration = 0;
  for (int index = 0; index < num_tiles; ++index) {
    const int token = p.schedule.tile(share, index) * kTileTokens;
    for (int k = 0; k < p.k_blocks; ++k, ++iteration) {
      if (index == 0) {
        ptx::mbarrier_arrive_expect_tx(shared.weight(k), T::kPanelBlockBytes);
        for (int i = 0; i < T::Panel::kCopies; ++i) {
          ptx::tma_load_4d(shared.panel_block(k) + i * T::Panel::kCopyRows * kLine, weight, k * T::kLineElements, 2 * i, 0,
                           panel * T::Panel::kGroups, shared.weight(k));
        }
      }
      // Blocks of one token tile share the fetching into L2.
      if (k == panel && index + kPrefetchTiles < num_tiles) {
        ptx::tma_prefetch_2d(inp, k * T::kLineElements, p.schedule.tile(share, index + kPrefetchTiles) * kTileTokens);
      }
      const uint32_t stage = Relu2UpRing::stage(iteration);
      wait(p, shared.empty(stage), Relu2UpRing::empty_parity(iteration), Barrier::empty, iteration);
      ptx::mbarrier_arrive_expect_tx(shared.full(stage), kStageBytes);
      ptx::tma_load_2d(shared.stage(stage), inp, k * T::kLineElements, token, shared.full(stage));
    }
  }
}

// The accumulators of tile `index` of the block; all stages are free again afterwards and the other group has its turn.
template <class Operand>
__device__ __forceinline__ void multiply(const Params& p, const Shared<Operand>& shared, int group, int index,
                                         float (&acc)[Tile<Operand>::kAccumulators]) {
  wait(p, shared.turn(group), Relu2UpRing::turn_parity(index), Barrier::turn, index);
  uint32_t iteration = static_cast<uint32_t>(index * p.k_blocks);
  for (int k = 0; k < p.k_blocks; ++k, ++iteration) {
    if (index < kGroups) wait(p, shared.weight(k), 0, Barrier::weight, k);
    const uint32_t stage = Relu2UpRing::stage(iteration);
    wait(p, shared.full(stage), Relu2UpRing::full_parity(iteration), Barrier::full, iteration);
    __syncwarp();
    const uint64_t a = ptx::swizzle_128b_descriptor(shared.stage(stage));
    const uint64_t b = ptx::swizzle_128b_descriptor(shared.panel_block(k));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kLine / kStepBytes; ++step) {
      constexpr int kUnits = kStepBytes / 16;  // of the descriptor's address
      Product<Operand>::add(acc, a + step * kUnits, b + step * kUnits, k > 0 || step > 0);
    }
    ptx::wgmma_commit_group();
    if (k > 0) {
      ptx::wgmma_wait_group<1>();
      arrive(p, shared.empty(Relu2UpRing::stage(iteration - 1)), Barrier::empty, iteration - 1);
    }
  }
  arrive(p, shared.turn(group ^ 1), Barrier::turn, index);
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(acc);
  arrive(p, shared.empty(Relu2UpRing::stage(iteration - 1)), Barrier::empty, iteration - 1);
}

// From accumulators to memory, one row of the thread: 8 outputs of each 32 columns of the panel.
template <class Operand, bool kPost8>
__device__ __forceinline__ void store_row(const Params& p, const float (&acc)[Tile<Operand>::kAccumulators], int half,
                                          int64_t token, float scale, float inverse_post_scale, Fp8Tally<false>& tally) {
  using Panel = typename Tile<Operand>::Panel;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const bool odd = t % 2 != 0, inside = token < p.N;
  const int64_t offset = token * p.F + static_cast<int>(blockIdx.x) * Tile<Operand>::kPanel;
  bf16* const post = p.post + offset + 8 * t;
#pragma unroll
  for (int pair = 0; pair < Panel::kGroups; pair += 2) {
    uint2 codes[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int a = Panel::accumulator(pair + g, i, half);
        words[i] = post_bf16x2(acc[a] * scale, acc[a + 1] * scale);
      }
      const uint4 values = {words[0], words[1], words[2], words[3]};
      if (inside) {
        tally.see(values);
        store16_streaming(post + 32 * (pair + g), values);
      }
      if constexpr (kPost8) codes[g] = tally.convert(values, inverse_post_scale);
    }
    if constexpr (kPost8) {
      // Of the two groups of 32 columns, even lanes store 16 codes of the first, odd lanes of the second.
      e4m3* const post8 = p.post8 + offset + (odd ? 32 + 8 * (t - 1) : 8 * t);
      const uint2 mine = odd ? codes[1] : codes[0], given = odd ? codes[0] : codes[1];
      const uint2 got = {__shfl_xor_sync(0xffffffffu, given.x, 1), __shfl_xor_sync(0xffffffffu, given.y, 1)};
      const uint4 line = odd ? uint4{got.x, got.y, mine.x, mine.y} : uint4{mine.x, mine.y, got.x, got.y};
      if (inside) store16_streaming(post8 + 32 * pair, line);
    }
  }
}

// A warp group: every second tile of the block.
template <class Operand, bool kPost8>
__device__ __forceinline__ void compute_tiles(const Params& p, const Shared<Operand>& shared, int group) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize % kGroupWarps, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int share = static_cast<int>(blockIdx.y), num_tiles = p.schedule.num_tiles(share);
  const float scale = (p.inp_scale != nullptr ? *p.inp_scale : 1.0f) * (p.weight_scale != nullptr ? *p.weight_scale : 1.0f);
  const float inverse_post_scale = kPost8 ? 1.0f / p.post_scale->scale : 0.0f;
  float acc[Tile<Operand>::kAccumulators] = {};
  Fp8Tally<false> tally;
  for (int index = group; index < num_tiles; index += kGroups) {
    multiply<Operand>(p, shared, group, index, acc);
    const int64_t token = p.schedule.tile(share, index) * kTileTokens + 16 * warp + lane / 4;
    store_row<Operand, kPost8>(p, acc, 0, token, scale, inverse_post_scale, tally);
    store_row<Operand, kPost8>(p, acc, 1, token + 8, scale, inverse_post_scale, tally);
  }
  if (p.post_scale != nullptr) {
    const uint32_t amax = __reduce_max_sync(0xffffffffu, max(tally.largest_bf16x2 << 16, tally.largest_bf16x2 & 0xffff0000u));
    if (lane == 0 && amax != 0) atomicMax(&p.post_scale->amax, amax);
  }
}

template <class Operand, bool kPost8>
__global__ void __launch_bounds__(kThreads, 1)
    relu2_up_kernel(const __grid_constant__ CUtensorMap inp, const __grid_constant__ CUtensorMap weight, const Params p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const Shared<Operand> shared{ptx::shared_address(shared_memory)};
  if (threadIdx.x == 0) {
    if (shared.base % 1024 != 0) stop();  // swizzle and descriptors count on it
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(shared.full(s), 1);
      ptx::mbarrier_init(shared.empty(s), kGroupWarps);
    }
    for (int g = 0; g < kGroups; ++g) ptx::mbarrier_init(shared.turn(g), kGroupWarps);
    for (int k = 0; k < p.k_blocks; ++k) ptx::mbarrier_init(shared.weight(k), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int group = static_cast<int>(threadIdx.x) / (kGroupWarps * kWarpSize);
  if (group == kGroups) {
    ptx::setmaxnreg_dec<kCopyRegisters>();
    if (threadIdx.x == kGroups * kGroupWarps * kWarpSize) copy_tiles<Operand>(p, inp, weight, shared);
  } else {
    ptx::setmaxnreg_inc<kComputeRegisters>();
    compute_tiles<Operand, kPost8>(p, shared, group);
  }
}

template <class Operand>
void launch(const Relu2Up<Operand>& args, const CudaExec& exec, const Relu2UpTesting& testing) {
  using T = Tile<Operand>;
  constexpr const char* kOp = "relu2_up_sm90";
  require(exec.compute_capability == 90, kOp, ": runs on sm_90 alone, not on compute capability ", exec.compute_capability);
  require(relu2_up_sm90_takes<Operand>(args.C, args.F, exec), kOp, ": C = ", args.C, ", F = ", args.F, ": C must be a multiple of ",
          T::kLineElements, " up to 768, F a multiple of ", T::kPanel, " up to ", int64_t{exec.num_sms} * T::kPanel, " (",
          exec.num_sms, " multiprocessors)");
  require(args.N >= 0 && args.N <= 0x7fffffff - 2 * kTileTokens, kOp, ": N = ", args.N, " tokens");
  require(args.post8 == nullptr || args.post_scale != nullptr, kOp, ": post8 needs post_scale");
  if (args.N == 0) return;
  const Relu2UpSchedule schedule = Relu2UpSchedule::make(args.N, args.F, T::kPanel, exec.num_sms);
  const Params params{.post = args.post,
                      .post8 = args.post8,
                      .post_scale = args.post_scale,
                      .inp_scale = args.inp_scale,
                      .weight_scale = args.weight_scale,
                      .N = args.N,
                      .F = args.F,
                      .k_blocks = args.C / T::kLineElements,
                      .schedule = schedule,
                      .testing = testing};
  const CUtensorMap inp = make_tensor_map<2>({.type = Product<Operand>::kMapType,
                                              .element_bytes = sizeof(Operand),
                                              .base = args.inp,
                                              .size = {args.C, args.N},
                                              .stride = {args.C},
                                              .box = {T::kLineElements, kTileTokens}},
                                             "relu2_up_sm90: inp");
  const CUtensorMap weight = make_tensor_map<4>({.type = Product<Operand>::kMapType,
                                                 .element_bytes = sizeof(Operand),
                                                 .base = args.weight,
                                                 .size = {args.C, 8, 4, args.F / 32},
                                                 .stride = {args.C, 8 * args.C, 32 * args.C},
                                                 .box = {T::kLineElements, 2, 4, T::Panel::kGroups}},
                                                "relu2_up_sm90: weight");
  auto* const kernel = args.post8 != nullptr ? relu2_up_kernel<Operand, true> : relu2_up_kernel<Operand, false>;
  allow_dynamic_smem(kernel, T::kSharedBytes, kOp);
  const dim3 grid{grid_size(schedule.panels, kOp), grid_size(schedule.groups, kOp)};
  kernel<<<grid, kThreads, T::kSharedBytes, exec.stream>>>(inp, weight, params);
  check_launch(kOp, ": N = ", args.N, ", C = ", args.C, ", F = ", args.F);
}

}  // namespace speedrun::kernels::relu2_up

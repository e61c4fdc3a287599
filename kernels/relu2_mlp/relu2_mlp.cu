// The Main Track's MLP on CUDA: cuBLASLt products and element-wise passes between them, or the fused Hopper kernel in front.
//   BF16           up product; post = max(pre, 0)² in place; down product
//   FP8, current   inp to E4M3 (maximum, then conversion); up product; post; post to E4M3 (maximum, then conversion); down product
//   FP8, delayed   the pass that squares writes the E4M3 copy and the maximum too: post is not read again
//   fused_up       the up product does that in its epilogue: pre never reaches memory (relu2_up_sm90.h)
//   backward       dpost = dout · down_weightᵀ rounded to BF16; dpre = 2·dpost·√post in place; the weight gradients add up in FP32
//                  inside their products
//   FP8 backward   dout to E5M2 in both layouts; with scales that are known before, the pass that makes dpre makes its E5M2 copies
//                  and post's transposed E4M3 one in tiles (fp8_tile.cuh), and dpre itself only where a BF16 product reads it
// Traffic   beside the products, bytes an element of the hidden (N, F): relu² 4 (5 with the E4M3 copy), maximum 2, conversion 3,
//           backward 6 (FP8 in one pass: 7).
// Numerics  FP32 between load and store; pre is rounded to BF16 at the product's store, post once more. FP8 products: fast
// accumulation.
#include "kernels/base/aligned.h"
#include "kernels/base/launch.cuh"
#include "kernels/fp8/fp8_tile.cuh"
#include "kernels/gemm/projection_fp8_cuda.h"
#include "kernels/relu2_mlp/relu2_activation.h"
#include "kernels/relu2_mlp/relu2_epilogue.cuh"
#include "kernels/relu2_mlp/relu2_mlp.h"
#include "kernels/relu2_mlp/relu2_up_sm90.h"

namespace speedrun::kernels {
namespace {

constexpr int kThreads = kFp8TileThreads, kStartThreads = 1024;
constexpr int kVecs = 4;          // 16-byte loads of a thread
constexpr int kGradientVecs = 2;  // of each of two tensors, backward
constexpr int kPairs = 4;         // of neighbouring 16-byte vectors of a thread, where they become one of E4M3

__device__ __forceinline__ uint32_t relu2_word(uint32_t pre) {
  const float2 x = unpack_bf16x2(pre);
  return post_bf16x2(x.x, x.y);
}
__device__ __forceinline__ uint4 relu2_vector(uint4 pre) {
  return {relu2_word(pre.x), relu2_word(pre.y), relu2_word(pre.z), relu2_word(pre.w)};
}

__global__ void __launch_bounds__(kThreads) relu2_kernel(bf16* post, const bf16* pre, int64_t vectors) {
  const int64_t first = int64_t{blockIdx.x} * kVecs * kThreads + threadIdx.x;
  uint4 raw[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < vectors) raw[i] = load16(pre + vector * kVec);
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < vectors) store16(post + vector * kVec, relu2_vector(raw[i]));
  }
}

template <bool kCount>
__global__ void __launch_bounds__(kThreads)
    relu2_fp8_kernel(bf16* post, const bf16* pre, e4m3* post8, Fp8Scale* scale, int64_t pairs) {
  const float inverse_scale = 1.0f / scale->scale;
  const int64_t first = int64_t{blockIdx.x} * kPairs * kThreads + threadIdx.x;
  Fp8Tally<kCount> tally;
  uint4 raw[kPairs][2];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t pair = first + i * kThreads;
    if (pair >= pairs) continue;
    raw[i][0] = load16(pre + pair * 2 * kVec);
    raw[i][1] = load16(pre + pair * 2 * kVec + kVec);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t pair = first + i * kThreads;
    if (pair >= pairs) continue;
    const uint4 low = relu2_vector(raw[i][0]), high = relu2_vector(raw[i][1]);
    store16(post + pair * 2 * kVec, low);
    store16(post + pair * 2 * kVec + kVec, high);
    tally.see(low);
    tally.see(high);
    const uint2 low8 = tally.convert(low, inverse_scale), high8 = tally.convert(high, inverse_scale);
    store16(post8 + pair * 2 * kVec, {low8.x, low8.y, high8.x, high8.y});
  }
  tally.template deliver<kThreads>(scale, true);
}

// What the fused kernel does not count.
__global__ void __launch_bounds__(kThreads) count_losses_kernel(const bf16* post, Fp8Scale* scale, int64_t vectors) {
  const float inverse_scale = 1.0f / scale->scale;
  const int64_t first = int64_t{blockIdx.x} * kVecs * kThreads + threadIdx.x;
  Fp8Tally<true> tally;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < vectors) tally.convert(load16(post + vector * kVec), inverse_scale);
  }
  tally.deliver<kThreads>(scale, false);
}

__device__ __forceinline__ uint4 dpre_vector(uint4 dpost, uint4 post) {
  float gradient[kVec], y[kVec];
  unpack8(dpost, gradient);
  unpack8(post, y);
#pragma unroll
  for (int j = 0; j < kVec; ++j) gradient[j] *= 2 * sqrtf(y[j]);
  return pack8(gradient);
}

__global__ void __launch_bounds__(kThreads) relu2_backward_kernel(bf16* dhidden, const bf16* post, int64_t vectors) {
  const int64_t first = int64_t{blockIdx.x} * kGradientVecs * kThreads + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kGradientVecs; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < vectors)
      store16(dhidden + vector * kVec, dpre_vector(load16(dhidden + vector * kVec), load16(post + vector * kVec)));
  }
}

// The same with copies in FP8 for the products; null pointers: not made.
struct HiddenGradient {
  bf16* dpre;  // may be dpost
  e5m2 *dpre8, *dpre8_t;
  e4m3* post8_t;
  const bf16 *dpost, *post;
  Fp8Scale* dpre_scale;
  const Fp8Scale* post_scale;
  bool raise_amax;  // of dpre
  int64_t N, F;     // N % 16 == 0
};

template <bool kCount>
__global__ void __launch_bounds__(kThreads) relu2_backward_fp8_kernel(const HiddenGradient p) {
  __shared__ __align__(16) uint32_t turned_dpre[kFp8TurnedWords], turned_post[kFp8TurnedWords];
  const Fp8Piece piece(p.N, p.F, blockIdx.x);
  Fp8Tally<kCount> dpre_tally;
  if (piece.inside) {
    uint4 dpre[4], post[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) dpre[i] = load16(p.dpost + piece.at(i)), post[i] = load16(p.post + piece.at(i));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      dpre[i] = dpre_vector(dpre[i], post[i]);
      if (p.dpre) store16(p.dpre + piece.at(i), dpre[i]);
    }
    convert_piece(piece, dpre, p.dpre8, p.dpre8_t ? turned_dpre : nullptr, 1.0f / p.dpre_scale->scale, dpre_tally);
    Fp8Tally<false> post_tally;
    if (p.post8_t) convert_piece<e4m3>(piece, post, nullptr, turned_post, 1.0f / p.post_scale->scale, post_tally);
  }
  __syncthreads();
  if (p.dpre8_t) store_turned(piece, turned_dpre, p.dpre8_t);
  if (p.post8_t) store_turned(piece, turned_post, p.post8_t);
  dpre_tally.template deliver<kThreads>(p.dpre_scale, p.raise_amax);
}

// dpre's first delayed scale. One block, which finds nothing to do but in the first step.
__global__ void __launch_bounds__(kStartThreads)
    start_dpre_scale_kernel(const bf16* dpost, const bf16* post, Fp8Scale* scale, int64_t vectors, double margin) {
  start_scale<e5m2, kStartThreads>(scale, vectors, margin, [&](int64_t vector) {
    return dpre_vector(load16(dpost + vector * kVec), load16(post + vector * kVec));
  });
}

unsigned blocks_for(int64_t vectors, int vectors_of_a_thread) {
  return grid_size(ceil_div(vectors, int64_t{kThreads} * vectors_of_a_thread), "relu2_mlp");
}

template <class Operand>
Relu2Up<Operand> fused_up(const Relu2MlpForward<bf16>& args, bool with_post8, const Operand* inp, const Operand* weight) {
  return {.post = args.post,
          .post8 = with_post8 ? args.fp8.post8 : nullptr,
          .post_scale = with_post8 ? args.fp8.post_scale : nullptr,
          .inp = inp,
          .weight = weight,
          .inp_scale = nullptr,
          .weight_scale = nullptr,
          .N = args.N,
          .C = args.C,
          .F = args.F};
}

void require_operands(const Relu2MlpForward<bf16>& args) {
  const Relu2MlpFp8& fp8 = args.fp8;
  require(fp8.up8 == nullptr || (fp8.up_scale && fp8.inp8 && fp8.inp_scale),
          "relu2_mlp: the FP8 up product needs up_scale, inp8 and inp_scale");
  require(fp8.down8 == nullptr || (fp8.down_scale && fp8.post8 && fp8.post_scale),
          "relu2_mlp: the FP8 down product needs down_scale, post8 and post_scale");
  require(fp8.down8 == nullptr || args.F % 16 == 0, "relu2_mlp: F = ", args.F, " must be a multiple of 16 for FP8");
}

// dpre in place of dpost, and the copies of it and of post: in one pass where both scales are known before. Then dpre in BF16 is
// left out if no product reads it.
void hidden_gradient(const Relu2MlpBackward<bf16>& args, const CudaExec& exec) {
  const Relu2MlpBackwardFp8& fp8 = args.fp8;
  const Fp8Copies<e5m2>& dpre = fp8.dpre;
  const Fp8Copies<e4m3>& post = fp8.post;
  const int64_t vectors = args.N * args.F / kVec;
  const bool copies = dpre.codes != nullptr || dpre.codes_t != nullptr;
  const bool one_pass = copies && dpre.scaling != Fp8Scaling::current && args.N % 16 == 0 && args.F % 16 == 0,
             post_too = one_pass && post.scaling == Fp8Scaling::fixed && !post.count;
  if (!post_too) fp8_copies(post, args.post, args.N, args.F, exec);
  if (!one_pass) {
    relu2_backward_kernel<<<blocks_for(vectors, kGradientVecs), kThreads, 0, exec.stream>>>(args.dhidden, args.post, vectors);
    check_launch("relu2_mlp: backward of N = ", args.N, ", F = ", args.F);
    fp8_copies(dpre, args.dhidden, args.N, args.F, exec);
    return;
  }
  const bool delayed = dpre.scaling == Fp8Scaling::delayed, bf16_products = fp8.up8_t == nullptr || fp8.inp.codes_t == nullptr;
  if (delayed && dpre.start_margin != 0)
    start_dpre_scale_kernel<<<1, kStartThreads, 0, exec.stream>>>(args.dhidden, args.post, dpre.scale, vectors, dpre.start_margin);
  const HiddenGradient pass{.dpre = bf16_products ? args.dhidden : nullptr,
                            .dpre8 = dpre.codes,
                            .dpre8_t = dpre.codes_t,
                            .post8_t = post_too ? post.codes_t : nullptr,
                            .dpost = args.dhidden,
                            .post = args.post,
                            .dpre_scale = dpre.scale,
                            .post_scale = post.scale,
                            .raise_amax = delayed,
                            .N = args.N,
                            .F = args.F};
  auto* kernel = dpre.count ? relu2_backward_fp8_kernel<true> : relu2_backward_fp8_kernel<false>;
  kernel<<<grid_size(fp8_tiles(args.N, args.F), "relu2_mlp"), kThreads, 0, exec.stream>>>(pass);
  check_launch("relu2_mlp: FP8 backward of N = ", args.N, ", F = ", args.F);
}

}  // namespace

void relu2_activation(const Relu2Activation& args, const CudaExec& exec) {
  require_aligned16("relu2_mlp", "post", args.post);
  require_aligned16("relu2_mlp", "pre", args.pre);
  if (args.post8 == nullptr) {
    const int64_t vectors = args.count / kVec;
    relu2_kernel<<<blocks_for(vectors, kVecs), kThreads, 0, exec.stream>>>(args.post, args.pre, vectors);
  } else {
    require_aligned16("relu2_mlp", "post8", args.post8);
    const int64_t pairs = args.count / (2 * kVec);
    auto* kernel = args.count_losses ? relu2_fp8_kernel<true> : relu2_fp8_kernel<false>;
    kernel<<<blocks_for(pairs, kPairs), kThreads, 0, exec.stream>>>(args.post, args.pre, args.post8, args.post_scale, pairs);
  }
  check_launch("relu2_mlp: relu2 of ", args.count, " values");
}

void relu2_mlp_forward(const Relu2MlpForward<bf16>& args, const CudaExec& exec) {
  require_operands(args);
  const Relu2MlpFp8& fp8 = args.fp8;
  const ProjectionSize up{.N = args.N, .K = args.C, .O = args.F}, down{.N = args.N, .K = args.F, .O = args.C};
  const int64_t hidden = args.N * args.F;
  const bool with_post8 = fp8.down8 != nullptr && fp8.post_scaling != Fp8Scaling::current;

  if (fp8.up8 != nullptr)
    fp8_quantize({fp8.inp8, nullptr, args.inp, fp8.inp_scale, args.N, args.C, fp8.inp_scaling, fp8.count}, exec);
  if (fp8.fused_up) {
    if (fp8.up8 != nullptr) {
      Relu2Up<e4m3> fused = fused_up<e4m3>(args, with_post8, fp8.inp8, fp8.up8);
      fused.inp_scale = &fp8.inp_scale->scale;
      fused.weight_scale = &fp8.up_scale->scale;
      relu2_up_sm90(fused, exec);
    } else {
      relu2_up_sm90(fused_up<bf16>(args, with_post8, args.inp, args.up_weight), exec);
    }
    if (with_post8 && fp8.count) {
      const int64_t vectors = hidden / kVec;
      count_losses_kernel<<<blocks_for(vectors, kVecs), kThreads, 0, exec.stream>>>(args.post, fp8.post_scale, vectors);
      check_launch("relu2_mlp: counting the losses of N = ", args.N, ", F = ", args.F);
    }
  } else {
    if (fp8.up8 != nullptr) {
      fp8_product(args.post, {fp8.inp8, &fp8.inp_scale->scale}, {fp8.up8, &fp8.up_scale->scale}, up, Accumulation::fast, exec);
    } else {
      project(args.post, args.inp, args.up_weight, nullptr, nullptr, up, exec);
    }
    relu2_activation({.post = args.post,
                      .pre = args.post,
                      .post8 = with_post8 ? fp8.post8 : nullptr,
                      .post_scale = fp8.post_scale,
                      .count = hidden,
                      .count_losses = fp8.count},
                     exec);
  }
  if (fp8.down8 != nullptr) {
    if (!with_post8)
      fp8_quantize({fp8.post8, nullptr, args.post, fp8.post_scale, args.N, args.F, fp8.post_scaling, fp8.count}, exec);
    fp8_product(args.out, {fp8.post8, &fp8.post_scale->scale}, {fp8.down8, &fp8.down_scale->scale}, down, Accumulation::fast, exec);
  } else {
    // Stored (F, C), the down weights stand to the activations as other layers' do to their output's gradient.
    project_input_grad(args.out, args.post, args.down_weight, nullptr, up, exec);
  }
}

void relu2_mlp_backward(const Relu2MlpBackward<bf16>& args, const CudaExec& exec) {
  const Relu2MlpBackwardFp8& fp8 = args.fp8;
  require_backward_operands(fp8);
  const bool input_grad = fp8.up8_t != nullptr, weight_grad = fp8.inp.codes_t != nullptr;
  const ProjectionSize size{.N = args.N, .K = args.C, .O = args.F}, turned{.N = args.N, .K = args.F, .O = args.C};
  fp8_copies(fp8.dout, args.dout, args.N, args.C, exec);
  if (input_grad) {
    fp8_product(args.dhidden, {fp8.dout.codes, &fp8.dout.scale->scale}, {fp8.down8, &fp8.down_scale->scale}, size,
                Accumulation::accurate, exec);
  } else {
    project(args.dhidden, args.dout, args.down_weight, nullptr, nullptr, size, exec);
  }
  hidden_gradient(args, exec);
  if (weight_grad) {
    fp8_copies(fp8.inp, args.inp, args.N, args.C, exec);
    fp8_weight_grad(args.ddown_weight, {fp8.post.codes_t, &fp8.post.scale->scale}, {fp8.dout.codes_t, &fp8.dout.scale->scale}, size,
                    exec);
    fp8_weight_grad(args.dup_weight, {fp8.dpre.codes_t, &fp8.dpre.scale->scale}, {fp8.inp.codes_t, &fp8.inp.scale->scale}, size,
                    exec);
  } else {
    project_weight_grad(args.ddown_weight, args.post, args.dout, size, exec);
    project_weight_grad(args.dup_weight, args.dhidden, args.inp, size, exec);
  }
  if (input_grad) {
    fp8_product(args.dinp, {fp8.dpre.codes, &fp8.dpre.scale->scale}, {fp8.up8_t, &fp8.up_scale->scale}, turned,
                Accumulation::accurate, exec);
  } else {
    project_input_grad(args.dinp, args.dhidden, args.up_weight, nullptr, size, exec);
  }
}

}  // namespace speedrun::kernels

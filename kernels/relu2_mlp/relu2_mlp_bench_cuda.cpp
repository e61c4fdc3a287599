#include <algorithm>

#include "kernels/bench/bench.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/relu2_mlp/relu2_activation.h"
#include "kernels/relu2_mlp/relu2_mlp.h"
#include "kernels/relu2_mlp/relu2_up_sm90.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kN = 49152;
constexpr int kC = 768, kF = 3072;
constexpr double kInp = static_cast<double>(kN) * kC, kHidden = static_cast<double>(kN) * kF,
                 kWeight = static_cast<double>(kC) * kF;
constexpr double kFlops = 2.0 * kInp * kF;  // of one product

// What an H200 at its power limit keeps up: products at the MLP's shapes by cuBLASLt, and a device copy.
constexpr double kBf16Rate = 604e12, kFp8Rate = 1012e12, kBandwidth = 4.2e12;

// A stage cannot beat the slower of its FLOPs and its bytes.
double floor_ms(double flops, double rate, double bytes) { return 1e3 * std::max(flops / rate, bytes / kBandwidth); }

class Mlp {
 public:
  explicit Mlp(const CudaExec& exec) : exec_(exec) {
    // Scales as training has them: the weights' and post's from their maxima, a margin of 1.8 on post; the input is a normalised
    // stream and takes a fixed one.
    const std::vector<Fp8Scale> start{{}, {}, {.scale = 0.0625f}, {}, {.scale = 0}, {.scale = 0}};
    scales_ = std::make_unique<BenchBuffer>(BenchBuffer::copy_of(start.data(), start.size() * sizeof(Fp8Scale)));
    const Fp8WeightItem<bf16> items[] = {{up8(), up8_t_.as<e4m3>(), up_.as<bf16>(), scale(0), kF, kC},
                                         {down8_rows_.as<e4m3>(), down8(), down_.as<bf16>(), scale(1), kF, kC}};
    const BenchBuffer table = BenchBuffer::copy_of(items, sizeof items);
    fp8_weights({table.as<Fp8WeightItem<bf16>>(), items, 2, Fp8Scaling::current, false, nullptr}, exec_);
    forward(Fp8Scaling::delayed, Fp8Scaling::fixed, false);
    fp8_next_scales({scale(3), 1, 1.8, nullptr}, exec_);
    backward(true, true, Fp8Scaling::delayed);
  }

  Fp8Scale* scale(int index) const { return scales_->as<Fp8Scale>() + index; }
  e4m3* up8() const { return up8_.as<e4m3>(); }
  e4m3* down8() const { return down8_.as<e4m3>(); }

  void forward_bf16(bool fused) const { forward({.fused_up = fused}); }
  void forward(Fp8Scaling post_scaling, Fp8Scaling inp_scaling, bool fused) const {
    forward({.up8 = up8(),
             .up_scale = scale(0),
             .inp8 = inp8_.as<e4m3>(),
             .inp_scale = scale(2),
             .inp_scaling = inp_scaling,
             .down8 = down8(),
             .down_scale = scale(1),
             .post8 = post8_.as<e4m3>(),
             .post_scale = scale(3),
             .post_scaling = post_scaling,
             .fused_up = fused});
  }
  // Of input and post in FP8 too, as forward left them.
  void backward(bool input_grad, bool weight_grad, Fp8Scaling scaling) const {
    const auto gradient = [&](const BenchBuffer& codes, const BenchBuffer& codes_t, int scale_index) {
      return Fp8Copies<e5m2>{.codes = input_grad ? codes.as<e5m2>() : nullptr,
                             .codes_t = weight_grad ? codes_t.as<e5m2>() : nullptr,
                             .scale = scale(scale_index),
                             .scaling = scaling,
                             .start_margin = 4};
    };
    const auto activation = [&](const BenchBuffer& codes_t, int scale_index) {
      return Fp8Copies<e4m3>{
          .codes_t = weight_grad ? codes_t.as<e4m3>() : nullptr, .scale = scale(scale_index), .scaling = Fp8Scaling::fixed};
    };
    relu2_mlp_backward({.dinp = out_.as<bf16>(),
                        .dup_weight = dup_.as<float>(),
                        .ddown_weight = ddown_.as<float>(),
                        .dhidden = pre_.as<bf16>(),
                        .dout = dout_.as<bf16>(),
                        .inp = inp_.as<bf16>(),
                        .post = post_.as<bf16>(),
                        .up_weight = up_.as<bf16>(),
                        .down_weight = down_.as<bf16>(),
                        .N = kN,
                        .C = kC,
                        .F = kF,
                        .fp8 = {.up8_t = input_grad ? up8_t_.as<e4m3>() : nullptr,
                                .up_scale = scale(0),
                                .down8 = input_grad ? down8_rows_.as<e4m3>() : nullptr,
                                .down_scale = scale(1),
                                .inp = activation(inp8_, 2),
                                .post = activation(post8_, 3),
                                .dout = gradient(dout8_, dout8_t_, 4),
                                .dpre = gradient(dpre8_, dpre8_t_, 5)}},
                       exec_);
  }
  void backward_bf16() const { backward(false, false, Fp8Scaling::fixed); }
  void quantize_inp(Fp8Scaling scaling) const {
    fp8_quantize({inp8_.as<e4m3>(), nullptr, inp_.as<bf16>(), scale(2), kN, kC, scaling, false}, exec_);
  }
  void quantize_post(Fp8Scaling scaling) const {
    fp8_quantize({post8_.as<e4m3>(), nullptr, post_.as<bf16>(), scale(3), kN, kF, scaling, false}, exec_);
  }
  void up_bf16() const { product(pre_.as<bf16>(), inp_.as<bf16>(), up_.as<bf16>(), kF, kC, true); }
  void up_fp8() const { product(pre_.as<bf16>(), fp8(inp8_, 2), fp8(up8_, 0), kF, kC, true); }
  void down_bf16() const { product(out_.as<bf16>(), post_.as<bf16>(), down_.as<bf16>(), kC, kF, false); }
  void down_fp8() const { product(out_.as<bf16>(), fp8(post8_, 3), fp8(down8_, 1), kC, kF, true); }
  void up_fused_fp8() const {
    relu2_up_sm90(Relu2Up<e4m3>{post_.as<bf16>(), post8_.as<e4m3>(), scale(3), inp8_.as<e4m3>(), up8(), &scale(2)->scale,
                                &scale(0)->scale, kN, kC, kF},
                  exec_);
  }
  void up_fused_bf16() const {
    relu2_up_sm90(Relu2Up<bf16>{post_.as<bf16>(), nullptr, nullptr, inp_.as<bf16>(), up_.as<bf16>(), nullptr, nullptr, kN, kC, kF},
                  exec_);
  }
  // too.
  void activate(bool with_post8) const {
    relu2_activation({.post = post_.as<bf16>(),
                      .pre = pre_.as<bf16>(),
                      .post8 = with_post8 ? post8_.as<e4m3>() : nullptr,
                      .post_scale = scale(3),
                      .count = kN * kF},
                     exec_);
  }

 private:
  void forward(const Relu2MlpFp8& fp8) const {
    relu2_mlp_forward({.out = out_.as<bf16>(),
                       .post = post_.as<bf16>(),
                       .inp = inp_.as<bf16>(),
                       .up_weight = up_.as<bf16>(),
                       .down_weight = down_.as<bf16>(),
                       .fp8 = fp8,
                       .N = kN,
                       .C = kC,
                       .F = kF},
                      exec_);
  }
  GemmOperand fp8(const BenchBuffer& codes, int scale_index) const { return {codes.as<e4m3>(), &scale(scale_index)->scale}; }
  void product(bf16* out, const GemmOperand& a, const GemmOperand& b, int64_t columns, int64_t depth, bool transpose_b) const {
    gemm({.d = out,
          .a = a,
          .b = b,
          .M = kN,
          .N = columns,
          .K = depth,
          .transpose_b = transpose_b,
          .accumulation = Accumulation::fast},
         exec_);
  }

  CudaExec exec_;
  BenchBuffer inp_ = BenchBuffer::normal_bf16(kN * kC), up_ = BenchBuffer::normal_bf16(int64_t{kF} * kC, 0.018),
              down_ = BenchBuffer::normal_bf16(int64_t{kF} * kC, 0.018), out_ = BenchBuffer::normal_bf16(kN * kC),
              pre_ = BenchBuffer::normal_bf16(kN * kF, 0.5), post_ = BenchBuffer::normal_bf16(kN * kF),
              inp8_ = BenchBuffer::normal_e4m3(kN * kC), post8_ = BenchBuffer::normal_e4m3(kN * kF),
              up8_ = BenchBuffer::normal_e4m3(int64_t{kF} * kC), down8_ = BenchBuffer::normal_e4m3(int64_t{kF} * kC),
              up8_t_ = BenchBuffer::normal_e4m3(int64_t{kF} * kC), down8_rows_ = BenchBuffer::normal_e4m3(int64_t{kF} * kC),
              dout_ = BenchBuffer::normal_bf16(kN * kC, 1e-4), dout8_ = BenchBuffer::normal_e5m2(kN * kC),
              dout8_t_ = BenchBuffer::normal_e5m2(kN * kC), dpre8_ = BenchBuffer::normal_e5m2(kN * kF),
              dpre8_t_ = BenchBuffer::normal_e5m2(kN * kF), dup_ = BenchBuffer::zeroed(sizeof(float) * kF * kC),
              ddown_ = BenchBuffer::zeroed(sizeof(float) * kF * kC);
  std::unique_ptr<BenchBuffer> scales_;  // up weights, down weights, input, post, gradients of the output and of pre
};

// Backward: its floor is the four products, with every operand read and every result written once, and 6 bytes a hidden value
// between them (FP8: 7, fused).
void bench_backward(const Mlp& mlp, const BenchOptions& options, std::ostream& out) {
  constexpr Fp8Scaling kCurrent = Fp8Scaling::current, kDelayed = Fp8Scaling::delayed;
  const auto products = [](double rate, double bytes) {
    const double hidden = kHidden * bytes, inp = kInp * bytes, weight = kWeight * bytes;
    return floor_ms(kFlops, rate, inp + weight + 2 * kHidden) + floor_ms(kFlops, rate, hidden + weight + 2 * kInp) +
           2 * floor_ms(kFlops, rate, hidden + inp + 8 * kWeight);
  };
  const double bf16_floor = products(kBf16Rate, 2) + floor_ms(0, 1, 6 * kHidden),
               fp8_floor = products(kFp8Rate, 1) + floor_ms(0, 1, 7 * kHidden + 7 * kInp);
  const auto whole = [&](const char* name, double floor, std::function<void()> run) {
    return BenchCase{.name = name, .run = std::move(run), .flops = 4 * kFlops, .bytes = 0, .floor_ms = floor};
  };
  bench_table("relu2 MLP backward, the same shape",
              {whole("BF16", bf16_floor, [&] { mlp.backward_bf16(); }),
               whole("FP8, current", fp8_floor, [&] { mlp.backward(true, true, kCurrent); }),
               whole("FP8, delayed", fp8_floor, [&] { mlp.backward(true, true, kDelayed); }),
               whole("FP8 input gradients alone, delayed", fp8_floor, [&] { mlp.backward(true, false, kDelayed); }),
               whole("FP8 weight gradients alone, delayed", fp8_floor, [&] { mlp.backward(false, true, kDelayed); })},
              options.exec, options.seconds, out);
}

}  // namespace

// The Main Track's MLP at one row of 49,152 tokens: forward, whole and the stages it is made of, and backward. post is relu² data:
// half zeros.
void bench_relu2_mlp(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  const Mlp mlp(exec);
  constexpr Fp8Scaling kFixed = Fp8Scaling::fixed, kCurrent = Fp8Scaling::current, kDelayed = Fp8Scaling::delayed;
  const bool fused_fp8 = relu2_up_sm90_takes<e4m3>(kC, kF, exec), fused_bf16 = relu2_up_sm90_takes<bf16>(kC, kF, exec);
  std::vector<BenchCase> cases;
  const auto add = [&](const char* name, double flops, double rate, double bytes, std::function<void()> run) {
    cases.push_back(
        {.name = name, .run = std::move(run), .flops = flops, .bytes = bytes, .floor_ms = floor_ms(flops, rate, bytes)});
  };
  // A whole forward pass is measured against the best form of itself: post written once, by the up product.
  const double up_bf16 = floor_ms(kFlops, kBf16Rate, 2 * (kInp + kWeight + kHidden)),
               down_bf16 = floor_ms(kFlops, kBf16Rate, 2 * (kHidden + kWeight + kInp)),
               up_fp8 = floor_ms(kFlops, kFp8Rate, kInp + kWeight + 3 * kHidden),
               down_fp8 = floor_ms(kFlops, kFp8Rate, kHidden + kWeight + 2 * kInp), quantize = floor_ms(0, 1, 3 * kInp);
  const double bf16_floor = up_bf16 + down_bf16, fp8_floor = quantize + up_fp8 + down_fp8;
  const auto add_whole = [&](const char* name, double whole_floor_ms, double bytes, std::function<void()> run) {
    cases.push_back({.name = name, .run = std::move(run), .flops = 2 * kFlops, .bytes = bytes, .floor_ms = whole_floor_ms});
  };
  const double ends = 2 * (2 * kInp + 2 * kWeight), ends8 = 3 * kInp + kInp + 2 * kWeight + 2 * kInp;

  add_whole("forward BF16", bf16_floor, ends + 8 * kHidden, [&] { mlp.forward_bf16(false); });
  if (fused_bf16) add_whole("forward BF16, fused up", bf16_floor, ends + 4 * kHidden, [&] { mlp.forward_bf16(true); });
  add_whole("forward FP8, current", fp8_floor, ends8 + 2 * kInp + 12 * kHidden, [&] { mlp.forward(kCurrent, kCurrent, false); });
  add_whole("forward FP8, delayed", fp8_floor, ends8 + 8 * kHidden, [&] { mlp.forward(kDelayed, kFixed, false); });
  if (fused_fp8) add_whole("forward FP8, fused up", fp8_floor, ends8 + 4 * kHidden, [&] { mlp.forward(kDelayed, kFixed, true); });
  add("input: convert (fixed scale)", 0, 1, 3 * kInp, [&] { mlp.quantize_inp(kFixed); });
  add("input: scan and convert (current)", 0, 1, 5 * kInp, [&] { mlp.quantize_inp(kCurrent); });
  add("up BF16", kFlops, kBf16Rate, 2 * (kInp + kWeight + kHidden), [&] { mlp.up_bf16(); });
  add("up FP8", kFlops, kFp8Rate, kInp + kWeight + 2 * kHidden, [&] { mlp.up_fp8(); });
  if (fused_bf16) add("up BF16 with relu2", kFlops, kBf16Rate, 2 * (kInp + kWeight + kHidden), [&] { mlp.up_fused_bf16(); });
  if (fused_fp8) add("up FP8 with relu2, E4M3 copy", kFlops, kFp8Rate, kInp + kWeight + 3 * kHidden, [&] { mlp.up_fused_fp8(); });
  add("relu2", 0, 1, 4 * kHidden, [&] { mlp.activate(false); });
  add("relu2, E4M3 copy, maximum (delayed)", 0, 1, 5 * kHidden, [&] { mlp.activate(true); });
  add("post: convert (fixed scale)", 0, 1, 3 * kHidden, [&] { mlp.quantize_post(kFixed); });
  add("post: scan and convert (current)", 0, 1, 5 * kHidden, [&] { mlp.quantize_post(kCurrent); });
  add("down BF16", kFlops, kBf16Rate, 2 * (kHidden + kWeight + kInp), [&] { mlp.down_bf16(); });
  add("down FP8", kFlops, kFp8Rate, kHidden + kWeight + 2 * kInp, [&] { mlp.down_fp8(); });
  bench_table("relu2 MLP forward, N = 49152, C = 768, F = 3072; floor: 604 (BF16) and 1012 (FP8) TFLOP/s, 4.2 TB/s", cases, exec,
              options.seconds, out);
  bench_backward(mlp, options, out);
}

}  // namespace speedrun::kernels

#include "kernels/bench/bench_projection_fp8.h"
#include "kernels/qkv/split_qkv.h"

namespace speedrun::kernels {

// The Main Track's widths, one row of its last stage: the products alone, then the op as layers use it. What a pass over the heads
// costs is the difference; the copy moves what forward's pass moves without embeddings.
void bench_split_qkv(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t kN = 49'152;
  constexpr int kC = 768, kH = 6, kD = kC / kH;
  const auto plane = [] { return BenchBuffer::normal_bf16(kN * kC); };
  const BenchBuffer inp = plane(), q = plane(), k = plane(), v = plane(), dq = plane(), dk = plane(), dv = plane(), dinp = plane(),
                    embed = plane(), dembed = plane(), add = plane(), weight = BenchBuffer::normal_bf16(int64_t{3} * kC * kC, 0.02),
                    raw = BenchBuffer::normal_bf16(kN * 3 * kC), tail = BenchBuffer::normal_bf16(kH * kD / 2),
                    gate = BenchBuffer::normal_bf16(kN * kH), dgate = BenchBuffer::normal_bf16(kN * kH),
                    rstd = BenchBuffer::normal_f32(kN * 2 * kH, 0.1), frequencies = BenchBuffer::normal_f32(kD / 4, 0.1),
                    dweight = BenchBuffer::zeroed(sizeof(float) * 3 * kC * kC);
  const SplitQkvForward<bf16> forward{.q = q.as<bf16>(),
                                      .k = k.as<bf16>(),
                                      .v = v.as<bf16>(),
                                      .qk_rstd = rstd.as<float>(),
                                      .key_tail = tail.as<bf16>(),
                                      .raw = raw.as<bf16>(),
                                      .inp = inp.as<bf16>(),
                                      .weight = weight.as<bf16>(),
                                      .frequencies = frequencies.as<float>(),
                                      .value_embed = nullptr,
                                      .value_gate = nullptr,
                                      .value_add = nullptr,
                                      .value_gate_stride = kH,
                                      .gate_heads = 1,
                                      .paired = false,
                                      .key_shift = false,
                                      .N = kN,
                                      .row_tokens = kN,
                                      .C = kC,
                                      .H = kH,
                                      .eps = 1.1920929e-7};
  const SplitQkvBackward<bf16> backward{.dinp = dinp.as<bf16>(),
                                        .dweight = dweight.as<float>(),
                                        .dvalue_embed = nullptr,
                                        .accumulate_dvalue_embed = false,
                                        .dvalue_gate = nullptr,
                                        .raw = raw.as<bf16>(),
                                        .dq = dq.as<bf16>(),
                                        .dk = dk.as<bf16>(),
                                        .dv = dv.as<bf16>(),
                                        .q = q.as<bf16>(),
                                        .k = k.as<bf16>(),
                                        .qk_rstd = rstd.as<float>(),
                                        .key_tail = tail.as<bf16>(),
                                        .inp = inp.as<bf16>(),
                                        .weight = weight.as<bf16>(),
                                        .frequencies = frequencies.as<float>(),
                                        .value_embed = nullptr,
                                        .value_gate = nullptr,
                                        .value_gate_stride = kH,
                                        .gate_heads = 1,
                                        .paired = false,
                                        .key_shift = false,
                                        .N = kN,
                                        .row_tokens = kN,
                                        .C = kC,
                                        .H = kH};
  SplitQkvForward<bf16> paired_forward = forward, shifted_forward = forward;
  paired_forward.paired = true;
  shifted_forward.key_shift = true;
  SplitQkvBackward<bf16> paired_backward = backward, shifted_backward = backward;
  paired_backward.paired = true;
  shifted_backward.key_shift = true;
  for (auto* args : {&paired_forward, &shifted_forward}) args->value_embed = embed.as<bf16>(), args->value_gate = gate.as<bf16>();
  for (auto* args : {&paired_backward, &shifted_backward}) {
    args->value_embed = embed.as<bf16>(), args->value_gate = gate.as<bf16>();
    args->dvalue_embed = dembed.as<bf16>(), args->dvalue_gate = dgate.as<bf16>();
  }
  shifted_forward.value_add = add.as<bf16>();
  shifted_forward.gate_heads = shifted_backward.gate_heads = 3;

  const ProjectionSize size{.N = kN, .K = kC, .O = 3 * kC};
  const BenchProjectionFp8 current(size, Fp8Scaling::current), delayed(size, Fp8Scaling::delayed);
  SplitQkvForward<bf16> current_forward = forward, delayed_forward = forward;
  SplitQkvBackward<bf16> current_backward = backward, delayed_backward = backward;
  current_forward.fp8 = current_backward.fp8 = current.args();
  delayed_forward.fp8 = delayed_backward.fp8 = delayed.args();
  const double flops = 2.0 * kN * kC * 3 * kC;
  const auto products_backward = [&] {
    project_weight_grad(dweight.as<float>(), raw.as<bf16>(), inp.as<bf16>(), size, exec);
    project_input_grad(dinp.as<bf16>(), raw.as<bf16>(), weight.as<bf16>(), nullptr, size, exec);
  };
  bench_table("split_qkv, 49152 x 768, 6 heads of 128",
              {bench_copy(kN * 3 * kC * sizeof(bf16), exec),
               {"forward, product alone",
                [&] { project(raw.as<bf16>(), inp.as<bf16>(), weight.as<bf16>(), nullptr, nullptr, size, exec); }, flops},
               {"forward", [&] { split_qkv_forward(forward, exec); }, flops},
               {"forward, paired, embeddings", [&] { split_qkv_forward(paired_forward, exec); }, flops},
               {"forward, shifted, embeddings and values", [&] { split_qkv_forward(shifted_forward, exec); }, flops},
               {"forward, FP8, current", [&] { split_qkv_forward(current_forward, exec); }, flops},
               {"forward, FP8, delayed", [&] { split_qkv_forward(delayed_forward, exec); }, flops},
               {"backward, products alone", products_backward, 2 * flops},
               {"backward", [&] { split_qkv_backward(backward, exec); }, 2 * flops},
               {"backward, paired, embeddings", [&] { split_qkv_backward(paired_backward, exec); }, 2 * flops},
               {"backward, shifted, embeddings", [&] { split_qkv_backward(shifted_backward, exec); }, 2 * flops},
               {"backward, FP8, current", [&] { split_qkv_backward(current_backward, exec); }, 2 * flops},
               {"backward, FP8, delayed", [&] { split_qkv_backward(delayed_backward, exec); }, 2 * flops}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

#pragma once
// FP8 operands of a layer for benches: delayed scales that are known.
#include "kernels/bench/bench.h"
#include "kernels/gemm/projection_cuda.h"
#include "kernels/gemm/projection_fp8.h"

namespace speedrun::kernels {

class BenchProjectionFp8 {
 public:
  BenchProjectionFp8(ProjectionSize size, Fp8Scaling scaling)
      : inp_(BenchBuffer::normal_e4m3(size.N * size.K)),
        inp_t_(BenchBuffer::normal_e4m3(size.N * size.K)),
        weight_(BenchBuffer::normal_e4m3(int64_t{size.O} * size.K)),
        weight_t_(BenchBuffer::normal_e4m3(int64_t{size.O} * size.K)),
        dout_(BenchBuffer::normal_e5m2(size.N * size.O)),
        dout_t_(BenchBuffer::normal_e5m2(size.N * size.O)),
        scaling_(scaling) {}

  ProjectionFp8 args() const {
    Fp8Scale* const scales = scales_.as<Fp8Scale>();
    return {.weight8 = weight_.as<e4m3>(),
            .weight8_t = weight_t_.as<e4m3>(),
            .weight_scale = scales,
            .inp = {.codes = inp_.as<e4m3>(),
                    .codes_t = inp_t_.as<e4m3>(),
                    .scale = scales + 1,
                    .scaling = scaling_,
                    .start_margin = kMargin},
            .dout = {.codes = dout_.as<e5m2>(),
                     .codes_t = dout_t_.as<e5m2>(),
                     .scale = scales + 2,
                     .scaling = scaling_,
                     .start_margin = kMargin}};
  }

 private:
  static constexpr double kMargin = 2;
  static BenchBuffer scales() {
    const Fp8Scale start[] = {{.scale = 1e-4f}, {.scale = 0.01f}, {.scale = 1e-4f}};
    return BenchBuffer::copy_of(start, sizeof start);
  }

  BenchBuffer inp_, inp_t_, weight_, weight_t_, dout_, dout_t_, scales_ = scales();
  Fp8Scaling scaling_;
};

}  // namespace speedrun::kernels

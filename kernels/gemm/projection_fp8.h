#pragma once
// A layer with a weight in FP8, each of its three products by itself: inp (N, K), weight (O, K), out (N, O).
//   forward       out = inp8 · weight8ᵀ              fast accumulation
//   input grad    dinp = dout8 · weight8_tᵀ          accurate
//   weight grad   dweight += dout8_t · inp8_tᵀ       accurate, FP32; sums over tokens, which FP8 products want contiguous: both
//                                                    operands transposed
// Weights and activations are E4M3, gradients E5M2. Backward is straight-through: the gradients of the BF16 layer at the stored
// values.
#include "kernels/base/error.h"
#include "kernels/fp8/fp8.h"

namespace speedrun::kernels {

// Where an activation or a gradient (rows, cols) is stored in FP8, and how; scratch of one call but for the scale.
template <class Fp8>
struct Fp8Copies {
  Fp8* codes = nullptr;    // (rows, cols), or null: not made
  Fp8* codes_t = nullptr;  // (cols, rows), or null: not made
  Fp8Scale* scale = nullptr;
  Fp8Scaling scaling = Fp8Scaling::current;
  double start_margin = 0;  // of a delayed scale that is not known yet; 0: it is known
  bool count = false;       // count saturated and flushed values
};

template <class T, class Fp8, class Exec>
void fp8_copies(const Fp8Copies<Fp8>& to, const T* values, int64_t rows, int cols, const Exec& exec) {
  if (to.codes == nullptr && to.codes_t == nullptr) return;
  fp8_quantize(Fp8Quantize<T, Fp8>{.out = to.codes,
                                   .out_t = to.codes_t,
                                   .inp = values,
                                   .scale = to.scale,
                                   .rows = rows,
                                   .cols = cols,
                                   .scaling = to.scaling,
                                   .count = to.count,
                                   .start_margin = to.start_margin},
               exec);
}

// What is null is a product in BF16. On CUDA K and O are multiples of 16, and for the weight gradient N.
struct ProjectionFp8 {
  const e4m3* weight8 = nullptr;    // (O, K): forward product
  const e4m3* weight8_t = nullptr;  // (K, O): input gradient
  const Fp8Scale* weight_scale = nullptr;
  Fp8Copies<e4m3> inp;   // (N, K): codes for the forward product, codes_t for the weight gradient
  Fp8Copies<e5m2> dout;  // (N, O): codes for the input gradient, codes_t for the weight gradient
};

// The copy of an activation that backward makes is forward's, transposed: with the scale that forward left, if it is FP8 too.
inline Fp8Copies<e4m3> backward_inp(const ProjectionFp8& fp8) {
  Fp8Copies<e4m3> inp = fp8.inp;
  inp.codes = nullptr;
  if (fp8.weight8 != nullptr) inp.scaling = Fp8Scaling::fixed, inp.count = false;
  return inp;
}
inline Fp8Copies<e4m3> forward_inp(const ProjectionFp8& fp8) {
  Fp8Copies<e4m3> inp = fp8.inp;
  inp.codes_t = nullptr;
  return inp;
}

inline void require_forward_operands(const char* op, const ProjectionFp8& fp8) {
  require(fp8.weight8 == nullptr || (fp8.weight_scale && fp8.inp.codes && fp8.inp.scale), op,
          ": the FP8 product needs weight_scale, inp.codes and inp.scale");
}
inline void require_backward_operands(const char* op, const ProjectionFp8& fp8) {
  require(fp8.weight8_t == nullptr || (fp8.weight_scale && fp8.dout.codes && fp8.dout.scale), op,
          ": the FP8 input gradient needs weight_scale, dout.codes and dout.scale");
  require(fp8.inp.codes_t == nullptr || (fp8.inp.scale && fp8.dout.codes_t && fp8.dout.scale), op,
          ": the FP8 weight gradient needs inp.scale, dout.codes_t and dout.scale");
}

}  // namespace speedrun::kernels

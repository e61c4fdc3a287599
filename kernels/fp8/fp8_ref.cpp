#include <algorithm>
#include <vector>

#include "kernels/base/host_parallel.h"
#include "kernels/fp8/fp8.h"
#include "kernels/fp8/fp8_scale.h"

namespace speedrun::kernels {
namespace {

constexpr int64_t kRows = 16;  // of one task

// A tensor on its way to FP8. Values pass through float whatever T is: BF16 ones, as on CUDA, are exact in it.
template <class T, class Fp8>
struct Conversion {
  Fp8* out;
  Fp8* out_t;
  const T* inp;
  Fp8Scale* scale;
  int64_t rows, cols;
  Fp8Scaling scaling;
  bool count;
  double start_margin = 0;
};

e4m3 encoded(e4m3, float value) { return to_e4m3(value); }
e5m2 encoded(e5m2, float value) { return to_e5m2(value); }

// result = what `part` found in each range of rows, combined; the order does not matter.
template <class Part>
Fp8Scale over_rows(int64_t rows, const HostExec& exec, const Part& part) {
  std::vector<Fp8Scale> parts(static_cast<size_t>((rows + kRows - 1) / kRows));
  parallel_ranges(exec, rows, kRows,
                  [&](int64_t begin, int64_t end) { parts[static_cast<size_t>(begin / kRows)] = part(begin, end); });
  Fp8Scale total;
  for (const Fp8Scale& found : parts) {
    total.amax = std::max(total.amax, found.amax);
    total.saturated += found.saturated;
    total.flushed += found.flushed;
  }
  return total;
}

template <class T, class Fp8>
uint32_t maximum(const Conversion<T, Fp8>& c, const HostExec& exec) {
  return over_rows(c.rows, exec,
                   [&](int64_t begin, int64_t end) {
                     Fp8Scale found;
                     for (int64_t i = begin * c.cols; i < end * c.cols; ++i)
                       found.amax = std::max(found.amax, magnitude_bits(static_cast<float>(c.inp[i])));
                     return found;
                   })
      .amax;
}

template <class T, class Fp8>
void convert(const Conversion<T, Fp8>& c, const HostExec& exec) {
  Fp8Scale& scale = *c.scale;
  if (c.scaling == Fp8Scaling::current) {
    scale.amax = maximum(c, exec);
    scale.scale = current_scale(scale.amax, Fp8Range<Fp8>::largest);
  } else if (c.scaling == Fp8Scaling::delayed && c.start_margin != 0 && scale.scale == 0) {
    scale.scale = current_scale(maximum(c, exec), Fp8Range<Fp8>::largest, c.start_margin);
  }
  const float inverse_scale = 1.0f / scale.scale;
  const Fp8Scale found = over_rows(c.rows, exec, [&](int64_t begin, int64_t end) {
    Fp8Scale part;
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < c.cols; ++col) {
        const float value = static_cast<float>(c.inp[row * c.cols + col]), scaled = value * inverse_scale;
        const Fp8 code = encoded(Fp8{}, scaled);
        if (c.out != nullptr) c.out[row * c.cols + col] = code;
        if (c.out_t != nullptr) c.out_t[col * c.rows + row] = code;
        part.amax = std::max(part.amax, magnitude_bits(value));
        part.saturated += is_saturated<Fp8>(scaled);
        part.flushed += is_flushed<Fp8>(value, scaled);
      }
    }
    return part;
  });
  if (c.scaling == Fp8Scaling::delayed) scale.amax = std::max(scale.amax, found.amax);
  if (c.count) {
    scale.saturated += found.saturated;
    scale.flushed += found.flushed;
  }
}

}  // namespace

template <class T>
void fp8_weights(const Fp8Weights<T>& args, const HostExec& exec) {
  if (args.verdict != nullptr && args.verdict->skip != 0) return;
  for (int i = 0; i < args.num_items; ++i) {
    const Fp8WeightItem<T>& item = args.items[i];
    convert(Conversion<T, e4m3>{item.out, item.out_t, item.weight, item.scale, item.rows, item.cols, args.scaling, args.count},
            exec);
  }
}

template <class T, class Fp8>
void fp8_quantize(const Fp8Quantize<T, Fp8>& args, const HostExec& exec) {
  convert(Conversion<T, Fp8>{args.out, args.out_t, args.inp, args.scale, args.rows, args.cols, args.scaling, args.count,
                             args.start_margin},
          exec);
}

void fp8_next_scales(const Fp8NextScales& args, const HostExec&) {
  for (int i = 0; i < args.num_scales; ++i) {
    Fp8Scale& scale = args.scales[i];
    const NextScale next = next_scale(scale, args.margin, args.largest, args.forget_zeros);
    if (next.bad && args.verdict != nullptr && args.verdict->skip == 0) {
      args.verdict->skip = 1;
      args.verdict->bad_parameter = -2 - i;
    }
    scale.scale = next.scale;
    scale.amax = 0;
  }
}

template void fp8_weights(const Fp8Weights<float>&, const HostExec&);
template void fp8_weights(const Fp8Weights<double>&, const HostExec&);
template void fp8_quantize(const Fp8Quantize<float, e4m3>&, const HostExec&);
template void fp8_quantize(const Fp8Quantize<float, e5m2>&, const HostExec&);
template void fp8_quantize(const Fp8Quantize<double, e4m3>&, const HostExec&);
template void fp8_quantize(const Fp8Quantize<double, e5m2>&, const HostExec&);

}  // namespace speedrun::kernels

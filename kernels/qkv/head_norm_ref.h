#pragma once
// RMS norm of one head, without gain, and its gradient, as the CPU references of both projections use them.
#include <cmath>

#include "kernels/base/dtype.h"

namespace speedrun::kernels {

// x (D) <- x / rms(x); returns 1/rms.
template <class T>
Acc<T> normalize_head(T* x, int D, double eps) {
  Acc<T> squares = 0;
  for (int d = 0; d < D; ++d) squares += x[d] * x[d];
  const Acc<T> rstd = 1 / std::sqrt(squares / static_cast<T>(D) + static_cast<T>(eps));
  for (int d = 0; d < D; ++d) x[d] *= rstd;
  return rstd;
}

// dx (D) <- gradient before the norm, from the gradient after it and the normalised values: rstd·(dx − x̂·mean(dx·x̂)).
template <class T>
void normalize_head_backward(T* dx, const T* normed, Acc<T> rstd, int D) {
  Acc<T> dot = 0;
  for (int d = 0; d < D; ++d) dot += dx[d] * normed[d];
  const Acc<T> mean = dot / static_cast<T>(D);
  for (int d = 0; d < D; ++d) dx[d] = rstd * (dx[d] - normed[d] * mean);
}

}  // namespace speedrun::kernels

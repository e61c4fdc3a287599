#pragma once
// Muon (Jordan et al. 2024) on a batch of equally shaped matrices, rows = output features:
//   G = grad · verdict.grad_scale;   M ← μM + (1−μ)G;   U = nesterov ? (1−μ)G + μM : M;   X = T(U), transposed if rows > cols
//   X ← X / (norm_margin·‖X‖_F + eps);   iterations times: A = XXᵀ, B = bA + cA², X ← aX + BX   (A, B, X stored in T, sums in
//   Acc<T>) W ← W − decay·W;   W ← W − lr · √max(1, rows/cols) · X(ᵀ)
// A zero gradient gives a zero X. Does nothing if verdict.skip is set.
// Cost per iteration and matrix, m = min, n = max of (rows, cols): 4·m²·n + 2·m³ FLOPs.
#include "kernels/base/exec.h"
#include "kernels/base/step_values.h"
#include "kernels/base/weight.h"

namespace speedrun::kernels {

template <class T>
struct MuonMatrix {
  WeightRef<T> weight;  // (rows, cols)
  Acc<T>* momentum;     // (rows, cols), zero at start
  const Acc<T>* grad;   // (rows, cols)
};

struct MuonCoefficients {
  double a, b, c;
};

template <class T>
struct Muon {
  const MuonMatrix<T>* matrices;         // (batch) table in device memory
  const MuonCoefficients* coefficients;  // (iterations) in HOST memory: they are launch parameters, fixed for the run
  T* x;                                  // (2, batch, rows·cols) scratch
  T* gram;                               // (2, batch, min(rows, cols)²) scratch
  Acc<T>* norms;                         // (batch, kMuonNormParts) scratch: partial sums of squares, added in a fixed order
  const MuonStep* step;                  // on the device
  const StepVerdict* verdict;            // on the device
  int batch, rows, cols, iterations;
  bool nesterov;
  double norm_margin, eps;
};

inline constexpr int kMuonNormParts = 64;

template <class T>
void muon_update(const Muon<T>& args, const HostExec& exec);
void muon_update(const Muon<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// Muon on a batch of equally shaped matrices, rows = output features:
//   G = grad · verdict.grad_scale;   M ← μM + (1−μ)G;   U = nesterov ? (1−μ)G + μM : M;   X = T(U)
//   X ← X / (norm_margin·‖X‖_F + eps);   iterations times: A = XXᵀ, B = bA + cA², X ← aX + BX   (A, B, X stored in T, sums in
//   Acc<T>); tall matrices are transposed for this, so that A is the smaller product: X(XᵀX) = (XXᵀ)X
//   muon      W ← W − decay·W;   W ← W − lr·s·X,   s = √max(1, rows/cols)     (Jordan et al. 2024)
//   normuon   one statistic per row (rows >= cols) or per column: m = mean of X² along it;   v ← β2·v + (1−β2)·m
//             r = 1/√max(v, 1e-10);   V = X · T(r · ‖X‖_F / max(√Σ(X·r)², 1e-10))   (Frobenius norm kept; V itself is not stored)
//             W ← W − [V·W >= 0]·decay·s·W − lr·s·V             (modded-nanogpt record #89)
// A zero gradient gives a zero X. Does nothing if verdict.skip is set.
// Cost per iteration and matrix, m = min, n = max of (rows, cols): 4·m²·n + 2·m³ FLOPs.
#include "kernels/base/exec.h"
#include "kernels/base/step_values.h"
#include "kernels/base/weight.h"

namespace speedrun::kernels {

enum class MuonForm : int { muon, normuon };

template <class T>
struct MuonMatrix {
  WeightRef<T> weight;   // (rows, cols)
  Acc<T>* momentum;      // (rows, cols), zero at start
  Acc<T>* second;        // normuon: (max(rows, cols)) v, zero at start; else null
  const Acc<T>* grad;    // (rows, cols)
  const MuonStep* step;  // on the device; groups with rates of their own can share a batch
  bool decays = true;    // false: step->decay is taken as 0
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
  Acc<T>* sums;                          // (batch, muon_sums(rows, cols)) scratch: partial sums, added in a fixed order
  const StepVerdict* verdict;            // on the device
  int batch, rows, cols, iterations;
  bool nesterov;
  double norm_margin, eps;
  MuonForm form = MuonForm::muon;
  double beta2 = 0;  // normuon
};

// Parts of a matrix whose squares are summed apart, and columns of X whose statistics are made together.
inline constexpr int kMuonNormParts = 64, kMuonStatColumns = 64;

inline constexpr int muon_stat_tiles(int rows, int cols) {
  return ((rows > cols ? rows : cols) + kMuonStatColumns - 1) / kMuonStatColumns;
}
inline constexpr int muon_sums(int rows, int cols) {
  const int stats = 2 * muon_stat_tiles(rows, cols);
  return stats > kMuonNormParts ? stats : kMuonNormParts;
}
// X is (cols, rows): statistics are then always of columns of X.
inline constexpr bool muon_transposes(MuonForm form, int rows, int cols) {
  return rows > cols || (form == MuonForm::normuon && rows == cols);
}

template <class T>
void muon_update(const Muon<T>& args, const HostExec& exec);
void muon_update(const Muon<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

#pragma once
// Weight extrapolation: a jump from the last of k snapshots of some parameters, taken as one vector x, towards where their sequence
// x_0, x_1, …, x_{k−1} (oldest first) tends to. With differences u_j = x_{j+1} − x_j and G_ij = ⟨u_i, u_j⟩ every method is
//   x* = x_{k−1} − d · Σ_j γ_j u_j,   then   x_{k−1} + δ · min(1, max_jump / ratio),  δ = x* − x_{k−1},  ratio = ‖δ‖ /
//   max(‖x_{k−1}‖, 1e−12)
// and differs in γ alone (m = k − 1 differences; every c sums to 1, from (G + λI) c ∝ 1 unless said otherwise,
// λ = regularization · max(tr G, 0) / m + 1e−10):
//   rre         γ_j = Σ_{i ≤ j} c_i        reduced-rank extrapolation (Eddy 1979, Mešina 1977): x* = Σ c_i x_i
//   rre_suffix  γ_j = Σ_{i ≥ j} c_i        as modded-nanogpt's optimization track result #34 writes it
//   mpe         as rre, c from Σ_{i < m−1} c_i u_i ≈ −u_{m−1}, c_{m−1} = 1, normalised (Cabay & Jackson 1976)
//   anderson    γ_j = Σ_{i < j} c_i + (1 − mixing) Σ_{i = j} c_i      x* = Σ c_i (x_i + mixing · u_i) (Anderson 1965)
//   linear      γ_j = −horizon / m                                     on along the mean difference
// ‖δ‖ follows from G: ‖Σ γ_j u_j‖² = γᵀGγ (without λ), so one pass makes all sums and a second one jumps.
#include <cstdint>

#include "kernels/base/exec.h"
#include "kernels/base/step_values.h"
#include "kernels/base/weight.h"

namespace speedrun::kernels {

inline constexpr int kMaxSnapshots = 8;
inline constexpr int kMaxSnapshotSums = kMaxSnapshots * (kMaxSnapshots - 1) / 2 + 1;

enum class ExtrapolationMethod : int { rre, rre_suffix, mpe, anderson, linear, fixed };  // fixed: γ as given in JumpPlan::fixed

// At most kSnapshotPiece neighbouring elements of one parameter: the unit of work. offset: of the first of them in every snapshot.
inline constexpr int64_t kSnapshotPiece = 32768;
template <class T>
struct SnapshotPiece {
  WeightRef<T> weight;  // (count), at the first element; CUDA is faster where all pointers are 16-byte aligned
  int64_t offset = 0;
  int64_t count = 0;
  bool counted = true;  // false: another rank has the same elements and counts them in the sums
};

// Why a jump was not made; the weights are then as they were.
enum class JumpRefusal : int { none, singular, not_finite, no_change };

// One jump as the log tells of it; always finite. Refused: all 0 but refusal, differences and, if it was reached, condition.
struct JumpReport {
  JumpRefusal refusal = JumpRefusal::none;
  int differences = 0;               // m
  double jump = 0, capped_jump = 0;  // ratio before and after the cap
  // Largest over smallest eigenvalue of G + λI (mpe: of its leading m − 1 rows and columns), at most 2⁴⁶; 0 if nothing is solved.
  double condition = 0;
  double c[kMaxSnapshots - 1] = {};        // coefficients that sum to 1; linear, fixed: 0
  double weights[kMaxSnapshots - 1] = {};  // x* − x_{k−1} = −Σ weights_j u_j, damping and cap included
};

// With num_pieces = 0 (a rank that updates nothing) the ops below do nothing, but snapshot_sums, which writes zeros.

// snapshot[offset + i] = master of weight element i, for every piece. Acc<T> holds a master exactly.
template <class T>
struct TakeSnapshot {
  const SnapshotPiece<T>* pieces;  // (num_pieces) on the device
  int64_t num_pieces;
  Acc<T>* snapshot;
};

// average[…] += (master − average[…]) · share; share = 1 starts it. In Acc<T>.
template <class T>
struct AverageWeights {
  const SnapshotPiece<T>* pieces;
  int64_t num_pieces;
  Acc<T>* average;
  Acc<T> share;
};

// sums = G's upper triangle by rows (00, 01, …, 0m−1, 11, …), then ‖x_{k−1}‖²: over the counted elements, in double, in a fixed
// order. Reads every snapshot once.
template <class T>
struct SnapshotSums {
  const SnapshotPiece<T>* pieces;
  int64_t num_pieces;
  const Acc<T>* snapshots[kMaxSnapshots];  // oldest first; device memory or host memory that the device can read
  int k;                                   // 2 … kMaxSnapshots
  double* scratch;                         // snapshot_sums_scratch(num_pieces, k)
  double* sums;                            // k(k−1)/2 + 1
};
int64_t snapshot_sums_scratch(int64_t num_pieces, int k);  // elements of double

// From the sums of all ranks to the report, in one thread. Refuses, in this order:
//   not_finite  a sum is not finite, or the verdict says skip (a step was not finite)
//   no_change   every difference is 0
//   singular    the smallest eigenvalue is rounding (condition at its bound), or |Σc| < 1e−12 before c is normalised
//   not_finite  a coefficient or ‖δ‖ is not, or an element of the result could be beyond the largest float
struct JumpPlan {
  ExtrapolationMethod method;
  int k;
  double regularization, damping;
  double max_jump;                       // 0: no cap
  double horizon = 1;                    // linear
  double mixing = 1;                     // anderson
  double fixed[kMaxSnapshots - 1] = {};  // fixed: γ
  const double* sums;                    // on the device
  const StepVerdict* verdict;            // on the device
  JumpReport* report;                    // on the device
};

// master = x_{k−1} − Σ weights_j u_j in Acc<T>, stored as the weight's split asks for; the value as stored (BF16 alone where there
// is no master) also goes to `result`, which may be one of the snapshots or null. k = 1: writes x_0 back. A refused jump does not
// touch the weights; their masters as they are go to `result`.
template <class T>
struct JumpWeights {
  const SnapshotPiece<T>* pieces;
  int64_t num_pieces;
  const Acc<T>* snapshots[kMaxSnapshots];
  int k;
  const JumpReport* report;  // on the device; not read if k = 1
  Acc<T>* result;
};

template <class T>
void take_snapshot(const TakeSnapshot<T>& args, const HostExec& exec);
template <class T>
void average_weights(const AverageWeights<T>& args, const HostExec& exec);
template <class T>
void snapshot_sums(const SnapshotSums<T>& args, const HostExec& exec);
void plan_jump(const JumpPlan& args, const HostExec& exec);
template <class T>
void jump_weights(const JumpWeights<T>& args, const HostExec& exec);

void take_snapshot(const TakeSnapshot<bf16>& args, const CudaExec& exec);
void average_weights(const AverageWeights<bf16>& args, const CudaExec& exec);
void snapshot_sums(const SnapshotSums<bf16>& args, const CudaExec& exec);
void plan_jump(const JumpPlan& args, const CudaExec& exec);
void jump_weights(const JumpWeights<bf16>& args, const CudaExec& exec);

}  // namespace speedrun::kernels

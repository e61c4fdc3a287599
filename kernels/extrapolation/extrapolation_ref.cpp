#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/host_parallel.h"
#include "kernels/extrapolation/extrapolation.h"
#include "kernels/extrapolation/extrapolation_parts.h"
#include "kernels/extrapolation/extrapolation_plan.h"

namespace speedrun::kernels {
namespace {

int num_sums(int k) { return k * (k - 1) / 2 + 1; }

// The sums of one piece, element by element.
template <class T>
void add_piece(const SnapshotSums<T>& a, const SnapshotPiece<T>& piece, double* sums) {
  double u[kMaxSnapshots - 1];
  for (int64_t i = piece.offset; i < piece.offset + piece.count; ++i) {
    for (int j = 0; j + 1 < a.k; ++j) u[j] = static_cast<double>(a.snapshots[j + 1][i]) - static_cast<double>(a.snapshots[j][i]);
    int s = 0;
    for (int row = 0; row + 1 < a.k; ++row) {
      for (int column = row; column + 1 < a.k; ++column) sums[s++] += u[row] * u[column];
    }
    const double newest = static_cast<double>(a.snapshots[a.k - 1][i]);
    sums[s] += newest * newest;
  }
}

}  // namespace

int64_t snapshot_sums_scratch(int64_t num_pieces, int k) { return num_pieces * kSnapshotParts * num_sums(k); }

template <class T>
void take_snapshot(const TakeSnapshot<T>& a, const HostExec& exec) {
  parallel(exec, a.num_pieces, [&](int64_t p) {
    const SnapshotPiece<T>& piece = a.pieces[p];
    std::copy_n(piece.weight.value, piece.count, a.snapshot + piece.offset);
  });
}

template <class T>
void average_weights(const AverageWeights<T>& a, const HostExec& exec) {
  parallel(exec, a.num_pieces, [&](int64_t p) {
    const SnapshotPiece<T>& piece = a.pieces[p];
    Acc<T>* average = a.average + piece.offset;
    for (int64_t i = 0; i < piece.count; ++i) average[i] = averaged<Acc<T>>(average[i], piece.weight.value[i], a.share);
  });
}

template <class T>
void snapshot_sums(const SnapshotSums<T>& a, const HostExec& exec) {
  require(a.k >= 2 && a.k <= kMaxSnapshots, "snapshot_sums: k = ", a.k, " (2 to ", kMaxSnapshots, ")");
  const int n = num_sums(a.k);
  parallel(exec, a.num_pieces, [&](int64_t p) {
    double* sums = a.scratch + p * n;
    std::fill_n(sums, n, 0.0);
    if (a.pieces[p].counted) add_piece(a, a.pieces[p], sums);
  });
  std::fill_n(a.sums, n, 0.0);
  for (int64_t p = 0; p < a.num_pieces; ++p) {
    for (int s = 0; s < n; ++s) a.sums[s] += a.scratch[p * n + s];
  }
}

void plan_jump(const JumpPlan& args, const HostExec& /*exec*/) {
  require(args.k >= 2 && args.k <= kMaxSnapshots, "plan_jump: k = ", args.k, " (2 to ", kMaxSnapshots, ")");
  *args.report = make_jump_report(args, args.sums, args.verdict->skip != 0);
}

template <class T>
void jump_weights(const JumpWeights<T>& a, const HostExec& exec) {
  using A = Acc<T>;
  require(a.k >= 1 && a.k <= kMaxSnapshots, "jump_weights: k = ", a.k, " (1 to ", kMaxSnapshots, ")");
  const bool refused = a.k > 1 && a.report->refusal != JumpRefusal::none;
  A weights[kMaxSnapshots - 1] = {};
  for (int j = 0; j + 1 < a.k; ++j) weights[j] = static_cast<A>(a.report->weights[j]);

  parallel(exec, a.num_pieces, [&](int64_t p) {
    const SnapshotPiece<T>& piece = a.pieces[p];
    for (int64_t i = 0; i < piece.count; ++i) {
      A x[kMaxSnapshots];
      for (int j = 0; j < a.k; ++j) x[j] = a.snapshots[j][piece.offset + i];
      if (!refused) {
        const A master = jumped(x, weights, a.k);
        piece.weight.value[i] = piece.weight.split == MasterSplit::none ? exec.store(master) : master;
      }
      if (a.result != nullptr) a.result[piece.offset + i] = piece.weight.value[i];
    }
  });
}

template void take_snapshot(const TakeSnapshot<float>&, const HostExec&);
template void take_snapshot(const TakeSnapshot<double>&, const HostExec&);
template void average_weights(const AverageWeights<float>&, const HostExec&);
template void average_weights(const AverageWeights<double>&, const HostExec&);
template void snapshot_sums(const SnapshotSums<float>&, const HostExec&);
template void snapshot_sums(const SnapshotSums<double>&, const HostExec&);
template void jump_weights(const JumpWeights<float>&, const HostExec&);
template void jump_weights(const JumpWeights<double>&, const HostExec&);

}  // namespace speedrun::kernels

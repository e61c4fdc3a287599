#include "kernels/bench/bench.h"
#include "kernels/extrapolation/extrapolation.h"

namespace speedrun::kernels {

void bench_extrapolation(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  // The 72 hidden matrices of a 12-layer model of width 768, with exact masters.
  constexpr int64_t kElements = int64_t{12} * 12 * 768 * 768, kPieces = kElements / kSnapshotPiece;
  static_assert(kPieces * kSnapshotPiece == kElements);
  constexpr int kSnapshots = 4, kMostDifferences = kMaxSnapshots - 1;
  constexpr double kMaster = 4, kFloat = 4;  // bytes of an element

  const BenchBuffer value = BenchBuffer::normal_bf16(kElements, 0.03), low = BenchBuffer::normal_bf16(kElements);
  std::vector<SnapshotPiece<bf16>> host_pieces;
  for (int64_t offset = 0; offset < kElements; offset += kSnapshotPiece)
    host_pieces.push_back(
        {.weight = {.value = value.as<bf16>() + offset, .low = low.as<uint16_t>() + offset, .split = MasterSplit::nearest},
         .offset = offset,
         .count = kSnapshotPiece});
  const BenchBuffer pieces = BenchBuffer::copy_of(host_pieces.data(), host_pieces.size() * sizeof(SnapshotPiece<bf16>));
  std::vector<BenchBuffer> snapshots;
  // The same numbers in every buffer but for their size, so that there is a difference to jump along.
  for (int j = 0; j < kSnapshots; ++j) snapshots.push_back(BenchBuffer::normal_f32(kElements, 0.03 + 1e-5 * j * j));
  const BenchBuffer result = BenchBuffer::normal_f32(kElements, 0.03);
  const BenchBuffer scratch = BenchBuffer::zeroed(static_cast<size_t>(snapshot_sums_scratch(kPieces, kSnapshots)) * sizeof(double));
  const BenchBuffer sums = BenchBuffer::zeroed(kMaxSnapshotSums * sizeof(double)),
                    verdict = BenchBuffer::zeroed(sizeof(StepVerdict));
  const BenchBuffer report = BenchBuffer::zeroed(sizeof(JumpReport));

  const TakeSnapshot<bf16> take{.pieces = pieces.as<SnapshotPiece<bf16>>(), .num_pieces = kPieces, .snapshot = result.as<float>()};
  const AverageWeights<bf16> average{
      .pieces = pieces.as<SnapshotPiece<bf16>>(), .num_pieces = kPieces, .average = result.as<float>(), .share = 1.0f / 150};
  SnapshotSums<bf16> gram{.pieces = pieces.as<SnapshotPiece<bf16>>(),
                          .num_pieces = kPieces,
                          .snapshots = {},
                          .k = kSnapshots,
                          .scratch = scratch.as<double>(),
                          .sums = sums.as<double>()};
  JumpWeights<bf16> jump{.pieces = pieces.as<SnapshotPiece<bf16>>(),
                         .num_pieces = kPieces,
                         .snapshots = {},
                         .k = kSnapshots,
                         .report = report.as<JumpReport>(),
                         .result = result.as<float>()};
  for (int j = 0; j < kSnapshots; ++j) gram.snapshots[j] = jump.snapshots[j] = snapshots[static_cast<size_t>(j)].as<float>();
  const JumpPlan plan{.method = ExtrapolationMethod::rre,
                      .k = kSnapshots,
                      .regularization = 1e-6,
                      .damping = 0.875,
                      .max_jump = 0.001,
                      .sums = sums.as<double>(),
                      .verdict = verdict.as<StepVerdict>(),
                      .report = report.as<JumpReport>()};
  // The largest system: differences of random sizes and neighbours that depend on each other.
  std::vector<double> host_sums;
  for (int i = 0; i < kMostDifferences; ++i) {
    for (int j = i; j < kMostDifferences; ++j) host_sums.push_back(1.0 / (1 + j - i) + (i == j ? 0.1 * i : 0));
  }
  host_sums.push_back(1e6);
  const BenchBuffer large_sums = BenchBuffer::copy_of(host_sums.data(), host_sums.size() * sizeof(double));
  const BenchBuffer large_report = BenchBuffer::zeroed(sizeof(JumpReport));
  JumpPlan large_plan = plan;
  large_plan.k = kMaxSnapshots;
  large_plan.sums = large_sums.as<double>();
  large_plan.report = large_report.as<JumpReport>();

  constexpr double kCount = kElements;
  bench_table("extrapolation, 84.9 M weights with exact masters, 4 snapshots",
              {bench_copy(static_cast<size_t>(kElements) * sizeof(float), exec),
               {"snapshot", [&] { take_snapshot(take, exec); }, 0, kCount * (kMaster + kFloat)},
               {"average", [&] { average_weights(average, exec); }, 0, kCount * (kMaster + 2 * kFloat)},
               {"sums", [&] { snapshot_sums(gram, exec); }, 0, kCount * kSnapshots * kFloat},
               {"plan", [&] { plan_jump(plan, exec); }},
               {"plan, 8 snapshots", [&] { plan_jump(large_plan, exec); }},
               {"jump", [&] { jump_weights(jump, exec); }, 0, kCount * (kSnapshots * kFloat + kMaster + kFloat)},
               {"sums, plan, jump", [&] { snapshot_sums(gram, exec), plan_jump(plan, exec), jump_weights(jump, exec); }, 0,
                kCount * (2 * kSnapshots * kFloat + kMaster + kFloat)}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

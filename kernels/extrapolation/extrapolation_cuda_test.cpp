// CUDA snapshots, averages, sums and jumps against the reference, which works on the FP32 masters. Pieces of every alignment, count
// and kind of master lie in common buffers; what is between them must stay as it was.
#include "kernels/extrapolation/extrapolation_sequence_test.h"
#include "kernels/extrapolation/reset_moment.h"
#include "kernels/testing/cuda_test.h"

namespace speedrun::kernels {
namespace {

using testing::CudaTest;
using testing::DeviceBuffer;
using testing::Random;
using testing::same_bits;
using testing::test_random;

constexpr MasterSplit kSplits[] = {MasterSplit::nearest, MasterSplit::truncated, MasterSplit::none};

// A piece's places in the buffers of weights and of snapshots, in elements.
struct Place {
  int64_t weight, snapshot, count;
  MasterSplit split;
  bool counted;
};

struct Layout {
  std::vector<Place> places;
  int64_t weights = 0, snapshot = 0;  // elements of the buffers, gaps included

  void add(int64_t count, int64_t weight_gap, int64_t snapshot_gap, MasterSplit split, bool counted = true) {
    places.push_back(
        {.weight = weights + weight_gap, .snapshot = snapshot + snapshot_gap, .count = count, .split = split, .counted = counted});
    weights += weight_gap + count;
    snapshot += snapshot_gap + count;
  }
};

int64_t to_multiple(int64_t position, int64_t multiple) { return (multiple - position % multiple) % multiple; }

// Counts around the vector width and the work of a block, aligned and not, and some at random.
Layout make_layout(Random& random) {
  Layout layout;
  for (const MasterSplit split : kSplits) {
    for (const int64_t count :
         {int64_t{1}, int64_t{7}, int64_t{8}, int64_t{9}, int64_t{2048}, int64_t{8191}, int64_t{8193}, kSnapshotPiece}) {
      layout.add(count, to_multiple(layout.weights, 8), to_multiple(layout.snapshot, 4), split);
      layout.add(count, 1 + random.below(8), 1 + random.below(8), split, random.below(4) != 0);
    }
    for (int i = 0; i < 20; ++i) layout.add(1 + random.below(3000), random.below(9), random.below(9), split, random.below(4) != 0);
    layout.add(0, 3, 3, split);
    // Weights aligned and snapshots not, and the reverse.
    layout.add(1001, to_multiple(layout.weights, 8), to_multiple(layout.snapshot, 4) + 1, split);
    layout.add(1001, to_multiple(layout.weights, 8) + 1, to_multiple(layout.snapshot, 4), split);
  }
  return layout;
}

template <class T>
std::vector<T> all_ones(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (count > 0) std::memset(static_cast<void*>(values.data()), 0xff, values.size() * sizeof(T));
  return values;
}

// Weights in both forms: as the device has them, and as masters for the reference.
struct Weights {
  std::vector<bf16> value;
  std::vector<uint16_t> low;
  std::vector<float> masters;

  Weights(const Layout& layout, Random& random)
      : value(all_ones<bf16>(layout.weights)), low(all_ones<uint16_t>(layout.weights)), masters(all_ones<float>(layout.weights)) {
    for (const Place& place : layout.places) {
      for (int64_t i = place.weight; i < place.weight + place.count; ++i) {
        const auto at = static_cast<size_t>(i);
        uint16_t rest;
        split_master(static_cast<float>(random.normal()), place.split, value[at], rest);
        if (place.split != MasterSplit::none) low[at] = rest;
        masters[at] = join_master(value[at], rest, place.split);
      }
    }
  }

  // The device's form of masters that the reference wrote.
  void split(const Layout& layout) {
    for (const Place& place : layout.places) {
      for (int64_t i = place.weight; i < place.weight + place.count; ++i) {
        const auto at = static_cast<size_t>(i);
        uint16_t rest;
        split_master(masters[at], place.split, value[at], rest);
        if (place.split != MasterSplit::none) low[at] = rest;
      }
    }
  }

  std::vector<SnapshotPiece<float>> pieces(const Layout& layout) {
    std::vector<SnapshotPiece<float>> made;
    for (const Place& p : layout.places)
      made.push_back({.weight = {.value = masters.data() + p.weight, .low = nullptr, .split = p.split},
                      .offset = p.snapshot,
                      .count = p.count,
                      .counted = p.counted});
    return made;
  }
};

// Snapshots that a run could have left: each near the one before.
std::vector<std::vector<float>> make_snapshots(const Layout& layout, int k, Random& random) {
  std::vector<std::vector<float>> x = {random.normal_vector<float>(layout.snapshot)};
  while (static_cast<int>(x.size()) < k) {
    std::vector<float> next = x.back();
    for (float& value : next) value += static_cast<float>(0.01 * random.normal());
    x.push_back(next);
  }
  return x;
}

struct FreePinned {
  void operator()(float* pointer) const { cudaFreeHost(pointer); }
};
using Pinned = std::unique_ptr<float, FreePinned>;

Pinned pinned(const std::vector<float>& values) {
  float* pointer = nullptr;
  cuda_check(cudaMallocHost(reinterpret_cast<void**>(&pointer), values.size() * sizeof(float)), "allocating pinned memory");
  std::copy(values.begin(), values.end(), pointer);
  return Pinned(pointer);
}

class ExtrapolationCudaTest : public CudaTest {
 protected:
  // Weights on the device.
  struct Device {
    DeviceBuffer<bf16> value;
    DeviceBuffer<uint16_t> low;
    DeviceBuffer<SnapshotPiece<bf16>> pieces;
    int64_t num_pieces;
  };

  Device device(const Layout& layout, const Weights& weights) const {
    auto value = uploaded("values", weights.value);
    auto low = uploaded("low halves", weights.low);
    std::vector<SnapshotPiece<bf16>> pieces;
    for (const Place& p : layout.places)
      pieces.push_back({.weight = {.value = value.get() + p.weight,
                                   .low = p.split == MasterSplit::none ? nullptr : low.get() + p.weight,
                                   .split = p.split},
                        .offset = p.snapshot,
                        .count = p.count,
                        .counted = p.counted});
    auto on_device = uploaded("pieces", pieces);
    return {.value = std::move(value),
            .low = std::move(low),
            .pieces = std::move(on_device),
            .num_pieces = static_cast<int64_t>(pieces.size())};
  }

  std::vector<DeviceBuffer<float>> upload(const std::vector<std::vector<float>>& x) const {
    std::vector<DeviceBuffer<float>> buffers;
    for (size_t j = 0; j < x.size(); ++j) buffers.push_back(uploaded("snapshot " + std::to_string(j), x[j]));
    return buffers;
  }

  std::vector<double> reference_sums(const Layout& layout, Weights& weights, const std::vector<std::vector<float>>& x) {
    const std::vector<SnapshotPiece<float>> pieces = weights.pieces(layout);
    const int k = static_cast<int>(x.size());
    const auto num_pieces = static_cast<int64_t>(pieces.size());
    std::vector<double> scratch(static_cast<size_t>(snapshot_sums_scratch(num_pieces, k)));
    std::vector<double> sums(static_cast<size_t>(k * (k - 1) / 2 + 1));
    SnapshotSums<float> args{
        .pieces = pieces.data(), .num_pieces = num_pieces, .snapshots = {}, .k = k, .scratch = scratch.data(), .sums = sums.data()};
    for (size_t j = 0; j < x.size(); ++j) args.snapshots[j] = x[j].data();
    snapshot_sums(args, truth_exec());
    return sums;
  }

  std::vector<double> device_sums(const Device& on, const std::vector<const float*>& x, Launch launch = Launch::direct) const {
    const int k = static_cast<int>(x.size());
    auto scratch = poisoned<double>("scratch", snapshot_sums_scratch(on.num_pieces, k));
    auto sums = poisoned<double>("sums", k * (k - 1) / 2 + 1);
    SnapshotSums<bf16> args{.pieces = on.pieces.get(),
                            .num_pieces = on.num_pieces,
                            .snapshots = {},
                            .k = k,
                            .scratch = scratch.get(),
                            .sums = sums.get()};
    std::copy(x.begin(), x.end(), args.snapshots);
    run(launch, [&] { snapshot_sums(args, exec()); });
    return sums.download();
  }

  JumpReport device_report(JumpPlan plan, const std::vector<double>& sums, const StepVerdict& verdict = {}) const {
    auto on_sums = uploaded("sums", sums);
    auto on_verdict = uploaded("verdict", std::vector<StepVerdict>{verdict});
    auto report = poisoned<JumpReport>("report", 1);
    plan.sums = on_sums.get();
    plan.verdict = on_verdict.get();
    plan.report = report.get();
    plan_jump(plan, exec());
    return report.download()[0];
  }

  // The reference's jump of `weights`, and what it writes to `result`.
  void reference_jump(const Layout& layout, Weights& weights, const std::vector<std::vector<float>>& x, const JumpReport& report,
                      std::vector<float>& result) {
    const std::vector<SnapshotPiece<float>> pieces = weights.pieces(layout);
    JumpWeights<float> args{.pieces = pieces.data(),
                            .num_pieces = static_cast<int64_t>(pieces.size()),
                            .snapshots = {},
                            .k = static_cast<int>(x.size()),
                            .report = &report,
                            .result = result.data()};
    for (size_t j = 0; j < x.size(); ++j) args.snapshots[j] = x[j].data();
    jump_weights(args, baseline_exec());  // rounds where a BF16 value is all there is
    weights.split(layout);
  }

  void device_jump(const Device& on, const std::vector<const float*>& x, const JumpReport* report, float* result,
                   Launch launch = Launch::direct) const {
    JumpWeights<bf16> args{.pieces = on.pieces.get(),
                           .num_pieces = on.num_pieces,
                           .snapshots = {},
                           .k = static_cast<int>(x.size()),
                           .report = report,
                           .result = result};
    std::copy(x.begin(), x.end(), args.snapshots);
    run(launch, [&] { jump_weights(args, exec()); });
  }

  static void expect_weights(const Device& on, const Weights& expected, const std::string& what) {
    EXPECT_TRUE(same_bits(on.value.download(), expected.value)) << what << ": values";
    EXPECT_TRUE(same_bits(on.low.download(), expected.low)) << what << ": low halves";
  }
};

std::vector<const float*> pointers(const std::vector<DeviceBuffer<float>>& buffers) {
  std::vector<const float*> made;
  for (const DeviceBuffer<float>& buffer : buffers) made.push_back(buffer.get());
  return made;
}

// Some weights of a jump that any k could make.
JumpReport random_report(int k, Random& random) {
  JumpReport report;
  report.differences = k - 1;
  for (int j = 0; j + 1 < k; ++j) report.weights[j] = random.normal();
  return report;
}

TEST_F(ExtrapolationCudaTest, SnapshotsHaveTheMastersBits) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  Weights weights(layout, random);
  const Device on = device(layout, weights);
  std::vector<float> expected = all_ones<float>(layout.snapshot);
  const std::vector<SnapshotPiece<float>> pieces = weights.pieces(layout);
  take_snapshot(TakeSnapshot<float>{pieces.data(), on.num_pieces, expected.data()}, truth_exec());
  for (const Launch launch : {Launch::direct, Launch::captured}) {
    auto snapshot = poisoned<float>("snapshot", layout.snapshot);
    run(launch, [&] { take_snapshot(TakeSnapshot<bf16>{on.pieces.get(), on.num_pieces, snapshot.get()}, exec()); });
    EXPECT_TRUE(same_bits(snapshot.download(), expected));
  }
  expect_weights(on, weights, "weights that were only read");
}

TEST_F(ExtrapolationCudaTest, AveragesHaveTheReferencesBits) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  std::vector<float> expected = all_ones<float>(layout.snapshot);
  auto average = poisoned<float>("average", layout.snapshot);  // NaN: the first share of 1 has to begin anew
  for (const float share : {1.0f, 1.0f / 150, 0.5f}) {
    Weights weights(layout, random);
    const Device on = device(layout, weights);
    const std::vector<SnapshotPiece<float>> pieces = weights.pieces(layout);
    average_weights(AverageWeights<float>{pieces.data(), on.num_pieces, expected.data(), share}, truth_exec());
    average_weights(AverageWeights<bf16>{on.pieces.get(), on.num_pieces, average.get(), share}, exec());
    EXPECT_TRUE(same_bits(average.download(), expected)) << "share " << share;
    expect_weights(on, weights, "weights that were only read");
  }
}

TEST_F(ExtrapolationCudaTest, SumsOfAnyNumberOfSnapshots) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  Weights weights(layout, random);
  const Device on = device(layout, weights);
  for (int k = 2; k <= kMaxSnapshots; ++k) {
    std::vector<std::vector<float>> x = make_snapshots(layout, k, random);
    std::vector<float> gaps(static_cast<size_t>(layout.snapshot), NAN);  // and what is not counted: neither may join in
    for (std::vector<float>& snapshot : x) {
      std::vector<float> only = gaps;
      for (const Place& p : layout.places) {
        if (p.counted) std::copy_n(snapshot.begin() + p.snapshot, p.count, only.begin() + p.snapshot);
      }
      snapshot = only;
    }
    const std::vector<double> expected = reference_sums(layout, weights, x);
    const auto buffers = upload(x);
    const std::vector<double> got = device_sums(on, pointers(buffers));
    size_t s = 0;
    for (int i = 0; i + 1 < k; ++i) {
      for (int j = i; j + 1 < k; ++j, ++s)
        EXPECT_NEAR(got[s], expected[s], 1e-12 * expected[0]) << "k = " << k << ", product of differences " << i << " and " << j;
    }
    EXPECT_NEAR(got[s], expected[s], 1e-12 * expected[s]) << "k = " << k << ", the newest snapshot's square";
    EXPECT_TRUE(same_bits(got, device_sums(on, pointers(buffers), Launch::captured))) << "k = " << k << ", second run";
  }
}

TEST_F(ExtrapolationCudaTest, EveryElementIsCounted) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  Weights weights(layout, random);
  const Device on = device(layout, weights);
  // Whole numbers: the sums are exact, so a single element that is left out or counted twice shows.
  std::vector<std::vector<float>> x(3, std::vector<float>(static_cast<size_t>(layout.snapshot), 0.0f));
  for (size_t i = 0; i < x[2].size(); ++i) {
    x[1][i] = static_cast<float>(random.below(1000));
    x[2][i] = static_cast<float>(1 + i % 1000);
  }
  const auto buffers = upload(x);
  EXPECT_TRUE(same_bits(device_sums(on, pointers(buffers)), reference_sums(layout, weights, x)));
}

TEST_F(ExtrapolationCudaTest, ManyPieces) {
  Random random = test_random();
  Layout layout;
  for (int i = 0; i < 3000; ++i) layout.add(1 + random.below(40), random.below(3), random.below(3), kSplits[i % 3]);
  Weights weights(layout, random);
  const Device on = device(layout, weights);
  const std::vector<std::vector<float>> x = make_snapshots(layout, 4, random);
  const auto buffers = upload(x);
  const std::vector<double> got = device_sums(on, pointers(buffers)), expected = reference_sums(layout, weights, x);
  for (size_t s = 0; s < got.size(); ++s) EXPECT_NEAR(got[s], expected[s], 1e-12 * std::max(expected[0], expected[s]));
}

TEST_F(ExtrapolationCudaTest, NoPieces) {
  const Layout layout;
  Random random = test_random();
  const Weights weights(layout, random);
  const Device on = device(layout, weights);
  take_snapshot(TakeSnapshot<bf16>{on.pieces.get(), 0, nullptr}, exec());
  average_weights(AverageWeights<bf16>{on.pieces.get(), 0, nullptr, 1}, exec());
  device_jump(on, std::vector<const float*>(4), nullptr, nullptr);
  for (const double sum : device_sums(on, std::vector<const float*>(4))) EXPECT_EQ(sum, 0);
}

TEST_F(ExtrapolationCudaTest, PlansAsTheReferenceDoes) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  Weights weights(layout, random);
  for (int k = 2; k <= kMaxSnapshots; ++k) {
    const std::vector<double> sums = reference_sums(layout, weights, make_snapshots(layout, k, random));
    for (const Method method : kAll) {
      for (const double max_jump : {0.0, 1e-5}) {
        JumpPlan plan = plan_of(method);
        plan.k = k;
        plan.damping = 0.875;
        plan.max_jump = max_jump;
        plan.horizon = 5;
        plan.mixing = 0.7;
        for (int j = 0; j + 1 < k; ++j) plan.fixed[j] = random.uniform(0.5, 1.5);
        const JumpReport got = device_report(plan, sums);
        JumpReport expected;
        const StepVerdict verdict;
        plan.sums = sums.data(), plan.verdict = &verdict, plan.report = &expected;
        plan_jump(plan, truth_exec());

        const std::string what = "method " + std::to_string(static_cast<int>(method)) + ", k = " + std::to_string(k);
        EXPECT_EQ(got.refusal, JumpRefusal::none) << what;
        EXPECT_EQ(got.differences, k - 1) << what;
        EXPECT_NEAR(got.jump, expected.jump, 1e-9 * expected.jump) << what;
        EXPECT_NEAR(got.capped_jump, expected.capped_jump, 1e-9 * expected.capped_jump) << what;
        EXPECT_NEAR(got.condition, expected.condition, 1e-9 * expected.condition) << what;
        for (int j = 0; j < kMaxSnapshots - 1; ++j) {
          EXPECT_NEAR(got.c[j], expected.c[j], 1e-9) << what << ", c " << j;
          EXPECT_NEAR(got.weights[j], expected.weights[j], 1e-9) << what << ", weight " << j;
        }
      }
    }
  }
}

TEST_F(ExtrapolationCudaTest, RefusesAsTheReferenceDoes) {
  struct Case {
    std::vector<double> sums;
    StepVerdict verdict;
    JumpRefusal expected;
  };
  const double huge = 1e10;
  const std::vector<Case> cases = {{{1, 0.5, 1, 10}, {}, JumpRefusal::none},
                                   {{0, 0, 0, 10}, {}, JumpRefusal::no_change},
                                   {{huge, huge, huge, huge}, {}, JumpRefusal::singular},
                                   {{1, NAN, 1, 10}, {}, JumpRefusal::not_finite},
                                   {{1, 0.5, INFINITY, 10}, {}, JumpRefusal::not_finite},
                                   {{1, 0.5, 1, NAN}, {}, JumpRefusal::not_finite},
                                   {{1, 0.5, 1, 10}, {.skip = 1}, JumpRefusal::not_finite}};
  for (size_t i = 0; i < cases.size(); ++i) {
    JumpPlan plan = plan_of(Method::rre);
    plan.k = 3;
    plan.regularization = 1e-18;
    const JumpReport got = device_report(plan, cases[i].sums, cases[i].verdict);
    EXPECT_EQ(got.refusal, cases[i].expected) << "case " << i;
    if (cases[i].expected == JumpRefusal::none) continue;
    for (const double weight : got.weights) EXPECT_EQ(weight, 0) << "case " << i;
  }
}

TEST_F(ExtrapolationCudaTest, JumpsHaveTheReferencesBits) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  for (int k = 1; k <= kMaxSnapshots; ++k) {
    const std::vector<std::vector<float>> x = make_snapshots(layout, k, random);
    const JumpReport report = random_report(k, random);
    auto on_report = uploaded("report", std::vector<JumpReport>{report});
    const Weights before(layout, random);
    Weights expected = before;
    std::vector<float> expected_result = all_ones<float>(layout.snapshot);
    reference_jump(layout, expected, x, report, expected_result);
    const std::string what = "k = " + std::to_string(k);

    const auto buffers = upload(x);
    for (const Launch launch : {Launch::direct, Launch::captured}) {
      const Device on = device(layout, before);
      auto result = poisoned<float>("result", layout.snapshot);
      device_jump(on, pointers(buffers), k == 1 ? nullptr : on_report.get(), result.get(), launch);
      expect_weights(on, expected, what);
      EXPECT_TRUE(same_bits(result.download(), expected_result)) << what << ": result";
    }
    for (size_t j = 0; j < x.size(); ++j) EXPECT_TRUE(same_bits(buffers[j].download(), x[j])) << what << ": snapshot " << j;

    const Device without = device(layout, before);
    device_jump(without, pointers(buffers), on_report.get(), nullptr);
    expect_weights(without, expected, what + ", no result");

    // The result in the place of a snapshot; between the pieces that one stays.
    const auto target = static_cast<size_t>(random.below(k));
    const Device over = device(layout, before);
    device_jump(over, pointers(buffers), on_report.get(), buffers[target].get());
    expect_weights(over, expected, what + ", result over a snapshot");
    std::vector<float> expected_over = x[target];
    for (const Place& p : layout.places)
      std::copy_n(expected_result.begin() + p.snapshot, p.count, expected_over.begin() + p.snapshot);
    EXPECT_TRUE(same_bits(buffers[target].download(), expected_over)) << what << ": result over snapshot " << target;
  }
}

TEST_F(ExtrapolationCudaTest, ARefusedJumpLeavesTheWeights) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  Weights weights(layout, random);
  std::vector<float> masters = all_ones<float>(layout.snapshot);
  const std::vector<SnapshotPiece<float>> pieces = weights.pieces(layout);
  take_snapshot(TakeSnapshot<float>{pieces.data(), static_cast<int64_t>(pieces.size()), masters.data()}, truth_exec());
  for (const JumpRefusal why : {JumpRefusal::singular, JumpRefusal::not_finite, JumpRefusal::no_change}) {
    JumpReport report = random_report(4, random);
    report.refusal = why;
    const auto on_report = uploaded("report", std::vector<JumpReport>{report});
    std::vector<std::vector<float>> x = make_snapshots(layout, 4, random);
    for (std::vector<float>& snapshot : x) std::fill(snapshot.begin(), snapshot.end(), NAN);
    const auto buffers = upload(x);
    const Device on = device(layout, weights);
    auto result = poisoned<float>("result", layout.snapshot);
    device_jump(on, pointers(buffers), on_report.get(), result.get());
    expect_weights(on, weights, "refused");
    EXPECT_TRUE(same_bits(result.download(), masters));
    device_jump(on, pointers(buffers), on_report.get(), nullptr);
    expect_weights(on, weights, "refused, no result");
  }
}

TEST_F(ExtrapolationCudaTest, SnapshotsInPinnedHostMemory) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  Weights weights(layout, random);
  const Device on = device(layout, weights);
  const std::vector<std::vector<float>> x = make_snapshots(layout, 4, random);
  std::vector<Pinned> buffers;
  std::vector<const float*> from;
  for (const std::vector<float>& snapshot : x) from.push_back(buffers.emplace_back(pinned(snapshot)).get());
  const Pinned result = pinned(all_ones<float>(layout.snapshot));
  auto values = [&] {
    cuda_check(cudaStreamSynchronize(exec().stream), "kernels on pinned memory");
    return std::vector<float>(result.get(), result.get() + layout.snapshot);
  };

  std::vector<float> expected = all_ones<float>(layout.snapshot);
  const std::vector<SnapshotPiece<float>> pieces = weights.pieces(layout);
  take_snapshot(TakeSnapshot<float>{pieces.data(), on.num_pieces, expected.data()}, truth_exec());
  take_snapshot(TakeSnapshot<bf16>{on.pieces.get(), on.num_pieces, result.get()}, exec());
  EXPECT_TRUE(same_bits(values(), expected));

  const auto on_device = upload(x);
  EXPECT_TRUE(same_bits(device_sums(on, from), device_sums(on, pointers(on_device))));

  const JumpReport report = random_report(4, random);
  const auto on_report = uploaded("report", std::vector<JumpReport>{report});
  reference_jump(layout, weights, x, report, expected);
  device_jump(on, from, on_report.get(), result.get());
  EXPECT_TRUE(same_bits(values(), expected));
  expect_weights(on, weights, "from pinned memory");
}

TEST_F(ExtrapolationCudaTest, ResetsAMoment) {
  Random random = test_random();
  for (const int64_t bytes : {int64_t{1}, int64_t{15}, int64_t{16}, int64_t{70'001}, int64_t{1} << 24}) {
    for (const JumpRefusal refusal : {JumpRefusal::none, JumpRefusal::singular}) {
      JumpReport report = random_report(4, random);
      report.refusal = refusal;
      const auto on_report = uploaded("report", std::vector<JumpReport>{report});
      std::vector<uint8_t> expected(static_cast<size_t>(bytes), 7);
      const auto moment = uploaded("moment", expected);
      reset_moment(ResetMoment{.moment = moment.get(), .bytes = bytes, .report = on_report.get()}, exec());
      reset_moment(ResetMoment{.moment = expected.data(), .bytes = bytes, .report = &report}, truth_exec());
      EXPECT_EQ(expected[0], refusal == JumpRefusal::none ? 0 : 7);
      EXPECT_TRUE(same_bits(moment.download(), expected)) << bytes << " bytes";
    }
  }
}

// Four updates, all kernels in a row, as a run does it.
TEST_F(ExtrapolationCudaTest, FromUpdatesToTheJump) {
  Random random = test_random();
  const Layout layout = make_layout(random);
  for (const Method method : kAll) {
    Weights weights(layout, random);
    std::vector<std::vector<float>> x;
    auto buffers = upload(std::vector<std::vector<float>>(4, all_ones<float>(layout.snapshot)));
    std::unique_ptr<Device> on;
    for (size_t n = 0; n < 4; ++n) {
      for (float& master : weights.masters) master += static_cast<float>(0.02 * random.normal());
      weights.split(layout);
      for (const Place& p : layout.places) {  // a BF16 value alone is rounded
        for (int64_t i = p.weight; i < p.weight + p.count; ++i) {
          const auto at = static_cast<size_t>(i);
          weights.masters[at] = join_master(weights.value[at], weights.low[at], p.split);
        }
      }
      on = std::make_unique<Device>(device(layout, weights));
      take_snapshot(TakeSnapshot<bf16>{on->pieces.get(), on->num_pieces, buffers[n].get()}, exec());
      const std::vector<SnapshotPiece<float>> pieces = weights.pieces(layout);
      take_snapshot(TakeSnapshot<float>{pieces.data(), on->num_pieces, x.emplace_back(all_ones<float>(layout.snapshot)).data()},
                    truth_exec());
    }
    JumpPlan plan = plan_of(method);
    plan.k = 4;
    plan.damping = 0.875;
    plan.max_jump = 0.01;
    plan.fixed[0] = plan.fixed[2] = 1;
    const JumpReport report = device_report(plan, device_sums(*on, pointers(buffers)));
    EXPECT_EQ(report.refusal, JumpRefusal::none);
    EXPECT_GT(report.jump, 0);
    const auto on_report = uploaded("report", std::vector<JumpReport>{report});
    device_jump(*on, pointers(buffers), on_report.get(), buffers[0].get());  // history begins anew

    std::vector<float> result = x[0];
    reference_jump(layout, weights, x, report, result);
    const std::string what = "method " + std::to_string(static_cast<int>(method));
    expect_weights(*on, weights, what);
    EXPECT_TRUE(same_bits(buffers[0].download(), result)) << what;
  }
}

}  // namespace
}  // namespace speedrun::kernels

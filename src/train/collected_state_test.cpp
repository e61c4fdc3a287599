// Tensors that ranks have whole, in parts or as a sum, made whole and taken apart again, over several exchanges and pieces.
#include "src/train/collected_state.h"

#include <algorithm>
#include <cstring>

#include "src/dist/collective_checks_test.h"

namespace speedrun {
namespace {

using Held = StateTensor::Held;
constexpr double kLimit_s = 60;
constexpr int64_t kPiece = kPieceBytes / sizeof(float);

float value_of(int64_t i) { return static_cast<float>((i * 7919 + 5) % 100003) * 0.25f - 7; }

std::vector<float> values(int64_t first, int64_t n) {
  std::vector<float> result(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) result[static_cast<size_t>(i)] = value_of(first + i);
  return result;
}

// Also requires that pieces are no larger than they may be.
class FloatSink : public PieceSink {
 public:
  std::byte* space(size_t bytes) override {
    require(bytes <= kPieceBytes, "a piece of ", bytes, " bytes");
    piece_.resize(bytes / sizeof(float));
    return reinterpret_cast<std::byte*>(piece_.data());
  }
  void filled() override { all.insert(all.end(), piece_.begin(), piece_.end()); }
  std::vector<float> all;

 private:
  std::vector<float> piece_;
};

// Elements of each rank; the middle one has nothing, and the shares are no multiples of a piece.
int64_t part_of(int rank) { return rank == 0 ? kPiece + 3 : rank == 1 ? 0 : 11 * kPiece + 7; }

TEST(CollectedState, PartsOfSeveralRanksAreTheWhole) {
  EXPECT_TRUE(testing::run_ranks(3, kLimit_s, [](Control& control) {
    const auto device = make_cpu_device(1);
    CollectedState collected(*device, &control);
    int64_t begin = 0, whole = 0;
    for (int r = 0; r < 3; ++r) {
      if (r < control.rank()) begin += part_of(r);
      whole += part_of(r);
    }
    const std::vector<float> expected = values(0, whole);
    std::vector<float> mine = values(begin, part_of(control.rank()));
    const StateTensor tensor{"t", DType::f32, mine.data(), part_of(control.rank()), Held::part, begin, whole};
    for (int round = 0; round < 2; ++round) {
      FloatSink sink;
      collected.read(tensor, sink);
      require(sink.all == (control.rank() == 0 ? expected : std::vector<float>()), "the whole is another");
      std::fill(mine.begin(), mine.end(), -1.0f);
      const auto bytes = std::as_bytes(std::span(expected));
      for (size_t at = 0; at < bytes.size(); at += kPieceBytes)
        collected.write(tensor, at, bytes.subspan(at, std::min(kPieceBytes, bytes.size() - at)));
      require(mine == values(begin, part_of(control.rank())), "rank ", control.rank(), " got another part");
    }
  }));
}

TEST(CollectedState, ASumIsOfAllRanksInTheirOrderAndRank0KeepsIt) {
  EXPECT_TRUE(testing::run_ranks(3, kLimit_s, [](Control& control) {
    const auto device = make_cpu_device(1);
    CollectedState collected(*device, &control);
    const int64_t n = kPiece + 5;
    std::vector<float> mine(static_cast<size_t>(n));
    // Sums that rounding makes depend on their order; the first is of negative zeros.
    const auto of_rank = [](int rank, int64_t i) {
      return i == 0 ? -0.0f : value_of(i) * (rank == 1 ? 1e9f : rank == 2 ? -1e9f : 1.1f);
    };
    std::vector<float> expected(static_cast<size_t>(n), 0.0f);
    for (int64_t i = 0; i < n; ++i) {
      mine[static_cast<size_t>(i)] = of_rank(control.rank(), i);
      for (int r = 0; r < 3; ++r) expected[static_cast<size_t>(i)] += of_rank(r, i);
    }
    const StateTensor tensor{"t", DType::f32, mine.data(), n, Held::sum};
    FloatSink sink;
    collected.read(tensor, sink);
    if (control.rank() == 0) {
      require(sink.all.size() == expected.size() && std::memcmp(sink.all.data(), expected.data(), expected.size() * 4) == 0,
              "another sum");
    } else {
      require(sink.all.empty(), "a sum on rank ", control.rank());
    }
    const auto bytes = std::as_bytes(std::span(expected));
    collected.write(tensor, 0, bytes.first(kPieceBytes));
    collected.write(tensor, kPieceBytes, bytes.subspan(kPieceBytes));
    if (control.rank() != 0) std::fill(expected.begin(), expected.end(), 0.0f);
    require(std::memcmp(mine.data(), expected.data(), expected.size() * 4) == 0, "rank ", control.rank(), " keeps something else");
  }));
}

TEST(CollectedState, WhatAllHaveIsRank0s) {
  EXPECT_TRUE(testing::run_ranks(2, kLimit_s, [](Control& control) {
    const auto device = make_cpu_device(1);
    CollectedState collected(*device, &control);
    std::vector<float> mine = values(control.rank(), 1000);
    const StateTensor tensor{"t", DType::f32, mine.data(), 1000};
    FloatSink sink;
    collected.read(tensor, sink);
    require(sink.all == (control.rank() == 0 ? values(0, 1000) : std::vector<float>()), "not rank 0's");
  }));
}

}  // namespace
}  // namespace speedrun

#include "src/data/row_reader.h"

#include <gtest/gtest.h>

#include <set>

#include "src/data/test_shards.h"

namespace speedrun {
namespace {

using test::counting_tokens;
using test::expect_contains;
using test::input_error;
using test::read_as_ranks;
using test::operator==;

class RowReaderTest : public test::DataTest {
 protected:
  // Three shards of different lengths with ids 0, 1, 2, … that are never repeated.
  void add_three() {
    add_shard("a.bin", counting_tokens(100, 0));
    add_shard("b.bin", counting_tokens(33, 100));  // 1 step of 32 would need 34
    add_shard("c.bin", counting_tokens(130, 133));
  }
  static constexpr StepShape kShape{.batch_tokens = 32, .row_tokens = 4, .max_seq_len = 0};
};

TEST_F(RowReaderTest, FollowsTheRule) {
  add_three();
  const std::unique_ptr<Reader> reader = make_row_reader(options());
  EXPECT_EQ(reader->files(), (std::vector<std::string>{path("a.bin"), path("b.bin"), path("c.bin")}));
  StepRows rows;
  // 100 tokens hold steps at 0, 32, 64 (64 + 33 < 100); 33 tokens hold none; 130 hold 0, 32, 64 and 96 (96 + 33 < 130).
  const std::vector<std::pair<int64_t, ReaderState>> expected = {
      {0, {0, 0, 32}},        {32, {0, 0, 64}},       {64, {0, 0, 96}},       {133, {0, 2, 32}},
      {133 + 32, {0, 2, 64}}, {133 + 64, {0, 2, 96}}, {133 + 96, {0, 2, 128}}};
  for (const auto& [first, after] : expected) {
    reader->next(kShape, 0, 1, rows);
    ASSERT_EQ(rows.num_rows, 8);
    ASSERT_EQ(rows.row_tokens, 4);
    for (int32_t i = 0; i < 32; ++i) {
      EXPECT_EQ(rows.inputs[static_cast<size_t>(i)], first + i);
      EXPECT_EQ(rows.targets[static_cast<size_t>(i)], first + i + 1);
      EXPECT_EQ(rows.doc_start[static_cast<size_t>(i)], 0);
    }
    EXPECT_EQ(reader->state(), after);
  }
  const std::string message = input_error([&] { reader->next(kShape, 0, 1, rows); });
  expect_contains(message, {"ends 7 steps after the start", "c.bin", "2 tokens left", "32 too few", "data.repeat", "*.bin"});
  EXPECT_EQ(reader->state(), expected.back().second);
  EXPECT_THROW(reader->next(kShape, 0, 1, rows), InputError);  // and stays so
}

TEST_F(RowReaderTest, TheBorderIsTheReferences) {
  EXPECT_FALSE(rows_fit(0, 32, 33));
  EXPECT_TRUE(rows_fit(0, 32, 34));
  int64_t batches = 0;
  for (int64_t position = 0; rows_fit(position, 524288, 100'000'000); position += 524288) ++batches;
  EXPECT_EQ(batches, 190);
  EXPECT_TRUE(rows_fit(int64_t{3} << 40, int64_t{1} << 40, (int64_t{4} << 40) + 2));  // 64-bit
}

TEST_F(RowReaderTest, RanksShareTheStepWithoutOverlap) {
  add_three();
  const auto make = [&] { return make_row_reader(options(2)); };
  for (const int world : {1, 2, 4, 8}) {
    const auto reference = make(), reader = make();
    std::multiset<int32_t> seen;
    StepRows expected;
    for (int step = 0; step < 14; ++step) {
      reference->next(kShape, 0, 1, expected);
      const StepRows all = read_as_ranks(*reader, kShape, world, make);
      EXPECT_TRUE(all == expected) << "world " << world << " step " << step;
      EXPECT_EQ(reader->state(), reference->state());
      seen.insert(all.inputs.begin(), all.inputs.end());
    }
    for (const int32_t token : seen) EXPECT_EQ(seen.count(token), 2u) << token;  // once in each epoch
    EXPECT_EQ(seen.size(), 14u * 32u);
  }
}

TEST_F(RowReaderTest, RepeatReadsEpochsOneAfterTheOther) {
  add_three();
  const auto once = make_row_reader(options(1)), thrice = make_row_reader(options(3));
  std::vector<StepRows> epoch(7);
  for (StepRows& rows : epoch) once->next(kShape, 0, 1, rows);
  StepRows rows;
  for (int64_t i = 0; i < 21; ++i) {
    thrice->next(kShape, 0, 1, rows);
    EXPECT_TRUE(rows == epoch[static_cast<size_t>(i % 7)]) << i;
    EXPECT_EQ(thrice->state().epoch, i / 7);
  }
  expect_contains(input_error([&] { thrice->next(kShape, 0, 1, rows); }), {"21 steps", "epoch 3 of 3"});
}

TEST_F(RowReaderTest, ResumeAtEveryStepAndOnOtherRanks) {
  add_three();
  const std::vector<StepShape> shapes = {kShape, {16, 4, 0}, {48, 8, 0}, {32, 16, 0}};  // stages of different shape
  std::vector<StepRows> steps;
  std::vector<ReaderState> states;
  const auto reader = make_row_reader(options(2));
  states.push_back(reader->state());
  for (size_t i = 0; i < 12; ++i) {
    steps.emplace_back();
    reader->next(shapes[i / 3], 0, 1, steps.back());
    states.push_back(reader->state());
  }
  const auto make = [&] { return make_row_reader(options(2)); };
  for (size_t start = 0; start < steps.size(); ++start) {
    const auto resumed = make();
    resumed->restore(states[start]);
    for (size_t i = start; i < steps.size(); ++i) {
      const StepRows all = read_as_ranks(*resumed, shapes[i / 3], i % 2 == 0 ? 1 : 2, make);
      EXPECT_TRUE(all == steps[i]) << "resumed at " << start << ", step " << i;
      EXPECT_EQ(resumed->state(), states[i + 1]);
    }
  }
}

TEST_F(RowReaderTest, SkipEqualsNext) {
  add_three();
  const auto a = make_row_reader(options(2)), b = make_row_reader(options(2));
  StepRows rows;
  for (int i = 0; i < 14; ++i) {
    a->next(kShape, 0, 1, rows);
    b->skip(kShape);
    EXPECT_EQ(a->state(), b->state());
  }
  EXPECT_THROW(b->skip(kShape), InputError);
}

TEST_F(RowReaderTest, NoShardLongEnough) {
  add_three();
  StepRows rows;
  const auto reader = make_row_reader(options(1000000000));  // ends all the same
  expect_contains(input_error([&] { reader->next({256, 4, 0}, 0, 1, rows); }), {"0 steps after the start", "train.batch_tokens"});
  EXPECT_EQ(reader->state(), ReaderState{});
}

TEST_F(RowReaderTest, RefusesWhatDoesNotFit) {
  add_three();
  const auto reader = make_row_reader(options());
  StepRows rows;
  expect_contains(input_error([&] { reader->next({30, 4, 0}, 0, 1, rows); }), {"train.batch_tokens", "30", "4"});
  expect_contains(input_error([&] { reader->next({0, 4, 0}, 0, 1, rows); }), {"train.batch_tokens"});
  expect_contains(input_error([&] { reader->next({32, 0, 0}, 0, 1, rows); }), {"train.seq_len"});
  expect_contains(input_error([&] { reader->next(kShape, 0, 3, rows); }), {"8 rows", "3 ranks"});
  EXPECT_EQ(reader->state(), ReaderState{});
  expect_contains(input_error([&] { reader->restore({0, 3, 0}); }), {"shard 3", "3 shards"});
  expect_contains(input_error([&] { reader->restore({0, 0, 101}); }), {"token 101"});
  expect_contains(input_error([&] { reader->restore({0, -1, 0}); }), {"shard -1"});
  expect_contains(input_error([&] { reader->restore({1, 0, 0}); }), {"epoch 2", "data.repeat is 1"});
  expect_contains(input_error([&] { make_row_reader(options(0)); }), {"data.repeat"});
  expect_contains(input_error([&] { make_row_reader({}); }), {"data.train"});
}

// What goes wrong while the next shard loads in the background is thrown when that shard is needed, every time, and not before.
TEST_F(RowReaderTest, FaultsOfTheBackgroundLoadSurfaceAtTheConsumer) {
  add_shard("a.bin", counting_tokens(100, 0));
  std::vector<uint16_t> bad = counting_tokens(100, 100);
  bad[77] = 60000;
  add_shard("b.bin", bad);
  const auto reader = make_row_reader(options());
  StepRows rows;
  for (int i = 0; i < 3; ++i) reader->next(kShape, 0, 1, rows);
  const ReaderState before = reader->state();
  for (int i = 0; i < 2; ++i) {
    expect_contains(input_error([&] { reader->next(kShape, 0, 1, rows); }), {"b.bin", "60000", "offset 77"});
    EXPECT_EQ(reader->state(), before);
  }
}

TEST_F(RowReaderTest, ShardThatChangesDuringTheRun) {
  add_three();
  const auto reader = make_row_reader(options());
  add_shard("a.bin", counting_tokens(99, 0));
  StepRows rows;
  expect_contains(input_error([&] { reader->next(kShape, 0, 1, rows); }),
                  {"a.bin", "changed since the start", "100 tokens", "99 tokens"});
}

}  // namespace
}  // namespace speedrun

#include "src/data/validation_reader.h"

#include <gtest/gtest.h>

#include "src/data/test_shards.h"

namespace speedrun {
namespace {

using test::expect_contains;
using test::input_error;
using test::kBos;

class ValidationReaderTest : public test::DataTest {
 protected:
  // One stream, stored as shards that end at the given places.
  std::vector<uint16_t> add_stream(int64_t count, const std::vector<int64_t>& borders, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<uint16_t> stream;
    for (int64_t i = 0; i < count; ++i) stream.push_back(random() % 6 == 0 ? kBos : static_cast<uint16_t>(random() % 50000));
    int64_t begin = 0;
    for (size_t i = 0; i <= borders.size(); ++i) {
      const int64_t end = i < borders.size() ? borders[i] : count;
      add_shard("v" + std::to_string(i) + ".bin", {stream.begin() + begin, stream.begin() + end});
      begin = end;
    }
    return stream;
  }
  ValidationOptions validation(int64_t tokens, int64_t row_tokens, DocumentBorders borders = DocumentBorders::ignored) {
    ValidationOptions result;
    result.shards = list_shards(path("v*.bin"));
    result.tokens = tokens;
    result.row_tokens = row_tokens;
    result.borders = borders;
    return result;
  }
};

TEST_F(ValidationReaderTest, ExactlyTheFirstTokensAcrossShards) {
  const std::vector<uint16_t> stream = add_stream(101, {1, 30, 31, 64}, 1);
  for (const DocumentBorders borders : {DocumentBorders::ignored, DocumentBorders::kept}) {
    const ValidationReader reader(validation(100, 10, borders));
    EXPECT_EQ(reader.num_rows(), 10);
    EXPECT_EQ(reader.files().size(), 5u);
    for (int64_t first = 0; first < 10; ++first) {
      for (int64_t count = 0; first + count <= 10; ++count) {  // the same rows whatever the micro-batch
        StepRows rows;
        reader.read(first, count, rows);
        ASSERT_EQ(rows.num_rows, count);
        ASSERT_EQ(rows.inputs.size(), static_cast<size_t>(count * 10));
        int32_t start = 0;
        for (int64_t i = 0; i < count * 10; ++i) {
          const auto at = static_cast<size_t>(first * 10 + i), here = static_cast<size_t>(i);
          EXPECT_EQ(rows.inputs[here], stream[at]);
          EXPECT_EQ(rows.targets[here], stream[at + 1]);
          const auto t = static_cast<int32_t>(i % 10);
          if (t == 0 || stream[at] == kBos) start = t;  // a document that crosses a row border is cut there
          EXPECT_EQ(rows.doc_start[here], borders == DocumentBorders::kept ? start : 0);
        }
      }
    }
    StepRows rows;
    EXPECT_THROW(reader.read(5, 6, rows), Error);
  }
}

TEST_F(ValidationReaderTest, FurtherShardsChangeNothing) {
  add_stream(101, {50}, 2);
  StepRows before, after;
  ValidationReader(validation(60, 20)).read(0, 3, before);
  std::vector<uint16_t> bad(100, 60000);  // not read, so not refused
  add_shard("v9.bin", bad);
  const ValidationReader reader(validation(60, 20));
  reader.read(0, 3, after);
  EXPECT_EQ(before.inputs, after.inputs);
  EXPECT_EQ(before.targets, after.targets);
  EXPECT_EQ(reader.files(), (std::vector<std::string>{path("v0.bin"), path("v1.bin")}));
}

TEST_F(ValidationReaderTest, OneTokenMoreThanPredictionsIsNeeded) {
  add_stream(61, {50}, 3);
  EXPECT_EQ(ValidationReader(validation(60, 20)).num_rows(), 3);
  std::filesystem::remove(path("v1.bin"));
  add_stream(60, {50}, 3);
  const std::string message = input_error([&] { ValidationReader(validation(60, 20)); });
  expect_contains(message,
                  {"v*.bin", "v1.bin", "hold 60 tokens", "eval.tokens = 60", "needs 61", "lower eval.tokens to at most 40"});
  expect_contains(input_error([&] { ValidationReader(validation(80, 80)); }), {"not one row of 80", "train.seq_len"});
}

TEST_F(ValidationReaderTest, RefusesWhatDoesNotFit) {
  add_stream(61, {}, 4);
  expect_contains(input_error([&] { ValidationReader(validation(50, 20)); }),
                  {"eval.tokens", "multiple of the row length 20", "50"});
  expect_contains(input_error([&] { ValidationReader(validation(0, 20)); }), {"eval.tokens", "found 0"});
  expect_contains(input_error([&] { ValidationReader(validation(60, 0)); }), {"train.seq_len"});
}

TEST_F(ValidationReaderTest, RangeIsCheckedWhereItIsRead) {
  std::vector<uint16_t> tokens(100, 5);
  tokens[60] = 50257;
  add_shard("v.bin", tokens);
  expect_contains(input_error([&] { ValidationReader(validation(60, 20)); }), {"v.bin", "50257", "offset 60"});  // the last target
  tokens[60] = 5;
  tokens[61] = 50257;
  add_shard("v.bin", tokens);
  EXPECT_EQ(ValidationReader(validation(60, 20)).num_rows(), 3);
}

}  // namespace
}  // namespace speedrun

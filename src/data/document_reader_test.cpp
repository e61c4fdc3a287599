#include "src/data/document_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>

#include "src/data/test_shards.h"

namespace speedrun {
namespace {

using test::documents;
using test::expect_contains;
using test::input_error;
using test::kBos;
using test::random_lengths;
using test::read_as_ranks;
using test::operator==;

// The rule once more, token by token and without an index: documents are cut out of the shards first, rows are grown from them.
class NaiveReader {
 public:
  NaiveReader(const std::vector<std::vector<uint16_t>>& shards, int64_t repeat) {
    for (int64_t epoch = 0; epoch < repeat; ++epoch) {
      for (const std::vector<uint16_t>& tokens : shards) {
        std::vector<std::vector<int32_t>>& docs = shards_.emplace_back();
        for (const uint16_t token : tokens) {
          if (token == kBos) docs.emplace_back();
          if (!docs.empty()) docs.back().push_back(token);
        }
      }
    }
  }

  // All rows of the next step, nothing at the end.
  std::optional<StepRows> next(const StepShape& shape, int64_t num_rows) {
    for (; shard_ < shards_.size(); ++shard_, document_ = 0) {
      size_t document = document_;
      if (const auto rows = fill(shape, num_rows, document)) {
        document_ = document;
        return rows;
      }
    }
    return std::nullopt;
  }

 private:
  std::optional<StepRows> fill(const StepShape& shape, int64_t num_rows, size_t& document) const {
    const auto n = static_cast<size_t>(shape.row_tokens);
    StepRows rows{.num_rows = num_rows, .row_tokens = shape.row_tokens, .inputs = {}, .targets = {}, .doc_start = {}};
    for (int64_t r = 0; r < num_rows; ++r) {
      std::vector<int32_t> row, start;
      while (row.size() <= n) {
        if (document == shards_[shard_].size()) return std::nullopt;
        const std::vector<int32_t>& doc = shards_[shard_][document++];
        const auto begin = static_cast<int32_t>(row.size());
        for (size_t i = 0; i < doc.size() && i < static_cast<size_t>(shape.max_seq_len) && row.size() <= n; ++i) {
          row.push_back(doc[i]);
          start.push_back(begin);
        }
      }
      rows.inputs.insert(rows.inputs.end(), row.begin(), row.end() - 1);
      rows.targets.insert(rows.targets.end(), row.begin() + 1, row.end());
      rows.doc_start.insert(rows.doc_start.end(), start.begin(), start.end() - 1);
    }
    return rows;
  }

  std::vector<std::vector<std::vector<int32_t>>> shards_;  // shard, document, token
  size_t shard_ = 0;
  size_t document_ = 0;
};

class DocumentReaderTest : public test::DataTest {
 protected:
  // Three shards of random documents; the second starts in the middle of a document, the third ends with a BOS.
  std::vector<std::vector<uint16_t>> add_random(uint32_t seed) {
    std::vector<std::vector<uint16_t>> shards;
    for (uint32_t i = 0; i < 3; ++i) shards.push_back(documents(random_lengths(60 + 20 * i, 40, seed + i), seed + i));
    shards[1].erase(shards[1].begin());
    shards[2].push_back(kBos);
    for (size_t i = 0; i < shards.size(); ++i) add_shard(std::to_string(i) + ".bin", shards[i]);
    return shards;
  }
  static StepRows one_step(Reader& reader, const StepShape& shape) {
    StepRows rows;
    reader.next(shape, 0, 1, rows);
    return rows;
  }
};

TEST_F(DocumentReaderTest, EqualsTheNaiveReader) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const auto shards = add_random(100 * seed);
    std::mt19937 random(seed);
    const int64_t num_rows = int64_t{1} << (random() % 4);
    const int64_t repeat = 1 + random() % 2;
    ReaderOptions with = options(repeat);
    with.document_rows = num_rows;
    const auto reader = make_document_reader(with);
    NaiveReader naive(shards, repeat);
    StepRows rows;
    for (int step = 0;; ++step) {
      const auto n = static_cast<int64_t>(1 + random() % 70);
      const StepShape shape{num_rows * n, n, static_cast<int64_t>(1 + random() % 45)};
      const std::optional<StepRows> expected = naive.next(shape, num_rows);
      if (!expected) {
        EXPECT_THROW(reader->next(shape, 0, 1, rows), InputError) << "seed " << seed << " step " << step;
        break;
      }
      reader->next(shape, 0, 1, rows);
      ASSERT_TRUE(rows == *expected) << "seed " << seed << " step " << step;
    }
  }
}

TEST_F(DocumentReaderTest, WorkedExample) {
  // Documents of 3, 1, 6, 9 and 3 tokens; rows of 4, documents cut at 5.
  add_shard("a.bin", {kBos, 1, 2, kBos, kBos, 3, 4, 5, 6, 7, kBos, 8, 9, 10, 11, 12, 13, 14, 15, kBos, 16, 17});
  ReaderOptions with = options();
  with.document_rows = 2;
  const auto reader = make_document_reader(with);
  const StepRows rows = one_step(*reader, {8, 4, 5});
  // Row 0: (BOS 1 2)(BOS) and the target BOS of the third document, of which no input is left; the rest of it is skipped. Row 1:
  // five tokens of the fourth.
  EXPECT_EQ(rows.inputs, (std::vector<int32_t>{kBos, 1, 2, kBos, kBos, 8, 9, 10}));
  EXPECT_EQ(rows.targets, (std::vector<int32_t>{1, 2, kBos, kBos, 8, 9, 10, 11}));
  EXPECT_EQ(rows.doc_start, (std::vector<int32_t>{0, 0, 0, 3, 0, 0, 0, 0}));
  EXPECT_EQ(reader->state(), (ReaderState{0, 0, 19}));  // the next step starts with the document (BOS 16 17)
}

TEST_F(DocumentReaderTest, LengthsAroundTheLimits) {
  constexpr int64_t kLimit = 8;
  for (const int64_t length : {kLimit - 1, kLimit, kLimit + 1}) {
    for (const int64_t n :
         {kLimit - 1, kLimit, kLimit + 1}) {  // a document that is shorter than the row, fills it, or overflows it
      const auto tokens = documents({length, 4, length, 4, length, 4, length, 4}, 1);
      add_shard("a.bin", tokens);
      ReaderOptions with = options();
      with.document_rows = 2;
      const StepShape shape{2 * n, n, kLimit};
      const StepRows rows = one_step(*make_document_reader(with), shape);
      EXPECT_TRUE(rows == *NaiveReader({tokens}, 1).next(shape, 2)) << length << " in rows of " << n;
      EXPECT_EQ(std::count(rows.inputs.begin(), rows.inputs.begin() + n, kBos), std::min(length, kLimit) >= n ? 1 : 2);
    }
  }
}

TEST_F(DocumentReaderTest, EmptyDocuments) {
  add_shard("a.bin", std::vector<uint16_t>(100, kBos));
  ReaderOptions with = options();
  with.document_rows = 2;
  const auto reader = make_document_reader(with);
  const StepRows rows = one_step(*reader, {8, 4, 16});
  EXPECT_EQ(rows.inputs, std::vector<int32_t>(8, kBos));
  EXPECT_EQ(rows.targets, std::vector<int32_t>(8, kBos));
  EXPECT_EQ(rows.doc_start, (std::vector<int32_t>{0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(reader->state().position, 10);  // 5 documents a row
}

TEST_F(DocumentReaderTest, ShardThatEndsExactlyWithTheStep) {
  add_shard("a.bin", documents({5, 5}, 1));
  add_shard("b.bin", documents({5, 4}, 2));          // one token short
  add_shard("c.bin", std::vector<uint16_t>(50, 7));  // no document at all
  add_shard("d.bin", documents({7, 7}, 3));
  ReaderOptions with = options();
  with.document_rows = 2;
  const auto reader = make_document_reader(with);
  one_step(*reader, {8, 4, 16});
  EXPECT_EQ(reader->state(), (ReaderState{0, 0, 10}));
  one_step(*reader, {8, 4, 16});
  EXPECT_EQ(reader->state(), (ReaderState{0, 3, 14}));
  expect_contains(input_error([&] { one_step(*reader, {8, 4, 16}); }), {"2 steps after the start", "d.bin", "10 too few"});
  EXPECT_EQ(reader->state(), (ReaderState{0, 3, 14}));

  const auto resumed = make_document_reader(with);
  resumed->restore({0, 0, 10});
  one_step(*resumed, {8, 4, 16});
  EXPECT_EQ(resumed->state(), (ReaderState{0, 3, 14}));
}

TEST_F(DocumentReaderTest, RanksSeeOneStreamWithoutOverlap) {
  // Every document has an id of its own, so that a document read twice or by two ranks shows.
  std::vector<uint16_t> tokens;
  const std::vector<int64_t> lengths = random_lengths(3000, 30, 5);
  for (size_t i = 0; i < lengths.size(); ++i) {
    tokens.push_back(kBos);
    tokens.insert(tokens.end(), static_cast<size_t>(lengths[i]), static_cast<uint16_t>(i));
  }
  add_shard("a.bin", {tokens.begin(), tokens.begin() + 20000});
  add_shard("b.bin", {tokens.begin() + 20000, tokens.end()});
  constexpr StepShape kShape{8 * 50, 50, 20};
  const auto make = [&] { return make_document_reader(options()); };
  for (const int world : {1, 2, 4, 8}) {
    const auto reference = make(), reader = make();
    std::vector<int64_t> counts(lengths.size(), 0);
    for (int step = 0; step < 40; ++step) {
      const StepRows expected = one_step(*reference, kShape);
      const StepRows all = read_as_ranks(*reader, kShape, world, make);
      ASSERT_TRUE(all == expected) << "world " << world << " step " << step;
      ASSERT_EQ(reader->state(), reference->state());
      for (const int32_t token : all.inputs) {
        if (token != kBos) ++counts[static_cast<size_t>(token)];
      }
    }
    for (size_t i = 0; i < counts.size(); ++i) EXPECT_LE(counts[i], std::min<int64_t>(lengths[i], 19)) << "document " << i;
  }
}

TEST_F(DocumentReaderTest, InputsContinueInTargetsAndDocumentsStartAtABos) {
  add_random(77);
  const auto reader = make_document_reader(options());
  for (int step = 0; step < 5; ++step) {
    const StepRows rows = one_step(*reader, {8 * 25, 25, 17});
    for (size_t row = 0; row < 8; ++row) {
      for (size_t t = 0; t < 25; ++t) {
        const size_t i = row * 25 + t;
        const auto start = static_cast<size_t>(rows.doc_start[i]);
        ASSERT_LE(start, t);
        EXPECT_LT(t - start, 17u);
        EXPECT_EQ(rows.inputs[row * 25 + start], kBos);
        EXPECT_EQ(rows.inputs[i] == kBos, start == t);
        if (t + 1 < 25) {
          EXPECT_EQ(rows.targets[i], rows.inputs[i + 1]);
        }
      }
    }
  }
}

TEST_F(DocumentReaderTest, ResumeAtEveryStepAndOnOtherRanks) {
  add_random(9);
  const std::vector<StepShape> shapes = {{8 * 10, 10, 7}, {8 * 20, 20, 40}, {8 * 5, 5, 40}};
  const auto make = [&] { return make_document_reader(options(8)); };
  const auto reader = make();
  std::vector<StepRows> steps;
  std::vector<ReaderState> states = {reader->state()};
  for (size_t i = 0; i < 30; ++i) {
    steps.push_back(one_step(*reader, shapes[i / 10]));
    states.push_back(reader->state());
  }
  EXPECT_GE(states.back().epoch, 1);
  for (size_t start = 0; start < steps.size(); ++start) {
    const auto resumed = make();
    resumed->restore(states[start]);
    for (size_t i = start; i < steps.size(); ++i) {
      const StepRows all = read_as_ranks(*resumed, shapes[i / 10], 1 << (i % 4), make);
      ASSERT_TRUE(all == steps[i]) << "resumed at " << start << ", step " << i;
      ASSERT_EQ(resumed->state(), states[i + 1]);
    }
  }
}

TEST_F(DocumentReaderTest, RefusesWhatDoesNotFit) {
  const auto shards = add_random(3);
  int64_t inside = 1;  // a place within a document
  while (shards[0][static_cast<size_t>(inside)] == kBos) ++inside;
  const auto reader = make_document_reader(options());
  expect_contains(input_error([&] { one_step(*reader, {4 * 10, 10, 7}); }), {"train.batch_tokens", "data.document_rows = 8"});
  expect_contains(input_error([&] { one_step(*reader, {8 * 10, 10, 0}); }), {"data.max_seq_len"});
  StepRows rows;
  expect_contains(input_error([&] { reader->next({8 * 10, 10, 7}, 0, 3, rows); }), {"8 rows", "3 ranks"});
  expect_contains(input_error([&] { reader->restore({0, 0, inside}); }), {"starts no document", "0.bin"});
  EXPECT_EQ(reader->state(), ReaderState{});
  ReaderOptions with = options();
  with.document_rows = 0;
  expect_contains(input_error([&] { make_document_reader(with); }), {"data.document_rows"});
  with = options();
  with.vocab_size = 50256;
  expect_contains(input_error([&] { make_document_reader(with); }), {"BOS id 50256", "50256"});
}

TEST_F(DocumentReaderTest, RangeIsCheckedAsAShardIsLoaded) {
  add_shard("a.bin", documents({30, 30}, 1));
  std::vector<uint16_t> bad = documents({30, 30}, 2);
  bad[31] = 50257;
  add_shard("b.bin", bad);
  ReaderOptions with = options();
  with.document_rows = 2;
  const auto reader = make_document_reader(with);
  one_step(*reader, {2 * 10, 10, 40});
  expect_contains(input_error([&] { one_step(*reader, {2 * 10, 10, 40}); }), {"b.bin", "id 50257", "offset 31"});
}

}  // namespace
}  // namespace speedrun

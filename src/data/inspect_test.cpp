#include "src/data/inspect.h"

#include <gtest/gtest.h>

#include <numeric>

#include "src/data/hash64.h"
#include "src/data/test_shards.h"

namespace speedrun {
namespace {

using test::documents;
using test::expect_contains;
using test::input_error;
using test::kBos;
using test::random_lengths;

class InspectTest : public test::DataTest {};

TEST_F(InspectTest, Shard) {
  const std::string file = add_shard("a.bin", {9, 8, kBos, 1, kBos, kBos, 60000, 3, 50257, 2});
  const ShardInspection shard = inspect_shard(file, 50257);
  EXPECT_EQ(shard.tokens, 10);
  EXPECT_EQ(shard.documents, 3);
  EXPECT_EQ(shard.tokens_before_first_bos, 2);
  EXPECT_EQ(shard.shortest_document, 1);
  EXPECT_EQ(shard.longest_document, 5);
  EXPECT_DOUBLE_EQ(shard.mean_document_length, 8.0 / 3);
  EXPECT_EQ(shard.min_id, 1);
  EXPECT_EQ(shard.max_id, 60000);
  EXPECT_EQ(shard.ids_out_of_range, 2);
  EXPECT_EQ(shard.first_out_of_range_offset, 6);
  EXPECT_EQ(shard.first_out_of_range_id, 60000);
  EXPECT_EQ(shard.content_hash, shard_content_hash(file));

  const ShardInspection without = inspect_shard(file, 65536);  // BOS 65535 does not occur
  EXPECT_EQ(without.documents, 0);
  EXPECT_EQ(without.tokens_before_first_bos, 10);
  EXPECT_EQ(without.ids_out_of_range, 0);
  EXPECT_EQ(without.first_out_of_range_offset, -1);
  EXPECT_EQ(inspect_shard(file, 4, 3).documents, 1);
  expect_contains(input_error([&] { inspect_shard(path("none.bin"), 50257); }), {"none.bin"});
}

TEST_F(InspectTest, StepIsTheSameForAnyNumberOfRanks) {
  for (uint32_t i = 0; i < 2; ++i) add_shard(std::to_string(i) + ".bin", documents(random_lengths(400, 40, i), i));
  const std::vector<StepRun> schedule = {{{8 * 20, 20, 15}, 3}, {{8 * 30, 30, 40}, 5}};
  for (const bool as_documents : {false, true}) {
    const auto make = [&] { return as_documents ? make_document_reader(options()) : make_row_reader(options()); };
    for (const int64_t step : {0, 2, 3, 7}) {
      const auto reader = make();
      StepRows rows;
      for (int64_t i = 0; i < step; ++i) reader->next(schedule[i < 3 ? 0 : 1].shape, 0, 1, rows);
      const ReaderState before = reader->state();
      reader->next(schedule[step < 3 ? 0 : 1].shape, 0, 1, rows);

      const StepDescription single = describe_step(*make(), schedule, step, 1);
      EXPECT_EQ(single.before, before);
      EXPECT_EQ(single.after, reader->state());
      EXPECT_EQ(single.shape.row_tokens, rows.row_tokens);
      EXPECT_EQ(single.input_hash, Hash64().add_values(std::span<const int32_t>(rows.inputs)).value());
      EXPECT_EQ(single.target_hash, Hash64().add_values(std::span<const int32_t>(rows.targets)).value());
      EXPECT_EQ(single.ranks[0].input_hash, single.input_hash);
      EXPECT_NE(single.input_hash, single.target_hash);
      for (const int world : {2, 4, 8}) {
        const StepDescription shared = describe_step(*make(), schedule, step, world);
        EXPECT_EQ(shared.input_hash, single.input_hash);
        EXPECT_EQ(shared.target_hash, single.target_hash);
        EXPECT_EQ(shared.after, single.after);
        ASSERT_EQ(shared.ranks.size(), static_cast<size_t>(world));
        size_t row = 0;
        for (const RankDescription& rank : shared.ranks) {
          EXPECT_EQ(rank.num_rows, 8 / world);
          int64_t pieces = 0;
          for (const std::vector<int64_t>& lengths : rank.document_lengths) {
            EXPECT_EQ(lengths, single.ranks[0].document_lengths[row++]);
            EXPECT_EQ(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), rank.row_tokens);
            if (!as_documents) {
              EXPECT_EQ(lengths.size(), 1u);
            }
            pieces += static_cast<int64_t>(lengths.size());
          }
          EXPECT_EQ(rank.num_documents, pieces);
        }
        EXPECT_EQ(row, 8u);
      }
    }
    expect_contains(input_error([&] { describe_step(*make(), schedule, 8, 1); }), {"step 8", "0 ... 7"});
    expect_contains(input_error([&] { describe_step(*make(), schedule, 0, 3); }), {"3 ranks"});
    expect_contains(input_error([&] { describe_step(*make(), schedule, -1, 1); }), {"step -1"});
  }
}

// Recorded hashes of a fixed shard: what a step sees must not change unnoticed.
TEST_F(InspectTest, RecordedHashes) {
  std::vector<uint16_t> tokens;
  for (uint32_t i = 0; i < 5000; ++i) tokens.push_back(i % 37 == 0 ? kBos : static_cast<uint16_t>(i * 40503u % 50000u));
  add_shard("a.bin", tokens);
  const StepDescription docs = describe_step(*make_document_reader(options()), {{{8 * 40, 40, 30}, 5}}, 4, 1);
  EXPECT_EQ(hash_text(docs.input_hash), "e6a3e43aee444d96");
  EXPECT_EQ(hash_text(docs.target_hash), "f97079755de76187");
  EXPECT_EQ(docs.ranks[0].document_lengths[0], (std::vector<int64_t>{30, 10}));
  const StepDescription rows = describe_step(*make_row_reader(options()), {{{8 * 40, 40, 0}, 5}}, 4, 1);
  EXPECT_EQ(hash_text(rows.input_hash), "73520393e289253d");
  EXPECT_EQ(hash_text(list_shards(path("*.bin")).hash), "c2f728baa6cf139f");
}

}  // namespace
}  // namespace speedrun

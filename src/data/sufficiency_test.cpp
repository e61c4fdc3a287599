#include "src/data/sufficiency.h"

#include <gtest/gtest.h>

#include "src/data/test_shards.h"

namespace speedrun {
namespace {

using test::counting_tokens;
using test::documents;
using test::expect_contains;
using test::input_error;
using test::random_lengths;

class SufficiencyTest : public test::DataTest {
 protected:
  // How many steps of the schedule the reader really serves.
  static int64_t steps_served(Reader& reader, const std::vector<StepRun>& schedule) {
    int64_t steps = 0;
    StepRows rows;
    for (const StepRun& run : schedule) {
      for (int64_t i = 0; i < run.count; ++i, ++steps) {
        try {
          reader.next(run.shape, 0, 1, rows);
        } catch (const InputError&) {
          return steps;
        }
      }
    }
    return steps;
  }
};

TEST_F(SufficiencyTest, RowsExactly) {
  for (int i = 0; i < 3; ++i) add_shard(std::to_string(i) + ".bin", counting_tokens(100, 100 * i));  // 3 steps of 32 each
  const StepShape shape{32, 8, 0};
  const Sufficiency enough = check_sufficient(ReaderRule::rows, options(), {{shape, 9}});
  EXPECT_TRUE(enough.sufficient);
  EXPECT_EQ(enough.steps_available, 9);
  EXPECT_EQ(enough.tokens_needed, 288);
  EXPECT_EQ(enough.tokens_present, 300);
  EXPECT_EQ(enough.repeat_needed, 1);
  expect_contains(enough.message, {"suffices", "9 steps", "288", "300"});

  const Sufficiency short_of_one = check_sufficient(ReaderRule::rows, options(), {{shape, 10}});
  EXPECT_FALSE(short_of_one.sufficient);
  EXPECT_EQ(short_of_one.steps_available, 9);
  EXPECT_EQ(short_of_one.repeat_needed, 2);
  expect_contains(short_of_one.message, {"ends at step 9 of 10", "320 tokens", "300 tokens", "set data.repeat to 2", "*.bin"});
  EXPECT_TRUE(check_sufficient(ReaderRule::rows, options(2), {{shape, 18}}).sufficient);
  EXPECT_EQ(check_sufficient(ReaderRule::rows, options(2), {{shape, 28}}).repeat_needed, 4);

  const Sufficiency never = check_sufficient(ReaderRule::rows, options(), {{{128, 8, 0}, 1}});
  EXPECT_FALSE(never.sufficient);
  EXPECT_EQ(never.steps_available, 0);
  EXPECT_EQ(never.repeat_needed, 0);
  expect_contains(never.message, {"no shard is long enough", "train.batch_tokens"});
  EXPECT_TRUE(check_sufficient(ReaderRule::rows, options(), {}).sufficient);
}

TEST_F(SufficiencyTest, RowsNeedNoLook) {
  std::vector<uint16_t> bad(100, 60000);
  add_shard("a.bin", bad);
  EXPECT_TRUE(check_sufficient(ReaderRule::rows, options(), {{{32, 8, 0}, 3}}).sufficient);
  expect_contains(input_error([&] { check_sufficient(ReaderRule::documents, options(), {{{32, 4, 8}, 3}}); }), {"60000"});
}

TEST_F(SufficiencyTest, ShardsWithoutDocumentsAreCalledThat) {
  add_shard("a.bin", std::vector<uint16_t>(1000, 7));
  const Sufficiency none = check_sufficient(ReaderRule::documents, options(), {{{32, 4, 8}, 3}});
  EXPECT_FALSE(none.sufficient);
  expect_contains(none.message,
                  {"token id " + std::to_string(options().bos_id) + " starts one", "data.max_seq_len = 8", "inspect"});
}

TEST_F(SufficiencyTest, AgreesWithTheReaders) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    for (uint32_t i = 0; i < 3; ++i) add_shard(std::to_string(i) + ".bin", documents(random_lengths(150, 40, seed + i), seed));
    const auto n = static_cast<int64_t>(5 + seed);
    const std::vector<StepRun> schedule = {{{8 * n, n, 10}, 5 + seed % 3}, {{16 * n, 2 * n, 30}, seed}, {{8 * n, n, 50}, 3 * seed}};
    for (const int64_t repeat : {1, 2}) {
      const Sufficiency rows = check_sufficient(ReaderRule::rows, options(repeat), schedule);
      EXPECT_EQ(rows.steps_available, steps_served(*make_row_reader(options(repeat)), schedule));
      const Sufficiency docs = check_sufficient(ReaderRule::documents, options(repeat), schedule);
      EXPECT_EQ(docs.steps_available, steps_served(*make_document_reader(options(repeat)), schedule)) << "seed " << seed;
      EXPECT_EQ(docs.sufficient, docs.steps_available == docs.steps_needed);
      ASSERT_GT(docs.repeat_needed, 0);
      EXPECT_EQ(steps_served(*make_document_reader(options(docs.repeat_needed)), schedule), docs.steps_needed);
      if (docs.repeat_needed > 1) {
        EXPECT_LT(steps_served(*make_document_reader(options(docs.repeat_needed - 1)), schedule), docs.steps_needed);
      }
    }
  }
}

}  // namespace
}  // namespace speedrun

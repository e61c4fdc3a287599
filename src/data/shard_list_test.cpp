#include "src/data/shard_list.h"

#include <gtest/gtest.h>

#include "src/data/hash64.h"
#include "src/data/test_shards.h"

namespace speedrun {
namespace {

using test::counting_tokens;
using test::expect_contains;
using test::input_error;

class ShardListTest : public test::DataTest {
 protected:
  std::vector<std::string> names(const ShardList& list) {
    std::vector<std::string> result;
    for (const std::string& file : list.files()) result.push_back(std::filesystem::path(file).filename().string());
    return result;
  }
};

TEST_F(ShardListTest, SortedByBytesWhateverTheOrderOfCreation) {
  for (const int i : {3, 10, 1, 2, 20}) add_shard("t_" + std::to_string(i) + ".bin", counting_tokens(10 * i, i));
  add_shard("T_1.bin", {1});
  add_shard("other.bin", {1});
  const ShardList list = list_shards(path("[tT]_*.bin"));
  EXPECT_EQ(names(list), (std::vector<std::string>{"T_1.bin", "t_1.bin", "t_10.bin", "t_2.bin", "t_20.bin", "t_3.bin"}));
  EXPECT_EQ(list.total_tokens, 361);
  EXPECT_EQ(list.shards[2].num_tokens, 100);
  EXPECT_EQ(list.shards[2].file_bytes, 1024 + 200);
  EXPECT_EQ(list.pattern, path("[tT]_*.bin"));
  EXPECT_EQ(names(list_shards(path("{t_1,other}.bin"))), (std::vector<std::string>{"other.bin", "t_1.bin"}));
}

TEST_F(ShardListTest, HashDependsOnNamesAndHeadersNotOnTheFolder) {
  const auto make = [&](const std::string& folder, const std::vector<std::pair<std::string, int>>& shards) {
    std::filesystem::create_directory(path(folder));
    for (const auto& [name, count] : shards) add_shard(folder + "/" + name, counting_tokens(count, 1));
    return list_shards(path(folder + "/*.bin")).hash;
  };
  const uint64_t hash = make("a", {{"1.bin", 10}, {"2.bin", 20}});
  EXPECT_EQ(make("b", {{"2.bin", 20}, {"1.bin", 10}}), hash);
  EXPECT_NE(make("c", {{"1.bin", 20}, {"2.bin", 10}}), hash);
  EXPECT_NE(make("d", {{"1.bin", 10}, {"3.bin", 20}}), hash);
  EXPECT_NE(make("e", {{"1.bin", 10}}), hash);
}

TEST_F(ShardListTest, NamesWithSpacesAccentsAndPatternCharacters) {
  std::filesystem::create_directory(
      path("donn\xC3\xA9"
           "es 1"));
  add_shard(
      "donn\xC3\xA9"
      "es 1/part \xC3\xA9 1.bin",
      {1, 2});
  add_shard(
      "donn\xC3\xA9"
      "es 1/x[1]{a,b}*.bin",
      {1, 2, 3});
  EXPECT_EQ(list_shards(path("donn\xC3\xA9"
                             "es 1/part*.bin"))
                .total_tokens,
            2);
  EXPECT_EQ(list_shards(path("donn\xC3\xA9"
                             "es 1/x[1]{a,b}*.bin"))
                .total_tokens,
            3);  // an existing file is itself
  EXPECT_EQ(list_shards(path("d*/*.bin")).shards.size(), 2u);
}

TEST_F(ShardListTest, NothingMatches) {
  const std::string pattern = path("no such folder/*.bin");
  expect_contains(input_error([&] { list_shards(pattern); }),
                  {"no files match", quoted_path(pattern), "working directory '" + std::filesystem::current_path().string() + "'"});
  expect_contains(input_error([&] { list_shards(""); }), {"empty"});
  expect_contains(input_error([&] { open_shards({}); }), {"no files"});
}

TEST_F(ShardListTest, FoldersAndDamageAreRefusedByName) {
  std::filesystem::create_directory(path("inner.bin"));
  expect_contains(input_error([&] { list_shards(folder_.string()); }), {quoted_path(folder_.string()), "found a folder", "*.bin"});
  add_shard("a.bin", {1, 2});
  expect_contains(input_error([&] { list_shards(path("*.bin")); }), {"inner.bin", "folder"});
  std::filesystem::remove(path("inner.bin"));
  const std::string last = add_shard("z.bin", {1, 2, 3});
  std::filesystem::resize_file(last, 1024 + 5);
  expect_contains(input_error([&] { list_shards(path("*.bin")); }), {"z.bin", "header says 3 tokens"});
  expect_contains(input_error([&] { open_shards({path("a.bin"), path("a.bin")}); }), {"a.bin", "twice"});
}

TEST_F(ShardListTest, UnreadableFolder) {
  std::filesystem::create_directory(path("closed"));
  add_shard("closed/a.bin", {1});
  std::filesystem::permissions(path("closed"), std::filesystem::perms::none);
  const bool all_powerful = ::access(path("closed").c_str(), R_OK) == 0;
  std::string by_pattern, by_name;
  if (!all_powerful) {
    by_pattern = input_error([&] { list_shards(path("closed/*.bin")); });
    by_name = input_error([&] { list_shards(path("closed/a.bin")); });
  }
  std::filesystem::permissions(path("closed"), std::filesystem::perms::owner_all);
  if (all_powerful) GTEST_SKIP() << "this user may read everything";
  expect_contains(by_pattern, {"Permission denied"});
  expect_contains(by_name, {"Permission denied"});
}

TEST_F(ShardListTest, ContentHash) {
  std::vector<uint16_t> tokens = counting_tokens(5'000'000, 0);  // more than is read in full
  const uint64_t hash = shard_content_hash(add_shard("a.bin", tokens));
  EXPECT_EQ(shard_content_hash(add_shard("b.bin", tokens)), hash);
  for (const size_t at : {size_t{0}, tokens.size() - 1}) {
    const uint16_t old = tokens[at];
    tokens[at] = 49999;
    EXPECT_NE(shard_content_hash(add_shard("c.bin", tokens)), hash) << at;
    tokens[at] = old;
  }
  tokens.pop_back();
  EXPECT_NE(shard_content_hash(add_shard("c.bin", tokens)), hash);

  std::vector<uint16_t> few = counting_tokens(1000, 0);
  const uint64_t small_hash = shard_content_hash(add_shard("small.bin", few));
  for (const size_t at : {size_t{0}, size_t{500}, size_t{999}}) {
    const uint16_t old = few[at];
    few[at] = 49999;
    EXPECT_NE(shard_content_hash(add_shard("small.bin", few)), small_hash) << at;
    few[at] = old;
  }
}

TEST(Hash64Test, IndependentOfTheSplitAndSensitiveToTheRest) {
  const std::string text = "The quick brown fox jumps over the lazy dog.";
  const uint64_t whole = Hash64().add_bytes(text.data(), text.size()).value();
  for (size_t split = 0; split <= text.size(); ++split) {
    Hash64 hash;
    hash.add_bytes(text.data(), split).add_bytes(text.data() + split, text.size() - split);
    EXPECT_EQ(hash.value(), whole) << split;
  }
  std::vector<uint64_t> seen = {whole};
  for (size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    seen.push_back(Hash64().add_bytes(changed.data(), changed.size()).value());
  }
  const std::string zeros(24, '\0');
  for (size_t length = 0; length <= zeros.size(); ++length) seen.push_back(Hash64().add_bytes(zeros.data(), length).value());
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
  EXPECT_NE(Hash64().add_text("ab").add_text("c").value(), Hash64().add_text("a").add_text("bc").value());
}

// Recorded values: run records hold such hashes, so the function must stay as it is.
TEST(Hash64Test, NeverChanges) {
  EXPECT_EQ(hash_text(Hash64().value()), "88404975477d8ec9");
  EXPECT_EQ(hash_text(Hash64().add_bytes("speedrun shards", 15).value()), "3e9ad90f69c76189");
  EXPECT_EQ(hash_text(Hash64().add_number(-1).add_number(2).value()), "d89e9b7a6dbfaa56");
}

}  // namespace
}  // namespace speedrun

#include "src/data/prefix_table.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "src/data/test_shards.h"

namespace speedrun {
namespace {

const std::string kVocab = std::string(SPEEDRUN_SOURCE_DIR) + "/data/gpt2_vocab";

// Every prefix of every token looked up, the longest first.
std::vector<int32_t> brute_force(const Gpt2Tokenizer& tokenizer, int64_t rows) {
  std::map<std::string, int32_t, std::less<>> ids;
  for (int32_t id = 0; id < tokenizer.bos(); ++id) ids.emplace(tokenizer.token_bytes(id), id);
  std::vector<int32_t> table(static_cast<size_t>(rows), -1);
  for (const auto& [bytes, id] : ids) {
    for (size_t size = bytes.size() - 1; size > 0; --size) {
      const auto found = ids.find(std::string_view(bytes).substr(0, size));
      if (found == ids.end()) continue;
      table[static_cast<size_t>(id)] = found->second;
      break;
    }
  }
  return table;
}

TEST(PrefixTable, EqualsBruteForce) {
  for (const int64_t vocab_size : {257, 258, 300, 1000, 4096, 50257}) {
    const Gpt2Tokenizer tokenizer(kVocab, vocab_size);
    const int64_t rows = vocab_size + 40;
    EXPECT_EQ(prefix_table(tokenizer, rows), brute_force(tokenizer, rows)) << vocab_size;
  }
}

TEST(PrefixTable, SpotChecks) {
  const Gpt2Tokenizer tokenizer(kVocab);
  const std::vector<int32_t> table = prefix_table(tokenizer, 50304);
  ASSERT_EQ(table.size(), 50304u);
  const auto id_of = [&](const std::string& text) {
    const std::vector<uint16_t> ids = tokenizer.encode(text);
    EXPECT_EQ(ids.size(), 1u) << text;
    return static_cast<size_t>(ids.at(0));
  };
  const auto prefix_of = [&](const std::string& text) {
    const int32_t prefix = table[id_of(text)];
    return prefix < 0 ? "(none)" : std::string(tokenizer.token_bytes(prefix));
  };
  EXPECT_EQ(prefix_of("a"), "(none)");
  EXPECT_EQ(prefix_of("the"), "th");
  EXPECT_EQ(prefix_of(" the"), " th");
  EXPECT_EQ(prefix_of(" t"), " ");
  EXPECT_EQ(prefix_of(" there"), " ther") << "not the pair's left half, \" the\"";
  EXPECT_EQ(table[id_of(" there")], static_cast<int32_t>(id_of(" ther")));
  for (size_t id = 0; id < 256; ++id) EXPECT_EQ(table[id], -1) << "a single byte: " << id;
  for (size_t id = 50256; id < 50304; ++id) EXPECT_EQ(table[id], -1) << "end of text and padding: " << id;
  for (size_t id = 256; id < 50256; ++id) {
    ASSERT_GE(table[id], 0) << "every merge begins with a byte, which is a token: " << id;
    ASSERT_NE(table[id], 50256) << id;
  }
}

TEST(PrefixTable, TooFewRowsAreRefused) {
  const Gpt2Tokenizer tokenizer(kVocab, 300);
  test::expect_contains(test::input_error([&] { prefix_table(tokenizer, 299); }), {"299 rows", "vocabulary of 300"});
}

}  // namespace
}  // namespace speedrun

#include "src/data/tokenize_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "src/data/document_source.h"
#include "src/data/test_shards.h"
#include "src/data/token_shard.h"

namespace speedrun {
namespace {

namespace fs = std::filesystem;

const std::string kVocab = std::string(SPEEDRUN_SOURCE_DIR) + "/data/gpt2_vocab";

class TokenizeFiles : public test::DataTest {
 protected:
  void SetUp() override {
    DataTest::SetUp();
    options_.out_prefix = path("out/shard");
  }

  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

  TokenizeSummary run() const { return tokenize_files(tokenizer_, options_); }
  std::string error() const {
    return test::input_error([this] { run(); });
  }

  std::vector<std::string> texts_of(const std::string& shard) const {
    const TokenShard opened = TokenShard::open(shard);
    std::vector<std::string> texts;
    for (const uint16_t id : opened.tokens()) {
      if (id == tokenizer_.bos()) {
        texts.emplace_back();
      } else {
        texts.back().append(tokenizer_.token_bytes(id));
      }
    }
    return texts;
  }

  // Names in the output folder.
  std::vector<std::string> written() const {
    std::vector<std::string> names;
    if (fs::exists(path("out"))) {
      for (const auto& entry : fs::directory_iterator(path("out"))) names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  Gpt2Tokenizer tokenizer_{kVocab, 4096};
  TokenizeOptions options_;
};

using Texts = std::vector<std::string>;

TEST_F(TokenizeFiles, EachFileIsADocument) {
  options_.inputs = {write("a.txt", "First file.\n\nTwo paragraphs.\n"), write("b.txt", "\xef\xbb\xbfSecond <|endoftext|> file")};
  const TokenizeSummary summary = run();
  EXPECT_EQ(summary.documents, 2);
  ASSERT_EQ(summary.shards, (Texts{path("out/shard_000.bin")}));
  EXPECT_EQ(texts_of(summary.shards[0]), (Texts{"First file.\n\nTwo paragraphs.\n", "Second <|endoftext|> file"}));
  EXPECT_EQ(summary.tokens, TokenShard::open(summary.shards[0]).num_tokens());
  EXPECT_EQ(written(), (Texts{"shard_000.bin"}));
}

TEST_F(TokenizeFiles, SeparatorCutsDocuments) {
  options_.inputs = {write("a.txt", "one==two== \n====three=="), write("b.txt", "=four=")};
  options_.separator = "==";
  const TokenizeSummary summary = run();
  EXPECT_EQ(summary.documents, 4);
  EXPECT_EQ(summary.empty_documents, 2);
  EXPECT_EQ(texts_of(summary.shards.at(0)), (Texts{"one", "two", "three", "=four="}));
}

// The source reads 4 MiB at a time: a separator lies at every position around the border.
TEST_F(TokenizeFiles, SeparatorAcrossReadBorder) {
  const std::string separator = "<separator>";
  for (size_t shift = 0; shift <= separator.size() + 1; ++shift) {
    const std::string first((size_t{4} << 20) - shift, 'a');
    DocumentSource source({write("a.txt", first + separator + "b" + separator + "c")}, separator);
    SourceDocument document;
    ASSERT_TRUE(source.next(document));
    ASSERT_TRUE(document.bytes == first) << shift;
    ASSERT_TRUE(source.next(document));
    EXPECT_EQ(document.bytes, "b") << shift;
    ASSERT_TRUE(source.next(document));
    EXPECT_EQ(document.bytes, "c") << shift;
    EXPECT_EQ(document.number, 3);
    EXPECT_FALSE(source.next(document));
  }
}

TEST_F(TokenizeFiles, JsonLines) {
  options_.format = TextFormat::jsonl;
  options_.field = "body";
  options_.inputs = {write(
      "a.jsonl", "\xef\xbb\xbf{\"body\": \"caf\\u00e9 \\ud83d\\ude00\", \"id\": 1}\r\n\n{\"id\": 2, \"body\": \"two\\nlines\"}")};
  const TokenizeSummary summary = run();
  EXPECT_EQ(texts_of(summary.shards.at(0)), (Texts{"café 😀", "two\nlines"}));
}

TEST_F(TokenizeFiles, JsonFaultsNameFileAndLine) {
  options_.format = TextFormat::jsonl;
  const std::string good = "{\"text\": \"fine\"}\n";
  const auto error_with = [&](const std::string& line) {
    options_.inputs = {write("a.jsonl", good + good + line + "\n" + good)};
    return error();
  };
  const std::string place = path("a.jsonl") + ":3: ";
  EXPECT_TRUE(error_with("{\"text\": \"cut").starts_with(place + "not a line of valid JSON"));
  EXPECT_TRUE(error_with("{\"text\": \"\xff\"}").starts_with(place + "not a line of valid JSON"));
  EXPECT_TRUE(error_with("{\"text\": \"\\ud800\"}").starts_with(place + "not a line of valid JSON"));
  EXPECT_TRUE(error_with("[1]").starts_with(place + "expected a JSON object, found array"));
  EXPECT_TRUE(error_with("{\"txt\": \"a\"}").starts_with(place + "the object has no field \"text\""));
  EXPECT_TRUE(error_with("{\"text\": 5}").starts_with(place + "field \"text\" is number"));
  EXPECT_EQ(written(), Texts{});  // no shard of a failed run is left behind
}

TEST_F(TokenizeFiles, ShardsEndBetweenDocumentsAndDoNotDependOnThreads) {
  std::string text;
  std::mt19937 rng(3);
  for (int document = 0; document < 3000; ++document) {
    for (uint64_t word = 1 + rng() % 60; word > 0; --word) text += "word" + std::to_string(rng() % 1000) + " ";
    text += '\x1e';
  }
  options_.inputs = {write("a.txt", text)};
  options_.separator = "\x1e";
  options_.shard_tokens = 20000;
  const TokenizeSummary one = run();
  EXPECT_EQ(one.documents, 3000);
  EXPECT_GT(one.shards.size(), 5u);
  int64_t tokens = 0;
  for (const std::string& path : one.shards) {
    const TokenShard shard = TokenShard::open(path);
    EXPECT_LE(shard.num_tokens(), 20000);
    EXPECT_EQ(shard.tokens()[0], tokenizer_.bos());
    tokens += shard.num_tokens();
  }
  EXPECT_EQ(tokens, one.tokens);

  options_.out_prefix = path("out/threads");
  options_.threads = 5;
  const TokenizeSummary five = run();
  ASSERT_EQ(five.shards.size(), one.shards.size());
  for (size_t i = 0; i < one.shards.size(); ++i) EXPECT_EQ(texts_of(five.shards[i]), texts_of(one.shards[i]));
}

TEST_F(TokenizeFiles, DocumentLongerThanAShardMakesALongerShard) {
  std::string text = "a b c\x1e";
  for (int i = 0; i < 500; ++i) text += "long ";
  options_.inputs = {write("a.txt", text + "\x1e d e f")};
  options_.separator = "\x1e";
  options_.shard_tokens = 100;
  const TokenizeSummary summary = run();
  ASSERT_EQ(summary.shards.size(), 3u);
  EXPECT_GT(TokenShard::open(summary.shards[1]).num_tokens(), 500);
}

TEST_F(TokenizeFiles, InvalidUtf8IsCountedAndReplaced) {
  options_.inputs = {write("a.txt", "caf\xe9!"), write("b.txt", "fine")};
  const TokenizeSummary summary = run();
  EXPECT_EQ(summary.repaired_documents, 1);
  EXPECT_EQ(texts_of(summary.shards.at(0)), (Texts{"caf\xef\xbf\xbd!", "fine"}));
}

TEST_F(TokenizeFiles, RefusesBadInputs) {
  options_.inputs = {path("missing.txt")};
  EXPECT_NE(error().find("missing.txt"), std::string::npos);
  options_.inputs = {folder_.string()};
  EXPECT_NE(error().find("is a folder"), std::string::npos);
  options_.inputs = {write("utf16.txt", std::string("\xff\xfeh\0i\0", 6))};
  EXPECT_NE(error().find("UTF-16"), std::string::npos);
  options_.inputs = {write("empty.txt", " \n")};
  EXPECT_NE(error().find("no text"), std::string::npos);

  options_.inputs = {write("good.txt", "text")};
  options_.shard_tokens = 0;
  EXPECT_NE(error().find("--shard-tokens 0"), std::string::npos);
  options_.shard_tokens = 10;
  options_.threads = 0;
  EXPECT_NE(error().find("--threads 0"), std::string::npos);
  options_.threads = 100000;
  EXPECT_NE(error().find("--threads 100000"), std::string::npos);
  options_.threads = 1;
  EXPECT_NO_THROW(run());
  EXPECT_NE(error().find("is there already"), std::string::npos);
  options_.out_prefix = path("good.txt/shard");
  EXPECT_NE(error().find("cannot make the folder"), std::string::npos);
}

}  // namespace
}  // namespace speedrun

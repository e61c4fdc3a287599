#include "src/data/token_shard.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <fstream>

#include "src/data/test_shards.h"

namespace speedrun {
namespace {

using test::counting_tokens;
using test::expect_contains;
using test::input_error;

class TokenShardTest : public test::DataTest {
 protected:
  std::string good() { return add_shard("good.bin", counting_tokens(1000, 7)); }

  void patch(const std::string& file, int64_t offset, int32_t value) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(offset);
    stream.write(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::string write_text(const std::string& name, const std::string& text) {
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name);
  }
  static std::string open_error(const std::string& file) {
    const std::string message = input_error([&] { TokenShard::open(file); });
    expect_contains(message, {quoted_path(file)});
    return message;
  }
};

TEST_F(TokenShardTest, WritesAndReadsBack) {
  const std::vector<uint16_t> tokens = counting_tokens(1000, 7);
  const TokenShard shard = TokenShard::open(good());
  EXPECT_EQ(shard.num_tokens(), 1000);
  EXPECT_EQ(shard.file_bytes(), 1024 + 2000);
  EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), shard.tokens().begin(), shard.tokens().end()));
  std::array<int32_t, 256> header{};
  std::memcpy(header.data(), shard.bytes().data(), sizeof header);
  EXPECT_EQ(header[0], 20240520);
  EXPECT_EQ(header[1], 1);
  EXPECT_EQ(header[2], 1000);
  for (size_t i = 3; i < header.size(); ++i) EXPECT_EQ(header[i], 0);
}

TEST_F(TokenShardTest, MoveKeepsTheMapping) {
  TokenShard a = TokenShard::open(good());
  TokenShard b = std::move(a);
  a = TokenShard::open(add_shard("other.bin", {1, 2}));
  EXPECT_EQ(b.tokens()[999], 1006);
  EXPECT_EQ(a.tokens()[1], 2);
}

TEST_F(TokenShardTest, WriteLeavesNothingHalfWritten) {
  good();
  add_shard("good.bin", {5});  // replaces
  EXPECT_EQ(TokenShard::open(path("good.bin")).num_tokens(), 1);
  EXPECT_THROW(write_shard(path("no such folder/a.bin"), std::vector<uint16_t>{1}), Error);
  std::filesystem::create_directory(path("folder.bin"));
  EXPECT_THROW(write_shard(path("folder.bin"), std::vector<uint16_t>{1}), Error);
  expect_contains(input_error([&] { write_shard(path("empty.bin"), {}); }), {"empty.bin", "got 0"});
  int files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++files;
  EXPECT_EQ(files, 2);
}

TEST_F(TokenShardTest, TruncatedFiles) {
  struct Case {
    int64_t bytes;
    std::vector<std::string> says;
  };
  const std::vector<Case> cases = {
      {1024 + 2000 - 2, {"header says 1000 tokens", "holds 999 tokens (", "cut short"}},
      {1024 + 2000 - 1, {"header says 1000 tokens", "holds 999 tokens and a half", "cut short"}},
      {1024 + 2000 - 1024, {"header says 1000 tokens", "holds 488 tokens", "cut short"}},
      {1024, {"header says 1000 tokens", "holds 0 tokens"}},
      {1000, {"header of 1024 bytes", "1000 bytes in all"}},
      {4, {"header of 1024 bytes", "4 bytes in all"}},
      {3, {"expected magic 20240520"}},
      {0, {"empty (0 bytes)"}},
      {1024 + 2000 + 1, {"header says 1000 tokens", "holds 1000 tokens and a half", "longer"}},
      {1024 + 2000 + 2, {"header says 1000 tokens", "holds 1001 tokens", "longer"}},
  };
  for (const Case& c : cases) {
    const std::string file = good();
    std::filesystem::resize_file(file, static_cast<uintmax_t>(c.bytes));
    expect_contains(open_error(file), c.says);
  }
}

TEST_F(TokenShardTest, WrongCounts) {
  const std::vector<std::pair<int32_t, std::vector<std::string>>> cases = {
      {1001, {"header says 1001 tokens", "holds 1000 tokens", "cut short"}},
      {999, {"header says 999 tokens", "holds 1000 tokens", "longer"}},
      {-1000, {"at least 1 token", "-1000"}},
      {0, {"at least 1 token", "0 tokens"}},
      {INT32_MAX, {"header says 2147483647 tokens", "holds 1000 tokens", "4294968318 bytes"}},
      {INT32_MIN, {"-2147483648"}},
      {500, {"32-bit tokens", "16-bit"}},  // 4 bytes for each token the header counts
  };
  for (const auto& [count, says] : cases) {
    const std::string file = good();
    patch(file, 8, count);
    expect_contains(open_error(file), says);
  }
}

TEST_F(TokenShardTest, OtherMagicsAndVersions) {
  const std::vector<std::pair<uint32_t, std::vector<std::string>>> cases = {
      {20240801, {"expected magic 20240520", "found 20240801", "32-bit Llama-3"}},
      {20240522, {"found 20240522", "HellaSwag"}},
      {20240326, {"model checkpoint"}},
      {20240328, {"tokenizer"}},
      {__builtin_bswap32(20240520), {"expected magic 20240520", "big-endian"}},
      {__builtin_bswap32(20240801), {"20240801 in big-endian", "Llama-3"}},
      {12345, {"found 12345", "without a header"}},
      {0xFFFFFFFF, {"found -1 (0xffffffff)"}},
  };
  for (const auto& [magic, says] : cases) {
    const std::string file = good();
    patch(file, 0, static_cast<int32_t>(magic));
    expect_contains(open_error(file), says);
  }
  const std::string file = good();
  patch(file, 4, 2);
  expect_contains(open_error(file), {"expected version 1, found 2"});
  patch(file, 4, 7);
  expect_contains(open_error(file), {"expected version 1, found 7", "32-bit"});
}

TEST_F(TokenShardTest, FilesThatAreNoShards) {
  expect_contains(open_error(write_text("lfs.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n")),
                  {"Git LFS pointer"});
  expect_contains(open_error(write_text("page.bin", "<!DOCTYPE html><html></html>")), {"HTML page"});
  expect_contains(open_error(write_text("packed.bin", std::string("\x1f\x8b\x08", 3) + std::string(2000, 'x'))), {"gzip"});
  expect_contains(open_error(write_text("text.bin", "{\"text\": \"a\"}")), {"JSONL"});
  expect_contains(open_error(path("absent.bin")), {"No such file"});
  expect_contains(open_error(folder_.string()), {"folder", "*.bin"});
  ASSERT_EQ(::mkfifo(path("pipe.bin").c_str(), 0600), 0);
  expect_contains(open_error(path("pipe.bin")), {"regular file"});
}

TEST_F(TokenShardTest, UnreadableFile) {
  const std::string file = good();
  std::filesystem::permissions(file, std::filesystem::perms::none);
  if (::access(file.c_str(), R_OK) == 0) GTEST_SKIP() << "this user may read everything";
  expect_contains(open_error(file), {"Permission denied"});
}

TEST_F(TokenShardTest, NamesStayOnOneLine) {
  EXPECT_EQ(quoted_path("a b\xC3\xA9.bin"), "'a b\xC3\xA9.bin'");
  expect_contains(open_error(path("two\nlines.bin")), {"two\\x0alines"});
}

TEST_F(TokenShardTest, TokenRange) {
  std::vector<uint16_t> tokens(20000, 3);
  tokens[12345] = 60000;
  tokens[19999] = 50257;
  const TokenShard shard = TokenShard::open(add_shard("ids.bin", tokens));
  const std::string message = input_error([&] { check_token_range(shard, 50257); });
  expect_contains(message, {"ids.bin", "id 60000", "offset 12345", "50257"});
  check_token_range(shard, 65536);
  check_token_range(shard, 50257, 12345);  // before the first bad one
  expect_contains(input_error([&] { check_token_range(shard, 50257, 12346); }), {"12345"});

  tokens[12345] = 3;  // 50257 is a row of the padded embedding, but no token
  const TokenShard padded = TokenShard::open(add_shard("padding.bin", tokens));
  expect_contains(input_error([&] { check_token_range(padded, 50257); }), {"id 50257", "offset 19999"});
  check_token_range(padded, 50258);
}

}  // namespace
}  // namespace speedrun

#pragma once
// Shards and folders for the tests of this directory.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "src/core/test_folder.h"
#include "src/core/test_refusal.h"
#include "src/data/reader.h"
#include "src/data/token_shard.h"

namespace speedrun::test {

inline constexpr uint16_t kBos = 50256;

// Files in a folder of the test's own.
class DataTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string add_shard(const std::string& name, const std::vector<uint16_t>& tokens) const {
    write_shard(path(name), tokens);
    return path(name);
  }
  // All shards of the folder.
  ReaderOptions options(int64_t repeat = 1) const {
    ReaderOptions result;
    result.shards = list_shards(path("*.bin"));
    result.repeat = repeat;
    return result;
  }

  TestFolder test_folder_;
  std::filesystem::path folder_ = test_folder_.path();
};

// Tokens first, first + 1, … so that every token of a test is told apart; none is a BOS as long as they stay below 50256.
inline std::vector<uint16_t> counting_tokens(int64_t count, int64_t first) {
  std::vector<uint16_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<uint16_t>(first + i));
  return tokens;
}

// Documents of the given lengths (BOS included) filled with random ids.
inline std::vector<uint16_t> documents(const std::vector<int64_t>& lengths, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> tokens;
  for (const int64_t length : lengths) {
    tokens.push_back(kBos);
    for (int64_t i = 1; i < length; ++i) tokens.push_back(static_cast<uint16_t>(random() % kBos));
  }
  return tokens;
}

// Mostly short documents, some empty ones (a BOS alone), a few long.
inline std::vector<int64_t> random_lengths(int64_t count, int64_t longest, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t kind = random() % 8;
    const int64_t limit = kind == 0 ? 1 : kind < 6 ? std::max<int64_t>(longest / 4, 1) : longest;
    lengths.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(limit)));
  }
  return lengths;
}

// Runs a callable that must throw InputError, and returns its message: one line.
template <class Callable>
std::string input_error(Callable&& callable) {
  const std::string message = refusal_of(callable);
  EXPECT_NE(message, "accepted") << "expected an InputError";
  return message;
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

inline bool operator==(const StepRows& a, const StepRows& b) {
  return a.num_rows == b.num_rows && a.row_tokens == b.row_tokens && a.inputs == b.inputs && a.targets == b.targets &&
         a.doc_start == b.doc_start;
}

// All rows of the next step, read as `world` ranks would: each by a reader of its own that stands at the same place.
template <class MakeReader>
StepRows read_as_ranks(Reader& reader, const StepShape& shape, int world, MakeReader&& make_reader) {
  StepRows all, part;
  const ReaderState before = reader.state();
  for (int rank = 0; rank < world; ++rank) {
    const std::unique_ptr<Reader> of_rank = make_reader();
    of_rank->restore(before);
    of_rank->next(shape, rank, world, part);
    all.num_rows += part.num_rows;
    all.row_tokens = part.row_tokens;
    all.inputs.insert(all.inputs.end(), part.inputs.begin(), part.inputs.end());
    all.targets.insert(all.targets.end(), part.targets.begin(), part.targets.end());
    all.doc_start.insert(all.doc_start.end(), part.doc_start.begin(), part.doc_start.end());
    if (rank == world - 1) reader.restore(of_rank->state());
  }
  return all;
}

}  // namespace speedrun::test

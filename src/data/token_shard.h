#pragma once
// A `.bin` token shard: 256 int32 of header (magic 20240520, version 1, number of tokens, zeros), then that many uint16 token ids,
// all little-endian. The format of llm.c and modded-nanogpt.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace speedrun {

inline constexpr int32_t kShardMagic = 20240520;
inline constexpr int32_t kShardVersion = 1;
inline constexpr int64_t kShardHeaderBytes = 256 * sizeof(int32_t);
inline constexpr int64_t kTokenBytes = sizeof(uint16_t);

// A path in quotes for an error message, control characters escaped so that the message stays one line.
std::string quoted_path(const std::string& path);

// Checks a shard's header against the size of its file and returns the number of tokens (at least 1). `file_start` holds the first
// min(file_bytes, kShardHeaderBytes) bytes. Throws InputError naming path, what was expected and what was found; recognises other
// formats.
int64_t check_shard_header(std::span<const std::byte> file_start, int64_t file_bytes, const std::string& path);

// An open shard, mapped into memory. Move-only. The file must not shrink while it is mapped.
class TokenShard {
 public:
  // Throws InputError for a missing, unreadable, foreign or damaged file, Error when the machine fails (descriptors, address
  // space).
  static TokenShard open(const std::string& path);
  TokenShard(TokenShard&& other) noexcept;
  TokenShard& operator=(TokenShard&& other) noexcept;
  ~TokenShard();

  const std::string& path() const { return path_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t file_bytes() const { return file_bytes_; }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(mapping_), static_cast<size_t>(file_bytes_)}; }
  std::span<const uint16_t> tokens() const;  // (num_tokens)

  // Asks the operating system to read the file ahead; returns at once.
  void read_ahead() const;

 private:
  TokenShard() = default;
  std::string path_;
  void* mapping_ = nullptr;
  int64_t file_bytes_ = 0;
  int64_t num_tokens_ = 0;
};

// Throws InputError naming shard, offset, id and vocabulary unless every id of the first `num_tokens` is below vocab_size.
void check_token_range(const TokenShard& shard, int64_t vocab_size, int64_t num_tokens);
void check_token_range(const TokenShard& shard, int64_t vocab_size);

// Writes a shard beside `path` and renames it, so that `path` is either the old file or the whole new one, on disk, even after a
// crash. 1 … 2³¹ − 1 tokens (the header's count is an int32). Throws InputError for a count outside, Error when the file cannot be
// written.
void write_shard(const std::string& path, std::span<const uint16_t> tokens);

}  // namespace speedrun

#pragma once
// The shards behind a pattern, in a defined order, each opened and checked.
#include <cstdint>
#include <string>
#include <vector>

namespace speedrun {

struct ShardInfo {
  std::string path;
  int64_t num_tokens = 0;
  int64_t file_bytes = 0;
};

struct ShardList {
  std::string pattern;            // what the user gave, for messages
  std::vector<ShardInfo> shards;  // sorted by path in plain byte order: part_10.bin comes before part_2.bin, whatever the locale
  int64_t total_tokens = 0;
  // Of names without folders, headers and sizes, in order: equal on two machines that hold copies of the same files. Says nothing
  // about the tokens themselves: see shard_content_hash.
  uint64_t hash = 0;

  std::vector<std::string> files() const;
};

// Resolves a shell pattern (* ? [..] {a,b}); a pattern that is the name of an existing file is that file, whatever characters it
// holds. Relative patterns start at the working directory. Every file is opened and its header checked against its size. Throws
// InputError: nothing matches, a folder, an unreadable or damaged file.
ShardList list_shards(const std::string& pattern);

// The same for files named one by one; they are sorted too. A file given twice is refused.
ShardList open_shards(std::vector<std::string> paths);

// Fingerprint of a shard's content for run records: the whole file up to 4 MiB; beyond, its size, header, and 64 blocks of 64 KiB
// spread evenly from the first token to the last. Cheap (at most 4 MiB are read), finds a different tokenisation or a different
// file, but not every flipped bit.
uint64_t shard_content_hash(const std::string& path);

}  // namespace speedrun

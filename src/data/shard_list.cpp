#include "src/data/shard_list.h"

#include <fmt/format.h>
#include <glob.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>

#include "kernels/base/error.h"
#include "src/data/hash64.h"
#include "src/data/token_shard.h"

namespace speedrun {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void throw_forbidden(const std::string& pattern) {
  throw InputError(fmt::format("shards {}: cannot read a folder of this path: {}", quoted_path(pattern), std::strerror(EACCES)));
}

class GlobResult {
 public:
  explicit GlobResult(const std::string& pattern) {
    const auto is_forbidden = [](const char*, int error) -> int { return error == EACCES || error == EPERM; };
    const int status = ::glob(pattern.c_str(), GLOB_BRACE | GLOB_NOSORT, is_forbidden, &result_);
    if (status == GLOB_NOSPACE) throw std::bad_alloc();
    if (status == GLOB_ABORTED) throw_forbidden(pattern);
  }
  GlobResult(const GlobResult&) = delete;
  GlobResult& operator=(const GlobResult&) = delete;
  ~GlobResult() { ::globfree(&result_); }
  std::vector<std::string> paths() const { return {result_.gl_pathv, result_.gl_pathv + result_.gl_pathc}; }

 private:
  glob_t result_{};
};

std::string working_directory() {
  std::error_code error;
  const fs::path path = fs::current_path(error);
  return error ? "unknown" : quoted_path(path.string());
}

ShardList make_list(std::string pattern, std::vector<std::string> paths) {
  std::sort(paths.begin(), paths.end());
  const auto twice = std::adjacent_find(paths.begin(), paths.end());
  if (twice != paths.end())
    throw InputError(fmt::format("shard {}: given twice; data.repeat reads shards more than once", quoted_path(*twice)));

  ShardList list;
  list.pattern = std::move(pattern);
  Hash64 hash;
  for (const std::string& path : paths) {
    const TokenShard shard = TokenShard::open(path);
    hash.add_text(fs::path(path).filename().string());
    hash.add_values(shard.bytes().first(kShardHeaderBytes)).add_number(shard.file_bytes());
    list.total_tokens += shard.num_tokens();
    list.shards.push_back({path, shard.num_tokens(), shard.file_bytes()});
  }
  list.hash = hash.value();
  return list;
}

}  // namespace

std::vector<std::string> ShardList::files() const {
  std::vector<std::string> paths;
  for (const ShardInfo& shard : shards) paths.push_back(shard.path);
  return paths;
}

ShardList list_shards(const std::string& pattern) {
  if (pattern.empty()) throw InputError("shards: the pattern is empty; expected a path such as data/train_*.bin");
  std::error_code error;
  const fs::file_status status = fs::status(pattern, error);
  if (error == std::errc::permission_denied) throw_forbidden(pattern);
  if (fs::is_directory(status)) {
    throw InputError(
        fmt::format("shards {}: expected a pattern of .bin files, found a folder; name the shards in it, for example {}",
                    quoted_path(pattern), quoted_path((fs::path(pattern) / "*.bin").string())));
  }
  if (fs::exists(status)) return make_list(pattern, {pattern});
  std::vector<std::string> paths = GlobResult(pattern).paths();
  if (paths.empty()) {
    throw InputError(fmt::format("no files match {} (working directory {}); see data/README.md for how to fetch or make shards",
                                 quoted_path(pattern), working_directory()));
  }
  return make_list(pattern, std::move(paths));
}

ShardList open_shards(std::vector<std::string> paths) {
  if (paths.empty()) throw InputError("shards: no files given");
  std::string pattern = paths.size() == 1 ? paths.front() : fmt::format("{} and {} more", paths.front(), paths.size() - 1);
  return make_list(std::move(pattern), std::move(paths));
}

uint64_t shard_content_hash(const std::string& path) {
  constexpr int64_t kBlockBytes = 64 << 10;
  constexpr int64_t kNumBlocks = 64;
  const TokenShard shard = TokenShard::open(path);
  const std::span<const std::byte> bytes = shard.bytes();
  Hash64 hash;
  if (shard.file_bytes() <= kBlockBytes * kNumBlocks) return hash.add_values(bytes).value();
  hash.add_number(shard.file_bytes()).add_values(bytes.first(kShardHeaderBytes));
  const int64_t last_begin = shard.file_bytes() - kBlockBytes;
  for (int64_t i = 0; i < kNumBlocks; ++i) {
    const int64_t begin = kShardHeaderBytes + (last_begin - kShardHeaderBytes) / (kNumBlocks - 1) * i;
    const int64_t block_begin = i == kNumBlocks - 1 ? last_begin : begin;
    hash.add_values(bytes.subspan(static_cast<size_t>(block_begin), kBlockBytes));
  }
  return hash.value();
}

}  // namespace speedrun

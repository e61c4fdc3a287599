#pragma once
// A shard made ready for a reader, and the background load of the one after it.
#include <cstdint>
#include <future>
#include <memory>
#include <vector>

#include "src/data/shard_list.h"
#include "src/data/token_shard.h"

namespace speedrun {

struct LoadOptions {
  int64_t vocab_size = 0;
  bool index_documents = false;
  int64_t bos_id = 0;
};

// Offsets of every `bos_id` in the tokens, ascending. A shard has fewer than 2³¹ tokens.
std::vector<int32_t> find_documents(std::span<const uint16_t> tokens, int64_t bos_id);

struct LoadedShard {
  TokenShard shard;
  std::vector<int32_t> bos;  // document starts; empty unless index_documents
};

// Maps a shard, checks that it is still the file that was listed, reads all of it once: ids in range, document starts.
std::shared_ptr<const LoadedShard> load_shard(const ShardInfo& info, const LoadOptions& options);

// Holds the shard in use and loads one more in the background. Not for use by several threads at once.
class ShardCache {
 public:
  ShardCache(std::vector<ShardInfo> shards, LoadOptions options) : shards_(std::move(shards)), options_(options) {}

  // The shard with this index. Waits for its background load, or loads it now; then starts to load `next_index` (-1: none). What
  // either load throws is thrown by the call that asks for that shard.
  std::shared_ptr<const LoadedShard> get(int64_t index, int64_t next_index);

 private:
  std::vector<ShardInfo> shards_;
  LoadOptions options_;
  int64_t current_index_ = -1;
  std::shared_ptr<const LoadedShard> current_;
  int64_t pending_index_ = -1;
  std::future<std::shared_ptr<const LoadedShard>> pending_;
};

}  // namespace speedrun

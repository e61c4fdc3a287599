#include "src/data/loaded_shard.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"

namespace speedrun {

std::vector<int32_t> find_documents(std::span<const uint16_t> tokens, int64_t bos_id) {
  constexpr size_t kBlock = 64;  // most blocks hold no BOS: the test of a whole one vectorises
  std::vector<int32_t> starts;
  if (bos_id < 0 || bos_id > UINT16_MAX) return starts;
  const auto bos = static_cast<uint16_t>(bos_id);
  for (size_t begin = 0; begin < tokens.size(); begin += kBlock) {
    const std::span<const uint16_t> block = tokens.subspan(begin, std::min(kBlock, tokens.size() - begin));
    uint16_t any = 0;
    for (const uint16_t token : block) any = static_cast<uint16_t>(any | (token == bos));
    if (any == 0) continue;
    for (size_t i = 0; i < block.size(); ++i) {
      if (block[i] == bos) starts.push_back(static_cast<int32_t>(begin + i));
    }
  }
  return starts;
}

std::shared_ptr<const LoadedShard> load_shard(const ShardInfo& info, const LoadOptions& options) {
  TokenShard shard = TokenShard::open(info.path);
  if (shard.num_tokens() != info.num_tokens || shard.file_bytes() != info.file_bytes) {
    throw InputError(fmt::format("shard {}: changed since the start: it held {} tokens in {} bytes, now {} tokens in {} bytes",
                                 quoted_path(info.path), info.num_tokens, info.file_bytes, shard.num_tokens(), shard.file_bytes()));
  }
  shard.read_ahead();
  check_token_range(shard, options.vocab_size);
  std::vector<int32_t> bos;
  if (options.index_documents) bos = find_documents(shard.tokens(), options.bos_id);
  return std::make_shared<const LoadedShard>(LoadedShard{std::move(shard), std::move(bos)});
}

std::shared_ptr<const LoadedShard> ShardCache::get(int64_t index, int64_t next_index) {
  if (index != current_index_) {
    std::shared_ptr<const LoadedShard> loaded;
    if (index == pending_index_) {
      pending_index_ = -1;  // first: a load that failed is tried again by the next call
      loaded = pending_.get();
    } else {
      loaded = load_shard(shards_.at(static_cast<size_t>(index)), options_);
    }
    current_ = std::move(loaded);
    current_index_ = index;
  }
  if (next_index >= 0 && next_index != current_index_ && next_index != pending_index_) {
    const ShardInfo info = shards_.at(static_cast<size_t>(next_index));
    pending_ = std::async(std::launch::async, [info, options = options_] { return load_shard(info, options); });
    pending_index_ = next_index;
  }
  return current_;
}

}  // namespace speedrun

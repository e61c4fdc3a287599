#include "src/data/validation_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/base/error.h"

namespace speedrun {

ValidationReader::ValidationReader(const ValidationOptions& options)
    : row_tokens_(options.row_tokens), bos_id_(options.bos_id), borders_(options.borders) {
  if (options.row_tokens < 1)
    throw InputError(
        fmt::format("eval.row_tokens, train.seq_len: expected validation rows of at least 1 token, found {}", options.row_tokens));
  if (options.tokens < 1 || options.tokens % options.row_tokens != 0) {
    throw InputError(fmt::format("eval.tokens: expected a positive multiple of the row length {}, found {}", options.row_tokens,
                                 options.tokens));
  }
  if (options.shards.shards.empty()) throw InputError("data.val: no shards given");
  num_rows_ = options.tokens / options.row_tokens;

  const int64_t needed = options.tokens + 1;  // the last prediction's target
  if (options.shards.total_tokens < needed) {
    const int64_t possible = std::max<int64_t>(options.shards.total_tokens - 1, 0) / options.row_tokens * options.row_tokens;
    throw InputError(fmt::format(
        "validation shards {} ({} files, the last is {}) hold {} tokens, eval.tokens = {} needs {}; {}",
        quoted_path(options.shards.pattern), options.shards.shards.size(), quoted_path(options.shards.shards.back().path),
        options.shards.total_tokens, options.tokens, needed,
        possible > 0 ? fmt::format("lower eval.tokens to at most {} or add shards to data.val", possible)
                     : fmt::format("not one row of {} tokens: lower eval.row_tokens (or train.seq_len) or add shards to data.val",
                                   options.row_tokens)));
  }
  int64_t begin = 0;
  for (const ShardInfo& info : options.shards.shards) {
    if (begin >= needed) break;
    TokenShard shard = TokenShard::open(info.path);
    if (shard.num_tokens() != info.num_tokens) {
      throw InputError(fmt::format("shard {}: changed since the start: it held {} tokens, now {}", quoted_path(info.path),
                                   info.num_tokens, shard.num_tokens()));
    }
    check_token_range(shard, options.vocab_size, std::min(info.num_tokens, needed - begin));
    files_.push_back(info.path);
    segments_.push_back({std::move(shard), begin});
    begin += info.num_tokens;
  }
}

void ValidationReader::copy(int64_t begin, int64_t count, int32_t* destination) const {
  // The last segment that starts at or before `begin`.
  auto segment =
      std::upper_bound(segments_.begin(), segments_.end(), begin, [](int64_t at, const Segment& s) { return at < s.begin; }) - 1;
  for (; count > 0; ++segment) {
    const int64_t offset = begin - segment->begin;
    const int64_t taken = std::min(count, segment->shard.num_tokens() - offset);
    const auto source = segment->shard.tokens().subspan(static_cast<size_t>(offset), static_cast<size_t>(taken));
    destination = std::copy(source.begin(), source.end(), destination);
    begin += taken;
    count -= taken;
  }
}

void ValidationReader::read(int64_t first_row, int64_t count, StepRows& out) const {
  require(first_row >= 0 && count >= 0 && first_row + count <= num_rows_, "validation: rows ", first_row, " ... ",
          first_row + count, " of ", num_rows_);
  out.num_rows = count;
  out.row_tokens = row_tokens_;
  const int64_t num_tokens = count * row_tokens_;
  for (std::vector<int32_t>* values : {&out.inputs, &out.targets, &out.doc_start}) values->resize(static_cast<size_t>(num_tokens));
  copy(first_row * row_tokens_, num_tokens, out.inputs.data());
  copy(first_row * row_tokens_ + 1, num_tokens, out.targets.data());
  if (borders_ == DocumentBorders::ignored) {
    std::fill(out.doc_start.begin(), out.doc_start.end(), 0);
    return;
  }
  for (int64_t row = 0; row < count; ++row) {
    const int32_t* inputs = out.inputs.data() + row * row_tokens_;
    int32_t* doc_start = out.doc_start.data() + row * row_tokens_;
    int32_t start = 0;
    for (int32_t t = 0; t < row_tokens_; ++t) {
      if (inputs[t] == bos_id_) start = t;
      doc_start[t] = start;
    }
  }
}

}  // namespace speedrun

#include "src/data/row_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/base/error.h"
#include "src/data/shard_reader.h"

namespace speedrun {
namespace {

class RowReader final : public ShardReader {
 public:
  explicit RowReader(ReaderOptions options) : ShardReader(std::move(options), DocumentIndex::none) {}

 private:
  void check_shape(const StepShape& shape) const override { check_row_shape(shape); }

  StepPlan plan_step(const ReaderState& at, const StepShape& shape) override {
    const int64_t shard_tokens = info(at).num_tokens;
    if (rows_fit(at.position, shape.batch_tokens, shard_tokens)) return {at.position + shape.batch_tokens, 0};
    return {at.position, at.position + shape.batch_tokens + 2 - shard_tokens};
  }

  void fill_rows(const ReaderState& at, const StepShape& shape, int64_t first_row, StepRows& out) override {
    const std::shared_ptr<const LoadedShard> loaded = load(at);
    const auto begin = loaded->shard.tokens().begin() + (at.position + first_row * shape.row_tokens);
    const auto count = static_cast<int64_t>(out.inputs.size());
    std::copy(begin, begin + count, out.inputs.begin());
    std::copy(begin + 1, begin + 1 + count, out.targets.begin());
    std::fill(out.doc_start.begin(), out.doc_start.end(), 0);
  }

  void check_restored(const ReaderState&) const override {}
};

}  // namespace

void check_row_shape(const StepShape& shape) {
  if (shape.row_tokens < 1) throw InputError(fmt::format("train.seq_len: expected at least 1, found {}", shape.row_tokens));
  if (shape.batch_tokens < shape.row_tokens || shape.batch_tokens % shape.row_tokens != 0) {
    throw InputError(fmt::format("train.batch_tokens: expected a positive multiple of the row length {} (train.seq_len), found {}",
                                 shape.row_tokens, shape.batch_tokens));
  }
}

std::unique_ptr<ShardReader> make_shard_row_reader(ReaderOptions options) {
  return std::make_unique<RowReader>(std::move(options));
}

std::unique_ptr<Reader> make_row_reader(ReaderOptions options) { return make_shard_row_reader(std::move(options)); }

}  // namespace speedrun

#include "src/data/document_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/base/error.h"
#include "src/data/shard_reader.h"

namespace speedrun {
namespace {

class DocumentReader final : public ShardReader {
 public:
  explicit DocumentReader(ReaderOptions options) : ShardReader(std::move(options), DocumentIndex::built) {
    if (this->options().document_rows < 1) {
      throw InputError(fmt::format("data.document_rows: expected at least 1, found {}", this->options().document_rows));
    }
    if (this->options().bos_id < 0 || this->options().bos_id >= this->options().vocab_size) {
      throw InputError(fmt::format("documents reader: the BOS id {} is not in the vocabulary of {}", this->options().bos_id,
                                   this->options().vocab_size));
    }
  }

 private:
  void check_shape(const StepShape& shape) const override { check_document_shape(shape, options().document_rows); }

  StepPlan plan_step(const ReaderState& at, const StepShape& shape) override {
    const std::shared_ptr<const LoadedShard> loaded = load(at);
    const std::vector<int32_t>& bos = loaded->bos;
    const int64_t first = std::lower_bound(bos.begin(), bos.end(), at.position) - bos.begin();
    const DocumentFill fill = fill_document_rows(bos, info(at).num_tokens, shape, options().document_rows, first, &pieces_);
    const auto next = static_cast<size_t>(fill.next_document);
    return {next < bos.size() ? bos[next] : info(at).num_tokens, fill.missing_tokens};
  }

  void fill_rows(const ReaderState& at, const StepShape& shape, int64_t first_row, StepRows& out) override {
    const std::shared_ptr<const LoadedShard> loaded = load(at);
    const std::span<const uint16_t> tokens = loaded->shard.tokens();
    const int64_t n = shape.row_tokens;
    for (int64_t row = 0; row < out.num_rows; ++row) {
      int32_t* inputs = out.inputs.data() + row * n;
      int32_t* targets = out.targets.data() + row * n;
      int32_t* doc_start = out.doc_start.data() + row * n;
      int64_t held = 0;
      for (const DocumentPiece& piece : pieces_[static_cast<size_t>(first_row + row)]) {
        const int64_t start = held;
        for (int64_t source = piece.begin; source < piece.end; ++source, ++held) {
          const int32_t token = tokens[static_cast<size_t>(source)];
          if (held > 0) targets[held - 1] = token;
          if (held == n) break;  // the token n + 1 is a target only
          inputs[held] = token;
          doc_start[held] = static_cast<int32_t>(start);
        }
      }
    }
  }

  void check_restored(const ReaderState& state) const override {
    const TokenShard shard = TokenShard::open(info(state).path);
    const std::span<const uint16_t> tokens = shard.tokens();
    const auto position = static_cast<size_t>(state.position);
    if (position == 0 || position >= tokens.size() || tokens[position] == options().bos_id) return;
    throw InputError(fmt::format(
        "data position of the checkpoint: token {} of shard {} starts no document: it is not the shard the run was started with",
        state.position, quoted_path(shard.path())));
  }

  std::vector<std::vector<DocumentPiece>> pieces_;  // of the step planned last, per row
};

}  // namespace

DocumentFill fill_document_rows(std::span<const int32_t> bos, int64_t shard_tokens, const StepShape& shape, int64_t num_rows,
                                int64_t first_document, std::vector<std::vector<DocumentPiece>>* pieces) {
  const auto num_documents = static_cast<int64_t>(bos.size());
  const int64_t wanted = shape.row_tokens + 1;
  if (pieces != nullptr) pieces->resize(static_cast<size_t>(num_rows));
  int64_t document = first_document;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (pieces != nullptr) (*pieces)[static_cast<size_t>(row)].clear();
    for (int64_t held = 0; held < wanted; ++document) {
      if (document >= num_documents) return {document, (num_rows - row) * wanted - held};
      const int64_t begin = bos[static_cast<size_t>(document)];
      const int64_t document_end = document + 1 < num_documents ? bos[static_cast<size_t>(document + 1)] : shard_tokens;
      const int64_t end = std::min({document_end, begin + shape.max_seq_len, begin + wanted - held});
      if (pieces != nullptr) (*pieces)[static_cast<size_t>(row)].push_back({begin, end});
      held += end - begin;
    }
  }
  return {document, 0};
}

void check_document_shape(const StepShape& shape, int64_t document_rows) {
  if (shape.max_seq_len < 1) throw InputError(fmt::format("data.max_seq_len: expected at least 1, found {}", shape.max_seq_len));
  if (shape.row_tokens < 1 || shape.batch_tokens != shape.row_tokens * document_rows) {
    throw InputError(fmt::format(
        "train.batch_tokens: a step of documents has data.document_rows = {} rows, so {} tokens cannot be rows of {}; expected "
        "a multiple of {} and rows of batch_tokens / {}",
        document_rows, shape.batch_tokens, shape.row_tokens, document_rows, document_rows));
  }
}

std::unique_ptr<ShardReader> make_shard_document_reader(ReaderOptions options) {
  return std::make_unique<DocumentReader>(std::move(options));
}

std::unique_ptr<Reader> make_document_reader(ReaderOptions options) { return make_shard_document_reader(std::move(options)); }

}  // namespace speedrun

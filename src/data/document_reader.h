#pragma once
// The rule by which documents fill the rows of a step (Main Track, modded-nanogpt record #89):
//   A row of n tokens takes n + 1 from the shard: inputs are the first n, targets the last n. While a row holds at most n tokens,
//   the next document (from its BOS) is appended, cut at its end, at max_seq_len, or where the row is full; the rest of a cut
//   document is skipped. A document ends before the next BOS or at the end of its shard. All rows of a step fill one after the
//   other from one cursor. When a shard cannot fill all of them, its rest is dropped and the step is filled from the first BOS of
//   the next shard.
// Targets run on across document borders: the target of a piece's last token is the first token of the next piece. The token n + 1
// is a target only, so the last piece counts one input less (none, if it is a lone BOS).
#include <cstdint>
#include <span>
#include <vector>

#include "src/data/reader.h"

namespace speedrun {

// Tokens [begin, end) of a shard, from a BOS on.
struct DocumentPiece {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const DocumentPiece&) const = default;
};

struct DocumentFill {
  int64_t next_document = 0;   // the first one that was not used
  int64_t missing_tokens = 0;  // what the documents left rows short of; 0: all rows are full
};

// Fills `num_rows` rows of row_tokens + 1 tokens from document number `first_document` on. `bos` holds the starts of all documents
// of a shard of `shard_tokens` tokens. `pieces` becomes the pieces of each row; nullptr: not wanted.
DocumentFill fill_document_rows(std::span<const int32_t> bos, int64_t shard_tokens, const StepShape& shape, int64_t num_rows,
                                int64_t first_document, std::vector<std::vector<DocumentPiece>>* pieces);

// Throws InputError naming the keys unless the shape has `document_rows` rows and a max_seq_len.
void check_document_shape(const StepShape& shape, int64_t document_rows);

}  // namespace speedrun

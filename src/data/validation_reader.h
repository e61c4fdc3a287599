#pragma once
// The validation set: the first `tokens` predictions of the stream that the shards make end to end, in rows of `row_tokens`. The
// stream is taken as it stands: rows are not aligned to documents, and the set depends neither on the number of ranks nor on
// further shards.
#include <cstdint>
#include <string>
#include <vector>

#include "src/data/reader.h"
#include "src/data/token_shard.h"

namespace speedrun {

enum class DocumentBorders {
  ignored,  // doc_start is 0: every token of a row sees all before it (Optimization Track)
  kept,     // doc_start follows the BOS tokens; a document that crosses a row border is cut there (Main Track)
};

struct ValidationOptions {
  ShardList shards;
  int64_t vocab_size = 50257;
  int64_t bos_id = 50256;
  int64_t tokens = 0;      // predictions; a multiple of row_tokens
  int64_t row_tokens = 0;  // T (rows) or n (documents)
  DocumentBorders borders = DocumentBorders::ignored;
};

class ValidationReader {
 public:
  // Maps the shards it needs and checks the ids it will use. Throws InputError: fewer than tokens + 1 tokens, tokens not a multiple
  // of row_tokens, damaged shards, ids out of range.
  explicit ValidationReader(const ValidationOptions& options);

  int64_t num_rows() const { return num_rows_; }
  int64_t row_tokens() const { return row_tokens_; }
  const std::vector<std::string>& files() const { return files_; }  // the shards in use, in order

  // Fills `out` with rows first_row … first_row + count − 1. May be called for any rows in any order.
  void read(int64_t first_row, int64_t count, StepRows& out) const;

 private:
  struct Segment {
    TokenShard shard;
    int64_t begin = 0;  // place of the shard's first token in the stream
  };
  void copy(int64_t begin, int64_t count, int32_t* destination) const;

  std::vector<Segment> segments_;
  std::vector<std::string> files_;
  int64_t num_rows_ = 0;
  int64_t row_tokens_ = 0;
  int64_t bos_id_ = 0;
  DocumentBorders borders_ = DocumentBorders::ignored;
};

}  // namespace speedrun

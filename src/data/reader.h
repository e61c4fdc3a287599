#pragma once
// Readers turn token shards into the rows of training steps. One interface, two readers: plain rows (Optimization Track) and rows
// of whole documents that start at a BOS (Main Track). Both see the same token stream whatever the number of ranks.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/data/shard_list.h"

namespace speedrun {

// Where a reader stands; part of a checkpoint. Restoring it continues the stream to the token, on any number of ranks.
struct ReaderState {
  int64_t epoch = 0;     // passes over the shard list completed
  int64_t shard = 0;     // index in the sorted list
  int64_t position = 0;  // tokens consumed in this shard
  bool operator==(const ReaderState&) const = default;
};

// What a step asks for; it may change from step to step (stages).
struct StepShape {
  int64_t batch_tokens = 0;  // of all ranks together
  int64_t row_tokens = 0;    // length n of a row; batch_tokens is a multiple of it
  int64_t max_seq_len = 0;   // documents reader only
};

// A run of equal steps; a schedule is a list of them.
struct StepRun {
  StepShape shape;
  int64_t count = 0;
};

// The rows of one rank for one step, one after the other.
struct StepRows {
  int64_t num_rows = 0;
  int64_t row_tokens = 0;          // n
  std::vector<int32_t> inputs;     // (num_rows * n)
  std::vector<int32_t> targets;    // (num_rows * n) the token after each input
  std::vector<int32_t> doc_start;  // (num_rows * n) index in its row of the first token of the document the token belongs to
};

class Reader {
 public:
  virtual ~Reader() = default;
  // Fills `out` with the rows of `rank` of the next step, rows rank·R/world … (rank+1)·R/world − 1 of the step's R, and moves the
  // cursor past the rows of all ranks. Vectors of `out` are reused: nothing is allocated while shapes stay the same. Throws
  // InputError naming shard, step and tokens missing when the stream ends, for a damaged shard or an id out of range; the cursor
  // then stays where it was.
  virtual void next(const StepShape& shape, int rank, int world, StepRows& out) = 0;
  // Moves the cursor as next() does, without making rows.
  virtual void skip(const StepShape& shape) = 0;
  virtual ReaderState state() const = 0;
  // Throws InputError for a state that does not fit the shards.
  virtual void restore(const ReaderState& state) = 0;
  virtual const std::vector<std::string>& files() const = 0;  // the resolved shard list, in order
};

struct ReaderOptions {
  ShardList shards;
  int64_t vocab_size = 50257;  // every id of a shard must be below; checked as the shard is loaded
  int64_t bos_id = 50256;      // documents reader: the token every document starts with
  int64_t repeat = 1;          // passes over the shards, one after the other in the same order
  int64_t document_rows = 8;   // documents reader: rows of a step, whatever the number of ranks
};

// No shard is read before the first next() (headers were checked when the list was made). While one shard is in use, the next one
// is loaded in the background; this never changes the rows, and what goes wrong there is thrown by the next() that needs the shard.
// Both throw InputError for options that make no sense.

// Rows of batch_tokens consecutive tokens. A step starts at the cursor if cursor + batch_tokens + 1 < tokens of the shard; else the
// rest of the shard is dropped and the next one starts. No document borders: doc_start is 0.
std::unique_ptr<Reader> make_row_reader(ReaderOptions options);

// Rows of document pieces: see document_reader.h for the rule.
std::unique_ptr<Reader> make_document_reader(ReaderOptions options);

}  // namespace speedrun

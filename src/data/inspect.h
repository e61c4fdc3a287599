#pragma once
// What `speedrun data inspect` and `speedrun data rows` show.
#include <cstdint>
#include <string>
#include <vector>

#include "src/data/reader.h"

namespace speedrun {

struct ShardInspection {
  std::string path;
  int64_t tokens = 0;
  int64_t documents = 0;                // BOS tokens; each starts a document
  int64_t tokens_before_first_bos = 0;  // belong to no document of this shard; all tokens where there is no BOS
  int64_t shortest_document = 0;        // tokens, its BOS included; 0 without documents
  int64_t longest_document = 0;
  double mean_document_length = 0;
  int64_t min_id = 0;
  int64_t max_id = 0;
  int64_t ids_out_of_range = 0;            // ids >= vocab_size. Padding rows of the model (50257..50303) are no ids: they count too
  int64_t first_out_of_range_offset = -1;  // token offset in the shard; -1: none
  int64_t first_out_of_range_id = -1;
  uint64_t content_hash = 0;  // shard_content_hash
};

// Reads a whole shard. Throws InputError for a file that is no valid shard; ids out of range are reported, not thrown.
ShardInspection inspect_shard(const std::string& path, int64_t vocab_size, int64_t bos_id);
// The same with the last id as BOS, as in GPT-2's vocabulary (50256 of 50257).
ShardInspection inspect_shard(const std::string& path, int64_t vocab_size);

struct RankDescription {
  int rank = 0;
  int64_t num_rows = 0;
  int64_t row_tokens = 0;
  int64_t num_documents = 0;  // pieces that hold at least one input token, all rows together
  std::vector<std::vector<int64_t>>
      document_lengths;     // per row, input tokens of each piece: they add up to row_tokens. Plain rows: one
  uint64_t input_hash = 0;  // Hash64 of the rank's inputs as int32, rows in order
  uint64_t target_hash = 0;
};

struct StepDescription {
  int64_t step = 0;
  ReaderState before;  // cursor before and after the step
  ReaderState after;
  StepShape shape;
  std::vector<RankDescription> ranks;  // by rank
  uint64_t input_hash = 0;             // of all rows in order: the same for every number of ranks
  uint64_t target_hash = 0;
};

// What step `step` (from 0) of a schedule looks like on `world` ranks. The reader's cursor must stand at step 0; it ends after the
// step. Throws InputError when the schedule is shorter, the data ends before, or `world` does not divide the rows of a step.
StepDescription describe_step(Reader& reader, const std::vector<StepRun>& schedule, int64_t step, int world);

}  // namespace speedrun

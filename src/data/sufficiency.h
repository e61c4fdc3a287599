#pragma once
// Before the first step: does the data suffice for the schedule?
#include <cstdint>
#include <string>
#include <vector>

#include "src/data/reader.h"

namespace speedrun {

enum class ReaderRule { rows, documents };

struct Sufficiency {
  bool sufficient = false;
  int64_t steps_needed = 0;
  int64_t steps_available = 0;  // the first step without data, if not sufficient
  int64_t tokens_needed = 0;    // batch tokens of the whole schedule; what a reader drops between them is not counted
  int64_t tokens_present = 0;   // of all shards, times repeat
  int64_t repeat_needed = 0;    // the smallest repeat that suffices; 0: none does, or none was found in reasonable time
  std::string message;          // one line: for the log if sufficient, else the error, with what to do
};

// Walks through the whole schedule as the reader will, so the answer is exact for both rules. Rows cost nothing (headers alone
// decide); documents read every shard the schedule reaches once (they drop what max_seq_len and row ends cut off, which only the
// BOS positions tell), and so find ids out of range too. Throws InputError for shapes the reader refuses and for damaged shards;
// too little data is not thrown but reported.
Sufficiency check_sufficient(ReaderRule rule, const ReaderOptions& options, const std::vector<StepRun>& schedule);

}  // namespace speedrun

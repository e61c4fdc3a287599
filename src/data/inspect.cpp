#include "src/data/inspect.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "src/data/hash64.h"
#include "src/data/loaded_shard.h"

namespace speedrun {
namespace {

std::vector<std::vector<int64_t>> document_lengths(const StepRows& rows) {
  std::vector<std::vector<int64_t>> lengths(static_cast<size_t>(rows.num_rows));
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    for (int64_t t = 0; t < rows.row_tokens; ++t) {
      std::vector<int64_t>& of_row = lengths[static_cast<size_t>(row)];
      if (rows.doc_start[static_cast<size_t>(row * rows.row_tokens + t)] == t) of_row.push_back(0);
      ++of_row.back();
    }
  }
  return lengths;
}

// The run of the schedule that holds the step.
const StepShape& shape_of_step(const std::vector<StepRun>& schedule, int64_t step) {
  int64_t begin = 0;
  for (const StepRun& run : schedule) {
    if (step < begin + run.count) return run.shape;
    begin += run.count;
  }
  throw InputError(fmt::format("step {} is beyond the schedule: it has steps 0 ... {}", step, begin - 1));
}

}  // namespace

ShardInspection inspect_shard(const std::string& path, int64_t vocab_size, int64_t bos_id) {
  const TokenShard shard = TokenShard::open(path);
  shard.read_ahead();
  const std::span<const uint16_t> tokens = shard.tokens();
  ShardInspection result;
  result.path = path;
  result.tokens = shard.num_tokens();
  const auto [least, largest] = std::minmax_element(tokens.begin(), tokens.end());
  result.min_id = *least;
  result.max_id = *largest;
  if (result.max_id >= vocab_size) {
    const auto out_of_range = [&](uint16_t token) { return token >= vocab_size; };
    const auto first = std::find_if(tokens.begin(), tokens.end(), out_of_range);
    result.first_out_of_range_offset = first - tokens.begin();
    result.first_out_of_range_id = *first;
    result.ids_out_of_range = std::count_if(first, tokens.end(), out_of_range);
  }

  const std::vector<int32_t> bos = find_documents(tokens, bos_id);
  result.documents = static_cast<int64_t>(bos.size());
  result.tokens_before_first_bos = bos.empty() ? result.tokens : bos.front();
  for (size_t i = 0; i < bos.size(); ++i) {
    const int64_t length = (i + 1 < bos.size() ? bos[i + 1] : result.tokens) - bos[i];
    result.longest_document = std::max(result.longest_document, length);
    result.shortest_document = i == 0 ? length : std::min(result.shortest_document, length);
  }
  if (!bos.empty()) {
    result.mean_document_length =
        static_cast<double>(result.tokens - result.tokens_before_first_bos) / static_cast<double>(result.documents);
  }
  result.content_hash = shard_content_hash(path);
  return result;
}

ShardInspection inspect_shard(const std::string& path, int64_t vocab_size) {
  return inspect_shard(path, vocab_size, vocab_size - 1);
}

StepDescription describe_step(Reader& reader, const std::vector<StepRun>& schedule, int64_t step, int world) {
  if (step < 0) throw InputError(fmt::format("step {}: expected 0 or more", step));
  if (world < 1) throw InputError(fmt::format("ranks: expected at least 1, found {}", world));
  StepDescription result;
  result.step = step;
  result.shape = shape_of_step(schedule, step);
  for (int64_t i = 0; i < step; ++i) reader.skip(shape_of_step(schedule, i));
  result.before = reader.state();

  Hash64 all_inputs, all_targets;
  StepRows rows;
  for (int rank = 0; rank < world; ++rank) {
    reader.restore(result.before);
    reader.next(result.shape, rank, world, rows);
    RankDescription description;
    description.rank = rank;
    description.num_rows = rows.num_rows;
    description.row_tokens = rows.row_tokens;
    description.document_lengths = document_lengths(rows);
    for (const auto& of_row : description.document_lengths) description.num_documents += static_cast<int64_t>(of_row.size());
    const std::span<const int32_t> inputs(rows.inputs), targets(rows.targets);
    description.input_hash = Hash64().add_values(inputs).value();
    description.target_hash = Hash64().add_values(targets).value();
    all_inputs.add_values(inputs);
    all_targets.add_values(targets);
    result.ranks.push_back(std::move(description));
  }
  result.after = reader.state();
  result.input_hash = all_inputs.value();
  result.target_hash = all_targets.value();
  return result;
}

}  // namespace speedrun

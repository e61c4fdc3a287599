#include "src/train/evaluate.h"

#include <algorithm>

namespace speedrun {

double evaluate(Engine& engine, const ValidationReader& reader, int completed) {
  const int64_t rows_at_once = engine.evaluation_tokens() / reader.row_tokens();
  engine.begin_evaluation(completed);
  StepRows rows;
  for (int64_t first = 0; first < reader.num_rows(); first += rows_at_once) {
    reader.read(first, std::min(rows_at_once, reader.num_rows() - first), rows);
    engine.evaluate_rows(rows);
  }
  return engine.take_evaluation_sum() / static_cast<double>(reader.num_rows() * reader.row_tokens());
}

}  // namespace speedrun

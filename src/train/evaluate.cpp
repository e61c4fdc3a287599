#include "src/train/evaluate.h"

#include <algorithm>

#include "src/dist/fault.h"

namespace speedrun {

double evaluate(Engine& engine, const ValidationReader& reader, int completed, Control* control) {
  const int64_t world = control == nullptr ? 1 : control->size(), rank = control == nullptr ? 0 : control->rank();
  const int64_t end = reader.num_rows() * (rank + 1) / world;
  const int64_t rows_at_once = engine.evaluation_tokens() / reader.row_tokens();
  engine.begin_evaluation(completed);
  StepRows rows;
  int64_t visit = 0;
  for (int64_t first = reader.num_rows() * rank / world; first < end; first += rows_at_once) {
    reader.read(first, std::min(rows_at_once, end - first), rows);
    engine.evaluate_rows(rows);
    if (control != nullptr) {
      control->progress();
      fault_point(FaultPlace::validation, visit++, control->rank());
    }
  }
  return engine.take_evaluation_sum() / static_cast<double>(reader.num_rows() * reader.row_tokens());
}

}  // namespace speedrun

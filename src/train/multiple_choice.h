#pragma once
// Multiple-choice evaluation in the style of HellaSwag, from a file in llm.c's evaluation format: 256 int32 of header (magic
// 20240522, version 1, questions, most bytes of a question), then per question uint16: 65535, bytes of the question, its index,
// label, number of completions, length of the context, context; per completion length and tokens. The completion with the lowest
// mean loss is the answer.
#include <cstdint>
#include <string>
#include <vector>

#include "src/train/engine.h"

namespace speedrun {

struct MultipleChoiceQuestion {
  int label = 0;
  std::vector<int32_t> context;
  std::vector<std::vector<int32_t>> completions;
};

// Throws InputError naming file, question and fault (damage, ids outside the vocabulary).
std::vector<MultipleChoiceQuestion> read_questions(const std::string& path, int64_t vocab_size);
std::vector<MultipleChoiceQuestion> parse_questions(const std::string& content, const std::string& name, int64_t vocab_size);

struct MultipleChoiceScore {
  int64_t questions = 0;
  int64_t correct = 0;
};

// Throws InputError for a question that does not fit a row, Error (non_finite) for a loss that is not finite.
MultipleChoiceScore score_multiple_choice(Engine& engine, int64_t row_tokens, int64_t vocab_size, const std::string& path);

}  // namespace speedrun

#include "src/train/multiple_choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/core/file.h"

namespace speedrun {
namespace {

constexpr int32_t kMagic = 20240522, kVersion = 1;
constexpr size_t kHeaderBytes = 256 * sizeof(int32_t);
constexpr uint16_t kStart = 65535;
constexpr size_t kMostCompletions = 64;

// Reads uint16 after uint16 of one question, never past its end.
class QuestionReader {
 public:
  QuestionReader(const std::string& content, size_t begin, size_t end, std::string where)
      : content_(content), at_(begin), end_(end), where_(std::move(where)) {}

  uint16_t next() {
    if (at_ + 2 > end_) throw InputError(where_ + ": ends in the middle");
    uint16_t value;
    std::memcpy(&value, content_.data() + at_, 2);
    at_ += 2;
    return value;
  }
  std::vector<int32_t> tokens(int64_t vocab_size) {
    std::vector<int32_t> ids(next());
    for (int32_t& id : ids) {
      id = next();
      if (id >= vocab_size)
        throw InputError(fmt::format("{}: id {} is outside the model's vocabulary of {}", where_, id, vocab_size));
    }
    if (ids.empty()) throw InputError(where_ + ": an empty context or completion");
    return ids;
  }
  size_t at() const { return at_; }

 private:
  const std::string& content_;
  size_t at_, end_;
  std::string where_;
};

}  // namespace

std::vector<MultipleChoiceQuestion> parse_questions(const std::string& content, const std::string& name, int64_t vocab_size) {
  int32_t header[4] = {};
  if (content.size() < kHeaderBytes)
    throw InputError(fmt::format("{}: only {} bytes, a header has {}", name, content.size(), kHeaderBytes));
  std::memcpy(header, content.data(), sizeof header);
  if (header[0] != kMagic || header[1] != kVersion) {
    throw InputError(fmt::format("{}: magic {} and version {}, expected {} and {} (llm.c's evaluation format)", name, header[0],
                                 header[1], kMagic, kVersion));
  }
  if (header[2] <= 0) throw InputError(fmt::format("{}: {} questions", name, header[2]));
  std::vector<MultipleChoiceQuestion> questions;
  size_t at = kHeaderBytes;
  for (int32_t i = 0; i < header[2]; ++i) {
    const std::string where = fmt::format("{}: question {}", name, i);
    QuestionReader reader(content, at, content.size(), where);
    if (reader.next() != kStart) throw InputError(where + ": does not start with 65535");
    const size_t bytes = reader.next();
    QuestionReader body(content, reader.at(), std::min(content.size(), at + bytes), where);
    body.next();  // index
    MultipleChoiceQuestion question;
    question.label = body.next();
    const size_t completions = body.next();
    if (completions < 2 || completions > kMostCompletions || static_cast<size_t>(question.label) >= completions) {
      throw InputError(fmt::format("{}: label {} of {} completions", where, question.label, completions));
    }
    question.context = body.tokens(vocab_size);
    for (size_t c = 0; c < completions; ++c) question.completions.push_back(body.tokens(vocab_size));
    if (body.at() != at + bytes) throw InputError(fmt::format("{}: {} bytes, its header says {}", where, body.at() - at, bytes));
    at = body.at();
    questions.push_back(std::move(question));
  }
  if (at != content.size()) {
    throw InputError(fmt::format("{}: {} bytes after the last of {} questions, which its header announces", name,
                                 content.size() - at, header[2]));
  }
  return questions;
}

std::vector<MultipleChoiceQuestion> read_questions(const std::string& path, int64_t vocab_size) {
  return parse_questions(read_file(path), path, vocab_size);
}

MultipleChoiceScore score_multiple_choice(Engine& engine, int64_t row_tokens, int64_t vocab_size, const std::string& path) {
  const std::vector<MultipleChoiceQuestion> questions = read_questions(path, vocab_size);
  const auto row = static_cast<size_t>(row_tokens);
  MultipleChoiceScore score;
  for (size_t q = 0; q < questions.size(); ++q) {
    const MultipleChoiceQuestion& question = questions[q];
    StepRows rows;
    rows.num_rows = static_cast<int64_t>(question.completions.size());
    rows.row_tokens = row_tokens;
    rows.inputs.assign(row * question.completions.size(), 0);
    rows.targets = rows.doc_start = rows.inputs;
    for (size_t c = 0; c < question.completions.size(); ++c) {
      std::vector<int32_t> text = question.context;
      text.insert(text.end(), question.completions[c].begin(), question.completions[c].end());
      if (text.size() > row + 1)
        throw InputError(fmt::format("{}: question {}: {} tokens, a row of the model has {}", path, q, text.size(), row));
      std::copy(text.begin(), text.end() - 1, rows.inputs.begin() + static_cast<std::ptrdiff_t>(c * row));
      std::copy(text.begin() + 1, text.end(), rows.targets.begin() + static_cast<std::ptrdiff_t>(c * row));
    }
    const std::vector<float> losses = engine.token_losses(rows);
    size_t best = 0;
    double best_loss = 0;
    for (size_t c = 0; c < question.completions.size(); ++c) {
      const size_t first = c * row + question.context.size() - 1, count = question.completions[c].size();
      double sum = 0;
      for (size_t i = 0; i < count; ++i) sum += static_cast<double>(losses[first + i]);
      const double mean = sum / static_cast<double>(count);
      if (!std::isfinite(mean)) {
        throw Error(
            fmt::format("{}: question {}: the model's loss on completion {} is {}: its weights are damaged", path, q, c, mean),
            ExitCode::non_finite);
      }
      if (c == 0 || mean < best_loss) {
        best = c;
        best_loss = mean;
      }
    }
    score.correct += best == static_cast<size_t>(question.label);
    ++score.questions;
  }
  return score;
}

}  // namespace speedrun

// Fuzzes the questions of a multiple-choice file: whatever the bytes are, they make questions that hold what the score relies on,
// or an InputError of one line. A well-formed header is put before the input, whose first byte is the number of questions.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "src/train/multiple_choice.h"

namespace {

constexpr int64_t kVocabulary = 50257;

bool sound(const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= kVocabulary) return false;
  }
  return !ids.empty();
}

void parse(const std::string& content) {
  using namespace speedrun;
  try {
    for (const MultipleChoiceQuestion& question : parse_questions(content, "fuzz.bin", kVocabulary)) {
      if (question.label < 0 || static_cast<size_t>(question.label) >= question.completions.size() || !sound(question.context))
        std::abort();
      for (const std::vector<int32_t>& completion : question.completions) {
        if (!sound(completion)) std::abort();
      }
    }
  } catch (const InputError& error) {
    if (std::string(error.what()).find('\n') != std::string::npos) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  parse(text);
  if (text.empty()) return 0;
  std::vector<int32_t> header(256);
  header[0] = 20240522;
  header[1] = 1;
  header[2] = data[0];
  parse(std::string(reinterpret_cast<const char*>(header.data()), header.size() * sizeof(int32_t)) + text.substr(1));
  return 0;
}

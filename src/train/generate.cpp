#include "src/train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/core/random.h"
#include "src/train/data_setup.h"

namespace speedrun {
namespace {

constexpr uint64_t kSampleStream = 0x73616d706c65;  // keeps these draws apart from the parameters'

}  // namespace

int32_t choose_token(const std::vector<float>& logits, int64_t vocab_size, const GenerateOptions& options, uint64_t index) {
  std::vector<int32_t> ids(static_cast<size_t>(vocab_size));
  std::iota(ids.begin(), ids.end(), 0);
  // −∞ alone has a meaning: never chosen. With anything else that is not finite (or nothing that is) no order and no sum is
  // defined.
  bool choice = false;
  for (const int32_t id : ids) {
    const float logit = logits[static_cast<size_t>(id)];
    choice = choice || std::isfinite(logit);
    if (!std::isfinite(logit) && !(logit < 0)) {
      throw Error(fmt::format("the model's logit of id {} is {}: its weights are damaged, or its training diverged", id, logit),
                  ExitCode::non_finite);
    }
  }
  if (!choice) throw Error("no logit of the model is finite: its weights are damaged", ExitCode::non_finite);
  const auto likelier = [&](int32_t a, int32_t b) {
    const float la = logits[static_cast<size_t>(a)], lb = logits[static_cast<size_t>(b)];
    return la != lb ? la > lb : a < b;  // ties in a defined order
  };
  if (options.temperature == 0) return *std::min_element(ids.begin(), ids.end(), likelier);
  const size_t k = options.top_k > 0 ? std::min(static_cast<size_t>(options.top_k), ids.size()) : ids.size();
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(k), ids.end(), likelier);
  const double largest = logits[static_cast<size_t>(ids[0])];
  std::vector<double> weights(k);
  double sum = 0;
  for (size_t i = 0; i < k; ++i)
    sum += weights[i] = std::exp((static_cast<double>(logits[static_cast<size_t>(ids[i])]) - largest) / options.temperature);
  double at = random_uniform(options.seed, kSampleStream, index) * sum;
  size_t last = 0;  // taken if rounding leaves `at` at 0 after all of them
  for (size_t i = 0; i < k; ++i) {
    at -= weights[i];
    if (at < 0) return ids[i];
    if (weights[i] > 0) last = i;
  }
  return ids[last];
}

void check_options(const GenerateOptions& options) {
  if (options.tokens < 0) throw InputError(fmt::format("--tokens {}: expected 0 or more", options.tokens));
  if (!(options.temperature >= 0) || std::isinf(options.temperature)) {
    throw InputError(fmt::format("--temperature {}: expected a number from 0 on", options.temperature));
  }
  if (options.top_k < 0) throw InputError(fmt::format("--top-k {}: expected 0 or more", options.top_k));
}

int64_t generation_row_tokens(const Config& config) {
  const int64_t row = eval_row_tokens(config);
  return config.data.reader == ReaderKind::documents ? std::min<int64_t>(row, config.data.max_seq_len) : row;
}

void generate(Engine& engine, const Config& config, const GenerateOptions& options, std::vector<int32_t> context,
              const std::function<bool(int32_t)>& emit) {
  check_options(options);
  const auto row = static_cast<size_t>(generation_row_tokens(config));
  for (int i = 0; i < options.tokens; ++i) {
    if (context.size() > row) context.erase(context.begin(), context.end() - static_cast<std::ptrdiff_t>(row));
    const int32_t id = choose_token(engine.next_logits(context), config.model.vocab_size, options, static_cast<uint64_t>(i));
    if (!emit(id)) return;
    context.push_back(id);
  }
}

}  // namespace speedrun

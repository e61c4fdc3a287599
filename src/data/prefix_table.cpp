#include "src/data/prefix_table.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "kernels/base/error.h"

namespace speedrun {

std::vector<int32_t> prefix_table(const Gpt2Tokenizer& tokenizer, int64_t rows) {
  if (rows < tokenizer.vocab_size()) {
    throw InputError("prefix table: " + std::to_string(rows) + " rows are too few for a vocabulary of " +
                     std::to_string(tokenizer.vocab_size()));
  }
  using Token = std::pair<std::string_view, int32_t>;
  std::vector<Token> tokens;
  tokens.reserve(static_cast<size_t>(tokenizer.vocab_size()));
  for (int32_t id = 0; id < tokenizer.bos(); ++id) tokens.emplace_back(tokenizer.token_bytes(id), id);
  std::sort(tokens.begin(), tokens.end());

  // In this order a token's prefixes come before it, and what lies between one of them and the token begins with that prefix too:
  // the prefixes of the token at hand are a stack.
  std::vector<int32_t> table(static_cast<size_t>(rows), -1);
  std::vector<const Token*> prefixes;
  for (const Token& token : tokens) {
    const auto is_proper_prefix = [&](const Token& other) {
      return other.first.size() < token.first.size() && token.first.starts_with(other.first);
    };
    while (!prefixes.empty() && !is_proper_prefix(*prefixes.back())) prefixes.pop_back();
    if (!prefixes.empty()) table[static_cast<size_t>(token.second)] = prefixes.back()->second;
    prefixes.push_back(&token);
  }
  return table;
}

}  // namespace speedrun

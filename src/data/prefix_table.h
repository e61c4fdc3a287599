#pragma once
// The token that spells most of another one, from the vocabulary alone: a second target of the Main Track's loss.
#include <cstdint>
#include <vector>

#include "src/data/gpt2_tokenizer.h"

namespace speedrun {

// Of each id below `rows`, the token whose bytes are the longest proper prefix of its bytes; -1 where no token is: single bytes,
// the end-of-text token, and rows beyond the vocabulary (padding). The end-of-text token is no prefix of another. Takes some 10 ms
// for all of GPT-2. Throws InputError if `rows` is less than the vocabulary.
std::vector<int32_t> prefix_table(const Gpt2Tokenizer& tokenizer, int64_t rows);

}  // namespace speedrun

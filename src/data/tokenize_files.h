#pragma once
// Text files -> token shards: what `speedrun data tokenize` does.
#include <cstdint>
#include <string>
#include <vector>

#include "src/data/gpt2_tokenizer.h"

namespace speedrun {

enum class TextFormat {
  text,   // documents between separators
  jsonl,  // one JSON object a line, the document in one of its fields
};

struct TokenizeOptions {
  std::vector<std::string> inputs;
  std::string out_prefix;  // shards are PREFIX_000.bin, PREFIX_001.bin, ...; folders are made
  TextFormat format = TextFormat::text;
  std::string separator;       // text: bytes between documents; empty: each file is one document
  std::string field = "text";  // jsonl
  // A shard ends before the document that would take it beyond this; so every shard starts with a document, and only a document
  // that is longer by itself makes a longer shard.
  int64_t shard_tokens = 100'000'000;
  int threads = 1;  // the shards do not depend on it
};

struct TokenizeSummary {
  int64_t documents = 0;
  int64_t empty_documents = 0;     // nothing but white space: left out
  int64_t repaired_documents = 0;  // held invalid UTF-8, which became U+FFFD
  int64_t text_bytes = 0;          // of the documents kept
  int64_t tokens = 0;              // one BOS per document included
  std::vector<std::string> shards;
};

// All shards appear together at the end, or none does. Throws InputError: an input missing, not UTF-8 text or with a fault in its
// JSON (names file and line), no text at all, shards of that name there already; Error when the machine fails.
TokenizeSummary tokenize_files(const Gpt2Tokenizer& tokenizer, const TokenizeOptions& options);

}  // namespace speedrun

#pragma once
// GPT-2's byte-level BPE tokenizer, identical to tiktoken's "gpt2" encoding (encode_ordinary) on all of Unicode. A smaller
// vocabulary is a prefix of GPT-2's: the 256 bytes, the first merges, and the end-of-text id last. The text "<|endoftext|>" is
// ordinary text. Input that is not valid UTF-8 is read as Python's bytes.decode(errors="replace") reads it: each maximal ill-formed
// part is U+FFFD. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/data/pair_table.h"

namespace speedrun {

// Immutable after construction: any number of threads may share one. Ids fit 16 bits, as in token shards.
class Gpt2Tokenizer {
 public:
  static constexpr int kNumByteTokens = 256;
  static constexpr int kNumMerges = 50000;
  static constexpr int kMinVocabSize = kNumByteTokens + 1;
  static constexpr int kMaxVocabSize = kNumByteTokens + kNumMerges + 1;  // GPT-2's own

  // Reads `folder`/vocab.bpe. Ids: the 256 bytes in GPT-2's order, the first vocab_size - 257 merges, then bos() = vocab_size - 1.
  // Throws InputError: vocab_size out of range; file missing, damaged or not GPT-2's (names file and, where there is one, line).
  explicit Gpt2Tokenizer(const std::string& folder, int64_t vocab_size = kMaxVocabSize);

  int64_t vocab_size() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  uint16_t bos() const { return static_cast<uint16_t>(vocab_size() - 1); }  // GPT-2's <|endoftext|>, which starts every document

  // The bytes of a token; "<|endoftext|>" for bos(). Valid as long as the tokenizer. Throws InputError on an id outside the
  // vocabulary.
  std::string_view token_bytes(int64_t id) const;

  std::string decode(std::span<const uint16_t> ids) const;
  std::string decode(std::span<const int32_t> ids) const;

  // For a prompt or two; Gpt2Encoder is faster on much text. No BOS is added.
  std::vector<uint16_t> encode(std::string_view text) const;

 private:
  friend class Gpt2Encoder;

  std::string bytes_;              // of all tokens, one after the other
  std::vector<uint32_t> offsets_;  // (vocab_size + 1) where a token's bytes start
  std::array<uint16_t, kNumByteTokens> id_of_byte_;
  PairTable merges_;  // every pair of tokens whose bytes together are a token
};

// Encodes text with a cache of the words seen so far (about 20 MB). One per thread; it refers to the tokenizer, which must outlive
// it.
class Gpt2Encoder {
 public:
  explicit Gpt2Encoder(const Gpt2Tokenizer& tokenizer);

  // Appends the ids of `text` (at most 4 GiB) to `out`.
  void encode(std::string_view text, std::vector<uint16_t>& out);

 private:
  static constexpr uint32_t kKeyWords = 3;
  static constexpr uint32_t kMaxKeyBytes = 8 * kKeyWords;  // longer words are merged anew each time

  struct Key {
    std::array<uint64_t, kKeyWords> words;  // the bytes, padded with zeros
    uint32_t size;                          // bytes; 0 marks an empty slot
    bool operator==(const Key&) const = default;
  };
  struct CachedWord {
    Key key;
    uint16_t num_ids;
    uint16_t id;         // if num_ids is 1
    uint32_t ids_begin;  // else: index in cached_ids_
  };

  void reset_cache();
  CachedWord& slot_of(const Key& key);
  void insert_cached(CachedWord& slot, const Key& key, std::span<const uint16_t> ids);
  void encode_word(std::string_view word, size_t readable, std::vector<uint16_t>& out);
  void merge_word(std::string_view word, std::vector<uint16_t>& out);
  void consider_pair(uint32_t left);

  const Gpt2Tokenizer& tokenizer_;
  std::vector<CachedWord> slots_;
  std::vector<uint16_t> cached_ids_;
  size_t num_cached_ = 0;
  std::vector<std::pair<std::string_view, uint16_t>> long_tokens_;  // tokens of more than kMaxKeyBytes, sorted by bytes

  // Work space of merge_word: the word's symbols as a doubly linked list, and a heap of possible merges.
  struct Symbol {
    uint32_t prev, next;
    uint16_t id;
    uint16_t merged;  // id of this symbol and the next one together, or PairTable::kNone
  };
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;  // merged id << 32 | left symbol: the lowest id first, then the leftmost
};

}  // namespace speedrun

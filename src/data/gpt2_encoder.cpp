// Text to ids: pre-tokenisation into words by hand-written scanning of GPT-2's pattern, a cache of words, and byte-pair merging.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "kernels/base/error.h"
#include "src/data/gpt2_tokenizer.h"
#include "src/data/unicode.h"

namespace speedrun {
namespace {

using unicode::CodePointClass;

constexpr size_t kNumSlots = size_t{1} << 19;
constexpr size_t kMaxCached = kNumSlots / 2;

constexpr std::array<CodePointClass, 128> kAsciiClass = [] {
  std::array<CodePointClass, 128> table{};
  for (size_t c = 0; c < 128; ++c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool number = c >= '0' && c <= '9';
    const bool space = c == ' ' || (c >= '\t' && c <= '\r');
    table[c] = letter   ? CodePointClass::letter
               : number ? CodePointClass::number
               : space  ? CodePointClass::space
                        : CodePointClass::other;
  }
  return table;
}();

// Splits valid UTF-8 as the regular expression does:
//   '(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s
class WordSplitter {
 public:
  explicit WordSplitter(std::string_view text) : text_(text) {}

  // End of the word that starts at `begin` < text size.
  size_t word_end(size_t begin) const {
    if (text_[begin] == '\'') {
      const size_t end = contraction_end(begin);
      if (end > begin) return end;
    }
    if (text_[begin] == ' ' && begin + 1 < text_.size()) {
      const CodePointClass next = class_at(begin + 1);
      if (next != CodePointClass::space) return run_end(begin + 1, next);
    }
    const CodePointClass first = class_at(begin);
    if (first != CodePointClass::space) return run_end(begin, first);
    // White space: all of it at the end of the text; else all but the last, which belongs to what follows (or stands alone).
    const size_t end = run_end(begin, CodePointClass::space);
    if (end == text_.size()) return end;
    size_t last = end - 1;
    while ((static_cast<unsigned char>(text_[last]) & 0xc0) == 0x80) --last;
    return last > begin ? last : end;
  }

 private:
  size_t contraction_end(size_t begin) const {
    const std::string_view rest = text_.substr(begin + 1, 2);
    if (rest.empty()) return begin;
    if (rest[0] == 's' || rest[0] == 'd' || rest[0] == 'm' || rest[0] == 't') return begin + 2;
    return rest == "ll" || rest == "ve" || rest == "re" ? begin + 3 : begin;
  }

  CodePointClass class_at(size_t pos) const {
    const unsigned char lead = static_cast<unsigned char>(text_[pos]);
    return lead < 0x80 ? kAsciiClass[lead] : unicode::code_point_class(unicode::decode_code_point(text_.data() + pos).value);
  }

  // End of the run of code points of one class.
  size_t run_end(size_t pos, CodePointClass wanted) const {
    while (pos < text_.size()) {
      const unsigned char lead = static_cast<unsigned char>(text_[pos]);
      if (lead < 0x80) {
        if (kAsciiClass[lead] != wanted) return pos;
        ++pos;
      } else {
        const unicode::CodePoint code_point = unicode::decode_code_point(text_.data() + pos);
        if (unicode::code_point_class(code_point.value) != wanted) return pos;
        pos += code_point.size;
      }
    }
    return pos;
  }

  std::string_view text_;
};

}  // namespace

Gpt2Encoder::Gpt2Encoder(const Gpt2Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  for (uint16_t id = 0; id < tokenizer.bos(); ++id) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (bytes.size() > kMaxKeyBytes) long_tokens_.emplace_back(bytes, id);
  }
  std::sort(long_tokens_.begin(), long_tokens_.end());
  reset_cache();
}

void Gpt2Encoder::encode(std::string_view text, std::vector<uint16_t>& out) {
  if (text.size() > UINT32_MAX)
    throw InputError(fmt::format("a document of {} bytes: at most 4 GiB can be encoded at once", text.size()));
  std::string repaired;
  if (unicode::valid_utf8_prefix(text) != text.size()) {
    repaired = unicode::replace_invalid_utf8(text);
    text = repaired;
  }
  const WordSplitter splitter(text);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = splitter.word_end(begin);
    encode_word(text.substr(begin, end - begin), text.size() - begin, out);
    begin = end;
  }
}

// A word that is a token is encoded as that token, even where merging would not lead there (tiktoken's rule): so the cache starts
// with the vocabulary. It starts anew when it is full, which bounds memory and changes no result.
void Gpt2Encoder::reset_cache() {
  slots_.assign(kNumSlots, CachedWord{});
  cached_ids_.clear();
  num_cached_ = 0;
  for (uint16_t id = 0; id < tokenizer_.bos(); ++id) {
    const std::string_view bytes = tokenizer_.token_bytes(id);
    if (bytes.size() > kMaxKeyBytes) continue;
    Key key{};
    key.size = static_cast<uint32_t>(bytes.size());
    std::memcpy(key.words.data(), bytes.data(), bytes.size());
    insert_cached(slot_of(key), key, std::span(&id, 1));
  }
}

// The key's slot, or the empty one where it would go.
Gpt2Encoder::CachedWord& Gpt2Encoder::slot_of(const Key& key) {
  uint64_t hash = key.size;
  for (const uint64_t word : key.words) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  size_t index = static_cast<size_t>(hash) & (kNumSlots - 1);
  while (slots_[index].key.size != 0 && !(slots_[index].key == key)) index = (index + 1) & (kNumSlots - 1);
  return slots_[index];
}

void Gpt2Encoder::insert_cached(CachedWord& slot, const Key& key, std::span<const uint16_t> ids) {
  slot.key = key;
  slot.num_ids = static_cast<uint16_t>(ids.size());
  slot.id = ids[0];
  slot.ids_begin = static_cast<uint32_t>(cached_ids_.size());
  if (ids.size() > 1) cached_ids_.insert(cached_ids_.end(), ids.begin(), ids.end());
  ++num_cached_;
}

// `readable`: bytes that may be read from the word's first on; they let short words be loaded as whole 64-bit words.
void Gpt2Encoder::encode_word(std::string_view word, size_t readable, std::vector<uint16_t>& out) {
  if (word.size() > kMaxKeyBytes) {
    const auto token = std::lower_bound(long_tokens_.begin(), long_tokens_.end(), std::pair(word, uint16_t{0}));
    if (token != long_tokens_.end() && token->first == word) {
      out.push_back(token->second);
    } else {
      merge_word(word, out);
    }
    return;
  }
  Key key{};
  key.size = static_cast<uint32_t>(word.size());
  if (readable >= kMaxKeyBytes) {
    std::memcpy(key.words.data(), word.data(), kMaxKeyBytes);
    for (uint32_t i = 0; i < kKeyWords; ++i) {
      const uint32_t kept = key.size > 8 * i ? std::min(key.size - 8 * i, 8u) : 0;  // bytes of this 64-bit word
      key.words[i] = kept == 0 ? 0 : key.words[i] & (~uint64_t{0} >> (64 - 8 * kept));
    }
  } else {
    std::memcpy(key.words.data(), word.data(), word.size());
  }
  CachedWord& slot = slot_of(key);
  if (slot.num_ids == 1) {
    out.push_back(slot.id);
  } else if (slot.num_ids > 1) {
    const uint16_t* ids = cached_ids_.data() + slot.ids_begin;
    out.insert(out.end(), ids, ids + slot.num_ids);
  } else {
    const size_t first = out.size();
    merge_word(word, out);
    insert_cached(slot, key, std::span(out).subspan(first));
    if (num_cached_ >= kMaxCached) reset_cache();
  }
}

// Byte-pair merging: again and again the pair with the lowest merged id, the leftmost of equals, in O(n log n).
void Gpt2Encoder::merge_word(std::string_view word, std::vector<uint16_t>& out) {
  const uint32_t size = static_cast<uint32_t>(word.size());
  symbols_.resize(size);
  heap_.clear();
  for (uint32_t i = 0; i < size; ++i) {
    symbols_[i] = {i - 1, i + 1, tokenizer_.id_of_byte_[static_cast<unsigned char>(word[i])], PairTable::kNone};
  }
  for (uint32_t i = 0; i + 1 < size; ++i) {
    symbols_[i].merged = tokenizer_.merges_.find(symbols_[i].id, symbols_[i + 1].id);
    if (symbols_[i].merged != PairTable::kNone) heap_.push_back(uint64_t{symbols_[i].merged} << 32 | i);
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const uint32_t left = static_cast<uint32_t>(heap_.back());
    const uint16_t merged = static_cast<uint16_t>(heap_.back() >> 32);
    heap_.pop_back();
    if (symbols_[left].merged != merged) continue;  // one of the two was merged otherwise meanwhile
    const uint32_t right = symbols_[left].next;
    symbols_[left].id = merged;
    symbols_[left].next = symbols_[right].next;
    symbols_[right].merged = PairTable::kNone;
    if (symbols_[left].next < size) symbols_[symbols_[left].next].prev = left;
    consider_pair(left);
    if (left > 0) consider_pair(symbols_[left].prev);
  }
  for (uint32_t i = 0; i < size; i = symbols_[i].next) out.push_back(symbols_[i].id);
}

// Looks up what a symbol and its right neighbour form now, and puts it on the heap.
void Gpt2Encoder::consider_pair(uint32_t left) {
  Symbol& symbol = symbols_[left];
  symbol.merged = symbol.next < symbols_.size() ? tokenizer_.merges_.find(symbol.id, symbols_[symbol.next].id) : PairTable::kNone;
  if (symbol.merged == PairTable::kNone) return;
  heap_.push_back(uint64_t{symbol.merged} << 32 | left);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

}  // namespace speedrun

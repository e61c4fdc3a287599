// UTF-8 validation by the table of well-formed byte sequences (Unicode standard, table 3-7).
#include <cstring>

#include "src/data/unicode.h"

namespace speedrun::unicode {
namespace {

struct Sequence {
  size_t size;  // bytes of the code point, or of the maximal ill-formed part
  bool valid;
};

Sequence first_sequence(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {1, true};
  if (lead < 0xc2 || lead > 0xf4) return {1, false};
  const size_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and what lies above U+10FFFF.
  const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (text.size() < 2 || byte(1) < low || byte(1) > high) return {1, false};
  for (size_t i = 2; i < size; ++i) {
    if (i >= text.size() || (byte(i) & 0xc0) != 0x80) return {i, false};
  }
  return {size, true};
}

}  // namespace

size_t valid_utf8_prefix(std::string_view text) {
  size_t pos = 0;
  while (pos < text.size()) {
    uint64_t word = 0;
    if (text.size() - pos >= sizeof word) {
      std::memcpy(&word, text.data() + pos, sizeof word);
      if ((word & 0x8080808080808080ull) == 0) {  // eight ASCII bytes
        pos += sizeof word;
        continue;
      }
    }
    const Sequence sequence = first_sequence(text.substr(pos));
    if (!sequence.valid) return pos;
    pos += sequence.size;
  }
  return pos;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string repaired;
  repaired.reserve(text.size() + 16);
  while (true) {
    const size_t valid = valid_utf8_prefix(text);
    repaired.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) return repaired;
    repaired.append("\xef\xbf\xbd");
    text.remove_prefix(first_sequence(text).size);
  }
}

}  // namespace speedrun::unicode

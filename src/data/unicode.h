#pragma once
// Classes of code points as GPT-2's pre-tokenisation pattern tells them apart, and UTF-8 decoding.
// The tables agree with tiktoken's regular expressions on every code point (scripts/make_unicode_tables.py).
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace speedrun::unicode {

enum class CodePointClass : uint8_t { other = 0, letter = 1, number = 2, space = 3 };

extern const uint8_t kBlockOfCodePoint[0x110000 / 256];  // index of the class block of 256 code points
extern const uint8_t kClassesOfBlock[][64];              // 2 bits per code point, the lowest first

inline CodePointClass code_point_class(uint32_t code_point) {
  const uint8_t packed = kClassesOfBlock[kBlockOfCodePoint[code_point >> 8]][(code_point & 255u) >> 2];
  return static_cast<CodePointClass>((packed >> (2 * (code_point & 3u))) & 3u);
}

struct CodePoint {
  uint32_t value;
  uint32_t size;  // bytes of its UTF-8 form
};

// The code point that starts at `bytes`, which must be valid UTF-8.
inline CodePoint decode_code_point(const char* bytes) {
  const auto byte = [bytes](int i) { return static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])); };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xe0) return {(lead & 0x1fu) << 6 | (byte(1) & 0x3fu), 2};
  if (lead < 0xf0) return {(lead & 0x0fu) << 12 | (byte(1) & 0x3fu) << 6 | (byte(2) & 0x3fu), 3};
  return {(lead & 0x07u) << 18 | (byte(1) & 0x3fu) << 12 | (byte(2) & 0x3fu) << 6 | (byte(3) & 0x3fu), 4};
}

// Number of leading bytes that are valid UTF-8 (text.size() if all are). Surrogates and overlong forms are not valid.
size_t valid_utf8_prefix(std::string_view text);

// The text with every maximal ill-formed part replaced by U+FFFD, as Python's bytes.decode(errors="replace") does it.
std::string replace_invalid_utf8(std::string_view text);

}  // namespace speedrun::unicode

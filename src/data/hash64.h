#pragma once
// A 64-bit fingerprint for shard lists, shard contents and rows: says whether two runs saw the same tokens. Not cryptographic. The
// value is part of run records, so the function must not change; it depends on the bytes alone, not on how they are split into
// calls of add().
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace speedrun {

class Hash64 {
 public:
  Hash64& add_bytes(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    total_bytes_ += size;
    while (size > 0) {
      if (pending_ == 0 && size >= kWordBytes) {
        std::memcpy(&word_, bytes, kWordBytes);
        state_ = mix(state_, word_);
        word_ = 0;
        bytes += kWordBytes;
        size -= kWordBytes;
      } else {
        word_ |= uint64_t{*bytes++} << (8 * pending_);
        --size;
        if (++pending_ == kWordBytes) {
          state_ = mix(state_, word_);
          word_ = 0;
          pending_ = 0;
        }
      }
    }
    return *this;
  }

  // The length goes first, so that neighbouring texts cannot trade characters.
  Hash64& add_text(std::string_view text) {
    return add_number(static_cast<int64_t>(text.size())).add_bytes(text.data(), text.size());
  }
  Hash64& add_number(int64_t value) { return add_bytes(&value, sizeof value); }
  template <class T>
  Hash64& add_values(std::span<const T> values) {
    return add_bytes(values.data(), values.size_bytes());
  }

  uint64_t value() const {
    uint64_t result = mix(mix(state_, word_), total_bytes_);
    result ^= result >> 29;
    result *= 0xBF58476D1CE4E5B9u;
    return result ^ (result >> 32);
  }

 private:
  static constexpr size_t kWordBytes = 8;
  static uint64_t mix(uint64_t state, uint64_t word) {
    state = (state ^ word) * 0x9E3779B97F4A7C15u;  // odd: no information is lost
    return state ^ (state >> 32);
  }

  uint64_t state_ = 0x5370656564527531u;
  uint64_t word_ = 0;  // bytes of an unfinished word
  size_t pending_ = 0;
  uint64_t total_bytes_ = 0;
};

// Sixteen hexadecimal digits, as run records and the terminal show a hash.
inline std::string hash_text(uint64_t hash) {
  std::string text(16, '0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = "0123456789abcdef"[(hash >> (60 - 4 * i)) & 15];
  return text;
}

}  // namespace speedrun

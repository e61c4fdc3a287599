#include "src/dist/message.h"

#include <algorithm>

#include "kernels/base/error.h"

namespace speedrun {
namespace {

// Names and messages of failures: a frame holds several.
constexpr size_t kLongestText = 8192;

}  // namespace

MessageWriter& MessageWriter::text(const std::string& text) {
  const size_t bytes = std::min(text.size(), kLongestText);
  number(static_cast<uint32_t>(bytes));
  append(text.data(), bytes);
  return *this;
}

void MessageWriter::append(const void* data, size_t bytes) {
  const size_t before = body_.size();
  body_.resize(before + bytes);
  if (bytes != 0) std::memcpy(body_.data() + before, data, bytes);
}

std::string MessageReader::text() {
  const auto bytes = number<uint32_t>();
  const std::byte* data = next(bytes);
  return {reinterpret_cast<const char*>(data), bytes};
}

const std::byte* MessageReader::next(size_t bytes) {
  require(body_.size() - position_ >= bytes, "a message of ", body_.size(), " bytes is shorter than it says");
  const std::byte* data = body_.data() + position_;
  position_ += bytes;
  return data;
}

}  // namespace speedrun

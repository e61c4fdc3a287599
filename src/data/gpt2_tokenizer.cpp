// Reading the vocabulary and decoding; the encoder is in gpt2_encoder.cpp.
#include "src/data/gpt2_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <unordered_map>

#include "kernels/base/error.h"
#include "src/data/hash64.h"
#include "src/data/unicode.h"

namespace speedrun {
namespace {

constexpr std::string_view kEndOfText = "<|endoftext|>";

// vocab.bpe writes each byte as one printable character: printable Latin-1 bytes as themselves, the others as U+0100, U+0101, ...
// in the order of the bytes. GPT-2's ids 0-255 are the bytes in this order: printable ones first.
struct ByteAlphabet {
  std::array<unsigned char, 256> byte_of_id;
  std::array<int, 0x144> byte_of_character;  // -1: no character of the alphabet

  ByteAlphabet() {
    const auto printable = [](int b) { return (b >= '!' && b <= '~') || (b >= 0xa1 && b != 0xad); };
    byte_of_character.fill(-1);
    size_t id = 0;
    for (int b = 0; b < 256; ++b) {
      if (!printable(b)) continue;
      byte_of_character[static_cast<size_t>(b)] = b;
      byte_of_id[id++] = static_cast<unsigned char>(b);
    }
    size_t character = 0x100;
    for (int b = 0; b < 256; ++b) {
      if (printable(b)) continue;
      byte_of_character[character++] = b;
      byte_of_id[id++] = static_cast<unsigned char>(b);
    }
  }

  // The bytes that a symbol of vocab.bpe stands for; nothing if it holds a character outside the alphabet.
  std::optional<std::string> bytes_of(std::string_view symbol) const {
    if (symbol.empty() || unicode::valid_utf8_prefix(symbol) != symbol.size()) return std::nullopt;
    std::string bytes;
    while (!symbol.empty()) {
      const unicode::CodePoint character = unicode::decode_code_point(symbol.data());
      if (character.value >= byte_of_character.size() || byte_of_character[character.value] < 0) return std::nullopt;
      bytes.push_back(static_cast<char>(byte_of_character[character.value]));
      symbol.remove_prefix(character.size);
    }
    return bytes;
  }
};

// Reads the merges of vocab.bpe: the bytes of each merged token, in order. All of them are read and checked whatever the vocabulary
// size, because ids that silently differ from GPT-2's would spoil every shard and model made with them.
std::vector<std::string> read_merges(const std::string& path, const ByteAlphabet& alphabet) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) {
    throw InputError(
        fmt::format("{}: cannot read GPT-2's vocabulary (a folder with vocab.bpe is needed; data/gpt2_vocab has it)", path));
  }
  std::vector<std::string> merges;
  std::string line;
  int64_t line_number = 0;
  while (std::getline(file, line)) {
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line_number == 1) {
      if (!line.starts_with("#version"))
        throw InputError(fmt::format("{}:1: expected \"#version: 0.2\": this is no vocab.bpe", path));
      continue;
    }
    const size_t space = line.find(' ');
    const auto left = alphabet.bytes_of(std::string_view(line).substr(0, space));
    const auto right = space == std::string::npos ? std::nullopt : alphabet.bytes_of(std::string_view(line).substr(space + 1));
    if (!left || !right || file.eof()) {
      throw InputError(
          fmt::format("{}:{}: expected two symbols and a line end: the file is damaged or cut short", path, line_number));
    }
    merges.push_back(*left + *right);
  }
  if (merges.size() != Gpt2Tokenizer::kNumMerges) {
    throw InputError(fmt::format("{}:{}: the file ends after {} merges; GPT-2's has {}: it is damaged or not GPT-2's", path,
                                 line_number, merges.size(), Gpt2Tokenizer::kNumMerges));
  }
  return merges;
}

uint64_t checksum(const std::vector<std::string>& merges) {
  Hash64 hash;
  for (const std::string& token : merges) hash.add_text(token);
  return hash.value();
}

constexpr uint64_t kGpt2Checksum = 0x9bec6677174ab362ull;  // of all 50,000 merges

template <class Id>
std::string decode_ids(const Gpt2Tokenizer& tokenizer, std::span<const Id> ids) {
  std::string text;
  for (const Id id : ids) text.append(tokenizer.token_bytes(id));
  return text;
}

}  // namespace

Gpt2Tokenizer::Gpt2Tokenizer(const std::string& folder, int64_t vocab_size) {
  if (vocab_size < kMinVocabSize || vocab_size > kMaxVocabSize) {
    throw InputError(fmt::format("vocabulary size {}: expected {} (bytes and end of text alone) to {} (GPT-2's own)", vocab_size,
                                 kMinVocabSize, kMaxVocabSize));
  }
  const std::string path = (std::filesystem::path(folder) / "vocab.bpe").string();
  const ByteAlphabet alphabet;
  const std::vector<std::string> merges = read_merges(path, alphabet);
  if (checksum(merges) != kGpt2Checksum) {
    throw InputError(fmt::format("{}: the merges are not GPT-2's (checksum {}, expected {}): the file is damaged", path,
                                 hash_text(checksum(merges)), hash_text(kGpt2Checksum)));
  }

  for (size_t id = 0; id < kNumByteTokens; ++id) {
    id_of_byte_[alphabet.byte_of_id[id]] = static_cast<uint16_t>(id);
    offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
    bytes_.push_back(static_cast<char>(alphabet.byte_of_id[id]));
  }
  for (size_t i = 0; i < static_cast<size_t>(vocab_size - kMinVocabSize); ++i) {
    offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
    bytes_.append(merges[i]);
  }
  offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
  bytes_.append(kEndOfText);
  offsets_.push_back(static_cast<uint32_t>(bytes_.size()));

  // tiktoken merges a pair if its bytes are a token, whichever two parts vocab.bpe names for it: so every split of a token counts.
  std::unordered_map<std::string_view, uint16_t> id_of_bytes(2 * offsets_.size());
  for (uint16_t id = 0; id < bos(); ++id) id_of_bytes.emplace(token_bytes(id), id);
  struct Split {
    uint16_t left, right, merged;
  };
  std::vector<Split> splits;
  for (uint16_t id = kNumByteTokens; id < bos(); ++id) {
    const std::string_view bytes = token_bytes(id);
    for (size_t cut = 1; cut < bytes.size(); ++cut) {
      const auto left = id_of_bytes.find(bytes.substr(0, cut));
      if (left == id_of_bytes.end()) continue;
      const auto right = id_of_bytes.find(bytes.substr(cut));
      if (right != id_of_bytes.end()) splits.push_back({left->second, right->second, id});
    }
  }
  merges_ = PairTable(splits.size());
  for (const Split& split : splits) merges_.insert(split.left, split.right, split.merged);
}

std::string_view Gpt2Tokenizer::token_bytes(int64_t id) const {
  if (id < 0 || id >= vocab_size()) {
    throw InputError(fmt::format("token id {} is not in the vocabulary of {} ids", id, vocab_size()));
  }
  const size_t index = static_cast<size_t>(id);
  return std::string_view(bytes_).substr(offsets_[index], offsets_[index + 1] - offsets_[index]);
}

std::string Gpt2Tokenizer::decode(std::span<const uint16_t> ids) const { return decode_ids(*this, ids); }
std::string Gpt2Tokenizer::decode(std::span<const int32_t> ids) const { return decode_ids(*this, ids); }

std::vector<uint16_t> Gpt2Tokenizer::encode(std::string_view text) const {
  std::vector<uint16_t> ids;
  Gpt2Encoder(*this).encode(text, ids);
  return ids;
}

}  // namespace speedrun

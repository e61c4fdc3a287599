// The golden files come from tiktoken (scripts/make_tokenizer_golden.py): equal ids, for every code point and on the cases' texts.
#include "src/data/gpt2_tokenizer.h"

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <random>
#include <sstream>

#include "src/data/test_shards.h"
#include "src/data/unicode.h"

namespace speedrun {
namespace {

const std::string kVocab = std::string(SPEEDRUN_SOURCE_DIR) + "/data/gpt2_vocab";
const std::string kGolden = std::string(SPEEDRUN_SOURCE_DIR) + "/src/data/testdata/";

constexpr uint64_t kFnvStart = 0xcbf29ce484222325ull;

uint64_t fnv(std::span<const uint16_t> ids, uint64_t hash = kFnvStart) {
  for (const uint16_t id : ids) hash = (hash ^ id) * 0x100000001b3ull;
  return hash;
}

std::string utf8(uint32_t c) {
  const auto tail = [c](int shift) { return static_cast<char>(0x80u | ((c >> shift) & 0x3fu)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xc0u | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xe0u | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xf0u | c >> 18), tail(12), tail(6), tail(0)};
}

std::string unhex(std::string_view text) {
  std::string unit;
  const size_t star = text.find('*');
  const std::string_view hex = text.substr(0, star);
  if (hex != "-") {
    for (size_t i = 0; i < hex.size(); i += 2)
      unit.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  if (star == std::string_view::npos) return unit;
  std::string repeated;
  for (int i = std::stoi(std::string(text.substr(star + 1))); i > 0; --i) repeated += unit;
  return repeated;
}

std::string shown(std::span<const uint16_t> ids) {
  std::ostringstream out;
  if (ids.empty()) return "-";
  if (ids.size() > 400) {
    out << ids.size() << ':' << std::hex;
    out.width(16);
    out.fill('0');
    out << fnv(ids);
    return out.str();
  }
  for (size_t i = 0; i < ids.size(); ++i) out << (i > 0 ? "," : "") << ids[i];
  return out.str();
}

std::string vocab_text() {
  std::ifstream file(kVocab + "/vocab.bpe", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Gpt2Tokenizer, EqualsTiktokenOnGoldenCases) {
  std::ifstream file(kGolden + "tokenizer_golden.txt");
  std::string name, input, expected;
  int64_t size = 0;
  int cases = 0;
  int64_t loaded_size = 0;
  std::unique_ptr<Gpt2Tokenizer> tokenizer;
  std::unique_ptr<Gpt2Encoder> encoder;
  while (file >> name >> size >> input >> expected) {
    if (size != loaded_size) {
      tokenizer = std::make_unique<Gpt2Tokenizer>(kVocab, size);
      encoder = std::make_unique<Gpt2Encoder>(*tokenizer);
      loaded_size = size;
    }
    const std::string text = unhex(input);
    std::vector<uint16_t> ids;
    encoder->encode(text, ids);
    EXPECT_EQ(shown(ids), expected) << name << " with " << size << " ids";
    EXPECT_EQ(tokenizer->decode(ids), unicode::replace_invalid_utf8(text)) << name;
    ids.clear();
    encoder->encode(text, ids);  // now from the cache
    EXPECT_EQ(shown(ids), expected) << name << " with " << size << " ids, cached";
    ++cases;
  }
  EXPECT_GT(cases, 600);
}

TEST(Gpt2Tokenizer, EqualsTiktokenOnEveryCodePoint) {
  const Gpt2Tokenizer tokenizer(kVocab);
  Gpt2Encoder encoder(tokenizer);
  std::ifstream file(kGolden + "tokenizer_code_points.txt");
  uint32_t start = 0;
  uint64_t expected = 0;
  int blocks = 0;
  std::vector<uint16_t> ids;
  const uint16_t end_of_document = 0xffff;
  while (file >> std::hex >> start >> expected) {
    uint64_t hash = kFnvStart;
    for (uint32_t c = start; c < start + 4096; ++c) {
      if (c >= 0xd800 && c < 0xe000) continue;
      const std::string character = utf8(c);
      for (const std::string& text : {" a" + character + "b", character + character, " " + character + "1"}) {
        ids.clear();
        encoder.encode(text, ids);
        ids.push_back(end_of_document);
        hash = fnv(ids, hash);
      }
    }
    EXPECT_EQ(hash, expected) << "block of code points from 0x" << std::hex << start;
    ++blocks;
  }
  EXPECT_EQ(blocks, 0x110000 / 4096);
}

// Fills the cache several times over; words met before and after it starts anew must come out the same.
TEST(Gpt2Tokenizer, DecodeUndoesEncodeOnRandomText) {
  for (const int64_t size : {int64_t{257}, int64_t{4096}, int64_t{Gpt2Tokenizer::kMaxVocabSize}}) {
    const Gpt2Tokenizer tokenizer(kVocab, size);
    Gpt2Encoder encoder(tokenizer);
    std::mt19937 rng(11);
    std::vector<uint16_t> first, ids;
    const std::string probe = "Supercalifragilistic zebras don't   re-tokenise naïvely.\n";
    encoder.encode(probe, first);
    for (int round = 0; round < 150; ++round) {
      std::string text;
      for (int i = 0; i < 8000; ++i) {
        const uint32_t c = static_cast<uint32_t>(rng()) % (i % 3 == 0 ? 0x110000u : i % 3 == 1 ? 0x800u : 0x80u);
        if (c < 0xd800 || c >= 0xe000) text += utf8(c);
      }
      ids.clear();
      encoder.encode(text, ids);
      ASSERT_EQ(tokenizer.decode(ids), text) << size << " ids, round " << round;
    }
    ids.clear();
    encoder.encode(probe, ids);
    EXPECT_EQ(ids, first) << size << " ids";
  }
}

TEST(Gpt2Tokenizer, PrefixVocabularyHasBosLast) {
  const Gpt2Tokenizer gpt2(kVocab);
  EXPECT_EQ(gpt2.vocab_size(), 50257);
  EXPECT_EQ(gpt2.bos(), 50256);
  EXPECT_EQ(gpt2.token_bytes(0), "!");
  EXPECT_EQ(gpt2.token_bytes(256), " t");
  EXPECT_EQ(gpt2.token_bytes(50255), " gazed");
  EXPECT_EQ(gpt2.token_bytes(50256), "<|endoftext|>");
  EXPECT_EQ(gpt2.decode(std::vector<int32_t>{15496, 11, 995, 50256}), "Hello, world<|endoftext|>");
  EXPECT_EQ(gpt2.encode("Hello, world"), (std::vector<uint16_t>{15496, 11, 995}));

  const Gpt2Tokenizer prefix(kVocab, 4096);
  EXPECT_EQ(prefix.bos(), 4095);
  EXPECT_EQ(prefix.token_bytes(4094), gpt2.token_bytes(4094));
  EXPECT_EQ(prefix.token_bytes(4095), "<|endoftext|>");
  const Gpt2Tokenizer bytes(kVocab, Gpt2Tokenizer::kMinVocabSize);
  EXPECT_EQ(bytes.encode("the cat").size(), 7u);
}

TEST(Gpt2Tokenizer, RefusesIdsAndSizesOutOfRange) {
  const Gpt2Tokenizer tokenizer(kVocab, 300);
  EXPECT_THROW(tokenizer.token_bytes(300), InputError);
  EXPECT_THROW(tokenizer.token_bytes(-1), InputError);
  EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{1, 4000}), InputError);
  for (const int64_t size : {int64_t{-1}, int64_t{0}, int64_t{256}, int64_t{50258}, int64_t{50304}}) {
    test::expect_contains(test::input_error([&] { const Gpt2Tokenizer refused(kVocab, size); }),
                          {std::to_string(size), "expected 257"});
  }
}

class Gpt2Vocabulary : public test::DataTest {};

TEST_F(Gpt2Vocabulary, DamageIsRefused) {
  const std::string file = path("vocab.bpe");
  const std::string good = vocab_text();
  const auto load = [&](const std::string& content) {
    std::ofstream(file, std::ios::binary) << content;
    const Gpt2Tokenizer tokenizer(folder_.string());
  };
  const auto error_with = [&](const std::string& content) { return test::input_error([&] { load(content); }); };
  EXPECT_TRUE(
      test::input_error([] { const Gpt2Tokenizer tokenizer("/no/folder"); }).starts_with("/no/folder/vocab.bpe: cannot read"));
  EXPECT_NO_THROW(load(good));
  EXPECT_TRUE(error_with("").starts_with(file + ":0: the file ends after 0 merges"));
  EXPECT_TRUE(error_with("{\"a\": 1}\n").starts_with(file + ":1: expected \"#version"));
  EXPECT_TRUE(error_with(good.substr(0, good.size() - 1)).starts_with(file + ":50001: expected two symbols and a line end"));
  EXPECT_TRUE(error_with(good.substr(0, 1000)).starts_with(file + ":"));
  EXPECT_TRUE(
      error_with(good.substr(0, good.rfind('\n', good.size() - 2) + 1)).starts_with(file + ":50000: the file ends after 49999"));
  EXPECT_TRUE(error_with(good + "a b\n").starts_with(file + ":50002: the file ends after 50001"));

  std::string one_symbol = good;
  one_symbol.replace(one_symbol.find("\nh e\n"), 5, "\nhhe\n");
  EXPECT_TRUE(error_with(one_symbol).starts_with(file + ":4: expected two symbols"));
  std::string other_letter = good;
  other_letter.replace(other_letter.find("\nh e\n"), 5, "\nh f\n");
  EXPECT_NE(error_with(other_letter).find("the merges are not GPT-2's"), std::string::npos);
  std::string foreign = good;
  foreign.replace(foreign.find("\nh e\n"), 5, "\nh \xe7\x8c\xab\n");
  EXPECT_TRUE(error_with(foreign).starts_with(file + ":4: expected two symbols"));

  std::string crlf;
  for (const char c : good) crlf += c == '\n' ? std::string("\r\n") : std::string(1, c);
  EXPECT_NO_THROW(load(crlf));
}

TEST(Unicode, ReplacesIllFormedPartsAsPythonDoes) {
  EXPECT_EQ(unicode::replace_invalid_utf8("a\xe2\x82x"), "a\xef\xbf\xbdx");
  EXPECT_EQ(unicode::replace_invalid_utf8("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(unicode::replace_invalid_utf8("\xf0\x9f\x98"), "\xef\xbf\xbd");
  EXPECT_EQ(unicode::valid_utf8_prefix("12345678abc\xc3\xa9\xff"), 13u);
  EXPECT_EQ(unicode::valid_utf8_prefix(""), 0u);
}

}  // namespace
}  // namespace speedrun

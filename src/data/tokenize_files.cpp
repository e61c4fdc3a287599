// Documents are read in rounds, tokenised by all threads, and written in their order: the shards are the same for any number of
// threads.
#include "src/data/tokenize_files.h"

#include <fmt/format.h>

#include <atomic>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "kernels/base/error.h"
#include "src/data/document_source.h"
#include "src/data/token_shard.h"
#include "src/data/unicode.h"

namespace speedrun {
namespace {

namespace fs = std::filesystem;

constexpr size_t kRoundBytesPerThread = size_t{4} << 20;
constexpr int kMaxShards = 1000;  // three digits, so that the sorted order of the names is the order of the shards
constexpr int64_t kMaxShardTokens = INT32_MAX;

struct TokenizedDocument {
  SourceDocument source;
  std::vector<uint16_t> ids;  // BOS first; empty: the document is empty
  size_t text_bytes = 0;
  bool repaired = false;
  std::exception_ptr fault;
};

// The text of one line of JSON. Blank lines hold none.
std::string text_of_line(const std::string& line, const std::string& field, const std::string& place) {
  if (line.find_first_not_of(" \t\r") == std::string::npos) return {};
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(line);
  } catch (const nlohmann::json::exception& fault) {
    throw InputError(fmt::format("{}: not a line of valid JSON: {}", place, fault.what()));
  }
  if (!object.is_object()) throw InputError(fmt::format("{}: expected a JSON object, found {}", place, object.type_name()));
  const auto value = object.find(field);
  if (value == object.end())
    throw InputError(fmt::format("{}: the object has no field \"{}\" (choose one with --field)", place, field));
  if (!value->is_string()) {
    throw InputError(fmt::format("{}: field \"{}\" is {}; expected a string", place, field, value->type_name()));
  }
  return std::move(value->get_ref<std::string&>());
}

// A document or a line becomes ids.
class DocumentTokenizer {
 public:
  DocumentTokenizer(const Gpt2Tokenizer& tokenizer, const TokenizeOptions& options, const DocumentSource& source)
      : bos_(tokenizer.bos()), encoder_(tokenizer), options_(options), source_(source) {}

  void run(TokenizedDocument& document) {
    const std::string place = fmt::format("{}:{}", source_.path(document.source.file), document.source.number);
    std::string text = std::move(document.source.bytes);
    if (options_.format == TextFormat::jsonl) text = text_of_line(text, options_.field, place);
    document.ids.clear();
    if (text.find_first_not_of(" \t\n\v\f\r") == std::string::npos) return;
    document.text_bytes = text.size();
    document.repaired = unicode::valid_utf8_prefix(text) != text.size();
    document.ids.push_back(bos_);
    encoder_.encode(text, document.ids);
    if (static_cast<int64_t>(document.ids.size()) > kMaxShardTokens) {
      throw InputError(fmt::format("{}: a document of {} tokens; a shard holds at most {} (is --separator right?)", place,
                                   document.ids.size(), kMaxShardTokens));
    }
  }

 private:
  uint16_t bos_;
  Gpt2Encoder encoder_;
  const TokenizeOptions& options_;
  const DocumentSource& source_;
};

// Writes shards under names that no pattern *.bin finds, and gives them their own names when all are there.
class ShardWriter {
 public:
  ShardWriter(std::string prefix, int64_t shard_tokens) : prefix_(std::move(prefix)), shard_tokens_(shard_tokens) {
    for (int i = 0; i < kMaxShards; ++i) {
      if (fs::exists(shard_path(i))) {
        throw InputError(fmt::format("{} is there already: remove it or choose another --out", quoted_path(shard_path(i))));
      }
    }
    const fs::path folder = fs::path(prefix_).parent_path();
    std::error_code error;
    if (!folder.empty()) fs::create_directories(folder, error);
    if (error) throw InputError(fmt::format("{}: cannot make the folder: {}", quoted_path(folder.string()), error.message()));
  }
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  ~ShardWriter() {
    std::error_code ignored;
    for (int i = 0; i < num_written_; ++i) fs::remove(partial_path(i), ignored);
  }

  void add(const std::vector<uint16_t>& document) {
    const int64_t held = static_cast<int64_t>(tokens_.size());
    if (held > 0 && held + static_cast<int64_t>(document.size()) > shard_tokens_) flush();
    tokens_.insert(tokens_.end(), document.begin(), document.end());
  }

  std::vector<std::string> finish() {
    if (!tokens_.empty()) flush();
    std::vector<std::string> paths;
    for (int i = 0; i < num_written_; ++i) {
      std::error_code error;
      fs::rename(partial_path(i), shard_path(i), error);
      if (error) throw Error(fmt::format("{}: cannot be written: {}", quoted_path(shard_path(i)), error.message()));
      paths.push_back(shard_path(i));
    }
    num_written_ = 0;
    return paths;
  }

 private:
  std::string shard_path(int index) const { return fmt::format("{}_{:03d}.bin", prefix_, index); }
  std::string partial_path(int index) const { return shard_path(index) + ".partial"; }

  void flush() {
    if (num_written_ == kMaxShards) {
      throw InputError(fmt::format("more than {} shards of {} tokens: raise --shard-tokens", kMaxShards, shard_tokens_));
    }
    write_shard(partial_path(num_written_), tokens_);
    ++num_written_;
    tokens_.clear();
  }

  std::string prefix_;
  int64_t shard_tokens_;
  std::vector<uint16_t> tokens_;
  int num_written_ = 0;
};

void tokenize_round(std::vector<TokenizedDocument>& round, std::vector<DocumentTokenizer>& tokenizers) {
  std::atomic<size_t> next{0};
  const auto work = [&](DocumentTokenizer& tokenizer) {
    for (size_t i = next++; i < round.size(); i = next++) {
      try {
        tokenizer.run(round[i]);
      } catch (...) {
        round[i].fault = std::current_exception();
      }
    }
  };
  std::vector<std::jthread> threads;
  for (size_t i = 1; i < tokenizers.size(); ++i) threads.emplace_back(work, std::ref(tokenizers[i]));
  work(tokenizers[0]);
}

}  // namespace

TokenizeSummary tokenize_files(const Gpt2Tokenizer& tokenizer, const TokenizeOptions& options) {
  if (options.shard_tokens < 1 || options.shard_tokens > kMaxShardTokens) {
    throw InputError(fmt::format("--shard-tokens {}: expected 1 to {}", options.shard_tokens, kMaxShardTokens));
  }
  constexpr int kMaxThreads = 1024;
  if (options.threads < 1 || options.threads > kMaxThreads)
    throw InputError(fmt::format("--threads {}: expected 1 to {}", options.threads, kMaxThreads));
  DocumentSource source(options.inputs, options.format == TextFormat::jsonl ? "\n" : options.separator);
  ShardWriter writer(options.out_prefix, options.shard_tokens);
  std::vector<DocumentTokenizer> tokenizers;
  for (int i = 0; i < options.threads; ++i) tokenizers.emplace_back(tokenizer, options, source);

  TokenizeSummary summary;
  bool more = true;
  while (more) {
    std::vector<TokenizedDocument> round;
    size_t round_bytes = 0;
    while (round_bytes < kRoundBytesPerThread * tokenizers.size()) {
      TokenizedDocument document;
      more = source.next(document.source);
      if (!more) break;
      round_bytes += document.source.bytes.size() + sizeof document;
      round.push_back(std::move(document));
    }
    tokenize_round(round, tokenizers);
    for (const TokenizedDocument& document : round) {
      if (document.fault) std::rethrow_exception(document.fault);
      if (document.ids.empty()) {
        ++summary.empty_documents;
        continue;
      }
      writer.add(document.ids);
      ++summary.documents;
      summary.repaired_documents += document.repaired ? 1 : 0;
      summary.text_bytes += static_cast<int64_t>(document.text_bytes);
      summary.tokens += static_cast<int64_t>(document.ids.size());
    }
  }
  if (summary.documents == 0) throw InputError("no text in the inputs: every document is empty");
  summary.shards = writer.finish();
  return summary;
}

}  // namespace speedrun

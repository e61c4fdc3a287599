// What is in token shards, how they are made, and what a step of training would read from them.
#include "src/cli/data_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/base/error.h"
#include "src/cli/arguments.h"
#include "src/config/config_io.h"
#include "src/data/gpt2_tokenizer.h"
#include "src/data/hash64.h"
#include "src/data/inspect.h"
#include "src/data/token_shard.h"
#include "src/data/tokenize_files.h"
#include "src/optim/schedule.h"
#include "src/train/data_setup.h"

namespace speedrun {
namespace {

constexpr const char* kUsage =
    "Usage: speedrun data VERB ... (speedrun data VERB --help for more)\n"
    "  inspect SHARD...       tokens, documents and ids of token shards, all of them checked\n"
    "  tokenize INPUT...      text or JSON lines -> token shards\n"
    "  decode SHARD           token shard -> text\n"
    "  rows CONFIG            what one step of training reads on each rank\n";

void check_vocab_size(int64_t vocab_size) {
  if (vocab_size < Gpt2Tokenizer::kMinVocabSize || vocab_size > Gpt2Tokenizer::kMaxVocabSize) {
    throw InputError(
        fmt::format("--vocab-size {}: expected {} to {}", vocab_size, Gpt2Tokenizer::kMinVocabSize, Gpt2Tokenizer::kMaxVocabSize));
  }
}

void add_vocab_size(cxxopts::Options& options) {
  options.add_options()("vocab-size", "ids in use; below 50257 a prefix of GPT-2's, whose last id starts documents",
                        cxxopts::value<int64_t>()->default_value("50257"));
}

void add_vocab_folder(cxxopts::Options& options) {
  options.add_options()("vocab", "folder with GPT-2's vocab.bpe", cxxopts::value<std::string>()->default_value("data/gpt2_vocab"));
}

// ---------------------------------------------------------------- inspect

int inspect_command(int argc, char** argv) {
  cxxopts::Options options =
      command_options("data inspect", "SHARD...", "Read token shards from end to end and show what they hold.");
  add_vocab_size(options);
  Arguments arguments;
  if (!parse_arguments("data inspect", options, argc, argv, arguments)) return 0;
  if (arguments.positional.empty()) throw InputError("data inspect: expected at least one SHARD");
  const int64_t vocab_size = arguments.flags["vocab-size"].as<int64_t>();
  check_vocab_size(vocab_size);

  std::string first_fault;
  for (const std::string& path : arguments.positional) {
    const ShardInspection shard = inspect_shard(path, vocab_size);
    fmt::print("{}\n", shard.path);
    fmt::print("  tokens             {}\n", shard.tokens);
    fmt::print("  documents          {} (id {} starts one){}\n", shard.documents, vocab_size - 1,
               shard.documents == 0 ? ": none; was the shard made with another --vocab-size?" : "");
    if (shard.tokens_before_first_bos > 0) fmt::print("  before the first   {} tokens\n", shard.tokens_before_first_bos);
    if (shard.documents > 0) {
      fmt::print("  document lengths   {} to {}, mean {:.1f}\n", shard.shortest_document, shard.longest_document,
                 shard.mean_document_length);
    }
    fmt::print("  ids                {} to {}\n", shard.min_id, shard.max_id);
    fmt::print("  content hash       {}\n", hash_text(shard.content_hash));
    if (shard.ids_out_of_range > 0 && first_fault.empty()) {
      first_fault = fmt::format("{}: {} ids are not below {}; the first is {} at token {}", quoted_path(path),
                                shard.ids_out_of_range, vocab_size, shard.first_out_of_range_id, shard.first_out_of_range_offset);
    }
  }
  std::fflush(stdout);
  if (!first_fault.empty()) throw InputError(first_fault);
  return 0;
}

// ---------------------------------------------------------------- tokenize

// \n \r \t \0 \\ and \xHH in a flag's value.
std::string unescape(const std::string& flag, const std::string& text) {
  constexpr std::string_view kEscapes = "nrt0\\";
  constexpr std::string_view kMeanings("\n\r\t\0\\", 5);
  constexpr std::string_view kHexDigits = "0123456789abcdef0123456789ABCDEF";
  const auto digit = [&](size_t i) { return i < text.size() ? kHexDigits.find(text[i]) : std::string_view::npos; };
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      bytes.push_back(text[i]);
      continue;
    }
    const size_t escape = i + 1 < text.size() ? kEscapes.find(text[i + 1]) : std::string_view::npos;
    if (escape != std::string_view::npos) {
      bytes.push_back(kMeanings[escape]);
      i += 1;
    } else if (i + 1 < text.size() && text[i + 1] == 'x' && digit(i + 2) != std::string_view::npos &&
               digit(i + 3) != std::string_view::npos) {
      bytes.push_back(static_cast<char>(digit(i + 2) % 16 * 16 + digit(i + 3) % 16));
      i += 3;
    } else {
      throw InputError(fmt::format("{} {}: expected \\n, \\r, \\t, \\0, \\\\ or \\xHH after a backslash", flag, text));
    }
  }
  return bytes;
}

int tokenize_command(int argc, char** argv) {
  cxxopts::Options options = command_options(
      "data tokenize", "INPUT... --out PREFIX",
      "Make token shards PREFIX_000.bin, PREFIX_001.bin, ... from UTF-8 text. Every document starts with the end-of-text id; the "
      "text <|endoftext|> is ordinary text. Documents of white space alone are left out. INPUT may be /dev/stdin.");
  options.add_options()("out", "prefix of the shards' names; folders are made", cxxopts::value<std::string>());
  add_vocab_folder(options);
  add_vocab_size(options);
  options.add_options()("shard-tokens", "a shard ends before the document that would make it longer",
                        cxxopts::value<int64_t>()->default_value("100000000"));
  options.add_options()("format", "text, or jsonl: one JSON object a line", cxxopts::value<std::string>()->default_value("text"));
  options.add_options()("field", "jsonl: where the text is", cxxopts::value<std::string>()->default_value("text"));
  options.add_options()("separator",
                        "text: what stands between documents (\\n, \\x1e, ... allowed); none: each file is one document",
                        cxxopts::value<std::string>()->default_value(""));
  options.add_options()("threads", "0: all cores; the shards do not depend on it", cxxopts::value<int>()->default_value("0"));
  Arguments arguments;
  if (!parse_arguments("data tokenize", options, argc, argv, arguments)) return 0;

  TokenizeOptions tokenize;
  tokenize.inputs = arguments.positional;
  if (tokenize.inputs.empty()) throw InputError("data tokenize: expected at least one INPUT");
  if (!arguments.has("out")) throw InputError("data tokenize: --out PREFIX is needed");
  tokenize.out_prefix = arguments.flags["out"].as<std::string>();
  const std::string format = arguments.flags["format"].as<std::string>();
  if (format != "text" && format != "jsonl") throw InputError(fmt::format("--format {}: expected text or jsonl", format));
  tokenize.format = format == "jsonl" ? TextFormat::jsonl : TextFormat::text;
  if (tokenize.format == TextFormat::jsonl && arguments.has("separator")) {
    throw InputError("--separator: documents of --format jsonl are lines");
  }
  if (tokenize.format == TextFormat::text && arguments.has("field")) throw InputError("--field: needs --format jsonl");
  tokenize.field = arguments.flags["field"].as<std::string>();
  tokenize.separator = unescape("--separator", arguments.flags["separator"].as<std::string>());
  tokenize.shard_tokens = arguments.flags["shard-tokens"].as<int64_t>();
  const int threads = arguments.flags["threads"].as<int>();
  tokenize.threads = threads != 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int64_t vocab_size = arguments.flags["vocab-size"].as<int64_t>();
  check_vocab_size(vocab_size);

  const Gpt2Tokenizer tokenizer(arguments.flags["vocab"].as<std::string>(), vocab_size);
  const auto start = std::chrono::steady_clock::now();
  const TokenizeSummary summary = tokenize_files(tokenizer, tokenize);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const std::string& path : summary.shards) fmt::print("{}\n", path);
  const double megabytes = static_cast<double>(summary.text_bytes) / 1e6;
  fmt::print("{} documents, {:.1f} MB of text, {} tokens ({:.2f} bytes a token), {:.1f} MB/s on {} threads\n", summary.documents,
             megabytes, summary.tokens, static_cast<double>(summary.text_bytes) / static_cast<double>(summary.tokens),
             megabytes / seconds, tokenize.threads);
  if (summary.empty_documents > 0) fmt::print("{} empty documents left out\n", summary.empty_documents);
  if (summary.repaired_documents > 0) {
    fmt::print("{} documents held invalid UTF-8, which became U+FFFD\n", summary.repaired_documents);
  }
  return 0;
}

// ---------------------------------------------------------------- decode

int decode_command(int argc, char** argv) {
  cxxopts::Options options = command_options(
      "data decode", "SHARD", "Write a shard's tokens to standard output as text; <|endoftext|> stands before every document.");
  add_vocab_folder(options);
  add_vocab_size(options);
  options.add_options()("from", "first token", cxxopts::value<int64_t>()->default_value("0"));
  options.add_options()("count", "number of tokens (default: to the end)", cxxopts::value<int64_t>());
  Arguments arguments;
  if (!parse_arguments("data decode", options, argc, argv, arguments)) return 0;
  const std::string path = only_argument("data decode", arguments, "SHARD");
  const Gpt2Tokenizer tokenizer(arguments.flags["vocab"].as<std::string>(), arguments.flags["vocab-size"].as<int64_t>());
  const TokenShard shard = TokenShard::open(path);

  const int64_t from = arguments.flags["from"].as<int64_t>();
  if (from < 0 || from > shard.num_tokens()) {
    throw InputError(fmt::format("--from {}: expected 0 to {}, the tokens of {}", from, shard.num_tokens(), quoted_path(path)));
  }
  const int64_t rest = shard.num_tokens() - from;
  const int64_t count = arguments.has("count") ? arguments.flags["count"].as<int64_t>() : rest;
  if (count < 0 || count > rest) {
    throw InputError(
        fmt::format("--count {}: expected 0 to {}, the tokens of {} from {} on", count, rest, quoted_path(path), from));
  }
  constexpr int64_t kChunkTokens = 65536;
  for (int64_t done = 0; done < count; done += kChunkTokens) {
    const int64_t begin = from + done;
    const auto ids = shard.tokens().subspan(static_cast<size_t>(begin), static_cast<size_t>(std::min(kChunkTokens, count - done)));
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < tokenizer.vocab_size()) continue;
      throw InputError(fmt::format("{}: id {} at token {} is not below --vocab-size {}", quoted_path(path), ids[i],
                                   begin + static_cast<int64_t>(i), tokenizer.vocab_size()));
    }
    const std::string text = tokenizer.decode(ids);
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size())
      throw Error("data decode: writing to standard output failed");
  }
  if (std::fflush(stdout) != 0) throw Error("data decode: writing to standard output failed");
  return 0;
}

// ---------------------------------------------------------------- rows

void print_rank(const RankDescription& rank, bool documents) {
  fmt::print("rank {}: {} rows of {} tokens, {} documents, inputs {}, targets {}\n", rank.rank, rank.num_rows, rank.row_tokens,
             rank.num_documents, hash_text(rank.input_hash), hash_text(rank.target_hash));
  if (!documents) return;
  for (size_t row = 0; row < rank.document_lengths.size(); ++row) {
    fmt::print("  row {}: {} documents of {} tokens\n", row, rank.document_lengths[row].size(),
               fmt::join(rank.document_lengths[row], " "));
  }
}

int rows_command(int argc, char** argv) {
  cxxopts::Options options = command_options(
      "data rows", "CONFIG",
      "Show what one step of training reads: documents and their lengths, and a hash of inputs and targets. The hashes over "
      "all ranks do not depend on their number.");
  options.add_options()("step", "from 0", cxxopts::value<int64_t>()->default_value("0"));
  options.add_options()("world", "number of ranks", cxxopts::value<int>()->default_value("1"));
  add_set_flag(options);
  Arguments arguments;
  if (!parse_arguments("data rows", options, argc, argv, arguments)) return 0;
  const std::string path = only_argument("data rows", arguments, "CONFIG");
  const Config config = load_config(path, arguments.all("set"));
  const int64_t step = arguments.flags["step"].as<int64_t>();
  const int world = arguments.flags["world"].as<int>();
  if (step < 0 || step >= num_steps(config)) {
    throw InputError(fmt::format("--step {}: expected 0 to {}, the last step of {}", step, num_steps(config) - 1, path));
  }
  if (world < 1) throw InputError(fmt::format("--world {}: expected at least 1", world));

  const std::unique_ptr<Reader> reader = make_train_reader(config, train_reader_options(config));
  const StepDescription description = describe_step(*reader, step_runs(config, num_steps(config)), step, world);
  const auto cursor = [&](const ReaderState& state) {
    return fmt::format("epoch {} shard {} token {}", state.epoch, state.shard, state.position);
  };
  fmt::print("step {} of {}: {} tokens in rows of {}\n", step, num_steps(config), description.shape.batch_tokens,
             description.shape.row_tokens);
  fmt::print("cursor: {} -> {}\n", cursor(description.before), cursor(description.after));
  fmt::print("all ranks: inputs {}, targets {}\n", hash_text(description.input_hash), hash_text(description.target_hash));
  for (const RankDescription& rank : description.ranks) print_rank(rank, config.data.reader == ReaderKind::documents);
  return 0;
}

}  // namespace

int data_command(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  if (verb == "--help" || verb == "-h") {
    fmt::print("{}", kUsage);
    return 0;
  }
  if (verb == "inspect") return inspect_command(argc - 1, argv + 1);
  if (verb == "tokenize") return tokenize_command(argc - 1, argv + 1);
  if (verb == "decode") return decode_command(argc - 1, argv + 1);
  if (verb == "rows") return rows_command(argc - 1, argv + 1);
  if (verb.empty()) throw InputError("data: expected one of inspect, tokenize, decode, rows (data --help says more)");
  throw InputError(fmt::format("data {}: expected one of inspect, tokenize, decode, rows (data --help says more)", verb));
}

}  // namespace speedrun

#include <cstdio>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/cli/arguments.h"
#include "src/cli/commands.h"
#include "src/core/log.h"
#include "src/data/gpt2_tokenizer.h"
#include "src/train/generate.h"
#include "src/train/saved_model.h"

namespace speedrun {

int sample_command(int argc, char** argv) {
  cxxopts::Options options = command_options("sample", "RUN | CHECKPOINT", "Let a trained model continue a text.");
  add_set_flag(options);
  options.add_options()("run", "the same as the argument", cxxopts::value<std::string>());
  options.add_options()("prompt", "text to continue; empty: start of a document", cxxopts::value<std::string>()->default_value(""));
  options.add_options()("tokens", "tokens to write", cxxopts::value<int>()->default_value("120"));
  options.add_options()("temperature", "0: always the likeliest token", cxxopts::value<double>()->default_value("0.8"));
  options.add_options()("top-k", "choose among the k likeliest tokens; 0: all", cxxopts::value<int>()->default_value("50"));
  options.add_options()("seed", "of the random choices", cxxopts::value<uint64_t>()->default_value("1"));
  Arguments arguments;
  if (!parse_arguments("sample", options, argc, argv, arguments)) return 0;
  if (arguments.has("run")) arguments.positional.push_back(arguments.flags["run"].as<std::string>());
  const GenerateOptions generate_options{.tokens = arguments.flags["tokens"].as<int>(),
                                         .temperature = arguments.flags["temperature"].as<double>(),
                                         .top_k = arguments.flags["top-k"].as<int>(),
                                         .seed = arguments.flags["seed"].as<uint64_t>()};
  check_options(generate_options);
  Log log(Log::Terminal::standard_error);
  SavedModel model = open_saved_model(only_argument("sample", arguments, "RUN or CHECKPOINT"), arguments.all("set"),
                                      SavedModelUse::generation, log);
  if (model.config.data.vocabulary.empty())
    throw InputError("data.vocabulary: not set; name the folder of GPT-2's vocab.bpe: --set data.vocabulary=data/gpt2_vocab");
  const Gpt2Tokenizer tokenizer(model.config.data.vocabulary, model.config.model.vocab_size);
  const std::string prompt = arguments.flags["prompt"].as<std::string>();
  std::vector<int32_t> context = {tokenizer.bos()};
  for (const uint16_t id : tokenizer.encode(prompt)) context.push_back(id);
  fmt::print("{}", prompt);
  generate(*model.engine, model.config, generate_options, context, [&](int32_t id) {
    if (id == tokenizer.bos()) return false;
    const std::string_view bytes = tokenizer.token_bytes(id);
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
    return true;
  });
  fmt::print("\n");
  return 0;
}

}  // namespace speedrun

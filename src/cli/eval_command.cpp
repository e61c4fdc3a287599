#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/cli/arguments.h"
#include "src/cli/commands.h"
#include "src/core/log.h"
#include "src/train/data_setup.h"
#include "src/train/evaluate.h"
#include "src/train/generate.h"
#include "src/train/multiple_choice.h"
#include "src/train/saved_model.h"

namespace speedrun {

int eval_command(int argc, char** argv) {
  cxxopts::Options options = command_options("eval", "RUN | CHECKPOINT",
                                             "Validation loss of a trained model, or its accuracy on multiple-choice questions.");
  add_set_flag(options);
  options.add_options()("multiple-choice", "a file of questions in llm.c's evaluation format (HellaSwag): accuracy instead of loss",
                        cxxopts::value<std::string>());
  Arguments arguments;
  if (!parse_arguments("eval", options, argc, argv, arguments)) return 0;
  Log log;
  const SavedModelUse use = arguments.has("multiple-choice") ? SavedModelUse::questions : SavedModelUse::evaluation;
  SavedModel model = open_saved_model(only_argument("eval", arguments, "RUN or CHECKPOINT"), arguments.all("set"), use, log);
  if (arguments.has("multiple-choice")) {
    const MultipleChoiceScore score =
        score_multiple_choice(*model.engine, generation_row_tokens(model.config), model.config.model.vocab_size,
                              arguments.flags["multiple-choice"].as<std::string>());
    fmt::print("accuracy {:.4f} ({} of {})\n", static_cast<double>(score.correct) / static_cast<double>(score.questions),
               score.correct, score.questions);
    return 0;
  }
  const ValidationReader reader = make_validation_reader(model.config);
  fmt::print("validation loss {:.6f} on {} tokens after {} steps\n", evaluate(*model.engine, reader, model.step),
             model.config.eval.tokens, model.step);
  return 0;
}

}  // namespace speedrun

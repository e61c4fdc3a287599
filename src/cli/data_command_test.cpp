// The data command as a user gives it: flags, output, and errors of one line.
#include "src/cli/data_command.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "src/core/test_folder.h"

namespace speedrun {
namespace {

const std::string kRoot = SPEEDRUN_SOURCE_DIR;
const std::string kSample = kRoot + "/data/sample/sample_val_000.bin";

class DataCommand : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

  // What `speedrun data ...` prints.
  std::string output(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "data");
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    testing::internal::CaptureStdout();
    try {
      EXPECT_EQ(data_command(static_cast<int>(arguments.size()), argv.data()), 0);
    } catch (...) {
      testing::internal::GetCapturedStdout();
      throw;
    }
    return testing::internal::GetCapturedStdout();
  }

  std::string error(const std::vector<std::string>& arguments) const {
    try {
      output(arguments);
    } catch (const InputError& fault) {
      return fault.what();
    }
    return "no error";
  }

  const std::vector<std::string> vocab_ = {"--vocab", kRoot + "/data/gpt2_vocab"};
  std::vector<std::string> with_vocab(std::vector<std::string> arguments) const {
    arguments.insert(arguments.end(), vocab_.begin(), vocab_.end());
    return arguments;
  }

  TestFolder folder_;
};

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

TEST_F(DataCommand, TokenizeInspectDecode) {
  const std::string text = write("books.txt", "First, a naïve book.\x1eSecond book: it's short.");
  expect_part(output(with_vocab({"tokenize", text, "--out", path("made/books"), "--separator", "\\x1e", "--threads", "2"})),
              "2 documents");
  const std::string shard = path("made/books_000.bin");
  expect_part(output({"inspect", shard}), "documents          2 (id 50256");
  EXPECT_EQ(output(with_vocab({"decode", shard})), "<|endoftext|>First, a naïve book.<|endoftext|>Second book: it's short.");
  EXPECT_EQ(output(with_vocab({"decode", shard, "--from", "1", "--count", "2"})), "First,");
  expect_part(error(with_vocab({"tokenize", text, "--out", path("made/books")})), "is there already");
}

TEST_F(DataCommand, JsonLines) {
  const std::string lines = write("web.jsonl", "{\"body\": \"one\"}\n{\"body\": \"two\"}\n");
  const std::vector<std::string> flags = {"--format", "jsonl", "--field", "body", "--out", path("web"), "--vocab-size", "4096"};
  std::vector<std::string> arguments = {"tokenize", lines};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  expect_part(output(with_vocab(arguments)), "2 documents");
  EXPECT_EQ(output(with_vocab({"decode", path("web_000.bin"), "--vocab-size", "4096"})), "<|endoftext|>one<|endoftext|>two");
}

TEST_F(DataCommand, BundledSampleIsWholeAndReadable) {
  for (const std::string& shard : {kSample, kRoot + "/data/sample/sample_train_000.bin"}) {
    expect_part(output({"inspect", shard, "--vocab-size", "4096"}), "(id 4095 starts one)");
  }
  expect_part(output({"inspect", kSample}), "documents          0");
  const std::string text = output(with_vocab({"decode", kSample, "--vocab-size", "4096", "--count", "20000"}));
  EXPECT_TRUE(text.starts_with("<|endoftext|>"));
  expect_part(text, " the ");
}

TEST_F(DataCommand, RowsDoNotDependOnTheNumberOfRanks) {
  const std::string config = kRoot + "/configs/quickstart.json";
  const auto all_ranks = [&](const std::string& world) {
    const std::string shown = output({"rows", config, "--step", "3", "--world", world});
    return shown.substr(0, shown.find("rank 0:"));
  };
  const std::string one = all_ranks("1");
  expect_part(one, "all ranks: inputs ");
  EXPECT_EQ(all_ranks("2"), one);
  EXPECT_EQ(all_ranks("4"), one);
  expect_part(output({"rows", config, "--set", "data.reader=documents"}), "row 0: ");
  expect_part(error({"rows", config, "--step", "1000000"}), "--step 1000000");
  expect_part(error({"rows", config, "--world", "0"}), "--world 0");
}

TEST_F(DataCommand, RefusesBadArguments) {
  expect_part(error({}), "expected one of inspect");
  expect_part(error({"inspct"}), "data inspct: expected one of inspect");
  expect_part(error({"inspect"}), "at least one SHARD");
  expect_part(error({"inspect", "--shard", kSample}), "shard");
  expect_part(error({"inspect", kSample, "--vocab-size", "12x"}), "12x");
  expect_part(error({"inspect", kSample, "--vocab-size", "50258"}), "--vocab-size 50258");
  expect_part(error({"inspect", kSample, "--vocab-size", "300"}), "not below 300");
  expect_part(error({"tokenize", kSample}), "--out PREFIX");
  expect_part(error({"tokenize", "--out", path("a")}), "at least one INPUT");
  expect_part(error({"tokenize", kSample, "--out", path("a"), "--format", "xml"}), "--format xml");
  expect_part(error({"tokenize", kSample, "--out", path("a"), "--separator", "\\q"}), "--separator \\q");
  expect_part(error({"tokenize", kSample, "--out", path("a"), "--field", "body"}), "--format jsonl");
  expect_part(error(with_vocab({"decode", kSample, "--vocab-size", "300"})), "not below --vocab-size 300");
  expect_part(error(with_vocab({"decode", kSample, "--from", "-1"})), "--from -1");
  expect_part(error(with_vocab({"decode", kSample, "--count", "999999999"})), "--count 999999999");
  expect_part(error({"decode", kSample, "--vocab", path("none")}), "vocab.bpe");
  expect_part(error({"decode"}), "expected one SHARD");
}

}  // namespace
}  // namespace speedrun

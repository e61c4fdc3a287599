// Question files with every kind of damage, and scores against losses added up by hand.
#include "src/train/multiple_choice.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "src/train/test_run.h"

namespace speedrun {
namespace {

using Ids = std::vector<int32_t>;

std::string bytes_of(const std::vector<uint16_t>& words) {
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint16_t)};
}

std::string header(int32_t questions, int32_t magic = 20240522, int32_t version = 1) {
  std::vector<int32_t> words(256);
  words[0] = magic;
  words[1] = version;
  words[2] = questions;
  words[3] = 1 << 12;
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int32_t)};
}

std::vector<uint16_t> words_of(const MultipleChoiceQuestion& question, size_t index = 0) {
  std::vector<uint16_t> words = {65535, 0, static_cast<uint16_t>(index), static_cast<uint16_t>(question.label),
                                 static_cast<uint16_t>(question.completions.size())};
  const auto add = [&](const Ids& ids) {
    words.push_back(static_cast<uint16_t>(ids.size()));
    for (const int32_t id : ids) words.push_back(static_cast<uint16_t>(id));
  };
  add(question.context);
  for (const Ids& ids : question.completions) add(ids);
  words[1] = static_cast<uint16_t>(2 * words.size());
  return words;
}

std::string file_of(const std::vector<MultipleChoiceQuestion>& questions) {
  std::string content = header(static_cast<int32_t>(questions.size()));
  for (size_t q = 0; q < questions.size(); ++q) content += bytes_of(words_of(questions[q], q));
  return content;
}

std::vector<MultipleChoiceQuestion> three_questions() {
  return {{.label = 1, .context = {5, 6, 7}, .completions = {{1}, {8, 9}, {10, 11, 12}, {2, 2}}},
          {.label = 0, .context = {299}, .completions = {{0, 299}, {298}}},
          {.label = 2, .context = {1, 2, 3, 4, 5, 6}, .completions = {{7, 8}, {7, 9}, {9, 9}}}};
}

TEST(MultipleChoice, AWellFormedFileIsReadAsItIs) {
  const auto expected = three_questions();
  const auto questions = parse_questions(file_of(expected), "q.bin", kTestVocabulary);
  ASSERT_EQ(questions.size(), expected.size());
  for (size_t q = 0; q < expected.size(); ++q) {
    EXPECT_EQ(questions[q].label, expected[q].label);
    EXPECT_EQ(questions[q].context, expected[q].context);
    EXPECT_EQ(questions[q].completions, expected[q].completions);
  }
  TestFolder folder;
  const auto path = folder.path() / "é q.bin";
  std::ofstream(path, std::ios::binary) << file_of(expected);
  EXPECT_EQ(read_questions(path.string(), kTestVocabulary).size(), 3u);
}

std::string refusal(const std::string& content) {
  return refusal_of([&] { parse_questions(content, "q.bin", kTestVocabulary); });
}

void expect_refusal(const std::string& content, const std::vector<std::string>& parts) {
  const std::string message = refusal(content);
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message << " lacks: " << part;
}

TEST(MultipleChoice, DamagedHeadersAreRefused) {
  expect_refusal("", {"q.bin", "0 bytes"});
  expect_refusal(file_of(three_questions()).substr(0, 1023), {"q.bin", "1023 bytes"});
  expect_refusal(header(1, 20240520), {"q.bin", "20240520", "20240522"});
  expect_refusal(header(1, 20240522, 2), {"q.bin", "version 2"});
  for (const int32_t count : {0, -1, std::numeric_limits<int32_t>::min()})
    expect_refusal(header(count), {"q.bin", std::to_string(count) + " questions"});
  expect_refusal(header(std::numeric_limits<int32_t>::max()), {"q.bin", "question 0"});
}

TEST(MultipleChoice, ACountThatIsNotTheFilesIsRefused) {
  const std::string body = file_of(three_questions()).substr(1024);
  expect_refusal(header(4) + body, {"q.bin", "question 3"});
  expect_refusal(header(2) + body, {"q.bin", "after the last of 2 questions"});
  expect_refusal(header(3) + body + "x", {"q.bin", "1 bytes after the last of 3 questions"});
}

TEST(MultipleChoice, EveryTruncationIsRefusedByItsQuestion) {
  const auto questions = three_questions();
  const std::string content = file_of(questions);
  std::vector<size_t> ends = {1024};
  for (const auto& question : questions) ends.push_back(ends.back() + 2 * words_of(question).size());
  ASSERT_EQ(ends.back(), content.size());
  for (size_t size = 1024; size < content.size(); ++size) {
    size_t question = 0;
    while (ends[question + 1] <= size) ++question;
    expect_refusal(content.substr(0, size), {"q.bin", "question " + std::to_string(question)});
  }
}

TEST(MultipleChoice, FaultyQuestionsAreRefusedByNameAndFault) {
  const std::vector<uint16_t> good = words_of(three_questions()[0]);
  const std::string first = bytes_of(words_of(three_questions()[2]));
  const auto with = [&](size_t at, uint16_t value) {
    std::vector<uint16_t> words = good;
    words.at(at) = value;
    return header(2) + first + bytes_of(words);
  };
  ASSERT_EQ(refusal(with(0, 65535)), "accepted");
  expect_refusal(with(0, 65534), {"q.bin", "question 1", "65535"});
  expect_refusal(with(1, 0), {"question 1"});
  expect_refusal(with(1, 6), {"question 1"});
  expect_refusal(with(1, good[1] - 2), {"question 1"});
  expect_refusal(with(1, good[1] + 2), {"question 1"});
  expect_refusal(with(1, 65535), {"question 1"});
  expect_refusal(with(3, 4), {"question 1", "label 4 of 4"});
  expect_refusal(with(3, 65535), {"question 1", "label 65535"});
  expect_refusal(with(4, 0), {"question 1", "0 completions"});
  expect_refusal(with(4, 1), {"question 1", "of 1 completions"});
  expect_refusal(with(4, 3), {"question 1"});
  expect_refusal(with(4, 5), {"question 1"});
  expect_refusal(with(4, 65), {"question 1", "65 completions"});
  expect_refusal(with(5, 0), {"question 1", "empty"});
  expect_refusal(with(5, 60000), {"question 1"});
  expect_refusal(with(6, kTestVocabulary), {"question 1", "id 300", "vocabulary of 300"});
  expect_refusal(with(10, 50256), {"question 1", "id 50256"});
}

TEST(MultipleChoice, AFlippedBitIsRefusedOrReadButNeverMore) {
  const std::string good = file_of(three_questions());
  for (size_t bit = 0; bit < 8 * good.size(); bit += bit < 8 * 1024 ? 61 : 1) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
    refusal(bad);
  }
}

class MultipleChoiceScoring : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = load_config(write_test_config(folder_.path()));
    device_ = make_cpu_device(2);
    engine_ = make_engine(config_, *device_, {.micro_batch_tokens = 96, .evaluation_row_tokens = 32, .training = false});
    engine_->warm_up();
    engine_->initialize(6);
    // Spread the logits, so that the answers differ by far more than rounding.
    for (const StateEntry& entry : engine_->state()) {
      if (entry.name != "parameter/wte") continue;
      std::vector<std::byte> bytes = entry.read();
      for (size_t i = 0; i < bytes.size() / 4; ++i) {
        const auto value = static_cast<float>(random_normal(3, 3, i));
        std::memcpy(bytes.data() + 4 * i, &value, 4);
      }
      entry.write(bytes);
    }
  }
  MultipleChoiceScore score(const std::vector<MultipleChoiceQuestion>& questions) {
    const auto path = folder_.path() / "questions.bin";
    std::ofstream(path, std::ios::binary) << file_of(questions);
    return score_multiple_choice(*engine_, 32, kTestVocabulary, path.string());
  }
  // Mean loss of the completion: each of its tokens predicted by a row of its own, which holds what comes before it and nothing
  // else.
  double loss_by_hand(const MultipleChoiceQuestion& question, const Ids& completion) {
    Ids text = question.context;
    double sum = 0;
    for (const int32_t id : completion) {
      StepRows rows{.num_rows = 1, .row_tokens = 32, .inputs = text, .targets = Ids(32, 17), .doc_start = Ids(32, 0)};
      rows.inputs.resize(32, 23);
      rows.targets[text.size() - 1] = id;
      sum += static_cast<double>(engine_->token_losses(rows)[text.size() - 1]);
      text.push_back(id);
    }
    return sum / static_cast<double>(completion.size());
  }
  int answer_by_hand(const MultipleChoiceQuestion& question) {
    int best = 0;
    for (size_t c = 1; c < question.completions.size(); ++c) {
      if (loss_by_hand(question, question.completions[c]) < loss_by_hand(question, question.completions[static_cast<size_t>(best)]))
        best = static_cast<int>(c);
    }
    return best;
  }
  static MultipleChoiceQuestion random_question(uint64_t seed) {
    uint64_t draws = 0;
    const auto draw = [&](uint32_t below) { return philox(seed, 9, draws++)[0] % below; };
    const auto ids = [&](uint32_t count) {
      Ids result;
      for (uint32_t i = 0; i < count; ++i) result.push_back(static_cast<int32_t>(draw(kTestVocabulary)));
      return result;
    };
    MultipleChoiceQuestion question;
    question.context = ids(1 + draw(15));
    for (uint64_t c = 0; c < 2 + seed % 4; ++c) question.completions.push_back(ids(1 + draw(12)));
    return question;
  }

  TestFolder folder_;
  Config config_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(MultipleChoiceScoring, CountsTheQuestionsWhoseLabelHasTheLowestMeanLoss) {
  std::vector<MultipleChoiceQuestion> questions;
  int64_t expected = 0;
  for (uint64_t q = 0; q < 12; ++q) {
    questions.push_back(random_question(q));
    const int answer = answer_by_hand(questions.back());
    const int wrong = (answer + 1) % static_cast<int>(questions.back().completions.size());
    questions.back().label = q % 3 == 0 ? wrong : answer;
    expected += q % 3 != 0;
  }
  const MultipleChoiceScore result = score(questions);
  EXPECT_EQ(result.questions, 12);
  EXPECT_EQ(result.correct, expected);
}

TEST_F(MultipleChoiceScoring, TheMeanCountsAndNotTheSum) {
  // A likely token and the same with a second, likelier one: the sum is larger, the mean lower.
  for (uint64_t seed = 0; seed < 200; ++seed) {
    MultipleChoiceQuestion question = random_question(seed);
    const Ids& completion = question.completions[0];
    if (completion.size() < 2) continue;
    question.completions = {{completion[0]}, {completion[0], completion[1]}};
    const double one = loss_by_hand(question, question.completions[0]), two = loss_by_hand(question, question.completions[1]);
    if (!(two < one - 1e-3)) continue;
    ASSERT_GT(2 * two, one);
    question.label = 1;
    EXPECT_EQ(score({question}).correct, 1);
    return;
  }
  FAIL() << "no such pair among 200 questions";
}

TEST_F(MultipleChoiceScoring, AQuestionMayFillARowAndNotMore) {
  MultipleChoiceQuestion question = {.label = 1, .context = Ids(30, 4), .completions = {{1}, {1, 2, 3}}};  // 32 inputs, 33 tokens
  EXPECT_EQ(score({question}).questions, 1);
  question.completions[1].push_back(4);
  const std::string message = refusal_of([&] { score({three_questions()[0], question}); });
  for (const char* part : {"questions.bin", "question 1", "34 tokens", "32"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST_F(MultipleChoiceScoring, ADamagedModelHasNoScore) {
  for (const StateEntry& entry : engine_->state()) {
    if (entry.name != "parameter/h.0.mlp.up.weight") continue;
    std::vector<std::byte> bytes = entry.read();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(bytes.data(), &nan, sizeof nan);
    entry.write(bytes);
  }
  try {
    score(three_questions());
    FAIL() << "a NaN won";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::non_finite);
    EXPECT_NE(std::string(error.what()).find("question 0"), std::string::npos) << error.what();
  }
}

TEST_F(MultipleChoiceScoring, AMissingFileIsNamed) {
  const std::string message =
      refusal_of([&] { score_multiple_choice(*engine_, 32, kTestVocabulary, (folder_.path() / "absent.bin").string()); });
  EXPECT_NE(message.find("absent.bin"), std::string::npos) << message;
}

}  // namespace
}  // namespace speedrun

// What a run leaves on the disk: its folder under odd names and obstacles, metrics that a kill cut short, values that are not
// finite.
#include "src/train/run_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <limits>

#include "src/train/run_record.h"
#include "src/train/test_run.h"

namespace speedrun {
namespace {

const double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

Config config_for(const std::filesystem::path& dir, const std::string& name) {
  Config config;
  config.run.dir = dir.string();
  config.run.name = name;
  return config;
}

std::string refusal(const Config& config) {
  return refusal_of([&] { RunFolder::create(config, "test"); });
}

TEST(RunFolder, IsMadeWithItsParentsAndNumberedIfItExists) {
  TestFolder folder;
  const auto dir = folder.path() / "a" / "b" / "runs";
  const Config config = config_for(dir, "r");
  const RunFolder first = RunFolder::create(config, "test"), second = RunFolder::create(config, "test"),
                  third = RunFolder::create(config, "test");
  EXPECT_EQ(first.path(), dir / "r");
  EXPECT_EQ(second.path(), dir / "r-2");
  EXPECT_EQ(third.path(), dir / "r-3");
  EXPECT_EQ(third.id(), "r-3");
  for (const RunFolder* run : {&first, &second, &third}) EXPECT_TRUE(std::filesystem::is_directory(run->path() / "checkpoints"));
}

TEST(RunFolder, WithoutANameGetsTimeAndConfigName) {
  TestFolder folder;
  const std::string id = RunFolder::create(config_for(folder.path(), ""), "quick start").id();
  ASSERT_EQ(id.size(), std::string("20240131-235959-quick start").size()) << id;
  EXPECT_EQ(id.substr(8, 1), "-");
  EXPECT_EQ(id.substr(15), "-quick start");
}

TEST(RunFolder, SpacesAndOtherLettersAreNamesLikeOthers) {
  TestFolder folder;
  const Config config = config_for(folder.path() / "mes essais d'été", "é 1 \"x\"");
  const RunFolder run = RunFolder::create(config, "test");
  run.write_config(config);
  EXPECT_EQ(RunFolder::open(run.path()).path(), run.path());
  EXPECT_EQ(load_config(run.path() / "config.json"), config);
}

TEST(RunFolder, AFileInTheWayIsNamed) {
  TestFolder folder;
  std::ofstream(folder.path() / "runs") << "x";
  for (const auto& dir : {folder.path() / "runs", folder.path() / "runs" / "deeper"}) {
    const std::string message = refusal(config_for(dir, "r"));
    EXPECT_NE(message.find("run.dir"), std::string::npos) << message;
    EXPECT_NE(message.find(dir.string()), std::string::npos) << message;
  }
  std::ofstream(folder.path() / "r") << "x";
  const std::string message = refusal(config_for(folder.path(), "r"));
  EXPECT_NE(message.find((folder.path() / "r").string()), std::string::npos) << message;
}

TEST(RunFolder, AFolderThatMayNotBeWrittenIsNamed) {
  TestFolder folder;
  const auto locked = folder.path() / "locked";
  std::filesystem::create_directory(locked);
  ASSERT_EQ(chmod(locked.c_str(), 0555), 0);
  // Root may write everywhere, so the test is someone else for a moment.
  const bool root = geteuid() == 0;
  if (root) {
    ASSERT_EQ(seteuid(65534), 0);
  }
  const std::string in_it = refusal(config_for(locked, "r")), below = refusal(config_for(locked / "runs", "r"));
  if (root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_NE(in_it.find((locked / "r").string()), std::string::npos) << in_it;
  EXPECT_NE(in_it.find("Permission denied"), std::string::npos) << in_it;
  EXPECT_NE(below.find((locked / "runs").string()), std::string::npos) << below;
  EXPECT_NE(below.find("Permission denied"), std::string::npos) << below;
}

TEST(RunFolder, OpenTakesARunAndRefusesTheRestByName) {
  TestFolder folder;
  const Config config = config_for(folder.path(), "r");
  const RunFolder run = RunFolder::create(config, "test");
  const auto refused = [&](const std::filesystem::path& path) {
    const std::string message = refusal_of([&] { RunFolder::open(path); });
    EXPECT_NE(message.find("not the folder of a run"), std::string::npos) << path << ": " << message;
    EXPECT_NE(message.find(path.filename().string()), std::string::npos) << message;
  };
  refused(run.path());  // no config.json yet
  run.write_config(config);
  EXPECT_EQ(RunFolder::open(run.path()).path(), run.path());
  EXPECT_EQ(RunFolder::open(run.path() / "").path(), run.path());
  EXPECT_EQ(RunFolder::open(run.path() / "checkpoints" / "..").id(), "r");
  refused(folder.path() / "absent");
  refused(run.path() / "config.json");
  refused(folder.path());
}

// The step of every line, validations marked with 'v', jumps with 'j'.
std::vector<std::string> steps_of(const std::filesystem::path& run) {
  std::vector<std::string> steps;
  for (const auto& line : read_metrics(run))
    steps.push_back((line.contains("val_loss") ? "v" : line.contains("jump") ? "j" : "") + std::to_string(line["step"].get<int>()));
  return steps;
}

TEST(RunFolder, TrimmedMetricsEndWhereTheCheckpointDoes) {
  TestFolder folder;
  const RunFolder run = RunFolder::create(config_for(folder.path(), "r"), "test");
  const auto file = run.path() / "metrics.jsonl";
  run.trim_metrics(5);  // no file: nothing to trim, nothing made
  EXPECT_FALSE(std::filesystem::exists(file));
  {
    MetricsFile metrics(file);
    for (int step = 0; step < 8; ++step) {
      if (step % 4 == 0 && step > 0) metrics.write({{"step", step}, {"jump", 1e-3}});
      if (step % 2 == 0) metrics.write({{"step", step}, {"val_loss", step == 4 ? kNan : 3.5}});
      metrics.write({{"step", step}, {"loss", 4.0}});
    }
  }
  const std::string whole = read_file(file.string());
  const auto trimmed = [&](const std::string& content, int first_step) {
    std::ofstream(file, std::ios::binary) << content;
    run.trim_metrics(first_step);
    return steps_of(run.path());
  };
  // Jump and validation after 4 updates belong to the checkpoint after 4; the update with index 4 does not.
  EXPECT_EQ(trimmed(whole, 4), (std::vector<std::string>{"v0", "0", "1", "v2", "2", "3", "j4", "v4"}));
  EXPECT_EQ(trimmed(whole, 5), (std::vector<std::string>{"v0", "0", "1", "v2", "2", "3", "j4", "v4", "4"}));
  EXPECT_EQ(trimmed(whole, 0), (std::vector<std::string>{"v0"}));
  EXPECT_EQ(trimmed(whole, 100).size(), 13u);
  EXPECT_EQ(read_file(file.string()), whole) << "lines that stay changed";
  EXPECT_EQ(trimmed("", 3).size(), 0u);
}

TEST(RunFolder, TrimmingDropsALineThatAKillCutShort) {
  TestFolder folder;
  const RunFolder run = RunFolder::create(config_for(folder.path(), "r"), "test");
  const auto file = run.path() / "metrics.jsonl";
  const std::string two = "{\"step\":0,\"loss\":4.5}\n{\"step\":1,\"loss\":4.25}\n", last = "{\"step\":2,\"loss\":4.125}";
  for (size_t size = 0; size <= last.size(); ++size) {
    std::ofstream(file, std::ios::binary) << two << last.substr(0, size);
    run.trim_metrics(10);
    // Complete but for its newline, it is whole: what is appended must start on a line of its own.
    EXPECT_EQ(read_file(file.string()), size == last.size() ? two + last + "\n" : two) << "cut after " << size << " bytes";
  }
  std::ofstream(file, std::ios::binary) << two << "\n[]\n7\n{\"step\":\"3\"}\n{\"loss\":1}\n"
                                        << std::string(3, '\0') << "\n"
                                        << last;
  run.trim_metrics(10);
  EXPECT_EQ(read_file(file.string()), two + last + "\n");
}

TEST(MetricsFile, WritesValuesThatAreNotFiniteAsNullAndSaysSo) {
  TestFolder folder;
  const auto file = folder.path() / "metrics.jsonl";
  {
    MetricsFile metrics(file);
    metrics.write({{"step", 0}, {"loss", 4.5}, {"lr", {{"head", 0.1}}}});
    metrics.write({{"step", 1}, {"loss", kNan}, {"grad_norm", 2.0}});
    metrics.write({{"step", 2}, {"loss", 4.0}, {"grad_norm", -kInfinity}});
    // Each line is in the file as soon as it is written: a killed run keeps it.
    EXPECT_EQ(read_metrics(folder.path()).size(), 3u);
  }
  {
    MetricsFile metrics(file);  // appends
    metrics.write({{"step", 3}, {"loss", kInfinity}});
  }
  const auto lines = read_metrics(folder.path());
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0], nlohmann::json::parse(R"({"step":0,"loss":4.5,"lr":{"head":0.1}})"));
  EXPECT_EQ(lines[1], nlohmann::json::parse(R"({"step":1,"loss":null,"grad_norm":2.0,"non_finite":true})"));
  EXPECT_EQ(lines[2], nlohmann::json::parse(R"({"step":2,"loss":4.0,"grad_norm":null,"non_finite":true})"));
  EXPECT_EQ(lines[3], nlohmann::json::parse(R"({"step":3,"loss":null,"non_finite":true})"));
  EXPECT_EQ(read_file(file.string()).substr(0, 9), "{\"step\":0") << "the step comes first";
}

TEST(MetricsFile, AFileThatCannotBeWrittenIsNamed) {
  TestFolder folder;
  EXPECT_THROW(MetricsFile(folder.path() / "absent" / "metrics.jsonl"), Error);
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  MetricsFile metrics("/dev/full");
  for (const size_t size : {size_t{1}, size_t{100000}}) {
    try {
      metrics.write({{"text", std::string(size, 'x')}});
      FAIL() << size << " bytes vanished";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("/dev/full: cannot be written: No space left"), std::string::npos) << error.what();
    }
  }
}

TEST(ResultJson, IsValidWithLossesThatAreNotFinite) {
  TestFolder folder;
  const RunFolder run = RunFolder::create(config_for(folder.path(), "r"), "test");
  write_test_shard(folder.path() / "train_0.bin", 100, 1);
  const ShardList shards = list_shards((folder.path() / "train_0.bin").string());
  const auto device = make_cpu_device(1);
  const auto written = [&](const RunRecord& record) {
    run.write_result(result_json(config_for(folder.path(), "r"), record, PhaseClock(), *device, shards, shards));
    return nlohmann::json::parse(read_file((run.path() / "result.json").string()));
  };
  RunRecord record;
  record.outcome = "non-finite: step 3";
  record.val_loss = kNan;
  record.train_loss = kInfinity;
  nlohmann::json result = written(record);
  EXPECT_EQ(result["reached"], false);
  for (const char* key : {"val_loss", "train_loss", "reached_at", "mfu", "joules", "joules_per_token"})
    EXPECT_TRUE(result.at(key).is_null()) << key << " is " << result[key];
  EXPECT_TRUE(result["from"].is_null() && result["val_loss_raw"].is_null());
  EXPECT_EQ(result["outcome"], "non-finite: step 3");
  EXPECT_EQ(result["train_shards"][0]["tokens"], 100);

  record.val_loss = 3.25;
  record.val_loss_raw = 3.5;
  record.from_checkpoint = "/c.ckpt";
  record.from_step = 2;
  record.reached = TargetReached{.step = 7, .clock_s = 1.5, .loss = 3.25};
  record.joules = 10;
  record.tokens = 4;
  result = written(record);
  EXPECT_EQ(result["val_loss"], 3.25);
  EXPECT_EQ(result["val_loss_raw"], 3.5);
  EXPECT_EQ(result["from"], (nlohmann::json{{"checkpoint", "/c.ckpt"}, {"step", 2}}));
  EXPECT_EQ(result["reached_at"], (nlohmann::json{{"step", 7}, {"clock_s", 1.5}, {"val_loss", 3.25}}));
  EXPECT_EQ(result["joules_per_token"], 2.5);
}

TEST(ResultJson, AFileNameThatIsNoUtf8CostsNoResult) {
  TestFolder folder;
  const RunFolder run = RunFolder::create(config_for(folder.path(), "r"), "test");
  run.write_result({{"train_shards", {"/data/\xe9t\xe9.bin"}}, {"steps", 5}});
  const auto result = nlohmann::json::parse(read_file((run.path() / "result.json").string()));
  EXPECT_EQ(result["steps"], 5);
  EXPECT_EQ(result["train_shards"][0], "/data/\ufffdt\ufffd.bin");
}

}  // namespace
}  // namespace speedrun

// Loading, refusing, dumping: what a user can write into a config file or after --set.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clocale>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <locale>
#include <set>

#include "kernels/base/error.h"
#include "src/config/config_fields.h"
#include "src/config/config_io.h"
#include "src/config/nearest_key.h"
#include "src/config/test_config.h"

namespace speedrun {
namespace {

namespace fs = std::filesystem;

TEST_F(ConfigTest, EmptyObjectIsAllDefaults) { EXPECT_EQ(load("{}"), Config{}); }

TEST_F(ConfigTest, ReadsEveryTypeOfKey) {
  const Config config = load(R"({
    "model": {"tied_head": false, "num_layers": 6, "norm": "rmsnorm", "layers": {"2": {"window": "long"}, "5": {"window": "short"}}},
    "train": {"batch_tokens": 6442450944, "seed": 18446744073709551615},
    "optim": {"matrix": {"lr": 2.5e-2}, "vector": {"lr": 1}, "muon": {"coefficients": [[2, -1.5, 0.5], [1, 0, 0]]}},
    "run": {"name": "é \u00e9"},
    "schedule.steps": 7
  })");
  EXPECT_FALSE(config.model.tied_head);
  EXPECT_EQ(config.model.num_layers, 6);
  EXPECT_EQ(config.model.norm, NormKind::rmsnorm);
  ASSERT_EQ(config.model.layers.size(), 2u);
  EXPECT_EQ(config.model.layers.at(2).window, WindowKind::long_window);
  EXPECT_EQ(config.model.layers.at(5).window, WindowKind::short_window);
  EXPECT_EQ(config.train.batch_tokens, 6442450944);
  EXPECT_EQ(config.train.seed, 18446744073709551615u);
  EXPECT_EQ(config.optim.matrix.lr, 0.025);
  EXPECT_EQ(config.optim.vector.lr, 1.0);
  const NumberRows rows = {{2, -1.5, 0.5}, {1, 0, 0}};
  EXPECT_EQ(config.optim.muon.coefficients, rows);
  EXPECT_EQ(config.run.name, "é é");
  EXPECT_EQ(config.schedule.steps, 7);
}

TEST_F(ConfigTest, CommentsByteOrderMarkAndCrlfChangeNothing) {
  const std::string text = "{\n// a comment\n\"train\": {\"seed\": 5 /* another */},\n\"optim\": {\"head\": {\"lr\": 0.0006}}\n}\n";
  std::string windows = "\xEF\xBB\xBF";
  for (const char c : text) windows += c == '\n' ? std::string("\r\n") : std::string(1, c);
  EXPECT_EQ(load(text).train.seed, 5u);
  EXPECT_EQ(load(windows), load(text));
  EXPECT_EQ(refusal("\xEF\xBB\xBF{\r\n\r\n\"sed\": 1}"), "test.json:3: unknown key \"sed\"; nearest valid key: \"train.seed\"");
}

TEST_F(ConfigTest, UnknownKeysNameTheNearest) {
  EXPECT_EQ(refusal("{\"modle\": {\"width\": 64}}"), "test.json:1: unknown key \"modle\"; nearest valid key: \"model\"");
  EXPECT_EQ(refusal("{\n\"model\": {\n\"widht\": 64}}"),
            "test.json:3: unknown key \"model.widht\"; nearest valid key: \"model.width\"");
  EXPECT_EQ(refusal("{\"width\": 64}"), "test.json:1: unknown key \"width\"; nearest valid key: \"model.width\"") << "wrong level";
  EXPECT_EQ(refusal("{\"model\": {\"seq_len\": 64}}"),
            "test.json:1: unknown key \"model.seq_len\"; nearest valid key: \"train.seq_len\"");
  EXPECT_EQ(refusal("{\"optim\": {\"matrix\": {\"learing_rate\": 1}}}"),
            "test.json:1: unknown key \"optim.matrix.learing_rate\"; nearest valid key: \"optim.matrix.lr\"");
  EXPECT_EQ(refusal("{\"optim\": {\"matrix\": {\"extends\": 1}}}").find("test.json:1: unknown key"), 0u);
  EXPECT_EQ(refusal("{\"\": 1}").find("test.json:1: unknown key \"\""), 0u);
}

TEST_F(ConfigTest, LayerKeys) {
  EXPECT_EQ(refusal("{\"model\": {\"layers\": {\"3\": {\"windw\": \"long\"}}}}"),
            "test.json:1: unknown key \"model.layers.3.windw\"; nearest valid key: \"model.layers.3.window\"");
  EXPECT_EQ(refusal("{\"model\": {\"layers\": {\"03\": {\"window\": \"long\"}}}}"),
            "test.json:1: unknown key \"model.layers.03\"; nearest valid key: \"model.layers.3\"");
  EXPECT_EQ(refusal("{\"model\": {\"layers\": {\"99999999999\": {}}}}").find("test.json:1: unknown key"), 0u);
  EXPECT_EQ(refusal("{\"model\": {\"layers\": {\"-1\": {\"window\": \"long\"}}}}").find("test.json:1: unknown key"), 0u);
  EXPECT_EQ(refusal("{}", {"model.layers.12.window=long"}),
            "test.json: model.layers.12 does not exist: model.num_layers is 12, the last layer is 11");
}

TEST_F(ConfigTest, WrongTypesAreRefused) {
  EXPECT_EQ(refusal("{\n\"optim\": {\"matrix\": {\"lr\": \"1e-3\"}}}"),
            "test.json:2: optim.matrix.lr: expected a number in the range >= 0, found \"1e-3\"");
  EXPECT_EQ(refusal("{\"train\": {\"stop_at_target\": 1}}"), "test.json:1: train.stop_at_target: expected true or false, found 1");
  EXPECT_EQ(refusal("{\"train\": {\"seed\": null}}"), "test.json:1: train.seed: expected an integer in the range >= 0, found null");
  EXPECT_EQ(refusal("{\"run\": {\"name\": 3}}"), "test.json:1: run.name: expected a string, found 3");
  EXPECT_EQ(refusal("{\"model\": {\"norm\": \"rms\"}}"),
            "test.json:1: model.norm: expected one of layernorm, rmsnorm, found \"rms\"");
  EXPECT_EQ(refusal("{\"model\": 3}"), "test.json:1: model is a group of keys: expected an object, found 3");
  EXPECT_EQ(refusal("{\"model\": {\"width\": {}}}"),
            "test.json:1: model.width: expected an integer in the range 2..65536, found an object");
  for (const std::string number : {"1e3", "1000.0", "1E0"}) {
    EXPECT_EQ(
        refusal("{\"schedule\": {\"steps\": " + number + "}}"),
        "test.json:1: schedule.steps: expected an integer without point or exponent in the range 0..1000000000, found " + number);
  }
  for (const std::string rows : {"[]", "[[1, 2]]", "[1, 2, 3]", "[[[1, 2, 3]]]", "3"}) {
    EXPECT_EQ(
        refusal("{\"optim\": {\"muon\": {\"coefficients\": " + rows + "}}}").find("test.json:1: optim.muon.coefficients: expected"),
        0u);
  }
  EXPECT_EQ(refusal("{\"data\": {\"train\": \"a\\u0000b\"}}").find("test.json:1: data.train: expected a string without NUL"), 0u);
}

TEST_F(ConfigTest, OutOfRangeIsRefused) {
  EXPECT_EQ(refusal("{\"model\": {\"width\": 0}}"), "test.json:1: model.width: expected a value in the range 2..65536, found 0");
  EXPECT_EQ(refusal("{\"eval\": {\"dense_from\": 1.5}}"),
            "test.json:1: eval.dense_from: expected a value in the range 0..1, found 1.5");
  EXPECT_EQ(refusal("{\"schedule\": {\"scale\": 0}}"),
            "test.json:1: schedule.scale: expected a value in the range > 0, <= 1000000, found 0");
  EXPECT_EQ(refusal("{\"train\": {\"seed\": -1}}"), "test.json:1: train.seed: expected a value in the range >= 0, found -1");
  EXPECT_EQ(refusal("{\"train\": {\"seq_len\": 18446744073709551615}}")
                .find("test.json:1: train.seq_len: expected an integer in the range"),
            0u);
  EXPECT_EQ(refusal("{\"train\": {\"seed\": 18446744073709551616}}").find("test.json:1: train.seed: expected an integer"), 0u);
  EXPECT_EQ(refusal("{\"optim\": {\"head\": {\"lr\": 1e999}}}"), "test.json:1: not valid JSON: number overflow parsing '1e999'");
}

TEST_F(ConfigTest, DuplicatedKeysAreRefused) {
  EXPECT_EQ(refusal("{\"train\": {\"seed\": 1,\n\"seed\": 1}}"), "test.json:2: the key \"train.seed\" is given twice");
  EXPECT_EQ(refusal("{\"train\": {},\n\n\"train\": {}}"), "test.json:3: the key \"train\" is given twice");
  EXPECT_EQ(refusal("{\"train\": {\"seed\": 1},\n\"train.seed\": 1}"), "test.json:2: the key \"train.seed\" is given twice");
}

TEST_F(ConfigTest, BrokenJsonNamesTheLine) {
  EXPECT_EQ(refusal("{\"train\": {\"seed\": 1,\n}}"),
            "test.json:2: not valid JSON: object key - unexpected '}'; expected string literal (trailing comma)");
  EXPECT_NE(refusal("{\"optim\": {\"muon\": {\"coefficients\": [[1, 2, 3], ]}}}").find("(trailing comma)"), std::string::npos);
  EXPECT_EQ(refusal("{\"train\": }").find("(trailing comma)"), std::string::npos);
  for (const std::string text : {"{", "{\"a", "{} x", "{\"a\" 1}", "nope", "{'a': 1}", "{\"a\": NaN}", "{\"a\": \"\xff\"}", "/*"}) {
    EXPECT_EQ(refusal(text).find("test.json:1: not valid JSON: "), 0u) << text << ": " << refusal(text);
  }
  for (const std::string text : {"[1]", "3", "\"a\"", "null"}) {
    EXPECT_EQ(refusal(text).find("test.json:1: expected a JSON object, found "), 0u) << text;
  }
  for (const std::string text : {"", " \r\n", "\xEF\xBB\xBF"}) {
    EXPECT_EQ(refusal(text), "test.json: the file is empty; expected a JSON object ({} for all defaults)");
  }
  std::string deep = "{\"a\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  EXPECT_EQ(refusal(deep), "test.json:1: lists are nested too deeply");
  deep = "";
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":";
  EXPECT_EQ(refusal(deep), "test.json:1: objects are nested too deeply");
}

TEST_F(ConfigTest, MissingFilesAndFolders) {
  EXPECT_EQ(refusal_of("none.json"), "none.json: no such config file");
  fs::create_directory(dir_ / "folder");
  EXPECT_EQ(refusal_of("folder"), "folder: is a directory; expected a JSON file");
  write("large.json", std::string((1 << 20) + 1, ' '));
  EXPECT_EQ(refusal_of("large.json"), "large.json: more than 1048576 bytes; that is no config file");
}

TEST_F(ConfigTest, ExtendsMergesObjectsAndReplacesLists) {
  write("base.json", R"({"model": {"width": 128, "num_heads": 2}, "optim": {"muon": {"coefficients": [[1, 2, 3], [4, 5, 6]]}}})");
  write("sub/middle.json", R"({"extends": "../base.json", "model": {"num_heads": 1}})");
  const Config config =
      load(R"({"model": {"num_layers": 3}, "optim": {"muon": {"coefficients": [[7, 8, 9]]}}, "extends": "sub/middle.json"})");
  EXPECT_EQ(config.model.width, 128);
  EXPECT_EQ(config.model.num_heads, 1);
  EXPECT_EQ(config.model.num_layers, 3) << "wherever \"extends\" stands";
  const NumberRows rows = {{7, 8, 9}};
  EXPECT_EQ(config.optim.muon.coefficients, rows);
}

TEST_F(ConfigTest, ExtendsIsChecked) {
  EXPECT_EQ(refusal("{\n\"extends\": \"test.json\"}"),
            "test.json:2: \"extends\" goes in a circle: test.json is being loaded already");
  write("a.json", "{\"extends\": \"b.json\"}");
  write("b.json", "{\"extends\": \"./a.json\"}");
  EXPECT_EQ(refusal_of("a.json"), "b.json:1: \"extends\" goes in a circle: ./a.json is being loaded already");
  write("base.json", "{}");
  EXPECT_EQ(refusal("{\"extends\": \"bse.json\"}"), "test.json:1: bse.json: no such config file");
  EXPECT_EQ(refusal("{\"extends\": 3}"), "test.json:1: extends: expected the path of a JSON file, found 3");
  EXPECT_EQ(refusal("{\"extends\": [\"base.json\"]}"), "test.json:1: extends: expected the path of a JSON file, found a list");
  EXPECT_EQ(refusal("{\"extends\": \".\"}"), "test.json:1: .: is a directory; expected a JSON file");
  write("bad.json", "{\n\"train\": {\"sed\": 1}}");
  EXPECT_EQ(refusal("{\"extends\": \"bad.json\", \"train\": {\"seed\": 1}}"),
            "bad.json:2: unknown key \"train.sed\"; nearest valid key: \"train.seed\"");
}

TEST_F(ConfigTest, FilePathsAreRelativeToTheFileThatSetsThem) {
  write("base/base.json",
        R"({"data": {"train": "../data/t_*.bin", "val": "v.bin"}, "train": {"init_weights": "/abs/w.safetensors"}})");
  const Config config = load(R"({"extends": "base/base.json", "data": {"val": "mine/v.bin"}})", {"data.vocabulary=vocab"});
  EXPECT_EQ(config.data.train, (dir_ / "data/t_*.bin").string());
  EXPECT_EQ(config.data.val, (dir_ / "mine/v.bin").string());
  EXPECT_EQ(config.train.init_weights, "/abs/w.safetensors");
  EXPECT_EQ(config.data.vocabulary, (fs::current_path() / "vocab").string());
  EXPECT_EQ(config.run.dir, "runs");
  EXPECT_EQ(load("{}", {"data.val="}).data.val, "") << "an empty path stays empty";
}

TEST_F(ConfigTest, OverridesAreCheckedLikeFiles) {
  const Config config =
      load("{\"train\": {\"seed\": 1}}", {"train.seed=2", "run.name=2024", "model.layers.2.window=long", "model.norm=rmsnorm",
                                          "optim.muon.coefficients=[[1, 2, 3]]", "train.stop_at_target=true",
                                          "optim.matrix.lr=1e-3", "train.seed=3", "data.train=\"/a b.bin\""});
  EXPECT_EQ(config.train.seed, 3u) << "the last one counts";
  EXPECT_EQ(config.run.name, "2024");
  EXPECT_EQ(config.model.layers.at(2).window, WindowKind::long_window);
  EXPECT_EQ(config.model.norm, NormKind::rmsnorm);
  EXPECT_EQ(config.optim.muon.coefficients, (NumberRows{{1, 2, 3}}));
  EXPECT_TRUE(config.train.stop_at_target);
  EXPECT_EQ(config.optim.matrix.lr, 1e-3);
  EXPECT_EQ(config.data.train, "/a b.bin");

  EXPECT_EQ(refusal("{}", {"train.sed=5"}), "--set train.sed=5: unknown key \"train.sed\"; nearest valid key: \"train.seed\"");
  EXPECT_EQ(refusal("{}", {"train.seed=1e3"}),
            "--set train.seed=1e3: train.seed: expected an integer without point or exponent in the range >= 0, found 1e3");
  EXPECT_EQ(refusal("{}", {"train.seed=\"5\""}),
            "--set train.seed=\"5\": train.seed: expected an integer in the range >= 0, found \"5\"");
  EXPECT_EQ(refusal("{}", {"train.seed="}), "--set train.seed=: train.seed: expected an integer in the range >= 0, found \"\"");
  EXPECT_EQ(refusal("{}", {"optim.head.lr=nan"}),
            "--set optim.head.lr=nan: optim.head.lr: expected a number in the range >= 0, found \"nan\"");
  EXPECT_EQ(refusal("{}", {"model.width=0"}), "--set model.width=0: model.width: expected a value in the range 2..65536, found 0");
  EXPECT_EQ(refusal("{}", {"train.seed"}), "--set train.seed: expected key=value, for example train.seed=1");
  EXPECT_EQ(refusal("{}", {"=1"}), "--set =1: expected key=value, for example train.seed=1");
  EXPECT_EQ(refusal("{}", {"train=1"}), "--set train=1: train is a group of keys: set one of them");
  EXPECT_EQ(refusal("{}", {"train={\"seed\": 1}"}), "--set train={\"seed\": 1}: train is a group of keys: set one of them");
  EXPECT_EQ(refusal("{}", {"extends=a.json"}), "--set extends=a.json: \"extends\" has its place in a config file only");
  EXPECT_EQ(refusal("{}", {"a\nb=1"}).find("--set \"a\\nb=1\": unknown key"), 0u);
}

std::vector<fs::path> config_files() {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(fs::path(SPEEDRUN_SOURCE_DIR) / "configs")) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  return files;
}

TEST_F(ConfigTest, DumpLoadsBackEqual) {
  ASSERT_GE(config_files().size(), 4u);
  for (const fs::path& file : config_files()) {
    Config config = load_config(file);
    config.model.layers[1].window = WindowKind::long_window;
    config.optim.matrix.lr = 0.1 + 0.2;
    config.train.seed = 0xFFFFFFFFFFFFFFFF;
    config.run.dir = "\"quoted\" \\ and\nmore";
    const std::string text = dump_config(config);
    EXPECT_EQ(load(text), config) << file;
    EXPECT_EQ(dump_config(load(text)), text) << file;
  }
}

TEST_F(ConfigTest, ChangedKeysAreThoseThatDiffer) {
  const Config before = load("{}");
  EXPECT_TRUE(changed_keys(before, before).empty());
  const std::vector<KeyChange> changes =
      changed_keys(before, load("{}", {"train.seed=7", "model.layers.3.window=long", "run.name=x", "model.layers.1.window=full"}));
  ASSERT_EQ(changes.size(), 3u) << "a layer named with its default value is no change";
  EXPECT_EQ(changes[0].key, "model.layers.3.window");
  EXPECT_EQ(changes[0].before, "\"full\"");
  EXPECT_EQ(changes[0].after, "\"long\"");
  EXPECT_EQ(changes[1].key, "train.seed");
  EXPECT_EQ(changes[1].after, "7");
  EXPECT_EQ(changes[2].key, "run.name");
}

TEST_F(ConfigTest, DumpHoldsEveryKey) {
  Config config;
  config.model.layers[3] = {};
  const std::string text = dump_config(config);
  for (const Field& field : config_fields(config)) {
    const std::string name = fmt::format("\"{}\": ", field.key.substr(field.key.rfind('.') + 1));
    EXPECT_NE(text.find(name), std::string::npos) << field.key;
  }
}

TEST_F(ConfigTest, EveryDefaultIsInItsRangeAndEveryKeyIsUnique) {
  Config config;
  std::set<std::string> keys;
  std::set<const void*> members;
  for (const Field& field : config_fields(config)) {
    EXPECT_TRUE(keys.insert(field.key).second) << field.key << " twice";
    EXPECT_FALSE(field.help.empty()) << field.key;
    struct Address {
      const void* operator()(const TextMember& text) const { return text.text; }
      const void* operator()(const EnumMember& names) const { return names.member; }
      const void* operator()(const void* member) const { return member; }
    };
    EXPECT_TRUE(members.insert(std::visit(Address{}, field.member)).second) << field.key << " has the member of another key";
  }
  EXPECT_EQ(load(dump_config(config)), config);
}

TEST_F(ConfigTest, KeyListNamesEveryKey) {
  Config config;
  const std::string list = describe_keys();
  for (const Field& field : config_fields(config)) EXPECT_NE(list.find("| " + field.key + " "), std::string::npos) << field.key;
  for (const std::string key : {"model.layers.<i>.window", "model.layers.<i>.skip_from", "schedule.stages.<i>.mtp_start"})
    EXPECT_NE(list.find("| " + key + " "), std::string::npos) << key;
}

TEST_F(ConfigTest, ShippedConfigsSayWhatTheyShould) {
  const fs::path configs = fs::path(SPEEDRUN_SOURCE_DIR) / "configs";
  const Config track = load_config(configs / "optimization_track.json");
  EXPECT_EQ(track.model.norm_eps, std::ldexp(1.0, -23));
  EXPECT_EQ(track.model.head_size(), 128);
  EXPECT_EQ(track.model.padded_vocab_size(), 50304);
  EXPECT_EQ(track.schedule.steps, 3250);
  EXPECT_EQ(track.train.reduction, ReductionKind::sum);
  EXPECT_EQ(track.optim.embedding.master, MasterKind::none);
  const Config gpt2 = load_config(configs / "gpt2_124m.json");
  EXPECT_EQ(gpt2.model.head_size(), 64);
  EXPECT_EQ(gpt2.optim.vector.weight_decay, 0);
  EXPECT_EQ(gpt2.optim.position.weight_decay, 0.1);
  const Config record = load_config(configs / "main_track.json");
  EXPECT_EQ(record.model.norm_eps, std::ldexp(1.0, -23));
  EXPECT_EQ(record.model.layers.size(), 11u);
  EXPECT_EQ(record.optim.matrix.master, MasterKind::truncated);
  EXPECT_EQ(record.optim.bigram.master, MasterKind::none);
  EXPECT_EQ(record.optim.muon.coefficients.size(), 5u);
  Config smoke = load_config(configs / "main_track_smoke.json");
  EXPECT_EQ(smoke.schedule.scale, 0.1);
  for (const fs::path& file : config_files()) EXPECT_NO_THROW(validate_for_cuda(load_config(file), file.string())) << file;
}

struct CommaPunctuation : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

// The C locale of a German user, if the machine has one or the tools to make one.
bool set_comma_locale(const fs::path& dir) {
  for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8"}) {
    if (std::setlocale(LC_ALL, name)) return true;
  }
  const std::string command = "localedef -i de_DE -f UTF-8 " + (dir / "de_DE.UTF-8").string() + " >/dev/null 2>&1";
  if (std::system(command.c_str()) != 0) return false;
  setenv("LOCPATH", dir.c_str(), 1);
  return std::setlocale(LC_ALL, "de_DE.UTF-8") != nullptr;
}

TEST_F(ConfigTest, DecimalCommaLocalesChangeNothing) {
  const std::string text = R"({"optim": {"matrix": {"lr": 1.5e-3, "eps": 0.25}}, "train": {"batch_tokens": 1048576}})";
  const Config expected = load(text, {"optim.vector.lr=0.125"});
  const std::string dump = dump_config(expected), keys = describe_keys();
  const std::string refused = refusal("{\"eval\": {\"dense_from\": 1.5}}");
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new CommaPunctuation));
  const bool c_locale = set_comma_locale(dir_);
  EXPECT_EQ(load(text, {"optim.vector.lr=0.125"}), expected);
  EXPECT_EQ(dump_config(expected), dump);
  EXPECT_EQ(describe_keys(), keys);
  EXPECT_EQ(refusal("{\"eval\": {\"dense_from\": 1.5}}"), refused);
  std::locale::global(before);
  std::setlocale(LC_ALL, "C");
  unsetenv("LOCPATH");
  EXPECT_EQ(expected.optim.matrix.lr, 1.5e-3);
  EXPECT_EQ(expected.optim.vector.lr, 0.125);
  if (!c_locale) GTEST_SKIP() << "only C++ locales checked: no C locale with a decimal comma, and no localedef";
}

TEST(EditDistance, CountsEditsAndSwaps) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("abc", "abc"), 0u);
  EXPECT_EQ(edit_distance("abc", "acb"), 1u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
}

}  // namespace
}  // namespace speedrun

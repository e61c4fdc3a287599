// Checkpoints under damage: every fault is refused by name, and the newest good one is found.
#include "src/train/checkpoint.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include "src/train/test_run.h"

namespace speedrun {
namespace {

// A state of three tensors in memory.
struct FakeState {
  std::vector<std::vector<std::byte>> tensors{std::vector<std::byte>(400), std::vector<std::byte>(12),
                                              std::vector<std::byte>(70000)};
  explicit FakeState(int fill) {
    for (auto& tensor : tensors) {
      for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<std::byte>((i * 7 + static_cast<size_t>(fill)) & 0xff);
    }
  }
  std::vector<StateEntry> entries() {
    std::vector<StateEntry> list;
    const char* names[] = {"parameter/a", "parameter/b", "adam.m/a"};
    for (size_t i = 0; i < tensors.size(); ++i) {
      list.push_back(small_entry(
          names[i], DType::f32, {static_cast<int64_t>(tensors[i].size() / 4)}, [this, i] { return tensors[i]; },
          [this, i](const std::vector<std::byte>& bytes) { tensors[i] = bytes; }));
    }
    return list;
  }
};

CheckpointMeta meta_of_step(int step) {
  CheckpointMeta meta;
  meta.step = step;
  meta.reader = {1, 2, 3};
  meta.clock_s[2] = 12.5;
  meta.last_val_loss = std::nan("");
  meta.has_val_loss = true;
  meta.config = "{\"text\": \"é\"}";
  meta.shards_hash = "00ff";
  return meta;
}

TEST(Checkpoint, RoundTrip) {
  TestFolder folder;
  FakeState state(1), loaded(2);
  const auto path = checkpoint_path(folder.path(), 42);
  write_checkpoint(path, meta_of_step(42), state.entries());
  const CheckpointMeta meta = load_checkpoint(path, loaded.entries(), false);
  EXPECT_EQ(loaded.tensors, state.tensors);
  EXPECT_EQ(meta.step, 42);
  EXPECT_EQ(meta.reader, (ReaderState{1, 2, 3}));
  EXPECT_EQ(meta.clock_s[2], 12.5);
  EXPECT_TRUE(std::isnan(meta.last_val_loss));
  EXPECT_EQ(meta.config, "{\"text\": \"é\"}");
  EXPECT_EQ(meta.last_val_loss_raw, std::nullopt);
  EXPECT_EQ(meta.from_checkpoint, "");
}

TEST(Checkpoint, SaysWhereItsRunCameFromAndWhatTheReadOutWas) {
  TestFolder folder;
  FakeState state(1);
  const auto path = checkpoint_path(folder.path(), 42);
  CheckpointMeta meta = meta_of_step(42);
  meta.last_val_loss_raw = 3.5;
  meta.from_checkpoint = "/runs/é/checkpoints/step_000040.ckpt";
  meta.from_step = 40;
  write_checkpoint(path, meta, state.entries());
  const CheckpointMeta found = read_checkpoint_meta(path);
  EXPECT_EQ(found.last_val_loss_raw, 3.5);
  EXPECT_EQ(found.from_checkpoint, meta.from_checkpoint);
  EXPECT_EQ(found.from_step, 40);
}

TEST(Checkpoint, NamesThatAreLeftOutAreNeitherRequiredNorLoaded) {
  TestFolder folder;
  FakeState state(1), loaded(2), untouched(2);
  const auto path = checkpoint_path(folder.path(), 42);
  auto entries = state.entries(), into = loaded.entries();
  write_checkpoint(path, meta_of_step(42), entries);
  load_checkpoint(path, into, false, "adam.");
  EXPECT_EQ(loaded.tensors[1], state.tensors[1]);
  EXPECT_EQ(loaded.tensors[2], untouched.tensors[2]);
  // One that the file lacks, or that only the file has.
  into[2].name = "adam.other";
  load_checkpoint(path, into, false, "adam.");
  EXPECT_THROW(load_checkpoint(path, into, false), InputError);
  into.pop_back();
  load_checkpoint(path, into, false, "adam.");
  EXPECT_THROW(load_checkpoint(path, into, false), InputError);
  into.pop_back();
  EXPECT_THROW(load_checkpoint(path, into, false, "adam."), InputError) << "only these are left out";
}

TEST(Checkpoint, IsFoundByItsOwnNameOrInItsRun) {
  TestFolder folder;
  FakeState state(1);
  const auto find = [](const std::filesystem::path& path) { return find_checkpoint(path, [](const std::string&) {}); };
  EXPECT_EQ(refusal_of([&] { find(folder.path() / "absent"); }),
            (folder.path() / "absent").string() + ": no such run or checkpoint");
  EXPECT_EQ(refusal_of([&] { find(folder.path()); }), folder.path().string() + ": holds no good checkpoint");
  for (const int step : {5, 10}) write_checkpoint(checkpoint_path(folder.path(), step), meta_of_step(step), state.entries());
  EXPECT_EQ(find(folder.path()), checkpoint_path(folder.path(), 10));
  EXPECT_EQ(find(checkpoint_path(folder.path(), 5)), checkpoint_path(folder.path(), 5));
}

TEST(Checkpoint, EveryTruncationAndFlippedByteIsRefusedByName) {
  TestFolder folder;
  FakeState state(1);
  const auto path = checkpoint_path(folder.path(), 1);
  write_checkpoint(path, meta_of_step(1), state.entries());
  const std::string good = read_file(path.string());
  const auto refused = [&](const std::string& content, const std::string& what) {
    std::ofstream(path, std::ios::binary) << content;
    FakeState into(9), untouched(9);
    try {
      load_checkpoint(path, into.entries(), false);
      ADD_FAILURE() << "accepted: " << what;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("step_000001.ckpt"), std::string::npos);
    }
    EXPECT_EQ(into.tensors, untouched.tensors) << "changed the state before refusing: " << what;
  };
  for (size_t cut : {size_t{1}, size_t{100}, good.size() / 2, good.size() - 40, good.size() - 5, good.size()})
    refused(good.substr(0, good.size() - cut), "truncated by " + std::to_string(cut));
  // Sections are padded to 64 bytes; only padding may be damaged without harm, so flip bytes that belong to something.
  for (size_t at = 0; at < good.size(); at += at < 2000 ? 41 : 1777) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    std::ofstream(path, std::ios::binary) << bad;
    FakeState into(9);
    try {
      load_checkpoint(path, into.entries(), false);
      EXPECT_EQ(into.tensors, state.tensors) << "damage at byte " << at << " was loaded";
    } catch (const InputError&) {
    }
  }
  refused(std::string(100, 'x'), "other file");
  refused("", "empty file");
}

TEST(Checkpoint, AnotherModelsIsRefusedByTheFieldThatDiffers) {
  TestFolder folder;
  FakeState state(1);
  const auto path = checkpoint_path(folder.path(), 1);
  write_checkpoint(path, meta_of_step(1), state.entries());
  auto entries = state.entries();
  entries[1].shape = {1, 3};
  try {
    load_checkpoint(path, entries, false);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("parameter/b"), std::string::npos);
  }
  entries = state.entries();
  entries.pop_back();
  EXPECT_THROW(load_checkpoint(path, entries, false), InputError);
  EXPECT_NO_THROW(load_checkpoint(path, entries, true));
}

TEST(Checkpoint, NewestGoodOneIsChosenAndDamagedOnesAreNamed) {
  TestFolder folder;
  FakeState state(1);
  for (const int step : {5, 10, 100}) write_checkpoint(checkpoint_path(folder.path(), step), meta_of_step(step), state.entries());
  std::filesystem::resize_file(checkpoint_path(folder.path(), 100),
                               std::filesystem::file_size(checkpoint_path(folder.path(), 100)) - 1000);
  std::vector<std::string> warnings;
  const auto newest = newest_good_checkpoint(folder.path(), [&](const std::string& text) { warnings.push_back(text); });
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->filename(), "step_000010.ckpt");
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("step_000100.ckpt"), std::string::npos);
  prune_checkpoints(folder.path(), 2);
  EXPECT_FALSE(std::filesystem::exists(checkpoint_path(folder.path(), 5)));
  EXPECT_TRUE(std::filesystem::exists(checkpoint_path(folder.path(), 10)));
}

TEST(Checkpoint, AFullDiskKeepsTheOldOneAndSaysSo) {
  TestFolder folder;
  FakeState old_state(1), new_state(2), loaded(3);
  const auto path = checkpoint_path(folder.path(), 1);
  write_checkpoint(path, meta_of_step(1), old_state.entries());
  // A limit on the file's size fails writes as a full disk does.
  rlimit former{};
  getrlimit(RLIMIT_FSIZE, &former);
  const auto former_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{30000, former.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    write_checkpoint(path, meta_of_step(1), new_state.entries());
  } catch (const Error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &former);
  std::signal(SIGXFSZ, former_handler);
  EXPECT_NE(message.find("step_000001.ckpt"), std::string::npos) << message;
  load_checkpoint(path, loaded.entries(), false);
  EXPECT_EQ(loaded.tensors, old_state.tensors);
  EXPECT_FALSE(std::filesystem::exists(path.string() + ".tmp"));
}

TEST(Checkpoint, KilledAtRandomMomentsLeavesAGoodOne) {
  TestFolder folder;
  FakeState state(1);
  write_checkpoint(checkpoint_path(folder.path(), 0), meta_of_step(0), state.entries());
  for (int round = 0; round < 12; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      for (int step = round * 1000;; ++step) {
        write_checkpoint(checkpoint_path(folder.path(), step), meta_of_step(step), state.entries());
        prune_checkpoints(folder.path(), 2);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(3000 + philox(1, 2, static_cast<uint64_t>(round))[0] % 20000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    int warnings = 0;
    ASSERT_TRUE(newest_good_checkpoint(folder.path(), [&](const std::string&) { ++warnings; }));
    EXPECT_EQ(warnings, 0) << "a half-written checkpoint had its final name";
  }
}

}  // namespace
}  // namespace speedrun

// Checkpoints whose sections are smaller, larger and no multiple of a piece, by one thread and by several.
#include "src/train/checkpoint_io.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "fmt/format.h"
#include "src/train/test_run.h"

namespace speedrun {
namespace {

// Tensors that come and go in pieces of any size up to kPieceBytes. Values are finite as FP32.
class PiecewiseState {
 public:
  explicit PiecewiseState(const std::map<std::string, size_t>& sizes) {
    for (const auto& [name, bytes] : sizes) tensors[name].resize(bytes);
  }

  void fill(uint64_t seed) {
    for (auto& [name, tensor] : tensors) {
      seed += 1000003;
      for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<std::byte>((i * 2654435761u + seed) >> 8 & 0x3f);
    }
  }

  // Pieces of `at_once` bytes in turn.
  std::vector<StateEntry> entries(size_t at_once = kPieceBytes) {
    std::vector<StateEntry> list;
    for (auto& [name, tensor] : tensors) {
      list.push_back({name,
                      DType::f32,
                      {static_cast<int64_t>(tensor.size() / 4)},
                      [&tensor, at_once](PieceSink& sink) {
                        for (size_t begin = 0; begin < tensor.size(); begin += at_once) {
                          const size_t bytes = std::min(at_once, tensor.size() - begin);
                          std::memcpy(sink.space(bytes), tensor.data() + begin, bytes);
                          sink.filled();
                        }
                      },
                      [&tensor](size_t begin, std::span<const std::byte> piece) {
                        ASSERT_LE(begin + piece.size(), tensor.size());
                        ASSERT_EQ(begin % 4 + piece.size() % 4, 0u);
                        std::copy(piece.begin(), piece.end(), tensor.begin() + static_cast<std::ptrdiff_t>(begin));
                      }});
    }
    return list;
  }

  std::map<std::string, std::vector<std::byte>> tensors;
};

const std::map<std::string, size_t> kSizes = {{"parameter/a", 4},
                                              {"parameter/b", kPieceBytes - 4},
                                              {"parameter/c", kPieceBytes},
                                              {"parameter/d", kPieceBytes + 4},
                                              {"adam.m/c", 3 * kPieceBytes + 400},
                                              {"adam.v/c", 36}};

struct FoundSection {
  size_t offset;
  std::string bytes;
};

// What a checkpoint's layout is, by another way: the sections that its header names, cut out of the file.
std::map<std::string, FoundSection> sections_of(const std::string& content) {
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, content.data() + 16, 8);
  const auto header = nlohmann::json::parse(content.substr(32, header_bytes));
  std::map<std::string, FoundSection> sections;
  for (const auto& row : header.at("sections")) {
    const size_t offset = std::stoull(row.at("offset").get<std::string>());
    const std::string bytes = content.substr(offset, row.at("bytes").get<size_t>());
    EXPECT_EQ(fmt::format("{:016x}", hash_bytes(bytes.data(), bytes.size())), row.at("hash").get<std::string>());
    sections[row.at("name").get<std::string>()] = {offset, bytes};
  }
  return sections;
}

TEST(CheckpointPieces, SectionsOfEverySizeGoThere) {
  TestFolder folder;
  PiecewiseState state(kSizes);
  state.fill(3);
  std::string first;
  for (const size_t at_once : {kPieceBytes, kPieceBytes / 3 / 4 * 4}) {
    const auto path = folder.path() / std::to_string(at_once);
    write_checkpoint(path, CheckpointMeta(), state.entries(at_once));
    const std::string content = read_file(path.string());
    const auto sections = sections_of(content);
    ASSERT_EQ(sections.size(), kSizes.size());
    for (const auto& [name, tensor] : state.tensors)
      EXPECT_TRUE(sections.at(name).bytes == std::string(reinterpret_cast<const char*>(tensor.data()), tensor.size())) << name;
    if (first.empty()) first = content;
    EXPECT_TRUE(content == first) << "the file depends on how the state was cut";
  }
}

TEST(CheckpointPieces, AndBack) {
  TestFolder folder;
  PiecewiseState state(kSizes), loaded(kSizes), parameters(kSizes);
  state.fill(3);
  const auto path = folder.path() / "c";
  write_checkpoint(path, CheckpointMeta(), state.entries());
  load_checkpoint(path, loaded.entries(), false);
  EXPECT_TRUE(loaded.tensors == state.tensors);
  auto entries = parameters.entries();
  std::erase_if(entries, [](const StateEntry& entry) { return !entry.name.starts_with(kParameterPrefix); });
  load_checkpoint(path, entries, true);
  EXPECT_TRUE(parameters.tensors.at("parameter/d") == state.tensors.at("parameter/d"));
  EXPECT_FALSE(parameters.tensors.at("adam.m/c") == state.tensors.at("adam.m/c"));
}

TEST(CheckpointPieces, ADamagedByteOfAnySectionIsFound) {
  TestFolder folder;
  PiecewiseState state(kSizes);
  state.fill(3);
  const auto path = folder.path() / "c";
  write_checkpoint(path, CheckpointMeta(), state.entries());
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const std::string content = read_file(path.string());
  for (const auto& [name, section] : sections_of(content)) {
    const size_t begin = section.offset, bytes = section.bytes.size();
    for (const size_t at : {begin, begin + bytes / 2, begin + bytes - 1}) {
      const auto put = [&](char byte) { file.seekp(static_cast<std::streamoff>(at)).put(byte).flush(); };
      put(static_cast<char>(content[at] ^ 1));
      for (const bool parameters_only : {false, true}) {
        PiecewiseState into(kSizes);
        const std::string refusal = refusal_of([&] { load_checkpoint(path, into.entries(), parameters_only); });
        EXPECT_NE(refusal.find("checksum of section " + name + " does not match"), std::string::npos) << refusal;
      }
      put(content[at]);
    }
  }
  EXPECT_NO_THROW(verify_checkpoint(path));
}

TEST(CheckpointPieces, TheFirstParameterThatIsNotFiniteIsNamedAndNoFileIsLeft) {
  TestFolder folder;
  for (int round = 0; round < 20; ++round) {
    PiecewiseState state(kSizes);
    const float infinite = std::numeric_limits<float>::infinity();
    for (const char* name : {"parameter/c", "parameter/d"}) {
      auto& tensor = state.tensors.at(name);
      std::memcpy(tensor.data() + tensor.size() - 4, &infinite, 4);
    }
    const auto path = folder.path() / "c";
    try {
      write_checkpoint(path, CheckpointMeta(), state.entries());
      FAIL() << "written";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::non_finite);
      EXPECT_EQ(std::string(error.what()), path.string() + ": not written: parameter/c is not finite");
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  }
}

TEST(CheckpointPieces, AStateThatFailsEndsTheThreads) {
  TestFolder folder;
  PiecewiseState state(kSizes);
  auto entries = state.entries();
  entries.back().read_to = [](PieceSink& sink) {
    sink.space(8);
    throw Error("the GPU is gone");
  };
  EXPECT_THROW(write_checkpoint(folder.path() / "c", CheckpointMeta(), entries), Error);
  entries = state.entries();
  write_checkpoint(folder.path() / "c", CheckpointMeta(), entries);
  entries.front().write_piece = [](size_t, std::span<const std::byte>) { throw Error("the GPU is gone"); };
  EXPECT_THROW(load_checkpoint(folder.path() / "c", entries, false), Error);
}

TEST(CheckpointPieces, ReaderAndWriterAgreeForAnyNumberOfThreads) {
  TestFolder folder;
  std::string content(50021, '\0');
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 31 >> 3);
  const std::string path = (folder.path() / "x").string();
  for (const int threads : {0, 1, 3, 8}) {
    std::vector<FilePiece> pieces;
    HashBytes written, read;
    AtomicFile file(path);
    {
      PieceWriter writer(file, 97, threads);
      for (size_t begin = 0; begin < content.size(); begin += 97) {
        const size_t bytes = std::min<size_t>(97, content.size() - begin);
        std::memcpy(writer.space(), content.data() + begin, bytes);
        writer.put({begin, bytes, &written}, nullptr);
        pieces.push_back({begin, bytes, &read});
      }
      writer.finish();
    }
    file.commit();
    EXPECT_EQ(read_file(path), content) << threads;
    EXPECT_EQ(written.value(), hash_bytes(content.data(), content.size())) << threads;
    const RandomAccessFile again(path);
    std::string back;
    {
      PieceReader reader(again, pieces, threads);
      for (size_t i = 0; i < pieces.size(); ++i) {
        const auto piece = reader.next();
        back.append(reinterpret_cast<const char*>(piece.data()), piece.size());
      }
    }
    EXPECT_EQ(back, content) << threads;
    EXPECT_EQ(read.value(), written.value()) << threads;
    // Beyond the end of the file, with pieces behind it that nobody will ask for.
    pieces[3].offset = content.size() - 1;
    PieceReader reader(again, pieces, threads);
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(reader.next().empty());
    EXPECT_TRUE(reader.next().empty()) << threads;
  }
}

}  // namespace
}  // namespace speedrun

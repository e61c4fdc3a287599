#include "src/train/checkpoint.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/core/file.h"
#include "src/core/text.h"
#include "src/train/checkpoint_io.h"

namespace speedrun {
namespace {

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

using Json = nlohmann::ordered_json;

constexpr char kMagic[17] = "speedrun ckpt 1\n";
constexpr size_t kPrefixBytes = 16 + 8 + 8;
constexpr size_t kAlignment = 64;
constexpr uint64_t kLargestHeader = 1u << 28;

size_t align(size_t offset) { return (offset + kAlignment - 1) / kAlignment * kAlignment; }

std::string hex(uint64_t value) { return fmt::format("{:016x}", value); }

[[noreturn]] void damaged(const std::filesystem::path& path, const std::string& what) {
  throw InputError(
      fmt::format("{}: damaged checkpoint: {}; use an older one of the run; --resume RUN and --from RUN do so themselves",
                  path.string(), what));
}

Json number_or_null(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }
double number_of(const Json& value) { return value.is_null() ? std::nan("") : value.get<double>(); }

Json meta_json(const CheckpointMeta& meta) {
  return {{"step", meta.step},
          {"reader", {{"epoch", meta.reader.epoch}, {"shard", meta.reader.shard}, {"position", meta.reader.position}}},
          {"clock_s", meta.clock_s},
          {"last_val_loss", number_or_null(meta.last_val_loss)},
          {"has_val_loss", meta.has_val_loss},
          {"last_val_loss_raw", meta.last_val_loss_raw ? number_or_null(*meta.last_val_loss_raw) : Json(nullptr)},
          {"reached_step", meta.reached_step},
          {"reached_clock_s", meta.reached_clock_s},
          {"reached_loss", meta.reached_loss},
          {"joules", meta.joules},
          {"config", meta.config},
          {"shards_hash", meta.shards_hash},
          {"from_checkpoint", meta.from_checkpoint},
          {"from_step", meta.from_step}};
}

CheckpointMeta meta_of(const Json& json) {
  CheckpointMeta meta;
  meta.step = json.at("step").get<int>();
  const Json& reader = json.at("reader");
  meta.reader = {reader.at("epoch").get<int64_t>(), reader.at("shard").get<int64_t>(), reader.at("position").get<int64_t>()};
  const auto clocks = json.at("clock_s").get<std::vector<double>>();
  if (clocks.size() != std::size(meta.clock_s)) throw std::out_of_range("clock_s");
  std::copy(clocks.begin(), clocks.end(), meta.clock_s);
  meta.last_val_loss = number_of(json.at("last_val_loss"));
  meta.has_val_loss = json.at("has_val_loss").get<bool>();
  meta.reached_step = json.at("reached_step").get<int>();
  meta.reached_clock_s = json.at("reached_clock_s").get<double>();
  meta.reached_loss = json.at("reached_loss").get<double>();
  meta.joules = json.at("joules").get<double>();
  meta.config = json.at("config").get<std::string>();
  meta.shards_hash = json.at("shards_hash").get<std::string>();
  // Checkpoints of earlier versions lack these.
  if (json.contains("last_val_loss_raw") && !json.at("last_val_loss_raw").is_null())
    meta.last_val_loss_raw = json.at("last_val_loss_raw").get<double>();
  meta.from_checkpoint = json.value("from_checkpoint", std::string());
  meta.from_step = json.value("from_step", 0);
  return meta;
}

struct Section {
  std::string name, dtype, hash;
  std::vector<int64_t> shape;
  uint64_t offset = 0, bytes = 0;
};

bool printable(std::string_view text) { return std::none_of(text.begin(), text.end(), is_control); }

// Bytes that the section's type and shape need; 0 for a type or shape that is none.
uint64_t expected_bytes(const Section& section) {
  uint64_t bytes = 0;
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::u8, DType::i64}) {
    if (section.dtype == dtype_name(dtype)) bytes = dtype_size(dtype);
  }
  for (const int64_t extent : section.shape) {
    if (extent <= 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes)) return 0;
  }
  return bytes;
}

// Weights can become infinite in an update whose gradients are finite (a huge learning rate). No run can go on from such a file.
PieceWriter::Check finite_check(const std::filesystem::path& path, const StateEntry& entry) {
  if (!entry.name.starts_with(kParameterPrefix) || entry.dtype != DType::f32) return nullptr;
  return [&path, &entry](std::span<const std::byte> bytes) {
    bool finite = true;
    for (size_t i = 0; i < bytes.size(); i += sizeof(float)) {
      float value;
      std::memcpy(&value, bytes.data() + i, sizeof value);
      finite &= std::isfinite(value);
    }
    if (!finite) throw Error(fmt::format("{}: not written: {} is not finite", path.string(), entry.name), ExitCode::non_finite);
  };
}

// The bytes of one section on their way into the file.
class SectionSink : public PieceSink {
 public:
  SectionSink(PieceWriter& writer, const Section& section, HashBytes& hash, const PieceWriter::Check& check)
      : writer_(writer), section_(section), hash_(hash), check_(check ? &check : nullptr) {}
  std::byte* space(size_t bytes) override {
    require(bytes <= kPieceBytes && bytes <= section_.bytes - done_, "internal: section ", section_.name, " has more than ",
            section_.bytes, " bytes");
    piece_ = bytes;
    return writer_.space();
  }
  void filled() override {
    writer_.put({section_.offset + done_, piece_, &hash_}, check_);
    done_ += piece_;
  }
  uint64_t done() const { return done_; }

 private:
  PieceWriter& writer_;
  const Section& section_;
  HashBytes& hash_;
  const PieceWriter::Check* check_;
  uint64_t done_ = 0;
  size_t piece_ = 0;
};

struct Header {
  CheckpointMeta meta;
  std::vector<Section> sections;
};

// An open checkpoint whose header has been verified.
class CheckpointFile {
 public:
  explicit CheckpointFile(const std::filesystem::path& path) : path_(path), file_(path.string()) {
    std::error_code error;
    size_ = std::filesystem::file_size(path, error);
    if (error || !file_.is_open())
      throw InputError(path.string() + ": cannot be read: " + (error ? error.message() : "open failed"));
    char prefix[kPrefixBytes];
    if (size_ < kPrefixBytes || !file_.read_at(0, prefix, sizeof prefix)) damaged(path, fmt::format("only {} bytes", size_));
    if (std::memcmp(prefix, kMagic, 16) != 0)
      throw InputError(path.string() + ": not a speedrun checkpoint (its first 16 bytes are not \"speedrun ckpt 1\\n\")");
    uint64_t header_bytes = 0, header_hash = 0;
    std::memcpy(&header_bytes, prefix + 16, 8);
    std::memcpy(&header_hash, prefix + 24, 8);
    if (header_bytes > size_ - kPrefixBytes || header_bytes > kLargestHeader)
      damaged(path, fmt::format("header of {} bytes in a file of {}", header_bytes, size_));
    std::string text(header_bytes, '\0');
    if (!file_.read_at(kPrefixBytes, text.data(), header_bytes)) damaged(path, "header cannot be read");
    if (hash_bytes(text.data(), text.size()) != header_hash) damaged(path, "checksum of the header does not match");
    try {
      const Json json = Json::parse(text);
      header_.meta = meta_of(json.at("meta"));
      for (const Json& row : json.at("sections")) {
        header_.sections.push_back({row.at("name").get<std::string>(), row.at("dtype").get<std::string>(),
                                    row.at("hash").get<std::string>(), row.at("shape").get<std::vector<int64_t>>(),
                                    std::stoull(row.at("offset").get<std::string>()), row.at("bytes").get<uint64_t>()});
      }
    } catch (const std::exception& reason) {
      damaged(path, std::string("header: ") + reason.what());
    }
    for (const Section& section : header_.sections) {
      // Messages name a section by these, in one line.
      if (!printable(section.name) || !printable(section.dtype)) damaged(path, "a section's name or type holds control characters");
      if (section.bytes == 0 || section.bytes != expected_bytes(section)) {
        damaged(path, fmt::format("section {} of {} bytes is {} [{}]", section.name, section.bytes, section.dtype,
                                  fmt::join(section.shape, ", ")));
      }
      if (section.offset > size_ || section.bytes > size_ - section.offset) {
        damaged(path,
                fmt::format("section {} ends at byte {}, the file holds {}", section.name, section.offset + section.bytes, size_));
      }
    }
  }

  const Header& header() const { return header_; }

  // Reads sections in their order and verifies their checksums. use(i, begin, piece) gets the bytes of the i-th of them from
  // `begin` on, the last piece only if the checksum is right.
  template <class Use>
  void read(const std::vector<const Section*>& sections, const Use& use) const {
    std::vector<HashBytes> hashes(sections.size());
    std::vector<FilePiece> pieces;
    uint64_t bytes = 0;
    for (size_t i = 0; i < sections.size(); ++i) {
      const Section& section = *sections[i];
      bytes += section.bytes;
      for (uint64_t begin = 0; begin < section.bytes; begin += kPieceBytes)
        pieces.push_back({section.offset + begin, std::min<uint64_t>(kPieceBytes, section.bytes - begin), &hashes[i]});
    }
    PieceReader reader(file_, std::move(pieces), read_threads(bytes));
    for (size_t i = 0; i < sections.size(); ++i) {
      const Section& section = *sections[i];
      for (uint64_t begin = 0; begin < section.bytes; begin += kPieceBytes) {
        const std::span<const std::byte> piece = reader.next();
        if (piece.empty()) damaged(path_, "section " + section.name + " cannot be read");
        if (begin + piece.size() == section.bytes && hex(hashes[i].value()) != section.hash)
          damaged(path_, "checksum of section " + section.name + " does not match");
        use(i, begin, piece);
      }
    }
  }

  void verify() const {
    std::vector<const Section*> all;
    for (const Section& section : header_.sections) all.push_back(&section);
    read(all, [](size_t, uint64_t, std::span<const std::byte>) {});
  }

 private:
  std::filesystem::path path_;
  RandomAccessFile file_;
  uint64_t size_ = 0;
  Header header_;
};

// (step, path) of every checkpoint of a run, newest first.
std::vector<std::pair<int, std::filesystem::path>> list_checkpoints(const std::filesystem::path& run) {
  std::vector<std::pair<int, std::filesystem::path>> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(run / "checkpoints", error)) {
    int step = 0, used = 0;
    const std::string name = entry.path().filename().string();
    if (std::sscanf(name.c_str(), "step_%d.ckpt%n", &step, &used) == 1 && used == static_cast<int>(name.size()))
      found.emplace_back(step, entry.path());
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  return found;
}

}  // namespace

std::filesystem::path checkpoint_path(const std::filesystem::path& run, int step) {
  return run / "checkpoints" / fmt::format("step_{:06}.ckpt", step);
}

void write_checkpoint(const std::filesystem::path& path, const CheckpointMeta& meta, const std::vector<StateEntry>& state) {
  std::filesystem::create_directories(path.parent_path());
  // Hashes and offsets have a fixed width, so the header's size is known before the sections are read: one pass, a few
  // pieces in memory at a time.
  const auto header_text = [&](const std::vector<Section>& sections) {
    Json rows = Json::array();
    for (const Section& s : sections)
      rows.push_back({{"name", s.name},
                      {"dtype", s.dtype},
                      {"shape", s.shape},
                      {"offset", fmt::format("{:020}", s.offset)},
                      {"bytes", s.bytes},
                      {"hash", s.hash}});
    return Json{{"meta", meta_json(meta)}, {"sections", rows}}.dump();
  };
  std::vector<Section> sections;
  uint64_t total = 0, largest = 0;
  for (const StateEntry& entry : state) {
    sections.push_back({entry.name, dtype_name(entry.dtype), hex(0), entry.shape, 0, entry.bytes()});
    total += entry.bytes();
    largest = std::max<uint64_t>(largest, entry.bytes());
  }
  size_t offset = align(kPrefixBytes + header_text(sections).size());
  for (Section& section : sections) {
    section.offset = offset;
    offset = align(offset + section.bytes);
  }
  AtomicFile file(path.string());
  std::vector<HashBytes> hashes(state.size());
  std::vector<PieceWriter::Check> checks;
  for (const StateEntry& entry : state) checks.push_back(finite_check(path, entry));
  PieceWriter writer(file, std::min<uint64_t>(largest, kPieceBytes), write_threads(total));
  for (size_t i = 0; i < state.size(); ++i) {
    SectionSink sink(writer, sections[i], hashes[i], checks[i]);
    state[i].read_to(sink);
    require(sink.done() == sections[i].bytes, "internal: section ", sections[i].name, " has ", sink.done(), " bytes, expected ",
            sections[i].bytes);
  }
  writer.finish();
  for (size_t i = 0; i < state.size(); ++i) sections[i].hash = hex(hashes[i].value());
  const std::string header = header_text(sections);
  const uint64_t numbers[2] = {header.size(), hash_bytes(header.data(), header.size())};
  file.write_at(0, kMagic, 16);
  file.write_at(16, numbers, sizeof numbers);
  file.write_at(kPrefixBytes, header.data(), header.size());
  file.commit();
}

CheckpointMeta read_checkpoint_meta(const std::filesystem::path& path) { return CheckpointFile(path).header().meta; }

void verify_checkpoint(const std::filesystem::path& path) { CheckpointFile(path).verify(); }

CheckpointMeta load_checkpoint(const std::filesystem::path& path, const std::vector<StateEntry>& state, bool parameters_only,
                               std::string_view left_out) {
  const auto takes_part = [&](std::string_view name) { return left_out.empty() || !name.starts_with(left_out); };
  CheckpointFile file(path);
  std::map<std::string, const Section*> by_name;
  for (const Section& section : file.header().sections) {
    if (takes_part(section.name)) by_name[section.name] = &section;
  }
  std::vector<const StateEntry*> entries;
  std::vector<const Section*> sections;  // by entry
  // Names, types and shapes are checked before anything is changed.
  for (const StateEntry& entry : state) {
    if (!takes_part(entry.name)) continue;
    const auto found = by_name.find(entry.name);
    if (found == by_name.end())
      throw InputError(fmt::format("{}: holds no {}: the checkpoint is of another model or optimizer", path.string(), entry.name));
    const Section& section = *found->second;
    if (section.dtype != dtype_name(entry.dtype) || section.shape != entry.shape) {
      throw InputError(fmt::format("{}: {} is {} [{}] there, {} [{}] here: the checkpoint is of another model, optimizer or device",
                                   path.string(), entry.name, section.dtype, fmt::join(section.shape, ", "),
                                   dtype_name(entry.dtype), fmt::join(entry.shape, ", ")));
    }
    entries.push_back(&entry);
    sections.push_back(&section);
  }
  if (!parameters_only && by_name.size() != entries.size()) {
    for (const StateEntry* entry : entries) by_name.erase(entry->name);
    throw InputError(fmt::format("{}: holds {}, which this run does not have: the checkpoint is of another model or optimizer",
                                 path.string(), by_name.begin()->first));
  }
  file.read(sections, [&](size_t i, uint64_t begin, std::span<const std::byte> piece) { entries[i]->write_piece(begin, piece); });
  return file.header().meta;
}

std::optional<std::filesystem::path> newest_good_checkpoint(const std::filesystem::path& run,
                                                            const std::function<void(const std::string&)>& warn) {
  for (const auto& [step, path] : list_checkpoints(run)) {
    try {
      verify_checkpoint(path);
      return path;
    } catch (const InputError& error) {
      warn(std::string(error.what()));
    }
  }
  return std::nullopt;
}

std::filesystem::path find_checkpoint(const std::filesystem::path& path, const std::function<void(const std::string&)>& warn) {
  if (!std::filesystem::exists(path)) throw InputError(path.string() + ": no such run or checkpoint");
  if (!std::filesystem::is_directory(path)) return path;
  const auto newest = newest_good_checkpoint(path, warn);
  if (!newest) throw InputError(path.string() + ": holds no good checkpoint");
  return *newest;
}

void prune_checkpoints(const std::filesystem::path& run, int keep) {
  const auto all = list_checkpoints(run);
  std::error_code ignored;
  for (size_t i = static_cast<size_t>(std::max(keep, 1)); i < all.size(); ++i) std::filesystem::remove(all[i].second, ignored);
  for (const auto& entry : std::filesystem::directory_iterator(run / "checkpoints", ignored)) {
    if (entry.path().extension() == ".tmp") std::filesystem::remove(entry.path(), ignored);
  }
}

}  // namespace speedrun

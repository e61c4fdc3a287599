#include "src/train/weights_file.h"

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "fmt/format.h"
#include "kernels/base/error.h"
#include "src/core/file.h"

namespace speedrun {
namespace {

using Json = nlohmann::ordered_json;

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  const char* data = nullptr;
  size_t bytes = 0;
};

std::map<std::string, Tensor> parse(const std::string& content, const std::string& path) {
  const auto bad = [&](const std::string& what) { return InputError(path + ": not a safetensors file: " + what); };
  uint64_t header_bytes = 0;
  if (content.size() < 8) throw bad(fmt::format("only {} bytes", content.size()));
  std::memcpy(&header_bytes, content.data(), 8);
  if (header_bytes > content.size() - 8) throw bad(fmt::format("header of {} bytes in a file of {}", header_bytes, content.size()));
  const size_t data = 8 + header_bytes;
  std::map<std::string, Tensor> tensors;
  try {
    const Json header = Json::parse(content.substr(8, header_bytes));
    for (const auto& [name, row] : header.items()) {
      if (name == "__metadata__") continue;
      const auto offsets = row.at("data_offsets").get<std::vector<uint64_t>>();
      if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > content.size() - data)
        throw bad("tensor " + name + " lies outside the file");
      tensors[name] = {row.at("dtype").get<std::string>(), row.at("shape").get<std::vector<int64_t>>(),
                       content.data() + data + offsets[0], offsets[1] - offsets[0]};
    }
  } catch (const nlohmann::json::exception& error) {
    throw bad(error.what());
  }
  return tensors;
}

std::vector<std::byte> as_f32(const Tensor& tensor, size_t count, const std::string& where) {
  std::vector<std::byte> bytes(count * sizeof(float));
  if (tensor.dtype == "F32" && tensor.bytes == bytes.size()) {
    std::memcpy(bytes.data(), tensor.data, bytes.size());
  } else if (tensor.dtype == "BF16" && tensor.bytes == count * 2) {
    for (size_t i = 0; i < count; ++i) {
      bf16 value;
      std::memcpy(&value, tensor.data + 2 * i, 2);
      const auto wide = static_cast<float>(value);
      std::memcpy(bytes.data() + sizeof(float) * i, &wide, sizeof wide);
    }
  } else {
    throw InputError(
        fmt::format("{}: {} bytes of {}, expected {} values of F32 or BF16", where, tensor.bytes, tensor.dtype, count));
  }
  return bytes;
}

}  // namespace

void load_weights(const std::filesystem::path& path, const std::vector<StateEntry>& state) {
  const std::string content = read_file(path.string());
  std::map<std::string, Tensor> tensors = parse(content, path.string());
  for (const StateEntry& entry : state) {
    if (!entry.name.starts_with(kParameterPrefix)) continue;
    const std::string name = entry.name.substr(kParameterPrefix.size());
    const auto found = tensors.find(name);
    if (found == tensors.end())
      throw InputError(fmt::format("{}: holds no tensor {}: it is of another model", path.string(), name));
    if (found->second.shape != entry.shape) {
      throw InputError(fmt::format("{}: {} is [{}], the model needs [{}]", path.string(), name,
                                   fmt::join(found->second.shape, ", "), fmt::join(entry.shape, ", ")));
    }
    const size_t count = entry.bytes() / dtype_size(entry.dtype);
    entry.write(as_f32(found->second, count, path.string() + ": " + name));
    tensors.erase(found);
  }
  if (!tensors.empty())
    throw InputError(fmt::format("{}: holds {}, which the model does not have", path.string(), tensors.begin()->first));
}

void save_tensors(const std::filesystem::path& path, const std::vector<StateEntry>& entries,
                  const std::map<std::string, std::string>& metadata) {
  Json header = {{"__metadata__", metadata}};
  uint64_t offset = 0;
  for (const StateEntry& entry : entries) {
    require(entry.dtype == DType::f32, "internal: ", entry.name, " is not FP32");
    const bool parameter = entry.name.starts_with(kParameterPrefix);
    header[parameter ? entry.name.substr(kParameterPrefix.size()) : entry.name] = {
        {"dtype", "F32"}, {"shape", entry.shape}, {"data_offsets", {offset, offset + entry.bytes()}}};
    offset += entry.bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  AtomicFile file(path.string());
  const uint64_t size = text.size();
  file.write(&size, sizeof size);
  file.write(text.data(), text.size());
  EachPiece sink([&](std::span<const std::byte> piece) { file.write(piece.data(), piece.size()); });
  for (const StateEntry& entry : entries) entry.read_to(sink);
  file.commit();
}

}  // namespace speedrun

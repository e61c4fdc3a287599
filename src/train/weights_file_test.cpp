// Safetensors files: what other programs write is read, and every damage is refused by file and tensor.
#include "src/train/weights_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "src/train/test_run.h"

namespace speedrun {
namespace {

using Json = nlohmann::ordered_json;

std::string bytes_of(const auto& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0])};
}

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char*>(&size), 8) + header + data;
}

// Two parameters of FP32 in memory, and a state that is no parameter, which a weights file leaves alone.
struct TwoTensors {
  std::vector<std::vector<float>> values{std::vector<float>(6), std::vector<float>(3)};
  std::vector<StateEntry> state() {
    std::vector<StateEntry> entries;
    const std::vector<int64_t> shapes[] = {{2, 3}, {3}};
    const char* names[] = {"parameter/h.0.weight", "parameter/gain"};
    for (size_t i = 0; i < 2; ++i) {
      entries.push_back(small_entry(
          names[i], DType::f32, shapes[i],
          [this, i] {
            std::vector<std::byte> bytes(values[i].size() * 4);
            std::memcpy(bytes.data(), values[i].data(), bytes.size());
            return bytes;
          },
          [this, i](const std::vector<std::byte>& bytes) {
            ASSERT_EQ(bytes.size(), values[i].size() * 4);
            std::memcpy(values[i].data(), bytes.data(), bytes.size());
          }));
    }
    entries.push_back(small_entry("adam.m/gain", DType::f32, {3}, nullptr, [](const auto&) { FAIL() << "not a parameter"; }));
    return entries;
  }
};

const std::vector<float> kWeight = {1, -2, 3.5f, 0, -0.0f, 1e-30f}, kGain = {7, 8, 9};
const Json kGood = {{"__metadata__", {{"format", "pt"}}},
                    {"gain", {{"dtype", "F32"}, {"shape", {3}}, {"data_offsets", {24, 36}}}},
                    {"h.0.weight", {{"dtype", "F32"}, {"shape", {2, 3}}, {"data_offsets", {0, 24}}}}};

class WeightsFile : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::string& content) {
    const auto path = folder_.path() / "w.safetensors";
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  TwoTensors load(const std::string& content) {
    TwoTensors tensors;
    load_weights(write(content), tensors.state());
    return tensors;
  }
  void expect_refusal(const std::string& content, const std::vector<std::string>& parts) {
    const std::string message = refusal_of([&] { load(content); });
    EXPECT_NE(message.find("w.safetensors"), std::string::npos) << message;
    for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message << " lacks: " << part;
  }
  // The good header with one value changed.
  void expect_refusal_with(const std::string& pointer, const Json& value, const std::vector<std::string>& parts) {
    Json header = kGood;
    header[Json::json_pointer(pointer)] = value;
    expect_refusal(file_of(header.dump(), data_), parts);
  }

  TestFolder folder_;
  const std::string data_ = bytes_of(kWeight) + bytes_of(kGain);
};

TEST_F(WeightsFile, ValuesArriveWhateverTheOrderAndMetadata) {
  const TwoTensors tensors = load(file_of(kGood.dump() + "     ", data_));
  EXPECT_EQ(bytes_of(tensors.values[0]), bytes_of(kWeight));
  EXPECT_EQ(tensors.values[1], kGain);
}

TEST_F(WeightsFile, Bf16IsWidened) {
  const std::vector<float> weight = {1, -2, 3.140625f, std::numeric_limits<float>::infinity(), -0.0f, 0x1p-130f};
  std::vector<bf16> narrow;
  for (const float value : weight) narrow.push_back(bf16(value));
  // BF16 first, so that the FP32 tensor behind it lies at an offset that is no multiple of 4 (the weight has 12 bytes, one more is
  // between).
  const Json header = {{"h.0.weight", {{"dtype", "BF16"}, {"shape", {2, 3}}, {"data_offsets", {0, 12}}}},
                       {"gain", {{"dtype", "F32"}, {"shape", {3}}, {"data_offsets", {13, 25}}}}};
  const TwoTensors tensors = load(file_of(header.dump(), bytes_of(narrow) + "x" + bytes_of(kGain)));
  EXPECT_EQ(bytes_of(tensors.values[0]), bytes_of(weight));
  EXPECT_EQ(tensors.values[1], kGain);
}

TEST_F(WeightsFile, EveryTruncationIsRefused) {
  const std::string good = file_of(kGood.dump(), data_);
  load(good);
  for (size_t size = 0; size < good.size(); ++size) expect_refusal(good.substr(0, size), {"not a safetensors file"});
}

TEST_F(WeightsFile, HeaderSizesThatAreNotTheFilesAreRefused) {
  std::string content = file_of(kGood.dump(), data_);
  for (const uint64_t size : {uint64_t{content.size() - 7}, uint64_t{1} << 40, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    std::memcpy(content.data(), &size, 8);
    expect_refusal(content, {"header of " + std::to_string(size) + " bytes in a file of " + std::to_string(content.size())});
  }
  for (const uint64_t size : {uint64_t{0}, kGood.dump().size() - 1, kGood.dump().size() + 1}) {
    std::memcpy(content.data(), &size, 8);
    expect_refusal(content, {"not a safetensors file"});
  }
  expect_refusal("a text file, longer than eight bytes", {"not a safetensors file"});
}

TEST_F(WeightsFile, HeadersOfAnotherFormAreRefused) {
  for (const char* header :
       {"[]", "null", "7", "\"text\"", "{\"gain\": 1}", "{\"gain\": null}", "{\"gain\": {}}", "{\"gain\": []}"})
    expect_refusal(file_of(header, data_), {});
  expect_refusal(file_of(std::string(100000, '['), ""), {"not a safetensors file"});
  expect_refusal_with("/gain/dtype", 32, {"not a safetensors file"});
  expect_refusal_with("/gain/shape", 3, {"not a safetensors file"});
  expect_refusal_with("/gain/shape", {"3"}, {"not a safetensors file"});
  expect_refusal_with("/gain/data_offsets", "24", {"not a safetensors file"});
}

TEST_F(WeightsFile, OffsetsOutsideTheFileAreRefusedByTensor) {
  for (const Json& offsets : {Json{24, 37}, Json{36, 24}, Json{1000, 1012}, Json{24}, Json::array(), Json{24, 36, 48}, Json{-12, 0},
                              Json{24, -1}, Json{uint64_t{0} - 12, uint64_t{0} - 1}, Json{uint64_t{1} << 63, uint64_t{1} << 63}})
    expect_refusal_with("/gain/data_offsets", offsets, {"gain", "outside"});
}

TEST_F(WeightsFile, OtherTypesAndShapesAreRefusedByTensor) {
  for (const char* dtype : {"F16", "F64", "I32", "f32", "", "BF16"}) expect_refusal_with("/gain/dtype", dtype, {"gain", dtype});
  expect_refusal_with("/gain/data_offsets", {24, 32}, {"gain", "8 bytes of F32", "3 values"});
  expect_refusal_with("/gain/shape", {4}, {"gain", "[4]", "[3]"});
  expect_refusal_with("/gain/shape", {3, 1}, {"gain", "[3, 1]"});
  expect_refusal_with("/gain/shape", Json::array(), {"gain", "[]"});
  expect_refusal_with("/h.0.weight/shape", {3, 2}, {"h.0.weight", "[3, 2]", "[2, 3]"});
}

TEST_F(WeightsFile, MissingAndUnknownTensorsAreNamed) {
  Json header = kGood;
  header.erase("h.0.weight");
  expect_refusal(file_of(header.dump(), data_), {"no tensor h.0.weight"});
  header = kGood;
  header["h.1.weight"] = header["gain"];
  expect_refusal(file_of(header.dump(), data_), {"h.1.weight"});
  expect_refusal(file_of("{}", ""), {"no tensor"});
}

TEST_F(WeightsFile, AMissingFileIsNamed) {
  TwoTensors tensors;
  for (const auto& path : {folder_.path() / "absent.safetensors", folder_.path()}) {
    try {
      load_weights(path, tensors.state());
      FAIL();
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos) << error.what();
    }
  }
}

TEST_F(WeightsFile, WhatIsSavedIsAFileThatOthersCanRead) {
  TwoTensors tensors;
  tensors.values = {kWeight, kGain};
  std::vector<StateEntry> entries = tensors.state();
  entries.pop_back();
  for (StateEntry& entry : entries) entry.name = entry.name.substr(10);
  const auto path = folder_.path() / "saved.safetensors";
  save_tensors(path, entries, {{"loss", "3.25"}});
  const std::string content = read_file(path.string());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, content.data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u) << "the data must be aligned";
  const Json header = Json::parse(content.substr(8, header_bytes));
  EXPECT_EQ(header["__metadata__"]["loss"], "3.25");
  EXPECT_EQ(header["h.0.weight"], (Json{{"dtype", "F32"}, {"shape", {2, 3}}, {"data_offsets", {0, 24}}}));
  EXPECT_EQ(content.substr(8 + header_bytes), data_);
  TwoTensors loaded;
  load_weights(path, loaded.state());
  EXPECT_EQ(bytes_of(loaded.values[0]), bytes_of(kWeight));
}

}  // namespace
}  // namespace speedrun

#pragma once
// Tests that write config files and load them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "src/config/config_io.h"
#include "src/core/test_folder.h"
#include "src/core/test_refusal.h"

namespace speedrun {

class ConfigTest : public testing::Test {
 protected:
  std::filesystem::path write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = dir_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  Config load(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    return load_config(write("test.json", text), overrides);
  }
  // The message of the refusal, without the folder; it must be one line.
  std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    write("test.json", text);
    return refusal_of("test.json", overrides);
  }
  std::string refusal_of(const std::string& name, const std::vector<std::string>& overrides = {}) const {
    std::string message = speedrun::refusal_of([&] { load_config(dir_ / name, overrides); });
    const std::string folder = dir_.string() + "/";
    for (size_t at; (at = message.find(folder)) != std::string::npos;) message.erase(at, folder.size());
    return message;
  }

  TestFolder folder_;
  std::filesystem::path dir_ = folder_.path();
};

}  // namespace speedrun

#pragma once
// A folder of its own for a test, removed afterwards.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "kernels/base/error.h"

namespace speedrun {

class TestFolder {
 public:
  TestFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "speedrun_test_XXXXXX").string();
    require(mkdtemp(pattern.data()) != nullptr, pattern, ": cannot be made: ", std::strerror(errno));
    path_ = std::filesystem::canonical(pattern);
    // mkdtemp closes it to others; tests that act as another user look in.
    std::filesystem::permissions(path_, static_cast<std::filesystem::perms>(0755));
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace speedrun

#pragma once
// What a test expects of bad input: an InputError of one line.
#include <gtest/gtest.h>

#include <string>

#include "kernels/base/error.h"

namespace speedrun {

// The message of the InputError that `call` ends with, which is one line; "accepted" if there is none.
template <class Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const InputError& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "accepted";
}

}  // namespace speedrun

#include "src/dist/fault.h"

#include <unistd.h>

#include <array>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <new>
#include <optional>
#include <vector>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "kernels/base/error.h"

namespace speedrun {
namespace {

constexpr std::array<const char*, 4> kPlaces = {"init", "step", "validation", "checkpoint"};                // as FaultPlace
constexpr std::array<const char*, 7> kKinds = {"kill", "stop", "exit", "throw", "memory", "term", "hang"};  // as FaultKind

[[noreturn]] void refuse(const std::string& text, const std::string& reason) {
  throw InputError(
      fmt::format("environment: SPEEDRUN_FAULT={:?}: {} (RANK:PLACE:COUNT:KIND, for example 1:step:3:kill)", text, reason));
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ':') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

template <class Number>
Number number(const std::string& text, const std::string& part, const char* name) {
  Number value = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
  if (error != std::errc() || end != part.data() + part.size() || value < 0)
    refuse(text, fmt::format("{} {:?} is no whole number from 0", name, part));
  return value;
}

template <size_t N>
size_t word(const std::string& text, const std::string& part, const char* name, const std::array<const char*, N>& words) {
  for (size_t i = 0; i < N; ++i) {
    if (part == words[i]) return i;
  }
  refuse(text, fmt::format("{} {:?} is none of {}", name, part, fmt::join(words, ", ")));
}

void happen(FaultKind kind, const std::string& where) {
  switch (kind) {
    // To the whole process: raise() would leave it to the calling thread when the signal is delivered.
    case FaultKind::kill:
      kill(getpid(), SIGKILL);
      break;
    case FaultKind::stop:
      kill(getpid(), SIGSTOP);
      break;
    case FaultKind::exit:
      _exit(static_cast<int>(ExitCode::failure));
    case FaultKind::error:
      throw Error(fmt::format("SPEEDRUN_FAULT: thrown at {}", where));
    case FaultKind::memory:
      throw std::bad_alloc();
    case FaultKind::term:
      kill(getpid(), SIGTERM);
      break;
    case FaultKind::hang:
      for (;;) sleep(1000);
  }
}

const std::optional<Fault>& fault_of_environment() {
  static const std::optional<Fault> fault = active_fault().empty() ? std::nullopt : std::optional(parse_fault(active_fault()));
  return fault;
}

}  // namespace

Fault parse_fault(const std::string& text) {
  const std::vector<std::string> parts = split(text);
  if (parts.size() != 4) refuse(text, fmt::format("{} parts where 4 are expected", parts.size()));
  Fault fault;
  fault.rank = number<int>(text, parts[0], "RANK");
  fault.place = static_cast<FaultPlace>(word(text, parts[1], "PLACE", kPlaces));
  fault.count = number<int64_t>(text, parts[2], "COUNT");
  fault.kind = static_cast<FaultKind>(word(text, parts[3], "KIND", kKinds));
  return fault;
}

void fault_point(FaultPlace place, int64_t count, int rank) {
  const std::optional<Fault>& fault = fault_of_environment();
  if (!fault || fault->rank != rank || fault->place != place || fault->count != count) return;
  happen(fault->kind, fmt::format("{} {} of rank {}", kPlaces[static_cast<size_t>(place)], count, rank));
}

std::string active_fault() {
  const char* text = std::getenv("SPEEDRUN_FAULT");
  return text == nullptr ? "" : text;
}

}  // namespace speedrun

#include "src/config/config_json.h"

#include <fmt/format.h>

#include <charconv>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/base/error.h"

namespace speedrun {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxDepth = 16;

// Counts the lines that the parser has read, which its events do not tell.
class LineCountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  LineCountingIterator(const char* at, int* line) : at_(at), line_(line) {}
  reference operator*() const { return *at_; }
  LineCountingIterator& operator++() {
    if (*at_ == '\n') ++*line_;
    ++at_;
    return *this;
  }
  LineCountingIterator operator++(int) {
    LineCountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const LineCountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const LineCountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  int* line_;
};

// True if text[end - 1] closes a list or object and the last thing before it is a comma.
bool is_after_trailing_comma(std::string_view text, size_t end) {
  if (end < 2 || end > text.size() || (text[end - 1] != '}' && text[end - 1] != ']')) return false;
  const size_t before = text.find_last_not_of(" \t\r\n", end - 2);
  return before != std::string_view::npos && text[before] == ',';
}

// Takes the parser's events: keeps the path of open objects and the stack of open lists.
class AssignmentBuilder : public nlohmann::json_sax<Json> {
 public:
  AssignmentBuilder(std::string_view text, const std::string& name, bool is_value)
      : text_(text), name_(name), is_value_(is_value) {}

  int* line() { return &line_; }
  std::vector<JsonAssignment> take() { return std::move(assignments_); }

  bool null() override { return add({nullptr}); }
  bool boolean(bool value) override { return add({value}); }
  bool number_integer(int64_t value) override { return add({value}); }
  bool number_unsigned(uint64_t value) override {
    if (value <= static_cast<uint64_t>(INT64_MAX)) return add({static_cast<int64_t>(value)});
    return add({value});
  }
  bool number_float(double value, const std::string& token) override {
    // The parser reads numbers with the C locale's decimal point, and gives the token with it.
    std::string text = token;
    const size_t point = text.find_first_not_of("0123456789+-eE");
    if (point != std::string::npos) text[point] = '.';
    std::from_chars(text.data(), text.data() + text.size(), value);  // keeps the parser's value (0) where this one underflows
    return add({JsonReal{value, text}});
  }
  bool string(std::string& value) override { return add({value}); }
  bool binary(Json::binary_t&) override { return fail("binary data has no place in a config"); }

  bool start_object(size_t) override {
    if (!lists_.empty()) return fail(describe({assignments_.back().key}) + ": a list holds no objects");
    if (path_.size() == kMaxDepth) return fail("objects are nested too deeply");
    if (!path_.empty() && !add({JsonObject{}})) return false;
    if (path_.empty() && is_value_) return fail("an object has many keys: set one of them");
    path_.push_back(path_.empty() ? "" : key_ + ".");
    return true;
  }
  bool key(std::string& name) override {
    key_ = path_.back() + name;
    key_line_ = line_;
    if (!keys_.insert(key_).second) return fail(fmt::format("the key {} is given twice", describe({key_})));
    return true;
  }
  bool end_object() override {
    path_.pop_back();
    return true;
  }
  bool start_array(size_t) override {
    if (lists_.size() == kMaxDepth) return fail("lists are nested too deeply");
    if (!add({std::vector<JsonValue>{}})) return false;
    std::vector<JsonValue>& list = lists_.empty() ? last_list() : std::get<std::vector<JsonValue>>(lists_.back()->back().value);
    lists_.push_back(&list);
    return true;
  }
  bool end_array() override {
    lists_.pop_back();
    return true;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    std::string reason = error.what();
    // "[json.exception…] parse error at line 3, column 5: syntax error while parsing …"
    for (const std::string_view before : {"] ", "syntax error while parsing "}) {
      const size_t at = reason.find(before);
      if (at != std::string::npos) reason = reason.substr(at + before.size());
    }
    constexpr size_t kShown = 200;  // it may quote a string that never ends
    reason = reason.substr(0, kShown);
    return fail(fmt::format("not valid JSON: {}{}", reason, is_after_trailing_comma(text_, position) ? " (trailing comma)" : ""));
  }

 private:
  bool add(JsonValue value) {
    if (!lists_.empty()) {
      lists_.back()->push_back(std::move(value));
      return true;
    }
    if (path_.empty() && !is_value_) return fail("expected a JSON object, found " + describe(value));
    assignments_.push_back({key_, std::move(value), key_line_});
    return true;
  }
  std::vector<JsonValue>& last_list() { return std::get<std::vector<JsonValue>>(assignments_.back().value.value); }
  bool fail(const std::string& what) { throw InputError(fmt::format("{}:{}: {}", name_, line_, what)); }

  std::string_view text_;
  const std::string& name_;
  bool is_value_;
  int line_ = 1;
  int key_line_ = 1;
  std::string key_;
  std::vector<std::string> path_;  // prefix of the keys of each open object
  std::vector<std::vector<JsonValue>*> lists_;
  std::set<std::string> keys_;
  std::vector<JsonAssignment> assignments_;
};

std::vector<JsonAssignment> run_parser(std::string_view text, const std::string& name, bool is_value) {
  AssignmentBuilder builder(text, name, is_value);
  const LineCountingIterator begin(text.data(), builder.line()), end(text.data() + text.size(), builder.line());
  Json::sax_parse(begin, end, &builder, nlohmann::detail::input_format_t::json, /*strict=*/true, /*ignore_comments=*/!is_value);
  return builder.take();
}

}  // namespace

std::vector<JsonAssignment> parse_json_object(std::string_view text, const std::string& name) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  const size_t start = text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
  if (text.find_first_not_of(" \t\r\n", start) == std::string_view::npos) {
    throw InputError(fmt::format("{}: the file is empty; expected a JSON object ({{}} for all defaults)", name));
  }
  return run_parser(text, name, false);
}

JsonValue parse_json_value(const std::string& text) {
  try {
    std::vector<JsonAssignment> assignments = run_parser(text, "--set", true);
    return std::move(assignments.at(0).value);
  } catch (const InputError&) {
    return {text};  // its type is checked like any other: a number key refuses it
  }
}

std::string describe(const JsonValue& value) {
  constexpr size_t kShown = 60;
  struct Describer {
    std::string operator()(std::nullptr_t) const { return "null"; }
    std::string operator()(bool flag) const { return flag ? "true" : "false"; }
    std::string operator()(int64_t number) const { return fmt::format("{}", number); }
    std::string operator()(uint64_t number) const { return fmt::format("{}", number); }
    std::string operator()(const JsonReal& number) const { return number.text.substr(0, kShown); }
    std::string operator()(const std::string& text) const {
      const std::string quoted = Json(text.substr(0, kShown)).dump(-1, ' ', false, Json::error_handler_t::replace);
      return text.size() > kShown ? quoted + "…" : quoted;
    }
    std::string operator()(const std::vector<JsonValue>&) const { return "a list"; }
    std::string operator()(const JsonObject&) const { return "an object"; }
  };
  return std::visit(Describer{}, value.value);
}

}  // namespace speedrun

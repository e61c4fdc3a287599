#include "src/config/config_io.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/base/error.h"
#include "src/config/config_fields.h"
#include "src/config/config_json.h"
#include "src/config/nearest_key.h"
#include "src/core/text.h"

namespace speedrun {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kExtends = "extends";
constexpr size_t kMaxFileBytes = 1 << 20;

// Where an assignment comes from: its place for messages, and what its file paths are relative to.
struct Source {
  std::string place;  // "configs/tiny.json:3" or "--set train.seed=1"
  fs::path base;
};

// Escaped and shortened: a message stays one line.
std::string quote(const std::string& text) { return describe({text}); }

[[noreturn]] void refuse(const Source& source, const std::string& what) { throw InputError(source.place + ": " + what); }

// Sets one field from a JSON value; refuses other types and values out of range.
class Setter {
 public:
  Setter(const Field& field, const JsonValue& value, const Source& source) : field_(field), value_(value), source_(source) {}

  void operator()(bool* member) const { *member = get<bool>("true or false"); }
  void operator()(int* member) const { *member = static_cast<int>(integer()); }
  void operator()(int64_t* member) const { *member = integer(); }
  void operator()(uint64_t* member) const {
    const uint64_t* large = std::get_if<uint64_t>(&value_.value);
    *member = large ? *large : static_cast<uint64_t>(integer());
  }
  void operator()(double* member) const {
    const double number = real(value_);
    check_range(number);
    *member = number;
  }
  void operator()(const TextMember& member) const {
    std::string text = get<std::string>("a string");
    if (text.find('\0') != std::string::npos) wrong_value("a string without NUL characters");
    if (member.kind == TextKind::file && !text.empty()) text = (source_.base / text).lexically_normal().string();
    *member.text = std::move(text);
  }
  void operator()(const EnumMember& member) const {
    const std::string text = get<std::string>("one of " + range_text(field_));
    const auto found = std::find(member.names->begin(), member.names->end(), text);
    if (found == member.names->end()) wrong_value("one of " + range_text(field_));
    member.set(member.member, static_cast<int>(found - member.names->begin()));
  }
  void operator()(NumberList* member) const {
    const std::string expected = "a list of " + range_text(field_);
    NumberList list;
    for (const JsonValue& number : get<std::vector<JsonValue>>(expected)) {
      list.push_back(real(number));
      if (!inside(list.back())) wrong_value(expected);
    }
    *member = std::move(list);
  }
  void operator()(NumberRows* member) const {
    constexpr const char* kExpected = "a list of lists of 3 numbers";
    NumberRows rows;
    for (const JsonValue& row : get<std::vector<JsonValue>>(kExpected)) {
      const std::vector<JsonValue>* numbers = std::get_if<std::vector<JsonValue>>(&row.value);
      if (!numbers || numbers->size() != 3) wrong_value(kExpected);
      rows.emplace_back();
      for (const JsonValue& number : *numbers) rows.back().push_back(real(number));
    }
    if (rows.empty()) wrong_value("at least one row [a, b, c]");
    *member = std::move(rows);
  }

 private:
  template <class T>
  const T& get(const std::string& expected) const {
    const T* value = std::get_if<T>(&value_.value);
    if (!value) wrong_value(expected);
    return *value;
  }
  int64_t integer() const {
    if (std::holds_alternative<JsonReal>(value_.value)) wrong_value("an integer without point or exponent" + in_range());
    if (std::holds_alternative<uint64_t>(value_.value)) wrong_value("an integer" + in_range());
    const int64_t number = get<int64_t>("an integer" + in_range());
    check_range(static_cast<double>(number));
    return number;
  }
  double real(const JsonValue& value) const {
    if (const int64_t* number = std::get_if<int64_t>(&value.value)) return static_cast<double>(*number);
    if (const uint64_t* number = std::get_if<uint64_t>(&value.value)) return static_cast<double>(*number);
    if (const JsonReal* number = std::get_if<JsonReal>(&value.value)) return number->value;
    refuse(source_, fmt::format("{}: expected a number{}, found {}", field_.key, in_range(), describe(value)));
  }
  bool inside(double number) const {
    const Range& range = field_.range;
    return (range.above_min ? number > range.min : number >= range.min) && number <= range.max;
  }
  void check_range(double number) const {
    if (!inside(number)) wrong_value("a value" + in_range());
  }
  std::string in_range() const {
    const bool list = std::holds_alternative<NumberRows*>(field_.member) || std::holds_alternative<NumberList*>(field_.member);
    const std::string range = list ? "" : range_text(field_);
    return range.empty() ? "" : " in the range " + range;
  }
  [[noreturn]] void wrong_value(const std::string& expected) const {
    refuse(source_, fmt::format("{}: expected {}, found {}", field_.key, expected, describe(value_)));
  }

  const Field& field_;
  const JsonValue& value_;
  const Source& source_;
};

void assign(FieldIndex& fields, const std::string& key, const JsonValue& value, const Source& source) {
  const bool object = std::holds_alternative<JsonObject>(value.value);
  if (const std::optional<Field> field = fields.find(key)) {
    std::visit(Setter(*field, value, source), field->member);
  } else if (!fields.is_group(key)) {
    const std::string nearest = nearest_key(key, fields.keys(key, object));
    refuse(source, fmt::format("unknown key {}; nearest valid key: \"{}\"", quote(key), nearest));
  } else if (!object) {
    refuse(source, fmt::format("{} is a group of keys: expected an object, found {}", key, describe(value)));
  }
}

std::string read_file(const fs::path& path, const std::string& asked_by) {
  const std::string place = asked_by.empty() ? path.string() : asked_by + ": " + path.string();
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) throw InputError(place + ": no such config file");
  if (fs::is_directory(status)) throw InputError(place + ": is a directory; expected a JSON file");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFileBytes + 1, '\0');
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) {
    throw InputError(fmt::format("{}: cannot read the config file: {}", place, errno != 0 ? std::strerror(errno) : "input error"));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes)
    throw InputError(fmt::format("{}: more than {} bytes; that is no config file", place, kMaxFileBytes));
  return text;
}

// Applies the text's assignments to `config`, those of the file it extends first. `folder`: where relative paths start; `chain`:
// the files being loaded.
void apply_text(Config& config, std::string_view text, const std::string& name, const fs::path& folder,
                std::vector<fs::path>& chain);

void apply_file(Config& config, const fs::path& path, const std::string& asked_by, std::vector<fs::path>& chain) {
  const std::string text = read_file(path, asked_by);
  std::error_code error;  // a pipe has no canonical path, and cannot be in a circle
  const fs::path canonical = fs::canonical(path, error);
  if (std::find(chain.begin(), chain.end(), canonical) != chain.end()) {
    throw InputError(fmt::format("{}: \"extends\" goes in a circle: {} is being loaded already", asked_by, path.string()));
  }
  chain.push_back(canonical);
  apply_text(config, text, path.string(), path.parent_path(), chain);
  chain.pop_back();
}

void apply_text(Config& config, std::string_view text, const std::string& name, const fs::path& folder,
                std::vector<fs::path>& chain) {
  const std::vector<JsonAssignment> assignments = parse_json_object(text, name);
  for (const JsonAssignment& assignment : assignments) {
    if (assignment.key != kExtends) continue;
    const std::string place = fmt::format("{}:{}", name, assignment.line);
    const std::string* parent = std::get_if<std::string>(&assignment.value.value);
    if (!parent || parent->empty() || parent->find('\0') != std::string::npos) {
      throw InputError(fmt::format("{}: extends: expected the path of a JSON file, found {}", place, describe(assignment.value)));
    }
    apply_file(config, folder / *parent, place, chain);
  }
  // absolute and without symbolic links, so that ".." in the paths of the file means what the file system would make of it
  const fs::path base = fs::weakly_canonical(fs::absolute(folder.empty() ? "." : folder));
  FieldIndex fields(config);
  for (const JsonAssignment& assignment : assignments) {
    if (assignment.key == kExtends) continue;
    assign(fields, assignment.key, assignment.value, {fmt::format("{}:{}", name, assignment.line), base});
  }
}

void apply_override(Config& config, const std::string& argument) {
  const bool readable = argument.size() < 200 && std::none_of(argument.begin(), argument.end(), is_control);
  const Source source{"--set " + (readable ? argument : quote(argument)), fs::current_path()};
  const size_t equals = argument.find('=');
  if (equals == std::string::npos || equals == 0) refuse(source, "expected key=value, for example train.seed=1");
  const std::string key = argument.substr(0, equals), text = argument.substr(equals + 1);
  if (key == kExtends) refuse(source, "\"extends\" has its place in a config file only");
  JsonValue value = parse_json_value(text);
  FieldIndex fields(config);
  const std::optional<Field> field = fields.find(key);
  const bool is_text =
      field && (std::holds_alternative<TextMember>(field->member) || std::holds_alternative<EnumMember>(field->member));
  // run.name=2024 is a name, whatever it looks like
  if (is_text && !std::holds_alternative<std::string>(value.value)) value = {text};
  if (!field && fields.is_group(key)) refuse(source, key + " is a group of keys: set one of them");
  assign(fields, key, value, source);
}

void finish(Config& config, const std::string& name, const std::vector<std::string>& overrides) {
  for (const std::string& argument : overrides) apply_override(config, argument);
  validate(config, name);
}

struct ToJson {
  nlohmann::json operator()(const TextMember& text) const { return *text.text; }
  nlohmann::json operator()(const EnumMember& names) const {
    return std::string((*names.names)[static_cast<size_t>(names.get(names.member))]);
  }
  template <class T>
  nlohmann::json operator()(const T* value) const {
    return *value;
  }
};

std::string json_text(const Member& member) {
  return std::visit(ToJson{}, member).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<std::string> split(const std::string& key) {
  std::vector<std::string> parts;
  size_t start = 0;
  for (size_t dot; (dot = key.find('.', start)) != std::string::npos; start = dot + 1)
    parts.push_back(key.substr(start, dot - start));
  parts.push_back(key.substr(start));
  return parts;
}

}  // namespace

Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  Config config;
  std::vector<fs::path> chain;
  apply_file(config, path, "", chain);
  finish(config, path.string(), overrides);
  return config;
}

Config parse_config(std::string_view text, const std::string& name, const std::filesystem::path& base,
                    const std::vector<std::string>& overrides) {
  Config config;
  std::vector<fs::path> chain;
  apply_text(config, text, name, base, chain);
  finish(config, name, overrides);
  return config;
}

std::string dump_config(const Config& config) {
  Config copy = config;
  std::string out = "{";
  std::vector<std::string> open;  // groups around the place we are at
  bool first = true;              // in its group
  const auto start_line = [&] {
    out.append(first ? "\n" : ",\n").append(2 * (open.size() + 1), ' ');
    first = false;
  };
  const auto close_to = [&](size_t depth) {
    for (; open.size() > depth; open.pop_back()) out.append("\n").append(2 * open.size(), ' ').append("}");
  };
  for (const Field& field : config_fields(copy)) {
    const std::vector<std::string> parts = split(field.key);
    size_t common = 0;
    while (common < open.size() && common + 1 < parts.size() && open[common] == parts[common]) ++common;
    close_to(common);
    for (size_t i = common; i + 1 < parts.size(); ++i) {
      start_line();
      out.append(fmt::format("\"{}\": {{", parts[i]));
      open.push_back(parts[i]);
      first = true;
    }
    start_line();
    out.append(fmt::format("\"{}\": {}", parts.back(), json_text(field.member)));
  }
  close_to(0);
  return out.append("\n}\n");
}

std::vector<KeyChange> changed_keys(const Config& before, const Config& after) {
  Config old_config = before, new_config = after;
  // Both tables get the same keys: a layer that one of them does not name has the defaults there.
  const auto share_indices = [](auto& a, auto& b) {
    for (const auto& [index, value] : a) b.try_emplace(index);
    for (const auto& [index, value] : b) a.try_emplace(index);
  };
  share_indices(old_config.model.layers, new_config.model.layers);
  share_indices(old_config.schedule.stages, new_config.schedule.stages);
  const std::vector<Field> old_fields = config_fields(old_config), new_fields = config_fields(new_config);
  std::vector<KeyChange> changes;
  for (size_t i = 0; i < old_fields.size(); ++i) {
    KeyChange change{old_fields[i].key, json_text(old_fields[i].member), json_text(new_fields[i].member)};
    if (change.before != change.after) changes.push_back(std::move(change));
  }
  return changes;
}

std::string describe_keys() {
  Config defaults;
  for (const IndexedKeys& indexed : indexed_keys()) indexed.fields(defaults, 0);
  std::vector<Field> fields = config_fields(defaults);
  for (Field& field : fields) {
    for (const IndexedKeys& indexed : indexed_keys()) {
      if (field.key.starts_with(indexed.prefix)) field.key.replace(indexed.prefix.size(), 1, "<i>");
    }
  }
  std::vector<std::vector<std::string>> rows = {{"key", "type", "default", "range", "meaning"},
                                                {"---", "---", "---", "---", "---"}};
  for (const Field& field : fields) {
    rows.push_back({field.key, type_name(field), json_text(field.member), range_text(field), std::string(field.help)});
  }
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const std::vector<std::string>& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const std::vector<std::string>& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) out += fmt::format("| {:<{}} ", row[i], widths[i]);
    out += "|\n";
  }
  return out;
}

}  // namespace speedrun

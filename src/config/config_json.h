#pragma once
// JSON text -> flat list of assignments. Used by config_io alone.
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace speedrun {

struct JsonObject {};  // stands for an object; its keys are assignments of their own

struct JsonReal {  // a number with a point or an exponent, or too large for an integer
  double value;
  std::string text;  // as written
};

struct JsonValue {
  std::variant<std::nullptr_t, bool, int64_t, uint64_t, JsonReal, std::string, std::vector<JsonValue>, JsonObject> value;
};

// `key` is the path from the top of the file ("optim.matrix.lr"). An object is followed by its keys.
struct JsonAssignment {
  std::string key;
  JsonValue value;
  int line;  // of the key
};

// Parses an object with comments. Throws InputError naming `name` and the line: syntax (with a hint for a trailing comma), a key
// given twice, nesting deeper than any key, an object inside a list.
std::vector<JsonAssignment> parse_json_object(std::string_view text, const std::string& name);

// The value of a --set argument: JSON if it is JSON, else the text itself as a string.
JsonValue parse_json_value(const std::string& text);

// For messages: `3`, `"abc"`, "a list", shortened.
std::string describe(const JsonValue& value);

}  // namespace speedrun

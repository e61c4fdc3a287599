#pragma once
// The table of keys: each declared once, with its member, range and help. Loading, --set, dump and the key list are loops over it.
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/config/config.h"

namespace speedrun {

// Allowed values, both ends included unless `above_min`.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  // min itself is refused
};

// An enum member with its type erased. `names[i]` is the text of the enumerator with value i.
struct EnumMember {
  void* member;
  const std::vector<std::string_view>* names;
  int (*get)(const void* member);
  void (*set)(void* member, int value);
};

enum class TextKind { plain, file };  // file: a path, made absolute when it is read

struct TextMember {
  std::string* text;
  TextKind kind;
};

using NumberRows = std::vector<std::vector<double>>;

using Member = std::variant<bool*, int*, int64_t*, uint64_t*, double*, TextMember, EnumMember, NumberRows*>;

struct Field {
  std::string key;  // "optim.matrix.lr"
  Member member;    // points into the Config the table was made for
  Range range;      // numbers only
  std::string_view help;
};

// The table for `config`, in the order of the structs. The keys of "model.layers.<i>" are there for every i in config.model.layers.
std::vector<Field> config_fields(Config& config);

// The table of a Config, for look-up.
class FieldIndex {
 public:
  explicit FieldIndex(Config& config);

  // The field of `key`, if there is one. A layer that is not yet in config.model.layers is added.
  std::optional<Field> find(const std::string& key);
  // Do other keys begin with "<key>."?
  bool is_group(const std::string& key) const;
  // All keys, and their groups if asked for. The number in `like`, if it has one, stands for "<i>".
  std::vector<std::string> keys(const std::string& like, bool with_groups) const;

 private:
  Config& config_;
  std::map<std::string, Field> fields_;
};

// Keys of one layer, with "<i>" for its index: a Config can be shown and searched without naming a layer.
std::vector<Field> layer_fields(Config::Model::Layer& layer, const std::string& index);

// "int", "0..1", …: for the key list and for messages.
std::string type_name(const Field& field);
std::string range_text(const Field& field);

}  // namespace speedrun

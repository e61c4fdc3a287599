#pragma once
// The table of keys: each declared once, with its member, range and help. Loading, --set, dump and the key list are loops over it.
#include <limits>
#include <map>
#include <optional>
#include <span>
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

using NumberList = std::vector<double>;
using NumberRows = std::vector<std::vector<double>>;

using Member = std::variant<bool*, int*, int64_t*, uint64_t*, double*, TextMember, EnumMember, NumberList*, NumberRows*>;

struct Field {
  std::string key;  // "optim.matrix.lr"
  Member member;    // points into the Config the table was made for
  Range range;      // numbers, and each number of a list
  std::string_view help;
};

// The table for `config`, in the order of the structs. The keys of "model.layers.<i>" are there for every i in config.model.layers,
// and so on for all indexed keys.
std::vector<Field> config_fields(Config& config);

// Structs in a map by index: "model.layers.2.window".
struct IndexedKeys {
  std::string_view prefix;                           // "model.layers."
  std::vector<Field> (*fields)(Config&, int index);  // the keys of one of them, which is added to the map if it is not there
};
std::span<const IndexedKeys> indexed_keys();

// The table of a Config, for look-up.
class FieldIndex {
 public:
  explicit FieldIndex(Config& config);

  // The field of `key`, if there is one. An indexed struct that is not yet in its map is added.
  std::optional<Field> find(const std::string& key);
  // Do other keys begin with "<key>."?
  bool is_group(const std::string& key) const;
  // All keys, and their groups if asked for. The number in `like`, if it has one, stands for "<i>".
  std::vector<std::string> keys(const std::string& like, bool with_groups) const;

 private:
  Config& config_;
  std::map<std::string, Field> fields_;
};

// "int", "0..1", …: for the key list and for messages.
std::string type_name(const Field& field);
std::string range_text(const Field& field);

}  // namespace speedrun

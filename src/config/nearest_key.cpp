#include "src/config/nearest_key.h"

#include <algorithm>
#include <string_view>

namespace speedrun {
namespace {

struct Synonym {
  std::string_view theirs;
  std::string_view ours;
};
constexpr Synonym kSynonyms[] = {
    {"learning_rate", "lr"},
    {"n_layer", "num_layers"},
    {"n_head", "num_heads"},
    {"n_embd", "width"},
    {"d_model", "width"},
    {"hidden_size", "width"},
    {"batch_size", "batch_tokens"},
    {"block_size", "seq_len"},
    {"context_length", "seq_len"},
    {"max_steps", "steps"},
    {"num_iterations", "steps"},
    {"num_steps", "steps"},
    {"warmup_iters", "warmup_steps"},
    {"val_loss_every", "every"},
    {"num_snapshots", "history"},
    {"ema_decay", "ema_updates"},
};

constexpr size_t kMaxComparedChars = 100;

std::string last_part(const std::string& key) { return key.substr(key.rfind('.') + 1); }

std::string all_but_last_part(const std::string& key) {
  const size_t dot = key.rfind('.');
  return dot == std::string::npos ? "" : key.substr(0, dot);
}

}  // namespace

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

std::string nearest_key(const std::string& key, const std::vector<std::string>& valid) {
  const std::string parent = all_but_last_part(key).substr(0, kMaxComparedChars);
  std::string name = last_part(key).substr(0, kMaxComparedChars);
  for (const Synonym& synonym : kSynonyms) {
    if (edit_distance(name, std::string(synonym.theirs)) > 2) continue;
    name = synonym.ours;
    break;
  }
  constexpr size_t kNameWeight = 4;
  const std::string* nearest = nullptr;
  size_t nearest_distance = 0;
  for (const std::string& candidate : valid) {
    const size_t distance =
        kNameWeight * edit_distance(name, last_part(candidate)) + edit_distance(parent, all_but_last_part(candidate));
    if (nearest && distance >= nearest_distance) continue;
    nearest = &candidate;
    nearest_distance = distance;
  }
  return *nearest;
}

}  // namespace speedrun

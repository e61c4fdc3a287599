#include "src/model/model_flops.h"

#include <algorithm>

namespace speedrun {

double mean_attended(const int32_t* doc_start, int64_t n, int64_t window) {
  double keys = 0;
  for (int64_t t = 0; t < n; ++t) {
    const int64_t first = window > 0 ? std::max<int64_t>(doc_start[t], t - window) : doc_start[t];
    keys += static_cast<double>(t - first + 1);
  }
  return keys / static_cast<double>(n);
}

std::vector<double> attended_keys(const Config::Model& model, const std::vector<int32_t>& doc_start, int64_t row_tokens,
                                  int64_t window_short, int64_t window_long) {
  std::vector<int32_t> doubled;
  for (const int32_t start : doc_start) doubled.insert(doubled.end(), 2, 2 * start);
  const auto rows = static_cast<int64_t>(doc_start.size()) / row_tokens;
  std::vector<double> attended(static_cast<size_t>(model.num_layers), 0.0);
  for (int l = 0; l < model.num_layers; ++l) {
    const Config::Model::Layer layer = model.layer(l);
    if (!layer.attention) continue;
    int64_t window = 0;
    if (layer.window == WindowKind::short_window) window = window_short;
    if (layer.window == WindowKind::long_window) window = window_long;
    const int64_t row = layer.paired_heads ? 2 * row_tokens : row_tokens;
    const int32_t* starts = layer.paired_heads ? doubled.data() : doc_start.data();
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += mean_attended(starts + r * row, row, window);
    attended[static_cast<size_t>(l)] = sum / static_cast<double>(rows);
  }
  return attended;
}

double flops_per_token(const Config::Model& model, const std::vector<double>& attended) {
  const double C = model.width, F = model.mlp_hidden, V = static_cast<double>(model.padded_vocab_size());
  double weights = model.num_layers * 2 * C * F + V * C;
  for (int l = 0; l < model.num_layers; ++l) {
    if (model.layer(l).attention) weights += 4 * C * C;
  }
  double flops = 6 * weights;
  for (const double keys : attended) flops += 12 * C * keys;
  return flops;
}

}  // namespace speedrun

#pragma once
// Which column of a gate net's output means what in the Main Track's model. Nets and their columns follow from the config: a
// feature that is off has none.
//   pre   from x0: XSA α and attention gates of the layers before model.mudd_gate_split (H columns each, α's first), then one x0
//   and
//         one bigram gate per attention layer
//   post  from the stream that enters layer mudd_gate_split: the same for the other layers, then the skip gates, then DC's w1 and
//   w2 mix   (model.mudd) from the last layer's input: 0–2 value sources, 3–5 residual sources, 6–7 value-embedding gates, 8–11 the
//         attention sublayer's λ_resid, λ_post, x0 and bigram factors, 12–13 the MLP sublayer's λ's
//   out   (model.mudd) from the stream after the last layer: 0–4 residual sources
// Record #89 has 26, 41, 14 and 5 columns.
#include <string>
#include <vector>

#include "src/config/config.h"

namespace speedrun {

struct GateNetLayout {
  std::string name;            // "gate.pre"; empty: the net does not exist
  std::vector<float> initial;  // wanted output at the start, one value a column
  int columns() const { return static_cast<int>(initial.size()); }
  bool exists() const { return !initial.empty(); }
};

// Columns of one layer in the net that serves it; −1: none.
struct LayerGates {
  bool post = false;  // which net
  int alpha = -1;     // H columns
  int gate = -1;      // H columns
  int x0 = -1, bigram = -1;
  int skip = -1;
  int w1 = -1, w2 = -1;  // H columns each
};

struct GateLayout {
  GateNetLayout pre, post, mix, out;
  std::vector<LayerGates> layers;
};

inline constexpr double kGateScale = 0.1;  // the nets' output scale at the start

GateLayout gate_layout(const Config::Model& model);

}  // namespace speedrun

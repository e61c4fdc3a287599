#pragma once
// Who computes what in the fused up-projection, and where operands lie in shared memory; plain arithmetic, so that it is tested on
// the host.
#include <cstdint>

#include "kernels/base/dtype.h"

namespace speedrun::kernels {

// F is cut into panels of kPanel rows of the weight, N into tiles of 64 tokens. A block keeps one panel in shared memory for its
// whole life; `groups` blocks share a panel and take its token tiles in turn, so that at any time all panels work on neighbouring
// tokens and inp is read from device memory once.
struct Relu2UpSchedule {
  static constexpr int kTileTokens = 64;

  int panels;
  int groups;
  int token_tiles;

  static constexpr Relu2UpSchedule make(int64_t N, int F, int panel, int num_sms) {
    const int panels = F / panel, groups = num_sms / panels;
    const int tiles = static_cast<int>((N + kTileTokens - 1) / kTileTokens);
    return {.panels = panels, .groups = groups < tiles ? groups : tiles, .token_tiles = tiles};
  }
  // Tiles of a block of group `group`, and its `index`-th tile.
  SPEEDRUN_HD constexpr int num_tiles(int group) const { return (token_tiles - group + groups - 1) / groups; }
  SPEEDRUN_HD constexpr int tile(int group, int index) const { return group + index * groups; }
};

// How many tiles of inp wait in shared memory, and the parities of barrier phases (kernels/ptx/mbarrier.cuh). A block counts the
// copies into its stages: iteration = tile index · copies of a tile + copy. Two warp groups take tiles in turn: group 0 the even
// indices.
struct Relu2UpRing {
  static constexpr uint32_t kStages = 4;

  SPEEDRUN_HD static constexpr uint32_t stage(uint32_t iteration) { return iteration % kStages; }
  // The copy of this iteration has arrived; the stage is free for it (at once in the first round).
  SPEEDRUN_HD static constexpr uint32_t full_parity(uint32_t iteration) { return iteration / kStages % 2; }
  SPEEDRUN_HD static constexpr uint32_t empty_parity(uint32_t iteration) { return (iteration / kStages + 1) % 2; }
  // The other group has seen all copies of the tile before this one arrive. Before that, a group must not ask for its own: the
  // stage could be a whole round behind, and its parity would say that the copy is there.
  SPEEDRUN_HD static constexpr uint32_t turn_parity(uint32_t index) { return (index / 2 + (index % 2 == 0 ? 1 : 0)) % 2; }
};

// The tensor cores give a thread (lane % 4 = t) of every 8 columns the two at 2t: scattered words. So the rows of a weight panel
// are laid out such that these columns are neighbours in the output: with G = kPanel / 32, the fragment's column 8·(G·i + g) + 2t +
// e (i < 4, g < G, e < 2) is the panel's row 32g + 8t + 2i + e. A thread then holds 8 neighbouring outputs for each g (16 bytes of
// BF16). The copy engine does it: seen as (F / 32, 4, 8, C), copy i takes rows 2i, 2i + 1 of the 8.
template <int kPanel>
struct Relu2UpPanel {
  static_assert(kPanel % 32 == 0 && kPanel <= 256);
  static constexpr int kGroups = kPanel / 32;
  static constexpr int kCopies = 4;  // copies of one panel block of 128 bytes of K
  static constexpr int kCopyRows = kPanel / kCopies;

  // Row of the panel in column `column` of the fragment.
  static constexpr int row(int column) {
    const int e = column % 2, t = column / 2 % 4, g = column / 8 % kGroups, i = column / 8 / kGroups;
    return 32 * g + 8 * t + 2 * i + e;
  }
  // Accumulators of a thread for its 8 neighbouring outputs of group g: those of row `lane / 4 + 8·half` are
  // accumulator(g, i, half) and the next for i = 0 … 3.
  SPEEDRUN_HD static constexpr int accumulator(int g, int i, int half) { return 4 * (kGroups * i + g) + 2 * half; }
};

}  // namespace speedrun::kernels

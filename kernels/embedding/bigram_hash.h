#pragma once
// Which rows of the two tables a token takes; the same arithmetic on host and device.
#include "kernels/base/dtype.h"

namespace speedrun::kernels {

struct BigramRows {
  int32_t index;     // of the table
  int32_t sign_row;  // of the table of signs; 0 without one
};

// position: of the token in its row. sign_rows = 0: no signs.
SPEEDRUN_HD inline BigramRows bigram_rows(const int32_t* tokens, int64_t t, int64_t position, int rows, int sign_rows) {
  const int32_t reserved = rows - 1;
  if (position == 0) return {.index = reserved, .sign_row = 0};
  const int32_t token = tokens[t], before = tokens[t - 1];
  // Unsigned products and XOR have the bits of wrapping int32 ones; the remainder is that of the signed value.
  const uint32_t bits = 36313u * static_cast<uint32_t>(token) ^ 27191u * static_cast<uint32_t>(position == 1 ? reserved : before);
  const int32_t remainder = static_cast<int32_t>(bits) % reserved;
  return {.index = remainder < 0 ? remainder + reserved : remainder, .sign_row = sign_rows > 0 ? (before ^ token) % sign_rows : 0};
}

}  // namespace speedrun::kernels

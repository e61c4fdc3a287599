#pragma once
// Scratch of embedding_backward on CUDA; sizes follow from the shape alone, so that memory is planned without a GPU.
#include <cstddef>
#include <cstdint>

namespace speedrun::kernels {

inline constexpr int kEmbeddingChunk = 64;  // entries of the sorted list summed by one block
inline constexpr size_t kEmbeddingScratchAlign = 256;

// Offsets in bytes.
struct EmbeddingScratch {
  size_t tokens, positions_in, positions;  // (N) 4-byte elements each
  size_t head, tail;                       // (chunks, C) floats each
  size_t sort, sort_bytes;                 // temporary storage of the radix sort
  size_t total;

  EmbeddingScratch(int64_t N, int C) {
    const size_t list_bytes = static_cast<size_t>(N) * 4;
    const size_t chunks = (static_cast<size_t>(N) + kEmbeddingChunk - 1) / kEmbeddingChunk;
    // The sort's double buffers and counters; checked against its own answer before every launch.
    sort_bytes = 4 * list_bytes + (size_t{4} << 20);
    size_t end = 0;
    auto place = [&end](size_t bytes) {
      const size_t offset = end;
      end += (bytes + kEmbeddingScratchAlign - 1) / kEmbeddingScratchAlign * kEmbeddingScratchAlign;
      return offset;
    };
    tokens = place(list_bytes);
    positions_in = place(list_bytes);
    positions = place(list_bytes);
    head = place(chunks * static_cast<size_t>(C) * sizeof(float));
    tail = place(chunks * static_cast<size_t>(C) * sizeof(float));
    sort = place(sort_bytes);
    total = end;
  }
};

}  // namespace speedrun::kernels

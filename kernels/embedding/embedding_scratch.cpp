#include "kernels/embedding/embedding_scratch.h"

#include "kernels/embedding/embedding.h"

namespace speedrun::kernels {

size_t embedding_backward_scratch(int64_t N, int C, int /*V*/) { return EmbeddingScratch(N, C).total; }

}  // namespace speedrun::kernels

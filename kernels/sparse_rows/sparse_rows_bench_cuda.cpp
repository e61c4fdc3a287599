#include <algorithm>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/sparse_rows/sparse_rows.h"

namespace speedrun::kernels {

// The bigram table of eight ranks with 49,152 tokens each: nearly every token touches another row.
void bench_sparse_rows(const BenchOptions& options, std::ostream& out) {
  const CudaExec& exec = options.exec;
  constexpr int64_t kV = 377'280, kK = 6'144;
  constexpr int kC = 768, kW = 8, kTouched = 46'000;
  constexpr int64_t kSlots = kW * kK;
  std::vector<int32_t> host_rows(kTouched), host_index(kSlots);
  for (int64_t i = 0; i < kTouched; ++i) host_rows[i] = static_cast<int32_t>(i * kV / kTouched);
  // As rank 0 receives: every sender's rows lie in the first eighth of the table, a part of them in common.
  for (int64_t slot = 0; slot < kSlots; ++slot)
    host_index[slot] = static_cast<int32_t>(std::min(slot % kK * (kV / kW) / kK + slot / kK, kV / kW - 1));
  for (int64_t sender = 0; sender < kW; ++sender) {
    const auto begin = host_index.begin() + sender * kK;
    std::fill(std::unique(begin, begin + kK), begin + kK, -1);
  }
  const int32_t host_num_rows = kTouched;
  const BenchBuffer table = BenchBuffer::normal_f32(kV * kC), values = BenchBuffer::normal_f32(kSlots * kC);
  const BenchBuffer rows = BenchBuffer::copy_of(host_rows.data(), host_rows.size() * sizeof(int32_t));
  const BenchBuffer num_rows = BenchBuffer::copy_of(&host_num_rows, sizeof host_num_rows);
  const BenchBuffer packed_index = BenchBuffer::zeroed(kSlots * sizeof(int32_t));
  const BenchBuffer received_index = BenchBuffer::copy_of(host_index.data(), host_index.size() * sizeof(int32_t));
  const SparseRowsPack<bf16> pack{.index = packed_index.as<int32_t>(),
                                  .values = values.as<float>(),
                                  .table = table.as<float>(),
                                  .rows = rows.as<int32_t>(),
                                  .num_rows = num_rows.as<int32_t>(),
                                  .V = kV,
                                  .K = kK,
                                  .W = kW,
                                  .C = kC};
  const SparseRowsSum<bf16> sum{
      .table = table.as<float>(), .index = received_index.as<int32_t>(), .values = values.as<float>(), .K = kK, .W = kW, .C = kC};
  constexpr double kRowBytes = kC * sizeof(float);
  bench_table("sparse rows, 46000 of 377280 x 768, 8 ranks",
              {bench_copy(kTouched * kC * sizeof(float), exec),
               {"pack", [&] { sparse_rows_pack(pack, exec); }, 0, 2 * kTouched * kRowBytes},
               {"sum", [&] { sparse_rows_sum(sum, exec); }, 0, kSlots * kRowBytes}},
              exec, options.seconds, out);
}

}  // namespace speedrun::kernels

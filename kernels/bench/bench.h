#pragma once
// Sustained timings of kernels: every case runs back to back for seconds, because a burst hides the power limit of the card.
#include <functional>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/exec.h"

namespace speedrun::kernels {

struct BenchCase {
  std::string name;
  std::function<void()> run;  // launches one call on the exec's stream
  double flops = 0;           // of one call; 0: not shown
  double bytes = 0;           // least device-memory traffic of one call; 0: not shown
  double floor_ms = 0;        // what one call cannot beat, by the bench's own constants; 0: not shown
};

struct BenchOptions {
  CudaExec exec;
  double seconds = 2;  // a case
  bool tune = false;   // gemm: search algorithms and print the rows of the tuning table
};

// Runs the cases one after the other and prints a table: ms, TFLOP/s, TB/s, SM clock (MHz), power (W), energy of a call (J; clock,
// power and energy from NVML, "-" if the library is missing), time relative to the first case, and the floor's share of the time
// (%).
void bench_table(const std::string& title, const std::vector<BenchCase>& cases, const CudaExec& exec, double seconds,
                 std::ostream& out);

// A stream, cuBLASLt plans and the CudaExec of device 0; throws Error without a usable GPU.
class BenchDevice {
 public:
  BenchDevice();
  ~BenchDevice();
  BenchDevice(const BenchDevice&) = delete;
  BenchDevice& operator=(const BenchDevice&) = delete;
  const CudaExec& exec() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Device memory with random contents (never zeros, which run faster than data does); freed with the object.
class BenchBuffer {
 public:
  static BenchBuffer normal_bf16(int64_t count, double deviation = 1);
  static BenchBuffer normal_f32(int64_t count, double deviation = 1);
  static BenchBuffer normal_e4m3(int64_t count, double deviation = 80);
  static BenchBuffer normal_e5m2(int64_t count, double deviation = 80);
  static BenchBuffer copy_of(const void* host, size_t bytes);
  static BenchBuffer zeroed(size_t bytes);  // scratch and accumulators

  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }

 private:
  template <class T>
  static BenchBuffer repeated_pattern(int64_t count, double deviation);

  struct Free {
    void operator()(void* pointer) const;
  };
  explicit BenchBuffer(size_t bytes);
  std::unique_ptr<void, Free> data_;
};

// Copies `bytes` bytes (twice that in traffic): the ceiling of memory-bound ops, the first case of their tables.
BenchCase bench_copy(size_t bytes, const CudaExec& exec);

// `speedrun bench <name>`: every op's function is declared here and listed in bench_list_cuda.cpp.
struct Bench {
  const char* name;
  const char* what;  // one line for --help
  void (*run)(const BenchOptions& options, std::ostream& out);
};
std::span<const Bench> benches();

void bench_adamw(const BenchOptions& options, std::ostream& out);
void bench_attention(const BenchOptions& options, std::ostream& out);
void bench_bigram(const BenchOptions& options, std::ostream& out);
void bench_dc_attention(const BenchOptions& options, std::ostream& out);
void bench_embedding(const BenchOptions& options, std::ostream& out);
void bench_extrapolation(const BenchOptions& options, std::ostream& out);
void bench_fp8(const BenchOptions& options, std::ostream& out);
void bench_gate_net(const BenchOptions& options, std::ostream& out);
void bench_gemm(const BenchOptions& options, std::ostream& out);
void bench_grad_stats(const BenchOptions& options, std::ostream& out);
void bench_head(const BenchOptions& options, std::ostream& out);
void bench_head_gate(const BenchOptions& options, std::ostream& out);
void bench_linear(const BenchOptions& options, std::ostream& out);
void bench_mlp(const BenchOptions& options, std::ostream& out);
void bench_muon(const BenchOptions& options, std::ostream& out);
void bench_norm(const BenchOptions& options, std::ostream& out);
void bench_qkv(const BenchOptions& options, std::ostream& out);
void bench_relu2_mlp(const BenchOptions& options, std::ostream& out);
void bench_scaled_weight(const BenchOptions& options, std::ostream& out);
void bench_smear(const BenchOptions& options, std::ostream& out);
void bench_sparse_rows(const BenchOptions& options, std::ostream& out);
void bench_split_qkv(const BenchOptions& options, std::ostream& out);
void bench_stream_mix(const BenchOptions& options, std::ostream& out);
void bench_value_gate(const BenchOptions& options, std::ostream& out);

}  // namespace speedrun::kernels

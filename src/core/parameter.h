#pragma once
// The parameter table: each trained tensor exists once, as a row that drives initialisation, optimizer, checkpoint and logging. The
// model fills the table (src/model), the optimizer reads it; neither knows the other.
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/weight.h"
#include "kernels/grad_stats/grad_stats.h"
#include "src/core/device.h"
#include "src/core/host_staging.h"
#include "src/core/memory_plan.h"
#include "src/core/sharding.h"

namespace speedrun {

// One set of optimizer settings each. The first five belong to every model; the others to the Main Track: down: the MLPs' down
// matrices; scalar: single factors; mudd, mudd_gate: the nets that make per-token coefficients.
enum class ParameterGroup : int {
  embedding,
  position,
  head,
  matrix,
  vector,
  down,
  bigram,
  value_embedding,
  scalar,
  smear,
  value_gate,
  resid_lambda,
  post_lambda,
  mudd,
  mudd_gate
};
inline constexpr int kNumParameterGroups = 15;
const char* group_name(ParameterGroup group);

struct ParameterSpec {
  std::string name;            // "h.0.attn.qkv.weight"
  std::vector<int64_t> shape;  // row-major; (rows, cols) for matrices, rows = output features
  ParameterGroup group = ParameterGroup::vector;
  kernels::MasterSplit split = kernels::MasterSplit::nearest;
  double init_std = 0;  // N(0, init_std²) around
  double init_mean = 0;
  int matrices = 1;                     // Muon treats the rows as this many matrices of equal size (q, k, v of one tensor)
  double init_bound = 0;                // U(−init_bound, init_bound) around init_mean instead of a normal
  std::vector<float> init_values = {};  // or exactly these, all of them
  bool init_sign = false;               // the sign of a normal draw: ±1
  bool decay = true;                    // false: weight decay leaves it alone, whatever its group says
  bool with_next = false;               // the next row's tensor follows without a gap: one product reads both
  bool frozen = false;                  // no optimizer touches it: a table that is drawn once and kept

  int64_t count() const {
    int64_t n = 1;
    for (const int64_t extent : shape) n *= extent;
    return n;
  }
};

// Values, masters and gradients of all parameters, each kind in one buffer at the same offsets: in the order of the table, with
// several ranks in that of the sharding's units.
template <class T>
class Parameters {
 public:
  explicit Parameters(std::vector<ParameterSpec> specs, bool with_gradients = true, Sharding sharding = {});
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  void plan(MemoryPlan& memory);

  int size() const { return static_cast<int>(specs_.size()); }
  const ParameterSpec& spec(int index) const { return specs_[static_cast<size_t>(index)]; }
  int index(const std::string& name) const;       // -1 if there is none
  int64_t total_count() const { return total_; }  // sum of counts, without padding
  int64_t buffer_count() const { return buffer_; }
  int64_t offset(int index) const { return offsets_[static_cast<size_t>(index)]; }
  const Sharding& sharding() const { return sharding_; }
  // What this rank updates: all of it with one rank or if it is replicated.
  ParameterRange own(int index) const { return own_[static_cast<size_t>(index)]; }
  bool replicated(int index) const { return replicated_[static_cast<size_t>(index)]; }

  T* values() { return values_; }
  T* value(int index) { return values_ + offset(index); }
  Acc<T>* grad(int index) { return grads_ == nullptr ? nullptr : grads_ + offset(index); }
  T* value(const std::string& name) { return name_or_null(values_, name); }
  Acc<T>* grad(const std::string& name) { return grads_ == nullptr ? nullptr : name_or_null(grads_, name); }
  Acc<T>* grads() { return grads_; }
  kernels::WeightRef<T> weight(int index);
  // Of what this rank updates; of what all update, on rank 0.
  std::vector<kernels::GradSegment> segments() const;

  // Master values (FP32, or FP64 for double) of a range of one parameter, through the host; synchronous. With several ranks, lower
  // halves are those of the last update only in what this rank updates.
  void read_master(Device& device, HostStaging& staging, int index, ParameterRange range, Acc<T>* to);
  void write_master(Device& device, HostStaging& staging, int index, ParameterRange range, const Acc<T>* from);
  // Of a whole parameter.
  std::vector<Acc<T>> read_master(Device& device, int index);
  void write_master(Device& device, int index, const std::vector<Acc<T>>& master);
  std::vector<Acc<T>> read_grad(Device& device, int index);

  // Draws every parameter from its row: value (seed, index of the parameter, index of the element) alone.
  void initialize(Device& device, uint64_t seed);

 private:
  void place();  // offsets and ranges

  template <class U>
  U* name_or_null(U* buffer, const std::string& name) {
    const int i = index(name);
    return i < 0 ? nullptr : buffer + offset(i);
  }

  std::vector<ParameterSpec> specs_;
  Sharding sharding_;
  std::vector<int64_t> offsets_;
  std::vector<ParameterRange> own_;
  std::vector<bool> replicated_;
  int64_t total_ = 0, buffer_ = 0;
  bool with_gradients_;
  T* values_ = nullptr;
  uint16_t* lows_ = nullptr;  // CUDA only
  Acc<T>* grads_ = nullptr;
};

}  // namespace speedrun

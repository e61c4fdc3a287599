#pragma once
// The host's half of a table's sparse gradient sum (src/dist/sparse_rows.h): which rows of the bigram table this rank's batches
// have touched since the table's last update, and whether the next sum is to be sparse. The list is made of the batch alone, so the
// host is ahead of the device.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/core/device.h"
#include "src/data/reader.h"
#include "src/dist/control.h"
#include "src/dist/sparse_rows.h"

namespace speedrun {

// Rows that a rank sends each owner when its batches between two updates have `tokens` tokens: what such text needs, and a margin,
// as a capacity for shape.V, C, ranks. 0: the whole table would be no more bytes.
int64_t touched_rows_capacity(const SparseRowsShape& shape, int64_t tokens);

class TouchedRows {
 public:
  // capacities: rows per owner by stage, 0: this stage always sums the whole table; not all 0.
  TouchedRows(Device& device, Control& control, int64_t V, std::vector<int64_t> capacities);

  void allocate();  // what the rows are sent from

  int64_t capacity(int stage) const { return capacities_.at(static_cast<size_t>(stage)); }
  int64_t largest_capacity() const;

  // The rows of a step, before it is submitted. In a step in which the table updates (on all ranks): the capacity to sum with, the
  // touched rows then being on their way to `list` in device memory (Optimizer::touched_rows); 0: the whole table is to be summed,
  // because on some rank the rows do not fit or are not known. Else 0.
  int64_t submit(const StepRows& rows, int stage, bool updates, int32_t* list);

  // Gradients were set from elsewhere: what they touch until the next update is not known.
  void forget() { known_ = false; }

  std::string note() const;  // for the log
  int64_t sparse_updates() const { return sparse_updates_; }
  int64_t dense_updates() const { return dense_updates_; }  // of stages that could have summed sparsely

 private:
  struct Slot {
    HostBuffer<int32_t> list;  // (1 + W·largest capacity): number, rows
    std::unique_ptr<Event> sent;
  };

  void mark(const StepRows& rows);
  void collect();  // rows_ from the marks, which are then gone
  void send(int32_t* list);

  Device& device_;
  Control& control_;
  int64_t V_;
  std::vector<int64_t> capacities_;
  std::vector<uint64_t> marks_;  // a bit for each row
  std::vector<int32_t> rows_;    // ascending
  bool known_ = true;
  std::vector<Slot> slots_;
  size_t sent_ = 0;
  int64_t sparse_updates_ = 0, dense_updates_ = 0;
};

}  // namespace speedrun

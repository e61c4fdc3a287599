#pragma once
// What a GPU did between two points: kernels, copies and memory sets with start and end on the GPU's own clock, those inside graphs
// included. Uses CUPTI's activity records; its library comes with the CUDA toolkit and is opened when a recorder is made, never
// before.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace speedrun {

enum class ActivityKind : uint32_t { kernel, copy, set };

struct Activity {
  ActivityKind kind = ActivityKind::kernel;
  uint32_t name = 0;                  // index into ActivityRecorder::names()
  uint64_t start_ns = 0, end_ns = 0;  // CUPTI's clock: the host's, comparable between the processes of a host
  uint64_t bytes = 0;                 // copied or set
  uint32_t stream = 0;                // CUPTI's number of it
  uint32_t registers = 0;             // of a thread; this and the following are a kernel's
  uint32_t shared_bytes = 0;          // of a block, static and dynamic
  std::array<int32_t, 3> grid = {}, block = {};
};

// At most one at a time in a process.
class ActivityRecorder {
 public:
  // Opens CUPTI and attaches it to the driver, so that graphs built from here on are made with it present. Throws InputError if
  // there is no CUPTI library, Error with CUPTI's own words if it refuses.
  ActivityRecorder();
  ~ActivityRecorder();
  ActivityRecorder(const ActivityRecorder&) = delete;
  ActivityRecorder& operator=(const ActivityRecorder&) = delete;

  // The caller makes sure that the GPU is idle at each of these calls: what is in flight may be missed. Outside of start … stop
  // nothing is recorded, except that until the first start or stop CUPTI records without keeping anything.
  void start();
  std::vector<Activity> stop();

  const std::vector<std::string>& names() const { return names_; }  // symbols of kernels, plain words for the rest
  int64_t num_lost() const { return num_lost_; }                    // activities CUPTI could not deliver or time, so far

 private:
  void enable();
  void disable();
  void flush();
  void read_buffer(unsigned char* buffer, size_t bytes, std::vector<Activity>& activities);
  uint32_t name_index(const char* name);

  std::vector<std::string> names_;
  std::map<std::string, uint32_t, std::less<>> index_of_name_;
  int64_t num_lost_ = 0;
  bool enabled_ = false;
};

}  // namespace speedrun

#include "src/core/activity_recorder.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>

#include "fmt/format.h"
#include "kernels/base/error.h"

namespace speedrun {
namespace {

// The parts of CUPTI's interface used here, declared so that building needs no CUPTI. Records are versioned, and each version of
// CUPTI writes its newest; they have only ever grown at the end, so these beginnings fit those of CUDA 9 (CUpti_ActivityKernel4,
// CUpti_ActivityMemcpy3, CUpti_ActivityMemset2) to CUDA 13.2 (CUpti_ActivityKernel10, CUpti_ActivityMemcpy6,
// CUpti_ActivityMemset4).
enum Result : int {
  kSuccess = 0,
  kMaxLimitReached = 12,  // no more records in a buffer
  kInvalidKind = 21,      // the rest of a buffer is unfinished
  kInsufficientPrivileges = 35,
  kMultipleSubscribers = 39,
  kVirtualizedInsufficientPrivileges = 40,
};
enum Kind : uint32_t { kMemcpy = 1, kMemset = 2, kConcurrentKernel = 10 };
constexpr std::array<Kind, 3> kKinds = {kConcurrentKernel, kMemcpy, kMemset};
constexpr uint32_t kFlushForced = 1;

struct KernelRecord {
  uint32_t kind;
  uint8_t cache_config, shared_memory_config;
  uint16_t registers;
  uint32_t partitioned_cache[2];
  uint64_t start, end, completed;  // ns
  uint32_t device, context, stream;
  int32_t grid[3], block[3];
  int32_t static_shared, dynamic_shared;
  uint32_t local_per_thread, local_total, correlation;
  int64_t grid_id;
  const char* name;
};
static_assert(offsetof(KernelRecord, start) == 16 && offsetof(KernelRecord, stream) == 48 && offsetof(KernelRecord, block) == 64 &&
              offsetof(KernelRecord, dynamic_shared) == 80 && offsetof(KernelRecord, name) == 104);

struct MemoryRecord {  // CUpti_ActivityMemcpy and CUpti_ActivityMemset
  uint32_t kind;
  uint8_t copy_kind, other[3];  // memset: the value
  uint64_t bytes, start, end;
  uint32_t device, context, stream;
};
static_assert(offsetof(MemoryRecord, bytes) == 8 && offsetof(MemoryRecord, end) == 24 && offsetof(MemoryRecord, stream) == 40);

using BufferRequested = void (*)(uint8_t** buffer, size_t* size, size_t* max_records);
using BufferCompleted = void (*)(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid);

struct Cupti {
  int (*register_callbacks)(BufferRequested, BufferCompleted);
  int (*enable)(uint32_t kind);
  int (*disable)(uint32_t kind);
  int (*flush_all)(uint32_t flag);
  int (*next_record)(uint8_t* buffer, size_t valid, void** record);
  int (*num_dropped)(void* context, uint32_t stream, size_t* dropped);
  int (*result_string)(int result, const char** text);
};

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  require(function != nullptr, "CUPTI: its library has no ", name);
}

Cupti open_cupti() {
  constexpr std::array<const char*, 7> kNames = {"libcupti.so.13",
                                                 "libcupti.so.12",
                                                 "libcupti.so",
                                                 "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13",
                                                 "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so",
                                                 "/usr/local/cuda/lib64/libcupti.so.13",
                                                 "/usr/local/cuda/lib64/libcupti.so"};
  void* library = nullptr;
  for (size_t i = 0; i < kNames.size() && library == nullptr; ++i) library = dlopen(kNames[i], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw InputError(
        "--timeline: no CUPTI library (libcupti.so.13 or libcupti.so.12) in the library path or below /usr/local/cuda; install the "
        "CUDA "
        "toolkit's package cuda-cupti-13-0 (pip: nvidia-cuda-cupti), or name its folder in LD_LIBRARY_PATH");
  }
  // Never closed: CUPTI stays attached to the driver.
  Cupti cupti{};
  find(library, "cuptiActivityRegisterCallbacks", cupti.register_callbacks);
  find(library, "cuptiActivityEnable", cupti.enable);
  find(library, "cuptiActivityDisable", cupti.disable);
  find(library, "cuptiActivityFlushAll", cupti.flush_all);
  find(library, "cuptiActivityGetNextRecord", cupti.next_record);
  find(library, "cuptiActivityGetNumDroppedRecords", cupti.num_dropped);
  find(library, "cuptiGetResultString", cupti.result_string);
  return cupti;
}

// CUPTI's callbacks carry no pointer of ours and may come from its own thread, even while the process ends: the state is global and
// never destroyed.
constexpr size_t kBufferBytes = 4 << 20;
struct Buffer {
  uint8_t* data;
  size_t valid;
};
struct Shared {
  Cupti cupti = open_cupti();
  std::atomic<bool> keep = false;  // else finished buffers are thrown away
  std::mutex mutex;
  std::vector<Buffer> finished;
};
Shared& shared() {
  static Shared& instance = *new Shared;
  return instance;
}

void buffer_requested(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = static_cast<uint8_t*>(std::malloc(kBufferBytes));  // aligned to 16 bytes, CUPTI needs 8
  *size = *buffer != nullptr ? kBufferBytes : 0;               // without a buffer CUPTI drops records and counts them
  *max_records = 0;                                            // as many as fit
}

void buffer_completed(void*, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  if (!shared().keep || valid == 0) {
    std::free(buffer);
    return;
  }
  const std::lock_guard lock(shared().mutex);
  shared().finished.push_back({buffer, valid});
}

void check(int result, std::string_view what) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  shared().cupti.result_string(result, &text);
  std::string hint;
  if (result == kInsufficientPrivileges || result == kVirtualizedInsufficientPrivileges) {
    hint =
        ": the driver lets root alone profile: run as root (in a container with --cap-add=SYS_ADMIN), or load the nvidia module "
        "with "
        "NVreg_RestrictProfilingToAdminUsers=0";
  } else if (result == kMultipleSubscribers) {
    hint = ": another profiler is attached: run without it";
  }
  throw Error(fmt::format("CUPTI: {} failed: {} ({}){}", what, text != nullptr ? text : "unknown error", result, hint));
}

const char* copy_name(int copy_kind) {
  switch (copy_kind) {
    case 1:
      return "copy host to device";
    case 2:
      return "copy device to host";
    case 8:
      return "copy device to device";
    default:
      return "copy";
  }
}

}  // namespace

ActivityRecorder::ActivityRecorder() {
  check(shared().cupti.register_callbacks(buffer_requested, buffer_completed), "registering buffers");
  enable();
}

// Nothing to be done about errors here: the process goes on without records.
ActivityRecorder::~ActivityRecorder() {
  shared().keep = false;
  if (!enabled_) return;
  for (const Kind kind : kKinds) shared().cupti.disable(kind);
  shared().cupti.flush_all(kFlushForced);
}

void ActivityRecorder::enable() {
  if (enabled_) return;
  for (const Kind kind : kKinds) check(shared().cupti.enable(kind), "enabling records");
  enabled_ = true;
}

void ActivityRecorder::disable() {
  if (!enabled_) return;
  for (const Kind kind : kKinds) check(shared().cupti.disable(kind), "disabling records");
  enabled_ = false;
}

// Complete records first; forced, CUPTI also hands over buffers in which one is not, without its times.
void ActivityRecorder::flush() {
  check(shared().cupti.flush_all(0), "collecting records");
  check(shared().cupti.flush_all(kFlushForced), "collecting records");
}

void ActivityRecorder::start() {
  flush();  // of what came before
  shared().keep = true;
  enable();
}

std::vector<Activity> ActivityRecorder::stop() {
  flush();
  disable();
  flush();
  const bool kept = shared().keep.exchange(false);
  std::vector<Buffer> buffers;
  {
    const std::lock_guard lock(shared().mutex);
    buffers.swap(shared().finished);
  }
  std::vector<Activity> activities;
  for (const Buffer& buffer : buffers) {
    const std::unique_ptr<uint8_t, decltype(&std::free)> owner(buffer.data, std::free);
    read_buffer(buffer.data, buffer.valid, activities);
  }
  size_t dropped = 0;
  check(shared().cupti.num_dropped(nullptr, 0, &dropped), "counting dropped records");
  if (kept) num_lost_ += static_cast<int64_t>(dropped);
  return activities;
}

uint32_t ActivityRecorder::name_index(const char* name) {
  const std::string_view text = name != nullptr ? name : "unnamed kernel";
  const auto found = index_of_name_.find(text);
  if (found != index_of_name_.end()) return found->second;
  names_.emplace_back(text);
  const auto index = static_cast<uint32_t>(names_.size() - 1);
  index_of_name_.emplace(text, index);
  return index;
}

void ActivityRecorder::read_buffer(unsigned char* buffer, size_t bytes, std::vector<Activity>& activities) {
  void* record = nullptr;
  while (true) {
    const int result = shared().cupti.next_record(buffer, bytes, &record);
    if (result == kMaxLimitReached || result == kInvalidKind) return;
    check(result, "reading records");
    uint32_t kind = 0;
    std::memcpy(&kind, record, sizeof(kind));
    Activity activity;
    if (kind == kConcurrentKernel) {
      const auto& from = *static_cast<const KernelRecord*>(record);
      activity.kind = ActivityKind::kernel;
      activity.start_ns = from.start;
      activity.end_ns = from.end;
      activity.stream = from.stream;
      activity.registers = from.registers;
      activity.shared_bytes = static_cast<uint32_t>(from.static_shared + from.dynamic_shared);
      std::memcpy(activity.grid.data(), from.grid, sizeof(from.grid));
      std::memcpy(activity.block.data(), from.block, sizeof(from.block));
      activity.name = name_index(from.name);
    } else if (kind == kMemcpy || kind == kMemset) {
      const auto& from = *static_cast<const MemoryRecord*>(record);
      activity.kind = kind == kMemcpy ? ActivityKind::copy : ActivityKind::set;
      activity.start_ns = from.start;
      activity.end_ns = from.end;
      activity.bytes = from.bytes;
      activity.stream = from.stream;
      activity.name = name_index(kind == kMemcpy ? copy_name(from.copy_kind) : "set memory");
    } else {
      continue;
    }
    // CUPTI leaves the times at zero where it had no memory left to measure them.
    if (activity.start_ns == 0 || activity.end_ns < activity.start_ns) {
      ++num_lost_;
      continue;
    }
    activities.push_back(activity);
  }
}

}  // namespace speedrun

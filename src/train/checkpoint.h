#pragma once
// Checkpoints: one file, written beside and renamed, with a checksum for every section. A damaged file is refused by name.
//
// Layout: 16 bytes magic "speedrun ckpt 1\n"; u64 size and u64 hash of the header; header (JSON: meta, sections with name, dtype,
// shape, offset, bytes, hash); sections, each at a multiple of 64 bytes from the start of the file. Little-endian.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/data/reader.h"
#include "src/train/engine.h"

namespace speedrun {

struct CheckpointMeta {
  int step = 0;  // completed updates
  ReaderState reader;
  double clock_s[5] = {};    // by Phase
  double last_val_loss = 0;  // NaN is stored as null
  bool has_val_loss = false;
  std::optional<double> last_val_loss_raw;  // without the read-out that last_val_loss is of
  int reached_step = -1;                    // first validation at or below the target: completed steps, clock; -1: not yet
  double reached_clock_s = 0;
  double reached_loss = 0;
  double joules = 0;            // of training so far; 0: not measured
  std::string config;           // resolved, JSON
  std::string shards_hash;      // of the train shard list
  std::string from_checkpoint;  // that the run branched from, after from_step steps; empty: it did not
  int from_step = 0;
};

// Throws Error if the file cannot be written, with ExitCode::non_finite if a parameter is not finite; the file is then not there.
void write_checkpoint(const std::filesystem::path& path, const CheckpointMeta& meta, const std::vector<StateEntry>& state);

// Reads and verifies the header; throws InputError naming the file and what is wrong.
CheckpointMeta read_checkpoint_meta(const std::filesystem::path& path);

// Hands each section to the entry of its name and verifies its checksum on the way. Entries that the file lacks, or of another type
// or shape, are an InputError, before anything is changed; so are sections that `state` has no entry for, which `parameters_only`
// skips instead. A wrong checksum is an InputError too: what came before it has been loaded by then. Names that begin with
// `left_out` (nothing: none) are neither required nor loaded.
CheckpointMeta load_checkpoint(const std::filesystem::path& path, const std::vector<StateEntry>& state, bool parameters_only,
                               std::string_view left_out = {});

// Reads every byte and compares all checksums.
void verify_checkpoint(const std::filesystem::path& path);

std::filesystem::path checkpoint_path(const std::filesystem::path& run, int step);  // RUN/checkpoints/step_000100.ckpt

// The newest checkpoint of a run whose every checksum is right; each damaged newer one is reported through `warn`, by name. Empty
// if none.
std::optional<std::filesystem::path> newest_good_checkpoint(const std::filesystem::path& run,
                                                            const std::function<void(const std::string&)>& warn);

// `path` itself if it is a file, of a run's folder the newest good checkpoint; throws InputError if there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& path, const std::function<void(const std::string&)>& warn);

// Deletes all but the newest `keep` and what interrupted writes left behind.
void prune_checkpoints(const std::filesystem::path& run, int keep);

}  // namespace speedrun

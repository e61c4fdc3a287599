#include "src/dist/world.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <vector>

#include "fmt/format.h"
#include "kernels/base/error.h"

namespace speedrun {
namespace {

constexpr int kMostRanks = 1 << 20;
constexpr int kDefaultPort = 29500;  // torchrun's

// Set but empty counts as not set, as in a shell script that clears a variable.
std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<int> number(const char* name, int least, int most) {
  const std::optional<std::string> text = variable(name);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < least || value > most)
    throw InputError(fmt::format("environment: {}={:?} is no whole number from {} to {}", name, *text, least, most));
  return value;
}

int needed(const char* name, int least, int most, const char* beside) {
  const std::optional<int> value = number(name, least, most);
  if (!value)
    throw InputError(fmt::format("environment: {} is set but {} is not: set both, or neither for a run of one rank", beside, name));
  return *value;
}

void check_below(const char* name, int value, const char* limit_name, int limit) {
  if (value >= limit) throw InputError(fmt::format("environment: {}={} must be less than {}={}", name, value, limit_name, limit));
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.compare(0, 4, "127.") == 0;
}

// Slurm's count per host, "4(x2),3": the entry of host `node`; -1 where the text has no such entry.
int tasks_of_node(std::string_view text, int node) {
  int first = 0;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    int tasks = 0, repeat = 1;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), tasks);
    if (error != std::errc()) return -1;
    const std::string_view rest = item.substr(static_cast<size_t>(end - item.data()));
    if (rest.substr(0, 2) == "(x") std::from_chars(rest.data() + 2, rest.data() + rest.size(), repeat);
    if (node < first + repeat) return tasks;
    first += repeat;
  }
  return -1;
}

// The first host of Slurm's node list: "node[003-005,7]-ib,other" -> "node003-ib".
std::string first_host(std::string_view list) {
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const size_t close = list.find(']', i);
    if (close == std::string_view::npos) return "";
    const std::string_view numbers = list.substr(i + 1, close - i - 1);
    host += numbers.substr(0, numbers.find_first_of("-,"));
    i = close;
  }
  return host;
}

// Two variables that are set together, the rank below the size.
void read_pair(const char* rank_name, int& rank, const char* size_name, int& size) {
  rank = needed(rank_name, 0, kMostRanks, size_name);
  size = needed(size_name, 1, kMostRanks, rank_name);
  check_below(rank_name, rank, size_name, size);
}

// torchrun's names, which the launcher of this program sets as well.
World from_torchrun() {
  World world;
  read_pair("RANK", world.rank, "WORLD_SIZE", world.size);
  if (variable("LOCAL_RANK") || variable("LOCAL_WORLD_SIZE")) {
    read_pair("LOCAL_RANK", world.local_rank, "LOCAL_WORLD_SIZE", world.local_size);
  } else if (world.size == 1 || is_loopback(variable("MASTER_ADDR").value_or("localhost"))) {
    world.local_rank = world.rank;
    world.local_size = world.size;
  } else {
    throw InputError(fmt::format(
        "environment: LOCAL_RANK and LOCAL_WORLD_SIZE are not set: which GPU of its host rank {} takes is not known", world.rank));
  }
  world.launched_here = variable("SPEEDRUN_LAUNCHED") == "1";
  return world;
}

World from_mpirun() {
  World world;
  read_pair("OMPI_COMM_WORLD_RANK", world.rank, "OMPI_COMM_WORLD_SIZE", world.size);
  world.local_rank = needed("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMostRanks, "OMPI_COMM_WORLD_RANK");
  world.local_size = needed("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMostRanks, "OMPI_COMM_WORLD_RANK");
  check_below("OMPI_COMM_WORLD_LOCAL_RANK", world.local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE", world.local_size);
  return world;
}

// Slurm sets SLURM_NTASKS for a whole job too; only a process that srun started is a rank. The script of sbatch itself looks like
// rank 0 but for ENVIRONMENT=BATCH, which its steps inherit beside a SLURM_STEP_ID.
bool is_srun_task() {
  if (!variable("SLURM_PROCID")) return false;
  return variable("SLURM_STEP_ID") || variable("SLURM_STEP_NUM_TASKS") || variable("ENVIRONMENT") != "BATCH";
}

std::optional<std::string> either(const char* name, const char* otherwise) {
  const std::optional<std::string> value = variable(name);
  return value ? value : variable(otherwise);
}

World from_srun() {
  World world;
  world.rank = *number("SLURM_PROCID", 0, kMostRanks);
  // The step's own number: SLURM_NTASKS may be the job's.
  const char* size_name = variable("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  world.size = number(size_name, 1, kMostRanks).value_or(1);
  check_below("SLURM_PROCID", world.rank, size_name, world.size);
  if (world.size == 1) return world;
  world.local_rank = needed("SLURM_LOCALID", 0, kMostRanks, "SLURM_PROCID");
  const int node = number("SLURM_NODEID", 0, kMostRanks).value_or(0);
  const std::optional<std::string> tasks = either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE");
  const std::optional<int> evenly = number("SLURM_NTASKS_PER_NODE", 1, kMostRanks);
  const int told = tasks ? tasks_of_node(*tasks, node) : evenly.value_or(world.size);
  if (told < 1 || told > world.size || world.local_rank >= told) {
    throw InputError(fmt::format("environment: SLURM_LOCALID={} and SLURM_NODEID={} do not go with {}={} and {}={}",
                                 world.local_rank, node, tasks ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_NTASKS_PER_NODE",
                                 tasks ? *tasks : fmt::format("{}", told), size_name, world.size));
  }
  world.local_size = told;
  return world;
}

// Two jobs on one host must not meet: jobs whose numbers are less than 20,000 apart have different ports, and so have steps of a
// job. All are below the ports that systems hand out themselves.
int port_of_slurm_job() {
  const std::optional<std::string> job = variable("SLURM_JOB_ID");
  if (!job) return kDefaultPort;
  const uint64_t id = std::strtoull(job->c_str(), nullptr, 10);
  const uint64_t step = std::strtoull(variable("SLURM_STEP_ID").value_or("0").c_str(), nullptr, 10);
  return static_cast<int>(10000 + (id + 1009 * step) % 20000);
}

}  // namespace

World world_from_environment() {
  World world;
  bool by_srun = false;
  if (variable("RANK") || variable("WORLD_SIZE")) {
    world = from_torchrun();
  } else if (variable("OMPI_COMM_WORLD_RANK") || variable("OMPI_COMM_WORLD_SIZE")) {
    world = from_mpirun();
  } else if (is_srun_task()) {
    world = from_srun();
    by_srun = true;
  }
  if (world.size == 1) return {};

  world.address = variable("MASTER_ADDR").value_or("");
  if (world.address.empty() && by_srun)
    world.address = first_host(either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST").value_or(""));
  if (world.address.empty() && world.local_size == world.size) world.address = "127.0.0.1";
  if (world.address.empty()) {
    throw InputError(fmt::format(
        "environment: MASTER_ADDR is not set: rank {} of {} ranks on several hosts needs the name or address of rank 0's host",
        world.rank, world.size));
  }
  world.port = number("MASTER_PORT", 1, 65535).value_or(by_srun ? port_of_slurm_job() : kDefaultPort);
  // torchrun's agent listens on MASTER_PORT itself and says so; rank 0 takes the port after it.
  if (variable("TORCHELASTIC_USE_AGENT_STORE") == "True") world.port = world.port < 65535 ? world.port + 1 : world.port - 1;
  return world;
}

}  // namespace speedrun

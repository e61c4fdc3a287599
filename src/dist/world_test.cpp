#include "src/dist/world.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "src/core/test_refusal.h"

namespace speedrun {
namespace {

using Environment = std::map<std::string, std::string>;

constexpr const char* kEveryName[] = {"RANK",
                                      "WORLD_SIZE",
                                      "LOCAL_RANK",
                                      "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR",
                                      "MASTER_PORT",
                                      "SPEEDRUN_LAUNCHED",
                                      "TORCHELASTIC_USE_AGENT_STORE",
                                      "OMPI_COMM_WORLD_RANK",
                                      "OMPI_COMM_WORLD_SIZE",
                                      "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "OMPI_COMM_WORLD_LOCAL_SIZE",
                                      "ENVIRONMENT",
                                      "SLURM_JOB_ID",
                                      "SLURM_STEP_ID",
                                      "SLURM_PROCID",
                                      "SLURM_NTASKS",
                                      "SLURM_STEP_NUM_TASKS",
                                      "SLURM_LOCALID",
                                      "SLURM_NODEID",
                                      "SLURM_NTASKS_PER_NODE",
                                      "SLURM_TASKS_PER_NODE",
                                      "SLURM_STEP_TASKS_PER_NODE",
                                      "SLURM_JOB_NODELIST",
                                      "SLURM_STEP_NODELIST"};

// In a process whose environment says nothing of ranks but these.
World world_of(const Environment& environment) {
  for (const char* name : kEveryName) unsetenv(name);
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  return world_from_environment();
}

void expect_world(const Environment& environment, int rank, int size, int local_rank, int local_size, const std::string& address,
                  int port) {
  std::string all;
  for (const auto& [name, value] : environment) all += name + "=" + value + " ";
  SCOPED_TRACE(all);
  const World world = world_of(environment);
  EXPECT_EQ(world.rank, rank);
  EXPECT_EQ(world.size, size);
  EXPECT_EQ(world.local_rank, local_rank);
  EXPECT_EQ(world.local_size, local_size);
  EXPECT_EQ(world.address, address);
  EXPECT_EQ(world.port, port);
}

void expect_refused(const Environment& environment, const std::string& name) {
  const std::string message = refusal_of([&] { world_of(environment); });
  EXPECT_NE(message.find("environment: "), std::string::npos) << message;
  EXPECT_NE(message.find(name), std::string::npos) << message;
}

TEST(World, OneRankWhereNothingSaysOtherwise) {
  expect_world({}, 0, 1, 0, 1, "", 0);
  expect_world({{"RANK", ""}, {"WORLD_SIZE", ""}}, 0, 1, 0, 1, "", 0);
  expect_world({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "somewhere"}}, 0, 1, 0, 1, "", 0);
  expect_world({{"LOCAL_RANK", "3"}, {"MASTER_PORT", "5"}}, 0, 1, 0, 1, "", 0);
}

TEST(World, Torchrun) {
  const Environment two_hosts = {{"RANK", "5"},        {"WORLD_SIZE", "8"},     {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"},
                                 {"MASTER_ADDR", "a"}, {"MASTER_PORT", "12345"}};
  expect_world(two_hosts, 5, 8, 1, 4, "a", 12345);
  expect_world({{"RANK", "1"}, {"WORLD_SIZE", "2"}}, 1, 2, 1, 2, "127.0.0.1", 29500);
  expect_world({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}}, 1, 2, 1, 2, "localhost", 29500);
  Environment agent = two_hosts;
  agent["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  expect_world(agent, 5, 8, 1, 4, "a", 12346);
  EXPECT_FALSE(world_of(two_hosts).launched_here);
  Environment ours = two_hosts;
  ours["SPEEDRUN_LAUNCHED"] = "1";
  EXPECT_TRUE(world_of(ours).launched_here);
}

TEST(World, Mpirun) {
  const Environment all = {{"OMPI_COMM_WORLD_RANK", "3"},
                           {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  Environment somewhere = all;
  somewhere["MASTER_ADDR"] = "b";
  expect_world(somewhere, 3, 4, 1, 2, "b", 29500);
  expect_refused(all, "MASTER_ADDR");
  Environment one_host = all;
  one_host["OMPI_COMM_WORLD_LOCAL_RANK"] = "3";
  one_host["OMPI_COMM_WORLD_LOCAL_SIZE"] = "4";
  expect_world(one_host, 3, 4, 3, 4, "127.0.0.1", 29500);
  // Inside an allocation of Slurm, and torchrun inside that.
  one_host["SLURM_PROCID"] = "0";
  one_host["SLURM_NTASKS"] = "7";
  expect_world(one_host, 3, 4, 3, 4, "127.0.0.1", 29500);
  one_host["RANK"] = "0";
  one_host["WORLD_SIZE"] = "2";
  expect_world(one_host, 0, 2, 0, 2, "127.0.0.1", 29500);
}

TEST(World, Srun) {
  Environment task = {{"SLURM_PROCID", "5"},  {"SLURM_NTASKS", "7"},           {"SLURM_LOCALID", "1"},
                      {"SLURM_NODEID", "1"},  {"SLURM_TASKS_PER_NODE", "4,3"}, {"SLURM_JOB_NODELIST", "node[003-005,7],other"},
                      {"SLURM_JOB_ID", "42"}, {"SLURM_STEP_ID", "2"}};
  expect_world(task, 5, 7, 1, 3, "node003", 10000 + 42 + 2018);
  task["SLURM_STEP_NODELIST"] = "gpu-a,gpu-b";
  expect_world(task, 5, 7, 1, 3, "gpu-a", 10000 + 42 + 2018);
  task["SLURM_STEP_NODELIST"] = "rack[1-2]n[08,09]-ib";
  task["MASTER_PORT"] = "7";
  expect_world(task, 5, 7, 1, 3, "rack1n08-ib", 7);
  task["MASTER_ADDR"] = "10.0.0.1";
  expect_world(task, 5, 7, 1, 3, "10.0.0.1", 7);
  task["SLURM_STEP_TASKS_PER_NODE"] = "2(x3),1";
  expect_world(task, 5, 7, 1, 2, "10.0.0.1", 7);
  task["SLURM_STEP_NUM_TASKS"] = "6";
  expect_world(task, 5, 6, 1, 2, "10.0.0.1", 7);
  expect_world({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "1"}}, 1, 2, 1, 2, "127.0.0.1", 29500);
}

TEST(World, JobsOfOneHostHaveDifferentPorts) {
  Environment task = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "0"}, {"SLURM_STEP_ID", "0"}};
  task["SLURM_JOB_ID"] = "123456";
  const int first = world_of(task).port;
  task["SLURM_JOB_ID"] = "123457";
  const int second = world_of(task).port;
  task["SLURM_STEP_ID"] = "1";
  const int third = world_of(task).port;
  EXPECT_NE(first, second);
  EXPECT_NE(second, third);
  EXPECT_NE(first, third);
}

TEST(World, AllocationWithoutStepIsOneRank) {
  expect_world({{"SLURM_JOB_ID", "4"}, {"SLURM_NTASKS", "8"}}, 0, 1, 0, 1, "", 0);  // salloc's shell
  expect_world({{"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "4"}}, 0, 1, 0, 1, "", 0);  // a lone srun
  expect_world({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_LOCALID", "0"}}, 0, 1, 0, 1, "", 0);
  Environment script = {
      {"SLURM_JOB_ID", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "8"}, {"ENVIRONMENT", "BATCH"}};
  expect_world(script, 0, 1, 0, 1, "", 0);  // sbatch's script itself
  script["SLURM_STEP_ID"] = "0";
  EXPECT_EQ(world_of(script).size, 8);  // srun inside it
}

TEST(World, RefusesWhatIsMissingOrWrong) {
  expect_refused({{"RANK", "0"}}, "WORLD_SIZE");
  expect_refused({{"WORLD_SIZE", "2"}}, "RANK");
  expect_refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK=2");
  for (const char* wrong : {"-1", "x", "1x", "0x1", " 1", "99999999999999999999", "1.0", "a\nb"}) {
    expect_refused({{"RANK", wrong}, {"WORLD_SIZE", "2"}}, "RANK=");
    expect_refused({{"RANK", "0"}, {"WORLD_SIZE", wrong}}, "WORLD_SIZE=");
    expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", wrong}}, "MASTER_PORT=");
    expect_refused({{"SLURM_PROCID", wrong}, {"SLURM_NTASKS", "2"}}, "SLURM_PROCID=");
    expect_refused({{"OMPI_COMM_WORLD_RANK", wrong}, {"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_RANK=");
  }
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE=");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "65536"}}, "MASTER_PORT=");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}}, "LOCAL_WORLD_SIZE");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "1"}}, "LOCAL_RANK=1");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}, "MASTER_ADDR");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "elsewhere"}}, "LOCAL_RANK");
  expect_refused({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_LOCAL_RANK");
  expect_refused({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}}, "SLURM_LOCALID");
  expect_refused({{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "0"}}, "SLURM_PROCID=3");
  expect_refused({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS_PER_NODE", "1"}},
                 "MASTER_ADDR");
  expect_refused({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "0"}, {"SLURM_TASKS_PER_NODE", "x"}},
                 "SLURM_LOCALID");
}

}  // namespace
}  // namespace speedrun

#pragma once
// Who takes part in a run: one process, a rank, for each GPU. Either this program started them itself (--gpus N), or a launcher did
// and says so in the environment: torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), mpirun (OMPI_COMM_WORLD_*) or srun
// (SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_[STEP_]TASKS_PER_NODE), looked for in
// this order. The address of rank 0 is MASTER_ADDR:MASTER_PORT. MASTER_ADDR may be missing where all ranks are on one host, and
// under srun, where it is the first host of SLURM_[STEP_]NODELIST. MASTER_PORT is 29500 unless set; under srun a port made of
// SLURM_JOB_ID and SLURM_STEP_ID, so that two jobs of a host have different ones; under torchrun the one after MASTER_PORT where
// its own agent listens on that (TORCHELASTIC_USE_AGENT_STORE=True).
#include <string>

namespace speedrun {

struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;   // among the ranks of this host: which GPU it takes
  int local_size = 1;   // ranks of this host
  std::string address;  // where rank 0 listens; empty with one rank
  int port = 0;
  bool launched_here = false;  // by `--gpus N` of this program, which waits for the ranks and ends what is left of them
};

// Of this process, from the environment; {} where nothing says otherwise (the shell of an salloc and the script of an sbatch are
// one rank: only srun's tasks are several). Throws InputError naming the variable for one that is missing beside the others, is no
// number, or contradicts (RANK >= WORLD_SIZE).
World world_from_environment();

}  // namespace speedrun

#!/usr/bin/env python3
"""Training with several ranks, by the executable as a user runs it: CPU processes of one host in the place of GPUs.

    ranks_test.py PATH_OF_SPEEDRUN [arguments of unittest]

Whatever the number of ranks, a run is to make the same steps, its checkpoints are to be resumed by any other number, and no failure
of one rank is to leave another one behind. The models are as small as their features allow, so that a run takes a second.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import shutil
import signal
import sys
import time
import unittest

import ranks_runs
from ranks_runs import LIMIT_S, PATIENCE, Ranks, STEPS, free_port, left_in_shared_memory, sets


class RanksEqualityTest(Ranks):
    """The same training on any number of ranks."""

    # Sums over tokens are made in another order. A gradient that is nothing but rounding has a random sign, and so has Adam's
    # update of such an element; a share of a tensor that is not updated or not passed on would be wrong by its whole size.
    NUMBERS, STATE = 1e-5, 0.02

    def assert_written_once(self, run, ranks, steps, text):
        self.assertEqual([line["step"] for line in self.lines(run) if "loss" in line], list(range(steps)))
        self.assertEqual((run / "log.txt").read_text(encoding="utf-8"), text)
        self.assertEqual(text.count("validation loss"), 1 + (steps + 4) // 5)
        self.assertEqual(len(self.checkpoints(run)), steps)
        result = self.result(run)
        self.assertEqual((result["outcome"], result["steps"], result["machine"]["ranks"]), ("finished", steps, ranks))
        self.assertEqual(result["val_loss"], self.numbers(run)[steps, "val_loss"])

    def assert_same_training(self, config, steps):
        runs = {}
        for ranks in (1, 2, 4, 8):
            runs[ranks] = self.folder / "runs" / f"{ranks}"
            text, error = self.speedrun("train", config, "--gpus", ranks, "--set", f"run.name={ranks}")
            self.assertEqual(error, "")
            self.assert_written_once(runs[ranks], ranks, steps, text)
        self.assertEqual(sorted(path.name for path in (self.folder / "runs").iterdir()), ["1", "2", "4", "8"])
        alone = self.numbers(runs[1])
        for ranks in (2, 4, 8):
            # Of the first step even the weights are the same to the bit.
            self.assertAlmostEqual(self.numbers(runs[ranks])[0, "loss"], alone[0, "loss"], delta=1e-6 * alone[0, "loss"])
            self.assert_same_numbers(runs[ranks], runs[1], self.NUMBERS)
            for step in (1, 2, 7, 8, steps):
                self.assert_same_state(runs[ranks], runs[1], step, self.STATE)
        for ranks in (2, 4):
            again = self.train(ranks, f"{ranks} again", config=config)
            self.assert_same_numbers(again, runs[ranks], 0)
            for step in (3, steps):
                self.assert_same_state(again, runs[ranks], step, 0)

    def test_main_track(self):
        self.assert_same_training("main_track.json", STEPS)

    def test_gpt2(self):
        self.assert_same_training("gpt2.json", 10)

    def test_touched_rows_alone_make_the_same_sum(self):
        told = "touched rows alone"
        for ranks in (2, 8):
            sparse, dense = (self.train(ranks, f"{ranks} {tables}", f"dist.sparse_tables={tables}") for tables in ("true", "false"))
            self.assertIn(told, (sparse / "log.txt").read_text(encoding="utf-8"))
            self.assertNotIn(told, (dense / "log.txt").read_text(encoding="utf-8"))
            self.assert_same_numbers(sparse, dense, self.NUMBERS)
            self.assert_same_state(sparse, dense, STEPS, self.STATE)

    def test_fp8_scales_are_those_of_all_ranks(self):
        # "Delayed" scales come from maxima over the whole step.
        fp8 = ["fp8.mlp_up=fp8", "fp8.mlp_up_scaling=delayed", "fp8.mlp_down=fp8", "fp8.head=fp8", "fp8.down_weight_exact_steps=4"]
        alone = self.train(1, "1", *fp8)
        for ranks in (2, 8):
            run = self.train(ranks, f"{ranks}", *fp8)
            # A value that rounding moves over the border between two FP8 numbers moves by a sixteenth.
            self.assert_same_numbers(run, alone, 0.01)
            for step in (1, 2, 4):  # later runs part, by such values
                found, wanted = self.checkpoint(run, step), self.checkpoint(alone, step)
                self.assertGreater(len(set(wanted.fp8_scales)), 4)
                for scale, expected in zip(found.fp8_scales, wanted.fp8_scales):
                    self.assertLessEqual(abs(scale - expected), 1e-4 * expected, f"{ranks} ranks, step {step}")
            again = self.copy_of(run, f"{ranks} again", 4)
            self.resume(ranks, again)
            self.assert_same_numbers(again, run, 0)


class RanksResumeTest(Ranks):
    """A run goes on from a checkpoint that another number of ranks has written."""

    def assert_resumes(self, before, after, step, whole, tolerance):
        name = f"{before} to {after} at {step}"
        run = self.copy_of(whole, name, step)
        self.resume(after, run)
        self.assert_same_numbers(run, whole, tolerance)
        self.assertEqual(self.result(run)["machine"]["ranks"], after)
        last = self.result(whole)["steps"]
        self.assert_same_state(run, whole, last, 0 if tolerance == 0 else RanksEqualityTest.STATE)

    def assert_resumes_between_all(self, config, steps):
        """steps: of the checkpoints, and how close a run on as many ranks as before comes."""
        whole = {ranks: self.train(ranks, f"{ranks}", config=config) for ranks in (1, 2, 4)}
        for before, after in ((1, 2), (2, 1), (4, 2), (2, 8)):
            for step in steps:
                self.assert_resumes(before, after, step, whole[before], 1e-5)
        for step, tolerance in steps.items():
            self.assert_resumes(2, 2, step, whole[2], tolerance)
        # What has been written is a model like any other.
        last = self.result(whole[4])["steps"]
        text, error = self.speedrun("eval", whole[4])
        found = re.search(rf"^validation loss (\d+\.\d+) on \d+ tokens after {last} steps$", text, re.MULTILINE)
        self.assertEqual((error, bool(found)), ("", True), text)
        self.assertAlmostEqual(float(found[1]), self.result(whole[4])["val_loss"], delta=1e-4)

    def test_main_track(self):
        # After an odd number of steps gradients are pending, which are one sum in a checkpoint and one for each rank in a run: they
        # are added up in another order. Embedding and head part in step 7: a checkpoint just before it, just after it, later.
        self.assert_resumes_between_all("main_track.json", {3: 1e-6, 7: 1e-6, 8: 0})

    def test_gpt2(self):
        self.assert_resumes_between_all("gpt2.json", {4: 0, 7: 0})

    def test_pending_gradients_are_in_the_checkpoint(self):
        # What the test above rests on.
        run = self.train(2, "pending")
        for step, pending in ((3, True), (4, False)):
            values = self.checkpoint(run, step).values
            self.assertEqual(any(values["grad/lambda.resid"]), pending, step)
            self.assertEqual(any(values["grad/bigram.table"]), pending, step)

    def test_other_rows_are_refused_on_any_number_of_ranks(self):
        run = self.train(2, "whole", config="gpt2.json")
        error = self.speedrun("train", "--resume", run, "--gpus", 4, "--set", "train.batch_tokens=512", code=2)[1]
        self.assert_one_cause(error, None)  # every rank finds it; whichever was first
        self.assertIn("train.batch_tokens", error)


class RanksFailureTest(Ranks):
    """Failures of one rank on order, everywhere in a run: all end, one line says why, and the run can be resumed."""

    RANKS = 4
    PLACES = {"init": 0, "step": 6, "validation": 0, "checkpoint": 0}

    def in_parallel(self, check, cases):
        """Most of a case is waiting. A failed one does not keep the others from running."""
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            results = [(case, pool.submit(check, *case)) for case in cases]
            for case, result in results:
                with self.subTest(case=":".join(map(str, case))):
                    result.result()

    def end_with_fault(self, name, rank, place, kind):
        """A run that goes on from step 4 and fails at its start, in step 6, the validation after 5 or the checkpoint after 8."""
        run = self.copy_of(self.whole, name, 4)
        (run / "checkpoints" / "step_000008.ckpt.tmp").write_bytes(b"speedrun ckpt 1")  # of a write that was interrupted
        fault = {"SPEEDRUN_FAULT": f"{rank}:{place}:{self.PLACES[place]}:{kind}"}
        # Only a thread that hangs needs the limit, which a loaded machine could exceed.
        limit = ["--set", f"dist.progress_s={3 * PATIENCE}"] if kind == "hang" else []
        return run, *self.end(self.start("train", "--resume", run, "--gpus", self.RANKS, *limit, environment=fault))

    def check_failure(self, rank, place, kind):
        run, code, output, error = self.end_with_fault(f"{rank} {place} {kind}", rank, place, kind)
        self.assertNotEqual(code, 0, output)
        if kind in ("exit", "throw", "memory", "hang"):
            self.assertEqual(code, 1, error)
        self.assert_one_cause(error, rank)
        if kind == "throw":
            self.assertIn(f"thrown at {place}", error)
        for name in self.checkpoints(run):
            if name.endswith(".ckpt"):
                self.speedrun("eval", run / "checkpoints" / name)
        self.resume(2, run, "dist.progress_s=0")
        self.assert_same_numbers(run, self.whole, 1e-5)
        self.assertEqual([name for name in self.checkpoints(run) if not name.endswith(".ckpt")], [])
        shutil.rmtree(run)

    def check_all(self, *kinds):
        self.whole = self.train(self.RANKS, "whole", "checkpoint.every=4")
        ranks = {"init": (0, 3), "step": (0, 2), "validation": (0, 3), "checkpoint": (0, 2)}
        cases = [(rank, place, kind) for kind in kinds for place in self.PLACES for rank in ranks[place]]
        self.in_parallel(self.check_failure, cases)

    def test_killed(self):
        self.check_all("kill")

    def test_stopped(self):
        self.check_all("stop")

    def test_ended_without_a_word(self):
        self.check_all("exit")

    def test_thrown(self):
        self.check_all("throw", "memory")

    def test_hanging(self):
        self.check_all("hang")


class RanksSignalTest(Ranks):
    """Signals from outside, to one rank, to all, to the process that started them."""

    LONG = ["schedule.steps=5000", "eval.every=0", "checkpoint.every=3", "checkpoint.keep=2"]

    def start_long(self, name, *overrides, ranks=2):
        """A run in the midst of its steps, and the process of every rank and of the launcher (None)."""
        started = self.start("train", "gpt2.json", "--gpus", ranks, *sets([f"run.name={name}", *self.LONG, *overrides]))
        run = self.folder / "runs" / name
        self.wait_for(lambda: any(run.glob("checkpoints/*.ckpt")), started)
        processes = {rank: process for process, rank in started.processes().items()}
        self.assertEqual(set(processes), {None, *range(ranks)})
        return started, run, processes

    @staticmethod
    def send(signal_number, processes):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # ended with the one before
                os.kill(process, signal_number)

    def wait_for(self, condition, started):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            self.assertIsNone(started.process.poll(), "the run ended by itself")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.005)

    def assert_goes_on(self, run, done, ranks=2):
        """Resuming makes the bits of a run that nothing happened to."""
        steps = f"schedule.steps={done + 4}"
        output, _ = self.speedrun("train", "--resume", run, "--gpus", ranks, "--set", steps)
        self.assertIn(f"after {done} steps", output)
        whole = self.train(ranks, f"{run.name} whole", *self.LONG, "checkpoint.every=0", steps, config="gpt2.json")
        self.assert_same_numbers(run, whole, 0)
        self.assert_same_state(run, whole, done + 4, 0)
        self.assertEqual([name for name in self.checkpoints(run) if not name.endswith(".ckpt")], [])

    def newest(self, run):
        return max(int(name[5:11]) for name in self.checkpoints(run) if name.endswith(".ckpt"))

    def assert_ends(self, signal_number, *receivers, rank, ranks=2):
        """After the signal to ranks (None: the launcher) all end with a failure. rank: the one that is named; None: whichever."""
        name = f"{signal_number.name} to {receivers}"
        with self.subTest(name):
            started, run, processes = self.start_long(name, ranks=ranks)
            self.send(signal_number, [processes[receiver] for receiver in receivers])
            code, _, error = self.end(started)
            self.assertNotEqual(code, 0)
            if None in receivers:
                self.assertEqual(error, "")
            elif error or signal_number != signal.SIGKILL or len(receivers) < ranks:
                self.assert_one_cause(error, rank)
            # Else the rank that was about to say so has been killed too.
            self.assert_goes_on(run, self.newest(run), ranks)

    def test_kill(self):
        self.assert_ends(signal.SIGKILL, 0, rank=0)
        self.assert_ends(signal.SIGKILL, 2, rank=2, ranks=4)
        self.assert_ends(signal.SIGKILL, 0, 1, rank=None)
        self.assert_ends(signal.SIGKILL, None, rank=None)

    def test_stop(self):
        self.assert_ends(signal.SIGSTOP, 0, rank=0)
        self.assert_ends(signal.SIGSTOP, 2, rank=2, ranks=4)

    def test_stop_of_all_ranks(self):
        self.assert_ends(signal.SIGSTOP, 0, 1, rank=None)

    def assert_stops(self, signal_number, *receivers, ranks=2):
        """All ranks end after the same step, which is saved."""
        name = f"{signal_number.name} to {receivers}"
        with self.subTest(name):
            started, run, processes = self.start_long(name, ranks=ranks)
            self.send(signal_number, [processes[receiver] for receiver in receivers])
            code, output, error = self.end(started)
            self.assertEqual((code, error), (128 + signal_number, ""), output)
            result = self.result(run)
            self.assertEqual(result["outcome"], signal_number.name)
            self.assertEqual(len(self.lines(run)), result["steps"] + 1)  # and the first validation
            self.assertEqual(self.newest(run), result["steps"])
            self.assert_goes_on(run, result["steps"], ranks)

    def test_termination(self):
        self.assert_stops(signal.SIGTERM, 0)
        self.assert_stops(signal.SIGTERM, 3, ranks=4)
        self.assert_stops(signal.SIGTERM, None)
        self.assert_stops(signal.SIGTERM, None, 0, 1)  # as to a process group
        self.assert_stops(signal.SIGINT, None, 0, 1)  # Ctrl-C

    def test_termination_on_order(self):
        # In every phase but a step. After an odd number of steps of the Main Track its checkpoint has gradients that are pending.
        for place in ("init", "validation", "checkpoint"):
            with self.subTest(place):
                environment = {"SPEEDRUN_FAULT": f"1:{place}:0:term"}
                run = self.train(2, place, *self.LONG, config="gpt2.json", code=143, environment=environment)
                self.assert_goes_on(run, self.newest(run))
        with self.subTest("step"):
            whole = self.train(2, "whole")
            run = self.train(2, "stopped", code=143, environment={"SPEEDRUN_FAULT": "1:step:0:term"})
            self.assertLess(self.newest(run), STEPS)
            self.resume(4, run)
            self.assert_same_numbers(run, whole, 1e-5)

    def test_a_pause_of_all_is_no_failure(self):
        # As a batch system suspends a job, for a little longer than the watchdog's limit. The launcher stops last and wakes first.
        started, run, processes = self.start_long("pause")
        for signal_number, receivers, pause_s in ((signal.SIGSTOP, (0, 1, None), 2.5), (signal.SIGCONT, (None, 0, 1), 0.5)):
            for receiver in receivers:
                self.send(signal_number, [processes[receiver]])
                time.sleep(0.02)
            time.sleep(pause_s)
        os.kill(processes[None], signal.SIGTERM)
        code, output, error = self.end(started)
        self.assertEqual((code, error), (143, ""), output)
        self.assert_goes_on(run, self.newest(run))

    def test_ranks_end_without_their_launcher(self):
        started, run, processes = self.start_long("launcher stopped", "schedule.steps=500")
        os.kill(processes[None], signal.SIGSTOP)
        self.wait_for(lambda: set(started.processes().values()) == {None}, started)
        os.kill(processes[None], signal.SIGCONT)
        self.assertEqual(self.end(started)[0], 0)
        self.assertEqual(self.result(run)["steps"], 500)

    def test_non_finite(self):
        for config, overrides in {
                "gpt2.json": ["optim.matrix.lr=1e30", "optim.embedding.lr=1e30"],
                "main_track.json": ["optim.matrix.lr=1e30", "optim.embedding.lr=1e30"],
        }.items():
            with self.subTest(config):
                error = self.speedrun("train", config, "--gpus", 4, *sets(["run.name=huge", *overrides]), code=3)[1]
                self.assert_one_cause(error, None)
                self.assertIn("not finite", error)
                shutil.rmtree(self.folder / "runs" / "huge")


class RanksStartTest(Ranks):
    """How ranks are started: by --gpus, by another launcher, wrongly, many times."""

    SHORT = ["schedule.steps=2", "eval.every=0", "eval.tokens=32", "eval.at_start=false", "checkpoint.at_end=false"]

    def refused(self, *arguments, names, environment=()):
        error = self.speedrun("train", "gpt2.json", *arguments, code=2, environment=environment)[1]
        self.assertRegex(error, r"\Aspeedrun: [^\n]*\n\Z")
        for name in names:
            self.assertIn(name, error)
        self.assertFalse((self.folder / "runs").exists())

    def test_numbers_of_ranks_that_make_no_sense(self):
        self.refused("--gpus", 3, names=["3 ranks", "8 rows", "divisor of 8"])
        self.refused("--gpus", 16, names=["16 ranks", "8 rows", "divisor of 8"])
        for number in (0, -1):
            self.refused(f"--gpus={number}", names=["--gpus", str(number)])
        self.refused("--gpus", "two", names=["two"])
        self.refused("--gpus", 2, "--dump-grads", "g.safetensors", names=["--dump-grads"])
        self.refused("--gpus", 2, "--resume", "absent", names=["--resume"])
        # Found by the ranks themselves.
        self.refused("--gpus", 2, "--set", "data.train=absent.bin", names=["absent.bin"])
        self.refused("--gpus", 2, environment={"SPEEDRUN_FAULT": "1:stop:3:kill"}, names=["SPEEDRUN_FAULT", "stop"])

    def test_environments_that_make_no_sense(self):
        whole = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        self.refused("--gpus", 4, environment=whole, names=["--gpus 4", "2 ranks"])
        self.refused(environment={"RANK": "0"}, names=["RANK", "WORLD_SIZE"])
        self.refused(environment={"WORLD_SIZE": "2"}, names=["RANK", "WORLD_SIZE"])
        self.refused(environment={"RANK": "2", "WORLD_SIZE": "2"}, names=["RANK=2", "WORLD_SIZE=2"])
        self.refused(environment={"RANK": "zero", "WORLD_SIZE": "2"}, names=["RANK", "zero"])
        self.refused(environment={"RANK": "0", "WORLD_SIZE": "3"}, names=["3 ranks", "divisor of 8"])
        self.refused(environment={**whole, "MASTER_PORT": "70000"}, names=["MASTER_PORT", "70000"])

    def test_what_trains_nothing(self):
        text, error = self.speedrun("train", "gpt2.json", "--gpus", 2, "--dry-run")
        self.assertEqual((text.count("dry run"), error), (1, ""))
        self.assertEqual(self.speedrun("train", "gpt2.json", "--gpus", 2, "--print-config"),
                         self.speedrun("train", "gpt2.json", "--print-config"))
        self.assertFalse((self.folder / "runs").exists())

    # ------------------------------------------------------------ other launchers

    def by_hand(self, name, environments, *overrides):
        """One process for each environment, as another launcher starts them. Returns their codes, outputs, errors."""
        port = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        started = [self.start("train", "gpt2.json", *sets([f"run.name={name}", *overrides]), environment={**port, **environment})
                   for environment in environments]
        return list(zip(*(self.end(each) for each in started)))

    def test_other_launchers(self):
        whole = self.train(2, "whole", config="gpt2.json")
        launchers = {
            "hand": lambda rank: {"RANK": rank, "WORLD_SIZE": 2},
            "torchrun": lambda rank: {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2},
            "mpirun": lambda rank: {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
                                    "OMPI_COMM_WORLD_LOCAL_SIZE": 2},
            "srun": lambda rank: {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
                                  "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2},
        }
        for name, environment in launchers.items():
            with self.subTest(name):
                ranks = [{key: str(value) for key, value in environment(rank).items()} for rank in (1, 0)]
                codes, outputs, errors = self.by_hand(name, ranks)
                self.assertEqual((codes, errors), ((0, 0), ("", "")), outputs)
                self.assertEqual(outputs[0], "")  # rank 1's
                run = self.folder / "runs" / name
                self.assertEqual(outputs[1], (run / "log.txt").read_text(encoding="utf-8"))
                self.assert_same_numbers(run, whole, 0)

    def test_failures_under_other_launchers(self):
        for fault, cause in {"1:step:3:kill": 1, "0:step:3:kill": 0, "1:step:3:throw": 1, "0:validation:0:stop": 0}.items():
            with self.subTest(fault):
                ranks = [{"RANK": str(rank), "WORLD_SIZE": "4", "SPEEDRUN_FAULT": fault} for rank in range(4)]
                codes, _, errors = self.by_hand("failure", ranks)
                self.assertNotIn(0, codes)
                self.assert_one_cause("".join(errors), cause)

    def test_ranks_that_do_not_come(self):
        codes, _, errors = self.by_hand("alone", [{"RANK": "0", "WORLD_SIZE": "4"}, {"RANK": "2", "WORLD_SIZE": "4"}],
                                        "dist.connect_s=1")
        self.assertNotIn(0, codes)
        told = "".join(errors)
        self.assertRegex(told, r"speedrun: .*ranks 1, 3\b")
        self.assertFalse((self.folder / "runs").exists())

    # ------------------------------------------------------------ again and again

    def test_fifty_starts_in_a_row(self):
        first = None
        for cycle in range(50):
            run = self.train(2, f"{cycle}", *self.SHORT, config="gpt2.json")
            first = first or run
            self.assert_same_numbers(run, first, 0)
        self.assertEqual(left_in_shared_memory() - self.shared_memory, set())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    ranks_runs.SPEEDRUN = pathlib.Path(sys.argv[1]).resolve()
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)

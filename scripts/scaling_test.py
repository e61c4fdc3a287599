#!/usr/bin/env python3
"""Tests of scaling_run.py, scaling_report.py and communication_model.py, in some seconds, without `speedrun`.
Run: python3 scripts/scaling_test.py"""

import argparse
import array
import json
import os
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import communication_model as model  # noqa: E402
import scaling_report as report  # noqa: E402
import scaling_run  # noqa: E402
from script_case import Folder  # noqa: E402

CONFIG = {"schedule": {"steps": 0, "stages": {"0": {"steps": 8, "batch_tokens": 1000}, "1": {"steps": 0, "batch_tokens": 1},
                                              "2": {"steps": 8, "batch_tokens": 3000}}}}  # fmt: skip


class ReportTest(Folder):
    def add_run(self, name, step_s, loss=5.0, norm=1.0, outcome="finished", config=CONFIG):
        """Steps of stage 2 take three times as long; every second step takes half as long again."""
        folder = self.folder / name
        folder.mkdir()
        clock, lines = 0.0, []
        for step in range(16):
            clock += step_s * (1 if step < 8 else 3) * (1 if step % 2 == 0 else 1.5)
            lines.append({"step": step, "loss": loss - 0.1 * step, "grad_norm": norm, "clock_s": clock})
        lines.append({"step": 16, "val_loss": 3.0, "clock_s": clock})
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        result = {"outcome": outcome, "joules_per_token": 1e-3, "clock_s": clock, "val_loss": 3.0, "tokens_per_s": 1.0}
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
        (self.folder / f"{name}.log").write_text("", encoding="utf-8")

    def made(self, mode="gpus"):
        made = report.Report(self.folder, mode)
        return made.make(), made.faults

    def test_speed_by_stage(self):
        self.add_run("stages_1", 0.2)
        self.add_run("stages_2", 0.1)
        text, faults = self.made()
        self.assertEqual(faults, [])
        # The mean of a step and one half as long again.
        self.assertIn("| 1 | 1 | 1,000 | 250.0 | 4,000 | 1.00× | 1.000 |", text)
        self.assertIn("| 2 | 2 | 3,000 | 375.0 | 8,000 | 2.00× | – |", text)

    def test_losses_that_differ_are_a_fault(self):
        self.add_run("stages_1", 0.2)
        self.add_run("stages_2", 0.1, loss=5.2)
        _, faults = self.made()
        self.assertTrue(any("losses of 2 and 1" in fault for fault in faults), faults)

    def test_gradient_norms_of_the_first_step_that_differ_are_a_fault(self):
        self.add_run("stages_1", 0.2)
        self.add_run("stages_2", 0.1, norm=1.1)
        self.assertNotEqual(self.made()[1], [])

    def test_a_run_that_did_not_finish_is_a_fault(self):
        self.add_run("full_1", 0.2, outcome="SIGTERM")
        (self.folder / "full_2.log").write_text("speedrun: no\n", encoding="utf-8")
        self.assertEqual(len(self.made()[1]), 2)

    def test_uncovered_communication_of_the_worst_rank(self):
        def window(rank, uncovered, steps=2, first=4):
            return {"rank": rank, "first_step": first, "steps": steps, "stage": 2, "step_ms": 100.0, "compute_ms": 90.0,
                    "communication_ms": 10.0, "uncovered_communication_ms": uncovered, "copies_alone_ms": 0.0,
                    "idle_ms": 1.0}  # fmt: skip

        windows = [window(0, 1.0), window(1, 2.0), window(1, 8.0, steps=4, first=9)]
        (self.folder / "timeline_2.json").write_text(json.dumps({"otherData": {"windows": windows}, "traceEvents": []}))
        text, faults = self.made()
        self.assertIn("| 2 | 3 | 100.0 | 90.0 | 10.0 | 6.0 (6.0%) | 1.0 | **NO** |", text)
        self.assertEqual(len(faults), 1)

    def failure(self, **changes):
        told = {"seconds": 9.0, "in_time": True, "exit_code": 137, "seconds_after_failure": 2.5,
                "gpu_mib_before": 4, "gpu_mib_after": 4}  # fmt: skip
        (self.folder / "fault_kill_1.json").write_text(json.dumps(told | changes))
        (self.folder / "fault_kill_1.log").write_text("step 1\nspeedrun: rank 1: killed\n")
        return self.made()

    def test_failures(self):
        text, faults = self.failure()
        self.assertIn("| kill -9 of rank 1 | 2.5 | 137 | rank 1: killed | 4; 4 | yes |", text)
        self.assertEqual(faults, [])
        for changes in ({"exit_code": 0}, {"seconds_after_failure": 31}, {"seconds_after_failure": None}, {"in_time": False},
                        {"gpu_mib_after": 900}, {"gpu_mib_after": None}):  # fmt: skip
            self.assertEqual(len(self.failure(**changes)[1]), 1, changes)

    def test_cycles(self):
        for i, code in enumerate((0, 0, 1)):
            told = {"exit_code": code, "in_time": True, "seconds": 1.0, "seconds_after_failure": 0.1}
            (self.folder / f"cycle_{i}.json").write_text(json.dumps(told))
        text, faults = self.made()
        self.assertIn("| 3 | 1 | 0 | 1.0 | **NO** |", text)
        self.assertEqual(len(faults), 1)


class RunTest(Folder):
    def watch(self, code, limit=20):
        script = pathlib.Path(__file__).with_name("scaling_run.py")
        out = self.folder / "told.json"
        done = subprocess.run([sys.executable, "-B", script, "watch", out, "--limit", str(limit), "--", sys.executable, "-c", code],
                              timeout=60, check=False)  # fmt: skip
        return done.returncode, json.loads(out.read_text())

    def test_exit_code(self):
        code, told = self.watch("import sys; sys.exit(3)")
        self.assertEqual((code, told["exit_code"], told["in_time"]), (0, 3, True))
        self.assertEqual(self.watch("import os; os.kill(os.getpid(), 9)")[1]["exit_code"], 137)

    def test_counts_from_the_death_of_the_first_process(self):
        code = "import subprocess, time\np = subprocess.Popen(['sleep', '1'])\np.wait()\ntime.sleep(1.5)"
        told = self.watch(code)[1]
        self.assertGreaterEqual(told["seconds_after_failure"], 0.5)
        self.assertGreater(told["seconds"], told["seconds_after_failure"])

    def test_a_stopped_process_is_a_failure_and_is_ended_after_the_limit(self):
        code, told = self.watch("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", limit=5)
        self.assertEqual((code, told["in_time"], told["exit_code"]), (1, False, 137))
        self.assertIsNotNone(told["seconds_after_failure"])

    def test_shards(self):
        scaling_run.make_shard(self.folder / "a.bin", 30000, 500, 1)
        data = (self.folder / "a.bin").read_bytes()
        header, ids = array.array("i", data[:1024]), array.array("H", data[1024:])
        self.assertEqual(list(header[:4]), [20240520, 1, 30000, 0])
        self.assertEqual((len(ids), ids[0], max(ids)), (30000, 499, 499))
        self.assertTrue(10 < ids.count(499) < 200)
        scaling_run.make_shard(self.folder / "b.bin", 30000, 500, 2)
        self.assertNotEqual(data, (self.folder / "b.bin").read_bytes())


class ModelTest(unittest.TestCase):
    ARGS = argparse.Namespace(step_ms=[189, 384, 587], fixed_ms=1.2, attention_share=0.15, overlap_cost=0.1)

    def machine(self, gpus, hosts=1, two_levels=True):
        return model.Machine(246, 255, 0.04, 0.025, 50, gpus, hosts, two_levels)

    def test_bytes_of_the_record(self):
        self.assertEqual(model.matrix_elements(1), 75497472)
        # Without the fixed signs and the small ones: all of the model's 642.2 M parameters.
        self.assertAlmostEqual((model.matrix_elements(1) + model.table_elements(2)[0]) / 1e6, 635.7, places=1)

    def test_formulas(self):
        self.assertAlmostEqual(self.machine(2).ms(246e6, 246), 0.5)
        self.assertAlmostEqual(self.machine(8, 2, False).ms(50e6, 246), 15 / 16)
        self.assertAlmostEqual(self.machine(8, 2).ms(50e6, 246), 50 * 7 / 8 / 246 + 0.5)

    def test_one_gpu_is_what_was_measured(self):
        for stage, ms in enumerate(self.ARGS.step_ms):
            step = model.step(self.machine(1), model.Wire(), stage, self.ARGS)
            self.assertAlmostEqual(step.compute, ms)

    def test_fewer_bytes_are_never_slower(self):
        for hosts in (1, 2, 16):
            plain = model.step(self.machine(8, hosts), model.Wire(), 2, self.ARGS)
            less = model.step(self.machine(8, hosts), model.Wire(2, True, 4), 2, self.ARGS)
            self.assertLess(less.mean, plain.mean)
            self.assertLessEqual(plain.uncovered, plain.mean)


if __name__ == "__main__":
    unittest.main()

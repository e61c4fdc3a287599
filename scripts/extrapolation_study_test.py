#!/usr/bin/env python3
"""Tests of extrapolation_study.py and what it consists of. Run: python3 scripts/extrapolation_study_test.py [SPEEDRUN]
Without the executable: in some seconds, with a stand-in for it. With it: a whole study of a tiny model on the CPU, too."""

import contextlib
import csv
import io
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import extrapolation_report as report  # noqa: E402
import extrapolation_study as study  # noqa: E402
import t_tests as stats  # noqa: E402
from script_case import Folder, executable_argument  # noqa: E402

BINARY = None
HERE = pathlib.Path(__file__).resolve().parent

# Stands in for `speedrun train`: losses follow from seed and method, and every start is written down. STUB_FAIL, STUB_DIFFER: part of
# a run's name.
STUB = r'''import json, os, pathlib, sys
words = sys.argv[1:]
assert words[0] == "train"
keys = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set")
if words[1] == "--from":
    before = json.loads(pathlib.Path(words[2]).read_text())
    done, keys = before["done"], before["keys"] | keys
else:
    done = 0
steps = int(int(keys.get("schedule.steps", 40)) * float(keys.get("schedule.scale", 1)) + 0.5)
if "--print-config" in words:
    print(json.dumps({"schedule": {"steps": int(keys.get("schedule.steps", 40)), "scale": float(keys.get("schedule.scale", 1))},
                      "train": {"batch_tokens": 512, "micro_batch_tokens": 0,
                                "device": keys.get("train.device")}, "run": {"name": keys.get("run.name", "")}}))
    sys.exit()
name, folder = keys["run.name"], pathlib.Path(keys["run.dir"]) / keys["run.name"]
with open(pathlib.Path(keys["run.dir"]) / "starts.txt", "a") as file:
    file.write(name + "\n")
if os.environ.get("STUB_FAIL", "nothing") in name:
    sys.exit("speedrun: no luck with " + name)
(folder / "checkpoints").mkdir(parents=True)
seed, method = int(keys.get("train.seed", 1)), keys.get("extrapolation.method", "none")
noise = (seed * 7919 % 101) / 1010
own = (seed * (3 + len(method)) % 7 - 3) * 1e-5
raw = 4 + noise - (steps - 40) * 1e-3
gain = {"rre": 0.01, "rre_suffix": -0.01, "average": 0.0}.get(method, 0) * float(keys.get("extrapolation.damping", 1))
loss = raw if method == "none" else raw - gain + own
if os.environ.get("STUB_DIFFER", "nothing") in name:
    loss, raw = loss + 1, raw + 1
every = int(keys.get("checkpoint.every", 0))
lines = []
for step in range(done, steps):
    lines.append({"step": step, "loss": 5.0, "clock_s": 0.1 * (step + 1)})
    at = step + 1
    if every and at % every == 0 and at < steps:
        (folder / "checkpoints" / f"step_{at:06d}.ckpt").write_text(json.dumps({"done": at, "keys": keys}))
        lines.append({"step": at, "val_loss": raw + 0.01 * (steps - at), "clock_s": 0.1 * at})
lines.append({"step": steps, "val_loss": loss, "clock_s": 0.1 * steps})
(folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
result = {"outcome": "finished", "val_loss": loss, "steps": steps, "build": {"executable_hash": "1"}}
if keys.get("extrapolation.apply") == "readout":
    result["val_loss_raw"] = raw
(folder / "result.json").write_text(json.dumps(result))
'''


class StatisticsTest(unittest.TestCase):
    def test_student_t_beside_tables(self):
        # Two-sided 95% and 99% points as every textbook prints them.
        for freedom, p, t in ((1, 0.975, 12.7062), (2, 0.975, 4.30265), (7, 0.975, 2.36462), (7, 0.995, 3.49948),
                              (30, 0.975, 2.04227), (1000, 0.975, 1.96234)):  # fmt: skip
            self.assertAlmostEqual(stats.t_quantile(p, freedom), t, delta=1e-5 * t)
            self.assertAlmostEqual(stats.t_cdf(t, freedom), p, delta=1e-6)
            self.assertAlmostEqual(stats.t_cdf(-t, freedom), 1 - p, delta=1e-6)
            self.assertAlmostEqual(stats.t_quantile(1 - p, freedom), -t, delta=1e-5 * t)

    def test_student_t_in_closed_form(self):
        # One degree of freedom is Cauchy's distribution, two have an algebraic one.
        for t in (-50.0, -1.0, 0.0, 0.3, 7.0):
            self.assertAlmostEqual(stats.t_cdf(t, 1), 0.5 + math.atan(t) / math.pi, delta=1e-13)
            self.assertAlmostEqual(stats.t_cdf(t, 2), 0.5 + t / (2 * math.sqrt(2 + t * t)), delta=1e-13)

    def test_incomplete_beta(self):
        for x in (0.0, 0.1, 0.5, 0.9, 1.0):
            self.assertAlmostEqual(stats.incomplete_beta(1, 1, x), x, delta=1e-14)
            self.assertAlmostEqual(stats.incomplete_beta(2, 3, x), x * x * (6 - 8 * x + 3 * x * x), delta=1e-14)

    def test_paired(self):
        # t = 2.5 / (sd 1.29099 / 2) = 3.87298, 3 degrees of freedom: p = 0.0304662
        found = stats.paired([1.0, 2.0, 3.0, 4.0])
        self.assertAlmostEqual(found.mean, 2.5)
        self.assertAlmostEqual(found.p, 0.0304662, delta=1e-6)
        self.assertAlmostEqual(found.low, 2.5 - 3.182446 * 0.645497, delta=1e-5)
        self.assertAlmostEqual(found.high, 2.5 + 3.182446 * 0.645497, delta=1e-5)

    def test_paired_without_spread(self):
        self.assertIsNone(stats.paired([]))
        self.assertIsNone(stats.paired([0.5]).p)
        self.assertEqual((stats.paired([0.0, 0.0]).p, stats.paired([0.5, 0.5]).p), (1.0, 0.0))

    def test_holm(self):
        adjusted = stats.holm([0.04, 0.001, None, 0.03])
        self.assertEqual([None if p is None else round(p, 6) for p in adjusted], [0.06, 0.003, None, 0.06])
        self.assertEqual(stats.holm([0.9, 0.8]), [1.0, 1.0])

    def test_verdicts(self):
        # Of a difference of losses: below zero is a gain.
        self.assertEqual(report.verdict(stats.Paired(8, -0.01, 0.001, -0.011, -0.009, 1e-6), 1e-5), "**helps**")
        self.assertEqual(report.verdict(stats.Paired(8, 0.01, 0.001, 0.009, 0.011, 1e-6), 1e-5), "**hurts**")
        self.assertEqual(report.verdict(stats.Paired(8, 0.01, 0.01, 0.001, 0.019, 0.02), 0.1), "does not help")
        self.assertEqual(report.verdict(stats.Paired(8, -0.01, 0.02, -0.03, 0.01, 0.2), 1.0),
                         "undecided; no gain beyond 0.03000 (95%)")  # fmt: skip
        self.assertEqual(report.verdict(stats.paired([0.0] * 8), 1.0), "no difference")
        self.assertIn("too few", report.verdict(stats.paired([0.1]), None))


class JumpsTest(unittest.TestCase):
    def test_jumps_of_the_record(self):
        # From update 406 to 460, every 5, with 4 snapshots: 410, 415, …, 460.
        self.assertEqual(study.jumps({"method": "rre_suffix", "every": 5, "history": 4}, 405, 460), 11)

    def test_snapshots_that_are_apart(self):
        setting = {"method": "rre", "every": 20, "snapshot_every": 5, "history": 4}
        self.assertEqual(study.jumps(setting, 405, 460), 2)  # 440 and 460: at 420 there are only 3

    def test_a_read_out_counts_at_the_end_alone(self):
        setting = {"method": "rre", "every": 5, "history": 4, "apply": "readout"}
        self.assertEqual(study.jumps(setting, 405, 460), 1)
        self.assertEqual(study.jumps(setting, 405, 462), 0)
        self.assertEqual(study.jumps(setting | {"start": 53}, 405, 460), 0)

    def test_every_setting_of_the_grids_does_something(self):
        for track, steps in (("small", 460), ("main", 128), ("tiny", 40)):
            branch = steps - int(study.TRACKS[track].tail * steps + 0.5)
            for method, settings in study.TRACKS[track].grid.items():
                labels = {study.slug(method, setting) for setting in settings}
                self.assertEqual(len(labels), len(settings))
                for setting in settings:
                    if method != "control":
                        self.assertGreater(study.jumps(setting | {"method": method}, branch, steps), 0, (track, method, setting))

    def test_seconds_of_a_tail(self):
        lines = [{"step": s, "loss": 1.0, "clock_s": 100 + 2.0 * s} for s in range(30, 40)]
        lines.append({"step": 40, "val_loss": 1.0, "clock_s": 100 + 2.0 * 39})
        self.assertAlmostEqual(study.tail_seconds(lines, 30, 40), 20)
        self.assertIsNone(study.tail_seconds(lines[:-2], 30, 40))


class StudyFolder(Folder):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "study"


class StudyTest(StudyFolder):
    """The whole path with a stand-in for the executable."""

    GRID = {"rre": [{"every": 5, "damping": 0.5}, {"every": 5, "damping": 1}], "rre_suffix": [{"every": 5}],
            "average": [{"apply": "readout"}]}  # fmt: skip

    def setUp(self):
        super().setUp()
        self.stub = self.make_stub(STUB)
        (self.folder / "grid.json").write_text(json.dumps(self.GRID), encoding="utf-8")

    def study(self, *arguments, **environment):
        """(exit code, output)"""
        text = io.StringIO()
        os.environ.update(environment)
        try:
            with contextlib.redirect_stdout(text):
                code = study.main(["--binary", str(self.stub), "--tiny", "--device", "cpu", "--out", str(self.out), "--jobs", "2",
                                   "--seeds", "3", "--tune-seeds", "1", "--grid", str(self.folder / "grid.json"),
                                   *arguments])  # fmt: skip
        except SystemExit as end:
            code = end.code
        finally:
            for name in environment:
                del os.environ[name]
        return code, text.getvalue()

    def starts(self):
        return (self.out / "runs" / "starts.txt").read_text().split()

    def test_a_study(self):
        code, text = self.study("--jobs", "3", "--seeds", "4", "--tune-seeds", "2", "--longer", "0.5")
        self.assertEqual(code, 0, text)
        told = json.loads((self.out / "study.json").read_text())
        self.assertEqual(told["chosen"], {"rre": "every=5 damping=1", "rre_suffix": "every=5", "average": "apply=readout"})
        self.assertEqual((told["steps"], told["branch"]), (40, 30))
        # 6 baselines, 2 longer ones, 2 · 4 tails and the branch without extrapolation, 4 · 3 tails; each once.
        self.assertEqual(len(self.starts()), 6 + 2 + 9 + 12)
        self.assertEqual(len(set(self.starts())), len(self.starts()))
        self.assertRegex(text, r"\| rre \| every=5 damping=1 \| 4 \| \S+ \| -0\.0\d+ \| .* \*\*helps\*\* \|")
        self.assertRegex(text, r"\| rre_suffix \| every=5 \| 4 \| .* \*\*hurts\*\* \|")
        self.assertRegex(text, r"\| average \| apply=readout \| 4 \| .* undecided; ")
        # 20 further steps gain 0.02: 0.01 of loss is worth 10 steps.
        self.assertRegex(text, r"\| rre \| .* \| \+(9\.|10\.)\d \| 1\.00 \|")
        self.assertIn("from baselines whose whole schedule is longer (60 steps, 2 seeds)", text)
        self.assertEqual(list(self.out.glob("runs/*/checkpoints/*.ckpt")), [])
        with open(self.out / "study.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), 29)
        final = [row for row in rows if row["phase"] == "final" and row["method"] == "rre"]
        self.assertEqual([row["seed"] for row in final], ["1", "2", "3", "4"])
        for row in final:
            self.assertAlmostEqual(float(row["difference"]), float(row["val_loss"]) - float(row["baseline_val_loss"]))

    def test_what_is_made_is_not_made_again(self):
        self.study()
        before = self.starts()
        code, _ = self.study()
        self.assertEqual((code, self.starts()), (0, before))
        # More seeds join; an arm that is missing needs its seed's baseline again, whose checkpoint is gone.
        (self.out / "runs" / "seed2_rre_suffix_every5" / "result.json").unlink()
        code, _ = self.study("--seeds", "4")
        self.assertEqual(code, 0)
        new = sorted(self.starts()[len(before) :])
        self.assertEqual(new, ["seed2_baseline", "seed2_rre_suffix_every5", "seed4_average_applyreadout", "seed4_baseline",
                               "seed4_rre_every5_damping1", "seed4_rre_suffix_every5"])  # fmt: skip

    def test_parts_with_other_seeds_can_be_put_together(self):
        self.study("--seeds", "1")
        whole, self.out = self.out, self.folder / "part"
        self.study("--seeds", "2", "--first-seed", "2", "--tune-seeds", "0", "--methods", "average")
        self.assertEqual(sorted(self.starts()), ["seed2_average_applyreadout", "seed2_baseline", "seed3_average_applyreadout",
                                                 "seed3_baseline"])  # fmt: skip
        for run in self.out.glob("runs/seed*/result.json"):
            shutil.copytree(run.parent, whole / "runs" / run.parent.name)
        self.out = whole
        before = self.starts()
        code, text = self.study("--methods", "average")
        self.assertEqual((code, self.starts()), (0, before))
        self.assertRegex(text, r"\| average \| apply=readout \| 3 \|")
        self.assertEqual(self.study("--seeds", "2", "--first-seed", "1000")[0], 2)  # 1001 is a tuning seed

    def test_checkpoints_can_be_kept(self):
        self.study("--keep-checkpoints")
        self.assertEqual(len(list(self.out.glob("runs/*/checkpoints/step_000030.ckpt"))), 4)

    def test_another_config_needs_another_folder(self):
        self.study()
        self.assertIn("name another folder", str(self.study("--set", "schedule.steps=60")[0]))
        self.assertIn("name another folder", str(self.study("--tail", "0.3")[0]))

    def test_a_failed_arm_is_named_and_the_rest_goes_on(self):
        code, text = self.study("--jobs", "2", STUB_FAIL="seed3_rre_suffix")
        self.assertEqual(code, 1)
        self.assertIn("seed3_rre_suffix_every5: exit code 1: speedrun: no luck with seed3_rre_suffix_every5", text)
        self.assertRegex(text, r"\| rre_suffix \| every=5 \| 2 \|")
        self.assertRegex(text, r"\| rre \| every=5 damping=1 \| 3 \|")
        # Its checkpoint stays, so that the same command makes what is missing.
        before = self.starts()
        self.assertEqual(self.study()[0], 0)
        self.assertEqual(self.starts()[len(before) :], ["seed3_rre_suffix_every5"])

    def test_a_failed_baseline_costs_its_seed(self):
        code, text = self.study(STUB_FAIL="seed2_baseline")
        self.assertEqual(code, 1)
        self.assertIn("seed2_average_applyreadout: not made, because seed2_baseline failed", text)
        self.assertRegex(text, r"\| average \| apply=readout \| 2 \|")

    def test_a_setting_without_all_tuning_runs_is_not_taken(self):
        code, text = self.study(STUB_FAIL="seed1001_rre_every5_damping1")
        self.assertEqual(code, 1)
        self.assertEqual(json.loads((self.out / "study.json").read_text())["chosen"]["rre"], "every=5 damping=0.5")

    def test_branches_that_are_not_the_baseline_are_told(self):
        code, text = self.study(STUB_DIFFER="seed1001_none")
        self.assertEqual(code, 1)
        self.assertIn("a branch without extrapolation ended at", text)
        self.out = self.folder / "other"
        code, text = self.study(STUB_DIFFER="seed1_average")
        self.assertEqual(code, 1)
        self.assertIn("a read-out changed the training", text)

    def test_settings_that_do_nothing_are_refused(self):
        (self.folder / "grid.json").write_text(json.dumps({"rre": [{"every": 7, "apply": "readout"}]}), encoding="utf-8")
        self.assertIn("would do nothing between updates 31 and 40", str(self.study()[0]))

    def test_start_is_in_steps_before_the_scale(self):
        self.study("--set", "schedule.steps=400", "--set", "schedule.scale=0.1")
        checkpoint = self.out / "runs" / "seed1_baseline"
        self.assertTrue(checkpoint.exists())
        plan = study.Plan(self.stub, "c.json", ["schedule.steps=400", "schedule.scale=0.1"], 0.25)
        self.assertEqual((plan.steps, plan.branch), (40, 30))
        self.assertIn("extrapolation.start=310", plan.arm_sets({"method": "rre"}))
        self.assertIn("extrapolation.start=330", plan.arm_sets({"method": "rre", "start": 3}))
        self.assertEqual(plan.arm_sets({"method": "none", "optim.matrix.lr": 0.03}), ["extrapolation.method=none", "optim.matrix.lr=0.03"])

    def test_time_runs_out(self):
        code, text = self.study("--budget", "1e-6")
        self.assertEqual(code, 3)
        self.assertIn("the same command goes on", text)
        self.assertEqual(self.study()[0], 0)

    def test_jobs_on_a_gpu_need_a_fixed_micro_batch(self):
        text = subprocess.run([sys.executable, "-B", HERE / "extrapolation_study.py", "--binary", self.stub, "--tiny", "--jobs", "2",
                               "--out", self.out], capture_output=True, text=True, check=False).stderr  # fmt: skip
        self.assertIn("train.micro_batch_tokens", text)

    def test_demo(self):
        code, text = self.study("--demo", "config.json", "--tail", "0.25")
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"\| 40 \| 4\.04059 \| 4\.04937 \| \+0\.00878 \|")
        self.assertEqual(self.starts(), ["baseline", "arm_methodrre_suffix_every5_history4_damping0.875_max_jump0.001"])

    def test_tune_baseline(self):
        code, text = self.study("--tune-baseline", "schedule.steps=40,60", "--tune-baseline", "optim.matrix.lr=1")
        self.assertEqual(code, 0, text)
        rows = [line for line in text.splitlines() if line.startswith("| schedule")]
        self.assertEqual([row.split()[1] for row in rows], ["schedule.steps=60", "schedule.steps=40"])


class TinyStudyTest(StudyFolder):
    def setUp(self):
        super().setUp()
        if BINARY is None:
            self.skipTest("no executable named")

    def test_everything_on_the_cpu(self):
        done = subprocess.run([HERE / "extrapolation_study.sh", "--tiny", "--device", "cpu", "--jobs", "2", "--binary", BINARY, "--out",
                               self.out], capture_output=True, text=True, check=False)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        told = json.loads((self.out / "study.json").read_text())
        self.assertEqual((set(told["chosen"]), told["faults"]), ({"rre", "rre_suffix", "average", "control"}, []))
        final = [row for row in told["runs"] if row["phase"] == "final" and row["method"] != "baseline"]
        self.assertEqual(len(final), 8)
        for row in final:
            self.assertNotEqual(row["difference"], 0, row)
            self.assertLess(abs(row["difference"]), 1, row)
        self.assertEqual(list(self.out.glob("runs/*/checkpoints/*.ckpt")), [])


if __name__ == "__main__":
    BINARY = executable_argument()
    unittest.main()

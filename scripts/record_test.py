#!/usr/bin/env python3
"""Tests of record.py and record_report.py. Run: python3 scripts/record_test.py [SPEEDRUN]
Without the executable: in some seconds, with a stand-in for it. With it: record.sh --cpu, too."""

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
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import record  # noqa: E402
import record_report as report  # noqa: E402
import run_metrics  # noqa: E402
import t_tests  # noqa: E402
from script_case import Folder, executable_argument  # noqa: E402

BINARY = None
HERE = pathlib.Path(__file__).resolve().parent

# Stands in for `speedrun train`: two stages of 8 and 6 steps times the scale, of 100 and 300 ms; a validation after 4 steps whose
# neighbours are slow, as are the first two steps of a stage. Every start is written down. STUB_FAIL: a run's name; STUB_REFUSE: what
# --dry-run says; STUB_BUILD: a run's name that another build makes.
STUB = r'''import json, os, pathlib, sys
words = sys.argv[1:]
assert words[0] == "train"
keys = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set")
flag = lambda name: words[words.index(name) + 1] if name in words else None
scale = float(keys.get("schedule.scale", 1))
config = {"schedule": {"steps": 0, "scale": scale, "stages": {"0": {"steps": 8, "batch_tokens": 1000},
                                                              "1": {"steps": 6, "batch_tokens": 3000}}},
          "train": {"seed": int(keys.get("train.seed", 1337)), "batch_tokens": 1, "target_loss": 3.28}, "checkpoint": {"every": 1},
          "data": {"train": keys.get("data.train", "/none/train_*.bin"), "val": keys.get("data.val", "/none/val_*.bin")},
          "model": {"width": int(keys.get("model.width", 768))}, "run": {"name": keys.get("run.name", "")}}
if "nonsense" in keys:
    sys.exit('speedrun: --set nonsense: unknown key')
if "--print-config" in words:
    print(json.dumps(config))
    sys.exit()
if "--dry-run" in words:
    sys.exit(os.environ.get("STUB_REFUSE", 0))
name, folder = keys["run.name"], pathlib.Path(keys["run.dir"]) / keys["run.name"]
with open(pathlib.Path(keys["run.dir"]) / "starts.txt", "a") as file:
    file.write(name + "\n")
if os.environ.get("STUB_FAIL") == name:
    sys.exit("speedrun: no luck with " + name)
assert keys["checkpoint.every"] == "0" and keys["checkpoint.at_end"] == "false"
folder.mkdir(parents=True)
seed, gpus, clock, lines = config["train"]["seed"], int(flag("--gpus") or 1), 0.0, []
ends = [max(int(8 * scale + 0.5), 1), max(int(8 * scale + 0.5), 1) + max(int(6 * scale + 0.5), 1)]
for step in range(ends[1]):
    first = 0 if step < ends[0] else ends[0]
    slow = step - first < 2 or step in (3, 4)
    clock += (0.1 if step < ends[0] else 0.3) * (5 if slow else 1) * (0.8 if step % 2 else 1.2) / gpus
    lines.append({"step": step, "loss": 5.0, "clock_s": clock})
    if step == 3:
        lines.append({"step": 4, "val_loss": 4.0, "clock_s": clock})
clock += seed * 0.01
loss = 3.278 + 0.0001 * seed
lines.append({"step": ends[1], "val_loss": loss, "clock_s": clock})
(folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
(folder / "config.json").write_text(json.dumps(config))
(folder / "log.txt").write_text("speedrun\nranks: NCCL, 2 ranks\nwarning: it is late\nstep 1/14  loss 5\n")
if flag("--timeline"):
    window = lambda rank, uncovered: {"rank": rank, "first_step": 4, "steps": 4, "stage": 1, "step_ms": 300.0, "compute_ms": 290.0,
                                      "communication_ms": 30.0, "uncovered_communication_ms": uncovered, "idle_ms": 1.0}
    windows = [window(0, 3.0), window(1, 6.0)]
    pathlib.Path(flag("--timeline")).write_text(json.dumps({"otherData": {"windows": windows}, "traceEvents": []}))
result = {"outcome": "finished", "val_loss": loss, "steps": ends[1], "tokens": 26000, "seed": seed, "clock_s": clock,
          "startup_s": 3.0, "warmup_s": 9.0, "validation_s": 2.0, "first_step_s": 12.5, "total_s": clock + 14, "mfu": 0.4,
          "tokens_per_s": 26000 / clock, "joules": 5000.0 + seed, "target_loss": 3.28,
          "reached_at": {"step": ends[1], "clock_s": clock, "val_loss": loss} if loss <= 3.28 else None,
          "machine": {"host": "h", "device": "NVIDIA H200", "ranks": gpus},
          "build": {"version": "0.1.0", "commit": "other" if os.environ.get("STUB_BUILD") == name else "abc"},
          "train_shards": [{"path": "p", "tokens": 1000, "content_hash": "1"}]}
(folder / "result.json").write_text(json.dumps(result))
'''


class StatisticsTest(unittest.TestCase):
    def test_mean_below_in_closed_form(self):
        # t = -sqrt(3) with two degrees of freedom
        self.assertAlmostEqual(t_tests.mean_below([1.0, 2.0, 3.0], 3), 0.5 - math.sqrt(3) / (2 * math.sqrt(5)), delta=1e-12)
        self.assertAlmostEqual(t_tests.mean_below([1.0, 2.0, 3.0], 1), 0.5 + math.sqrt(3) / (2 * math.sqrt(5)), delta=1e-12)

    def test_mean_below_without_spread(self):
        self.assertIsNone(t_tests.mean_below([1.0], 3))
        self.assertEqual([t_tests.mean_below([2.0, 2.0], bound) for bound in (3, 2, 1)], [0.0, 1.0, 1.0])

    def test_welch(self):
        # Equal variances and numbers: two degrees of freedom, t = 3 / sqrt(2).
        self.assertAlmostEqual(t_tests.welch([0.0, 2.0], [3.0, 5.0]), 1 - 3 / math.sqrt(13), delta=1e-12)
        # Integrated numerically: t = 2.4372 with 4.7036 degrees of freedom.
        self.assertAlmostEqual(t_tests.welch([73.8, 74.1, 74.4, 73.5], [72.9, 73.6, 73.3]), 0.06199745, delta=1e-7)
        self.assertIsNone(t_tests.welch([1.0], [1.0, 2.0]))
        self.assertEqual([t_tests.welch([1.0, 1.0], [other] * 2) for other in (1.0, 2.0)], [1.0, 0.0])

    def test_the_rule_in_words(self):
        p, text = report.loss_rule([3.2783, 3.2779, 3.2791, 3.2788], 3.28)
        self.assertAlmostEqual(p, 0.00576690, delta=1e-7)
        self.assertIn("**passes**", text)
        p, text = report.loss_rule([3.2783, 3.2815], 3.28)
        self.assertGreater(p, 0.01)
        self.assertIn("**does not pass**", text)
        self.assertEqual(report.loss_rule([3.2], 3.28)[0], None)
        self.assertIn("One run, so no test", report.loss_rule([3.2], 3.28)[1])


class StepsTest(unittest.TestCase):
    def steps(self, durations):
        clock, steps = 0.0, {}
        for step, seconds in enumerate(durations):
            clock += seconds
            steps[step] = {"clock_s": clock}
        return steps

    def test_steps_beside_a_validation_and_the_first_two_are_left_out(self):
        # 10 steps; a validation after 6: 0, 1, 5 and 6 are out, 2 3 4 and 7 8 9 stay.
        steps = self.steps([9, 9, 1, 2, 1, 9, 9, 1, 2, 1])
        pairs, left_out = run_metrics.pairs_ms(steps, 0, 10, validated={6, 0})
        self.assertEqual(pairs, [1500.0] * 4)
        self.assertAlmostEqual(left_out, 0.4)

    def test_a_step_without_a_neighbour_is_left_out(self):
        pairs, left_out = run_metrics.pairs_ms(self.steps([9, 9, 1]), 0, 3)
        self.assertEqual((pairs, left_out), ([], 1.0))

    def test_stages_with_a_scale(self):
        stages = {"0": {"steps": 423, "batch_tokens": 1}, "1": {"steps": 0, "batch_tokens": 2}, "2": {"steps": 15, "batch_tokens": 3}}
        config = {"schedule": {"steps": 0, "scale": 0.01, "stages": stages}}
        self.assertEqual(run_metrics.stages(config), [(0, 4, 1), (4, 5, 3)])


class RecordFolder(Folder):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "record"


class StubFolder(RecordFolder):
    """A stand-in for the executable, on two GPUs."""

    def setUp(self):
        super().setUp()
        self.stub = self.make_stub(STUB)

    def record(self, *arguments, **environment):
        """(exit code, output)"""
        text = io.StringIO()
        with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0,1"} | environment):
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                code = record.main(["--binary", str(self.stub), "--out", str(self.out), *arguments])
        return code, text.getvalue()

    def refused(self, *arguments, **environment):
        """The one line that is told."""
        code, text = self.record(*arguments, **environment)
        self.assertEqual(code, 2, text)
        self.assertEqual(text.count("\n"), 1, text)
        self.assertTrue(text.startswith("record: "), text)
        return text

    def starts(self):
        return (self.out / "runs" / "starts.txt").read_text().split()

    def told(self):
        return json.loads((self.out / "record.json").read_text())


class RecordTest(StubFolder):
    def test_three_runs(self):
        code, text = self.record()
        self.assertEqual(code, 0, text)
        self.assertEqual(self.starts(), ["warm_up", "seed_1", "seed_2", "seed_3"])
        self.assertIn("3 runs on 2 × NVIDIA H200", text)
        clocks = [run["clock_s"] for run in self.told()["runs"]]
        self.assertIn(f"| 1 | {clocks[0]:.3f} | {clocks[0]:.3f} | 3.27810 | 3.0 | 9.0 | 2.0 | ", text)
        self.assertIn(f"| mean | {clocks[1]:.3f} | {clocks[1]:.3f} | 3.27820 |", text)
        self.assertRegex(text, r"\| standard deviation \| 0\.010 \| 0\.010 \| 0\.00010 \|")
        self.assertRegex(text, r"\| 40\.0 \| 5\.00 \|\n")
        self.assertIn("**passes**", text)
        self.assertIn("3 of 3 runs reached the target of 3.28", text)
        # Steps 5, 6, 7 and 10, 11, 12 are neither first nor beside a validation: two GPUs halve 100 and 300 ms.
        self.assertIn("| 1 | 8 | 1,000 | 50.00 | 50.00 to 50.00 | 20,000 | 62.5% |", text)
        self.assertIn("| 2 | 6 | 3,000 | 150.00 | 150.00 to 150.00 | 20,000 | 50.0% |", text)
        self.assertEqual((text.count("warning: it is late"), text.count("ranks: NCCL")), (1, 1))
        told = self.told()
        self.assertAlmostEqual(told["loss"]["mean"], 3.2782)
        self.assertLess(told["loss"]["p"], 0.01)
        self.assertEqual((told["loss"]["passes"], told["faults"], told["timeline"]), (True, [], []))
        with open(self.out / "record.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["seed"] for row in rows], ["1", "2", "3"])
        self.assertAlmostEqual(float(rows[0]["clock_s"]), told["runs"][0]["clock_s"])
        self.assertIn((self.out / "record.md").read_text(), text)

    def test_what_is_made_is_not_made_again(self):
        self.record("--runs", "2")
        before = self.starts()
        self.assertEqual(self.record("--runs", "2")[0], 0)
        self.assertEqual(self.starts(), before)
        self.assertEqual(self.record("--runs", "4", "--no-warm-up")[0], 0)
        self.assertEqual(self.starts()[len(before) :], ["seed_3", "seed_4"])
        self.assertEqual([run["seed"] for run in self.told()["runs"]], [1, 2, 3, 4])
        # What was interrupted left no result.
        before = self.starts()
        (self.out / "runs" / "seed_2" / "result.json").unlink()
        self.assertEqual(self.record("--runs", "4")[0], 0)
        self.assertEqual(self.starts()[len(before) :], ["warm_up", "seed_2"])

    def test_a_failed_run_is_named_and_the_rest_goes_on(self):
        code, text = self.record(STUB_FAIL="seed_2")
        self.assertEqual(code, 1)
        self.assertEqual(self.starts(), ["warm_up", "seed_1", "seed_2", "seed_3"])
        self.assertIn("- seed_2: exit code 1: speedrun: no luck with seed_2 (", text)
        self.assertEqual([run["seed"] for run in self.told()["runs"]], [1, 3])
        before = self.starts()
        self.assertEqual(self.record("--no-warm-up")[0], 0)
        self.assertEqual(self.starts()[len(before) :], ["seed_2"])

    def test_nothing_but_failures(self):
        code, text = self.record("--runs", "1", "--no-warm-up", STUB_FAIL="seed_1")
        self.assertEqual(code, 1)
        self.assertIn("no luck with seed_1", text)
        self.assertNotIn("| seed |", text)

    def test_one_run_has_no_test(self):
        code, text = self.record("--runs", "1")
        self.assertEqual(code, 0, text)
        self.assertIn("One run, so no test", text)
        self.assertIn("| standard deviation | – |", text)

    def test_runs_of_two_builds_are_told(self):
        code, text = self.record(STUB_BUILD="seed_3")
        self.assertEqual(code, 1)
        self.assertIn("more than one of: builds of speedrun", text)

    def test_short_runs_do_not_validate_on_the_way(self):
        self.record("--timeline", "--runs", "1", "--gpus", "1")
        config = json.loads((self.out / "runs" / "warm_up" / "config.json").read_text())
        self.assertAlmostEqual(config["schedule"]["scale"], 12 / 14)
        self.assertEqual(self.starts(), ["warm_up", "seed_1", "timeline"])
        self.assertEqual(self.told()["machine"]["ranks"], 1)

    def test_timeline(self):
        code, text = self.record("--timeline")
        self.assertEqual(code, 0, text)
        self.assertIn("| 2 | 300.0 | 290.0 | 30.0 | 6.0 (2.0%) | 1.0 |", text)
        before = self.starts()
        (self.out / "timeline.json").unlink()
        self.assertEqual(self.record("--timeline", "--no-warm-up")[0], 0)
        self.assertEqual(self.starts()[len(before) :], ["timeline"])

    def test_another_config_needs_another_folder(self):
        self.record("--runs", "1")
        self.assertIn("holds runs with another config.model.width: name another", self.refused("--set", "model.width=64"))
        self.assertIn("holds runs with another gpus: ", self.refused("--gpus", "1"))

    def test_what_is_refused_claims_no_folder(self):
        self.assertIn("record: speedrun: 3 ranks cannot share", self.refused(STUB_REFUSE="speedrun: 3 ranks cannot share"))
        self.assertEqual(self.record("--runs", "1", "--set", "model.width=64")[0], 0)

    def test_arguments(self):
        self.assertIn("give both or neither", self.refused("--train", "a"))
        self.assertIn("--gpus 3: 2 here", self.refused("--gpus", "3"))
        self.assertIn("1 or more", self.refused("--runs", "0"))
        self.assertIn("invalid int value: 'many'", self.refused("--runs", "many"))
        self.assertIn("unrecognized arguments: --speed", self.refused("--speed"))
        self.assertIn("--set train.seed=3: seeds, folders", self.refused("--set", "train.seed=3"))
        self.assertIn("unknown key", self.refused("--set", "nonsense=3"))
        self.assertIn("not with --cpu", self.refused("--cpu", "--timeline"))
        self.assertIn("no GPU here; --cpu", self.refused(CUDA_VISIBLE_DEVICES=""))
        self.assertIn("not built", self.refused("--binary", str(self.folder / "nothing")))
        self.assertIn("No such file", self.refused("--reference", str(self.folder / "nothing")))

    def test_reference(self):
        self.record("--gpus", "1", "--runs", "4")
        other, self.out = self.out / "record.json", self.folder / "two"
        code, text = self.record("--reference", str(other))
        self.assertEqual(code, 0, text)
        self.assertIn(f"**Beside {other}**", text)
        self.assertIn("| runs | 3 | 4 |  |", text)
        self.assertRegex(text, r"\| clock, s \| \d\.\d{3} ± 0\.010 \| \d\.\d{3} ± 0\.013 \| 0\.50\d\d \|")
        self.assertIn("| validation loss | 3.27820 ± 0.00010 | 3.27825 ± 0.00013 | -0.00005 |", text)
        self.assertIn("| stage 2, ms a step | 150.00 | 300.00 | 0.5000 |", text)
        self.assertIn("p < 0.0001: these clocks are shorter", text)
        # The tables alone, again.
        done = subprocess.run([sys.executable, "-B", HERE / "record_report.py", self.out, "--reference", other], capture_output=True,
                              text=True, check=True)  # fmt: skip
        self.assertIn("| runs | 3 | 4 |  |", done.stdout)

    def test_a_reference_by_hand(self):
        file = self.folder / "by hand.json"
        file.write_text('{"name": "the public record", "runs": [{"clock_s": 73.8}]}', encoding="utf-8")
        code, text = self.record("--reference", str(file))
        self.assertEqual(code, 0, text)
        self.assertIn("**Beside the public record**", text)
        self.assertIn("| validation loss | 3.27820 ± 0.00010 | – | – |", text)
        self.assertIn("no test of the clock", text)
        for wrong in ("[]", "{", '{"runs": []}', '{"runs": [{"val_loss": 3}]}', '{"runs": [{"clock_s": "1"}]}'):
            file.write_text(wrong, encoding="utf-8")
            self.assertIn("by hand.json: ", self.refused("--reference", str(file)))


class LocalTest(StubFolder):
    def setUp(self):
        super().setUp()
        self.data, self.disk = self.folder / "data", self.folder / "fast disk"
        self.data.mkdir()
        for name in ("t_1", "t_2", "v_1"):
            (self.data / f"{name}.bin").write_bytes(name.encode() * 1000)
        self.patterns = ["--train", str(self.data / "t_*.bin"), "--val", str(self.data / "{v,w}_*.bin"), "--local", str(self.disk),
                         "--runs", "1"]  # fmt: skip

    def test_shards_are_copied_once(self):
        code, text = self.record(*self.patterns)
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"3 shards copied, 0 were there: 0\.00 GB in \d+\.\d s, [\d,]+ MB/s")
        self.assertEqual((self.disk / "train" / "t_2.bin").read_bytes(), b"t_2" * 1000)
        self.assertEqual(sorted(path.name for path in self.disk.glob("*/*")), ["t_1.bin", "t_2.bin", "v_1.bin"])
        config = json.loads((self.out / "runs" / "seed_1" / "config.json").read_text())
        self.assertEqual([config["data"][name] for name in ("train", "val")],
                         [str(self.disk / "train" / "t_*.bin"), str(self.disk / "val" / "{v,w}_*.bin")])  # fmt: skip
        (self.disk / "train" / "t_1.bin").write_bytes(b"broken off")
        code, text = self.record(*self.patterns)
        self.assertEqual((code, (self.disk / "train" / "t_1.bin").read_bytes()), (0, b"t_1" * 1000))
        self.assertIn("1 shards copied, 2 were there", text)

    def test_no_space(self):
        with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=8999)):
            self.assertIn("0.00 GB of shards do not fit", self.refused(*self.patterns))
        self.assertEqual(list(self.disk.glob("*/*")), [])
        with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=9000)):
            self.assertEqual(self.record(*self.patterns)[0], 0)

    def test_no_files(self):
        for path in self.data.glob("v_*"):
            path.unlink()
        self.assertIn("no files match", self.refused(*self.patterns))

    def test_other_shards_in_the_folder_would_be_read_too(self):
        (self.disk / "train").mkdir(parents=True)
        (self.disk / "train" / "t_9.bin").write_bytes(b"of another corpus")
        code, text = self.record(*self.patterns)
        self.assertEqual(code, 2)
        self.assertIn("t_9.bin is none of", text)


class TinyRecordTest(RecordFolder):
    def setUp(self):
        super().setUp()
        if BINARY is None:
            self.skipTest("no executable named")

    def test_everything_on_the_cpu(self):
        command = [HERE / "record.sh", "--cpu", "--runs", "2", "--set", "schedule.scale=0.1", "--local", self.folder / "disk",
                   "--binary", BINARY, "--out", self.out]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        told = json.loads((self.out / "record.json").read_text())
        self.assertEqual((told["faults"], told["machine"]["ranks"], told["loss"]["passes"]), ([], 2, False))
        self.assertEqual([(run["seed"], run["steps"]) for run in told["runs"]], [(1, 11), (2, 11)])
        self.assertNotEqual(told["runs"][0]["val_loss"], told["runs"][1]["val_loss"])
        self.assertEqual([(row["steps"], row["tokens"]) for row in told["stages"]], [(3, 2048), (3, 2048), (4, 4096), (1, 4096)])
        self.assertGreater(told["stages"][2]["step_ms"], 0)
        self.assertTrue(any(line.startswith("ranks: ") for line in told["logged"]), told["logged"])
        self.assertEqual(list(self.out.glob("runs/*/checkpoints/*.ckpt")), [])
        # The same command has nothing left to do.
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(again.returncode, 0, again.stdout + again.stderr)
        self.assertNotIn("to make", again.stdout)
        self.assertEqual(again.stdout[again.stdout.index("**Runs**") :], done.stdout[done.stdout.index("**Runs**") :])


if __name__ == "__main__":
    BINARY = executable_argument()
    unittest.main()

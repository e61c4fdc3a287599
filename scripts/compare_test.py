#!/usr/bin/env python3
"""Tests of compare.py. Run: python3 scripts/compare_test.py [SPEEDRUN]
Without the executable: with a stand-in for it. With it: two configs of a tiny model on the CPU, too."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import unittest
import unittest.mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402
from run_queue import sets  # noqa: E402
from script_case import Folder, executable_argument  # noqa: E402

BINARY = None
HERE = pathlib.Path(__file__).resolve().parent

# Stands in for `speedrun train`: `gain` lowers the loss, by a little less or more with each seed; the target is 4.05.
STUB = r'''import json, os, pathlib, sys, time
words = sys.argv[1:]
assert words[0] == "train"
keys = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set")
if "bad" in keys:
    sys.exit("speedrun: bad: unknown key")
seed, gain = int(keys.get("train.seed", 1337)), float(keys.get("gain", 0))
if "--print-config" in words:
    print(json.dumps({"gain": gain, "train": {"seed": seed, "micro_batch_tokens": 0, "steps": int(keys.get("steps", 20))}, "run": {}}))
    sys.exit()
folder = pathlib.Path(keys["run.dir"]) / keys["run.name"]
with open(folder.parent / "starts.txt", "a") as file:
    on = os.environ.get("CUDA_VISIBLE_DEVICES")
    file.write(" ".join([keys["run.name"], *(word for word in words if word == "--gpus"), *([on] if on else [])]) + "\n")
if on:
    time.sleep(0.2)
if os.environ.get("STUB_FAIL", "nothing") in keys["run.name"]:
    sys.exit("speedrun: no luck")
folder.mkdir(parents=True)
steps = int(keys.get("steps", 20))
loss = 4 + seed * 0.01 - gain * (1 + seed % 3 * 0.01)
lines = [{"step": step, "loss": 6 + seed - 2 * gain if step >= 18 else 9.0} for step in range(steps)]
(folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
(folder / "result.json").write_text(json.dumps({
    "outcome": "finished", "val_loss": loss, "steps": steps, "clock_s": 10.0 - gain, "target_loss": 4.05,
    "reached_at": {"step": 19, "clock_s": 9.5} if loss <= 4.05 else None, "build": {"executable_hash": "1"}}))
'''


class CompareTest(Folder):
    def setUp(self):
        super().setUp()
        outside = unittest.mock.patch.dict(os.environ)
        outside.start()
        self.addCleanup(outside.stop)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self.stub, self.out = self.make_stub(STUB), self.folder / "out"

    def compare(self, *arguments):
        """(exit code, what it printed)"""
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                code = compare.main(["config.json", "--binary", str(self.stub), "--out", str(self.out), *arguments])
            except SystemExit as end:
                code = end.code
        return code, text.getvalue()

    def starts(self):
        return (self.out / "runs" / "starts.txt").read_text().splitlines()

    def test_arms_beside_the_config_as_it_is(self):
        code, text = self.compare("--arm", "gain=0.02", "--arm", "gain=-0.03 other=1", "--seeds", "6")
        self.assertEqual(code, 0, text)
        self.assertEqual(self.starts()[:4], ["seed1_baseline", "seed1_gain=0.02", "seed1_gain=-0.03_other=1", "seed2_baseline"])
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
        rows = {row[0]: row[1:] for row in cells}
        # Loss 4.01 to 4.06: mean 4.035; the training loss of the last two steps falls by twice the gain.
        self.assertEqual(rows["baseline"], ["6", "4.03500", "", "", "", "", "", "10.0", "5 of 6: step 19, 9.5 s"])
        self.assertEqual(rows["gain=0.02"][:3] + rows["gain=0.02"][4:],
                         ["6", "4.01480", "-0.02020", "< 0.0001", "**helps**", "-0.04000", "10.0", "6 of 6: step 19, 9.5 s"])
        self.assertEqual(rows["gain=-0.03 other=1"][5:7], ["**hurts**", "+0.06000"])
        self.assertIn("Standard deviation of the baseline over seeds: 0.01871.", text)
        told = json.loads((self.out / "compare.json").read_text())
        self.assertEqual((len(told["runs"]), told["failures"]), (18, []))
        self.assertEqual((self.out / "compare.md").read_text().strip(), text[text.index("| arm") : text.rindex(str(self.out))].strip())

    def test_goes_on_with_more_seeds_and_arms(self):
        self.compare("--arm", "gain=0.02", "--seeds", "1")
        code, text = self.compare("--arm", "gain=0.02", "--arm", "gain=0.04", "--seeds", "2")
        self.assertEqual(code, 0, text)
        self.assertEqual(sorted(self.starts()), ["seed1_baseline", "seed1_gain=0.02", "seed1_gain=0.04", "seed2_baseline",
                                                 "seed2_gain=0.02", "seed2_gain=0.04"])  # fmt: skip
        code, text = self.compare("--arm", "gain=0.02", "--set", "steps=30")
        self.assertIn("name another folder", str(code))

    def test_one_seed_decides_nothing(self):
        _, text = self.compare("--arm", "gain=0.02", "--seeds", "1")
        self.assertIn("undecided: too few seeds", text)

    def test_other_steps_have_no_training_difference(self):
        _, text = self.compare("--arm", "steps=30", "--seeds", "2")
        self.assertRegex(text, r"\| steps=30 \| 2 \| .* \| – \| 10\.0 \|")

    def test_a_failed_run_is_named_and_the_rest_goes_on(self):
        os.environ["STUB_FAIL"] = "seed2_gain"
        code, text = self.compare("--arm", "gain=0.02", "--seeds", "3")
        self.assertEqual(code, 1)
        self.assertRegex(text, r"\| gain=0\.02 \| 2 \|")
        self.assertIn("seed2_gain=0.02: exit code 1: speedrun: no luck", text)

    def test_no_time(self):
        code, text = self.compare("--arm", "gain=0.02", "--budget", "1e-9")
        self.assertEqual((code, "No baseline has ended." in text), (3, True))

    def test_bad_input_is_one_line_before_anything_runs(self):
        for arguments, part in ((["--arm", "bad=1"], "bad: unknown key"), (["--arm", "gain=0"], "same config as baseline"),
                                (["--arm", "gain=1", "--arm", "gain=1.0"], "same config as gain=1"),
                                (["--arm", "gain=1", "--jobs", "2"], "train.micro_batch_tokens")):  # fmt: skip
            code, _ = self.compare(*arguments)
            self.assertIn(part, str(code))
            self.assertNotIn("\n", str(code))
        for arguments in (["--arm", "gain"], ["--arm", " "], ["--arm", "gain=1", "--seeds", "0"], []):
            code, text = self.compare(*arguments)
            self.assertEqual(code, 2, text)
        self.assertFalse(self.out.exists())

    def test_several_gpus_share_the_runs(self):
        code, text = self.compare("--arm", "gain=0.02", "--seeds", "3", "--devices", "2,5")
        self.assertEqual(code, 0, text)
        told = dict(line.split() for line in self.starts())
        self.assertEqual(len(told), 6)
        self.assertGreaterEqual(min(list(told.values()).count(device) for device in ("2", "5")), 2)
        for devices in ("", "1,1", "0,"):
            code, text = self.compare("--arm", "gain=0.02", "--devices", devices)
            self.assertEqual((code, "expected different GPUs" in text), (2, True))
        self.assertEqual(self.compare("--arm", "gain=0.02", "--devices", "0,1", "--gpus", "2")[0], 2)

    def test_ranks(self):
        self.compare("--arm", "gain=0.02", "--seeds", "1", "--gpus", "2")
        self.assertEqual(self.starts(), ["seed1_baseline --gpus", "seed1_gain=0.02 --gpus"])


class RealRunsTest(Folder):
    def test_two_rates_of_a_tiny_model(self):
        if BINARY is None:
            self.skipTest("no executable named")
        small = ["model.num_layers=1", "model.width=64", "model.num_heads=1", "model.mlp_hidden=128", "train.batch_tokens=512",
                 "train.device=cpu", "train.threads=1", "train.stop_step=12", "eval.every=0", "eval.at_start=false",
                 "eval.tokens=4096"]  # fmt: skip
        command = [HERE / "compare.sh", HERE.parent / "configs" / "quickstart.json", "--binary", BINARY, "--out", self.folder / "o",
                   "--arm", "optim.matrix.lr=0.0001", "--seeds", "3", "--jobs", "2"]  # fmt: skip
        done = subprocess.run([*command, *sets(small)], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        told = json.loads((self.folder / "o" / "compare.json").read_text())
        self.assertEqual([row["steps"] for row in told["runs"]], [12] * 6)
        self.assertTrue(all(row["train_loss"] > 0 for row in told["runs"]))
        self.assertRegex(done.stdout, r"\| optim\.matrix\.lr=0\.0001 \| 3 \| .* \| \+0\.\d+ \|")


if __name__ == "__main__":
    BINARY = executable_argument()
    unittest.main()

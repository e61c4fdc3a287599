#!/usr/bin/env python3
"""The executable as a user runs it, on the CPU and the bundled sample: flags, errors, a run, signals, resume, eval and sample.

    cli_test.py PATH_OF_SPEEDRUN [arguments of unittest]
"""

import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEEDRUN = pathlib.Path("speedrun")

# Constant learning rate: what a step does depends on no later one, so runs of different lengths can be compared.
CONFIG = {
    "model": {"vocab_size": 4096, "num_layers": 2, "width": 32, "num_heads": 2, "mlp_hidden": 64, "max_positions": 32},
    "data": {
        "train": str(ROOT / "data/sample/sample_train_*.bin"),
        "val": str(ROOT / "data/sample/sample_val_*.bin"),
        "vocabulary": str(ROOT / "data/gpt2_vocab"),
    },
    "train": {"device": "cpu", "threads": 2, "batch_tokens": 512, "seq_len": 32, "target_loss": 0.1},
    "eval": {"every": 5, "tokens": 1024},
    "checkpoint": {"every": 4, "keep": 3},
    "run": {"dir": "runs", "name": "r"},
    "schedule": {"steps": 10},
}


class Executable(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="speedrun cli é ")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.run_folder = self.folder / "runs" / "r"
        (self.folder / "test.json").write_text(json.dumps(CONFIG), encoding="utf-8")

    def speedrun(self, *arguments, code=0):
        """Runs to the end in the test's folder and returns standard output and standard error."""
        done = subprocess.run([SPEEDRUN, *map(str, arguments)], cwd=self.folder, capture_output=True, text=True,
                              encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done.stdout, done.stderr

    def refused(self, *arguments, names):
        """Exit code 2 and exactly one line on standard error, which names all of `names`."""
        error = self.speedrun(*arguments, code=2)[1]
        if arguments[0] == "sample":  # its standard output is the text, so the log is on standard error too
            error = re.sub(r"^(device: .*|warning: .*)\n", "", error, flags=re.MULTILINE)
        self.assertRegex(error, r"^speedrun: .*\n$")
        self.assertEqual(error.count("\n"), 1, error)
        for name in names:
            self.assertIn(name, error)

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    def metrics(self, run=None):
        lines = ((run or self.run_folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, run=None):
        """(step, loss) of every update, as written."""
        return [(line["step"], line["loss"]) for line in self.metrics(run) if "loss" in line]

    def result(self):
        return json.loads((self.run_folder / "result.json").read_text(encoding="utf-8"))

    def checkpoints(self):
        return sorted(path.name for path in (self.run_folder / "checkpoints").iterdir())

    def start(self, *overrides):
        """A run with far more steps than it will take, in the background."""
        flags = [part for value in ("schedule.steps=5000", "eval.every=0", *overrides) for part in ("--set", value)]
        process = subprocess.Popen([SPEEDRUN, "train", "test.json", *flags], cwd=self.folder, stdout=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def wait_for(self, condition, process):
        while not condition():
            self.assertIsNone(process.poll(), "the run ended by itself")
            time.sleep(0.002)


class CliTest(Executable):
    # ------------------------------------------------------------ help, errors, printing

    def test_help_and_version(self):
        text, _ = self.speedrun("--help")
        for command in ("train", "eval", "sample", "data", "bench"):
            self.assertIn(command, text)
            self.assertIn("Usage", self.speedrun(command, "--help")[0])
        version, _ = self.speedrun("--version")
        self.assertRegex(version, r"^speedrun \d+\.\d+\.\d+\n")
        self.assertIn("commit", version)
        self.speedrun(code=2)
        self.assertIn("optim.muon.momentum", self.speedrun("train", "--help-config")[0])

    def test_flags_and_arguments_that_make_no_sense(self):
        self.refused("trian", names=["trian"])
        self.refused("--nope", names=["--nope"])
        for command in ("train", "eval", "sample", "bench"):
            self.refused(command, "--nope", names=[command, "nope"])
        self.refused("train", names=["CONFIG"])
        self.refused("train", "test.json", "other.json", names=["CONFIG"])
        self.refused("train", "test.json", "--set", names=["set"])
        self.refused("eval", names=["RUN"])
        self.refused("data", "nope", names=["nope"])
        self.refused("train", "test.json", "--dump-grads", "", names=["--dump-grads"])
        self.refused("train", "test.json", "--timeline", "", names=["--timeline"])
        self.refused("train", "test.json", "--timeline", "absent/t.json", names=["--timeline", "absent"])
        self.refused("train", "test.json", "--timeline", "t.json", "--dry-run", names=["--timeline", "--dry-run"])
        self.refused("train", "test.json", "--timeline-steps", "1:2", names=["--timeline-steps", "--timeline FILE"])
        self.refused("train", "test.json", "--timeline", "t.json", "--timeline-steps", "4", names=["--timeline-steps", "FIRST:COUNT"])
        self.refused("train", "test.json", "--timeline", "t.json", names=["--timeline", "GPU", "train.device"])
        self.refused("bench", "nope", names=["bench"])

    def test_configs_that_make_no_sense(self):
        self.refused("train", "absent.json", names=["absent.json"])
        self.refused("train", ".", names=["."])
        self.write("bad.json", '{"train": {"seed": 1},\n "model": {"width" 32}}')
        self.refused("train", "bad.json", names=["bad.json:2"])
        self.write("empty.json", "")
        self.refused("train", "empty.json", names=["empty.json"])
        self.write("key.json", '{\n "train": {\n  "sede": 1}}')
        self.refused("train", "key.json", names=["key.json", "train.sede", "train.seed"])
        self.write("type.json", '{"train": {"seed": "one"}}')
        self.refused("train", "type.json", names=["type.json", "train.seed", "integer", "one"])
        self.refused("train", "test.json", "--set", "trian.seed=1", names=["trian.seed", "train.seed"])
        self.refused("train", "test.json", "--set", "train.seed=1.5", names=["train.seed", "1.5"])
        self.refused("train", "test.json", "--set", "train.device=gpu", names=["train.device", "gpu", "cuda"])
        self.refused("train", "test.json", "--set", "train.seed", names=["train.seed"])
        self.refused("train", "test.json", "--set", "train.seq_len=48", names=["train.batch_tokens", "train.seq_len"])
        self.refused("train", "test.json", "--set", "model.num_heads=3", names=["model.width", "model.num_heads"])

    def test_data_that_is_missing_too_short_or_damaged(self):
        self.refused("train", "test.json", "--set", "data.train=absent_*.bin", names=["absent_*.bin"])
        self.refused("train", "test.json", "--set", "data.train=", names=["data.train"])
        self.refused("train", "test.json", "--set", "schedule.steps=100000", names=["data.repeat"])
        shard = next((ROOT / "data/sample").glob("sample_val_*.bin")).read_bytes()
        self.write("cut.bin", shard[:5000])
        self.refused("train", "test.json", "--set", "data.train=cut.bin", names=["cut.bin"])
        # The last predictions that validation asks for are not there.
        self.write("short.bin", shard[:8] + struct.pack("<i", 500) + shard[12:1024 + 2 * 500])
        self.refused("train", "test.json", "--set", "data.val=short.bin", names=["short.bin", "1024"])

    def test_printed_config_is_the_config(self):
        first, _ = self.speedrun("train", "test.json", "--set", "optim.matrix.lr=0.015", "--set", "run.name=é \"1\"",
                                 "--print-config")
        self.assertEqual(json.loads(first)["optim"]["matrix"]["lr"], 0.015)
        self.write("printed.json", first)
        self.assertEqual(self.speedrun("train", "printed.json", "--print-config")[0], first)
        for config in sorted((ROOT / "configs").glob("*.json")):
            self.write("printed.json", self.speedrun("train", config, "--print-config")[0])
            self.assertEqual(self.speedrun("train", "printed.json", "--print-config")[0],
                             self.speedrun("train", config, "--print-config")[0], config)

    def test_printed_schedule_has_a_line_a_step(self):
        text, _ = self.speedrun("train", "test.json", "--print-schedule")
        lines = text.splitlines()
        self.assertEqual([line.split()[0] for line in lines], ["#", *map(str, range(10))])
        columns = lines[0].split()[1:]
        for line in lines[1:]:
            self.assertEqual(len(line.split()), len(columns))
        evaluations = [int(line.split()[columns.index("eval")]) for line in lines[1:]]
        self.assertEqual(evaluations, [0, 0, 0, 0, 1, 0, 0, 0, 0, 1])
        self.assertFalse(self.run_folder.exists())

    def test_a_full_disk_behind_standard_output_is_an_error(self):
        for flag in ("--print-config", "--print-schedule", "--help-config"):
            with open("/dev/full", "wb") as full:
                done = subprocess.run([SPEEDRUN, "train", "test.json", flag], cwd=self.folder, stdout=full,
                                      stderr=subprocess.PIPE, check=False)
            self.assertEqual(done.returncode, 1, flag)
            self.assertRegex(done.stderr.decode(), r"^speedrun: .*No space left on device\n$")

    def test_dry_run_makes_nothing(self):
        text, _ = self.speedrun("train", "test.json", "--dry-run")
        self.assertIn("dry run", text)
        self.assertIn("memory plan", text)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["test.json"])

    # ------------------------------------------------------------ runs

    def test_a_run_with_what_can_be_done_with_it(self):
        text, error = self.speedrun("train", "test.json")
        self.assertEqual(error, "")
        self.assertIn(str(self.run_folder), text)
        self.assertEqual(text, (self.run_folder / "log.txt").read_text(encoding="utf-8"))
        losses = self.losses()
        self.assertEqual([step for step, _ in losses], list(range(10)))
        self.assertLess(losses[-1][1], losses[0][1])
        self.assertEqual([line["step"] for line in self.metrics() if "val_loss" in line], [0, 5, 10])
        self.assertEqual(self.checkpoints(), ["step_000004.ckpt", "step_000008.ckpt", "step_000010.ckpt"])
        result = self.result()
        self.assertEqual((result["outcome"], result["reached"], result["steps"], result["tokens"]),
                         ("finished", False, 10, 5120))

        # The same again: the same bits, in a folder with a number.
        self.speedrun("train", "test.json")
        self.assertEqual(self.losses(self.folder / "runs" / "r-2"), losses)

        # eval
        text, error = self.speedrun("eval", "runs/r")
        self.assertEqual(error, "")
        match = re.search(r"^validation loss (\d+\.\d+) on 1024 tokens after 10 steps$", text, re.MULTILINE)
        self.assertIsNotNone(match, text)
        self.assertAlmostEqual(float(match[1]), result["val_loss"], delta=1e-4)
        self.assertIn("after 4 steps", self.speedrun("eval", "runs/r/checkpoints/step_000004.ckpt")[0])
        self.refused("eval", "runs/absent", names=["runs/absent"])
        self.refused("eval", "runs", names=["runs"])
        self.refused("eval", "test.json", names=["test.json"])

        # export, and a run that begins with what was exported
        self.assertIn("w.safetensors", self.speedrun("export", "runs/r", "w.safetensors")[0])
        self.speedrun("train", "test.json", "--set", "train.init_weights=w.safetensors", "--set", "run.name=w",
                      "--set", "schedule.steps=1")
        first = next(line["val_loss"] for line in self.metrics(self.folder / "runs" / "w") if "val_loss" in line)
        self.assertAlmostEqual(first, result["val_loss"], delta=1e-6)
        # ... of a config: what its runs begin with, train.init_weights included
        for change in ("train.seed=5", "train.init_weights=w.safetensors"):
            self.assertIn("after 0 steps", self.speedrun("export", "test.json", "begin.safetensors", "--set", change)[0])
            curves = []
            for start in (change, "train.init_weights=begin.safetensors"):
                self.speedrun("train", "test.json", "--set", start, "--set", "run.name=begin", "--set", "schedule.steps=2")
                curves.append(self.losses(self.folder / "runs" / "begin"))
                shutil.rmtree(self.folder / "runs" / "begin")
            self.assertEqual(*curves)
            os.remove(self.folder / "begin.safetensors")
        self.refused("export", "absent.json", "x.safetensors", names=["absent.json"])
        self.refused("export", "runs/r", "w.safetensors", names=["w.safetensors", "exists"])
        self.refused("export", "runs/r", names=["FILE", "1 arguments"])
        self.refused("export", "runs/r", "absent/w.safetensors", names=["absent"])

        # eval on questions: of two equal completions the first is taken
        words = [word for label in (0, 1) for word in (65535, 28, 0, label, 2, 2, 10, 11, 2, 12, 13, 2, 12, 13)]
        header = struct.pack("<4i", 20240522, 1, 2, 28).ljust(1024, b"\0")
        self.write("questions.bin", header + struct.pack(f"<{len(words)}H", *words))
        self.assertIn("accuracy 0.5000 (1 of 2)", self.speedrun("eval", "runs/r", "--multiple-choice", "questions.bin")[0])
        self.write("questions.bin", header + struct.pack(f"<{len(words)}H", *words)[:-1])
        self.refused("eval", "runs/r", "--multiple-choice", "questions.bin", names=["questions.bin", "question 1"])

        # sample
        sample = ["sample", "--run", "runs/r", "--prompt", "Once upon a time", "--tokens", "12"]
        text, error = self.speedrun(*sample)
        self.assertTrue(text.startswith("Once upon a time") and text.endswith("\n"), repr(text))
        self.assertGreater(len(text), len("Once upon a time\n"))
        self.assertNotIn("warning", error)
        self.assertEqual(self.speedrun(*sample)[0], text)
        self.assertNotEqual(self.speedrun(*sample, "--seed", 2)[0], text)
        self.assertEqual(self.speedrun(*sample[:-1], 0)[0], "Once upon a time\n")
        self.refused(*sample, "--temperature=-1", names=["--temperature", "-1"])
        self.refused(*sample, "--top-k=-1", names=["--top-k", "-1"])
        self.refused(*sample, "--set", "data.vocabulary=nowhere", names=["nowhere"])

        # a damaged newest checkpoint: named, and the one before it used
        older = self.speedrun("sample", "runs/r/checkpoints/step_000008.ckpt", *sample[3:])[0]
        self.assertNotEqual(older, text)
        newest = self.run_folder / "checkpoints" / "step_000010.ckpt"
        content = bytearray(newest.read_bytes())
        content[(32 + struct.unpack("<Q", content[16:24])[0] + 63) // 64 * 64] ^= 1  # the first byte after the header
        newest.write_bytes(content)
        text, error = self.speedrun(*sample)
        self.assertEqual(text, older)
        self.assertRegex(error, r"warning: .*step_000010\.ckpt")
        self.refused("sample", "runs/r/checkpoints/step_000010.ckpt", *sample[3:], names=["step_000010.ckpt"])
        # ... and so does a resume, which makes it anew
        text, _ = self.speedrun("train", "--resume", "runs/r")
        self.assertRegex(text, r"warning: .*step_000010\.ckpt")
        self.assertIn("after 8 steps", text)
        self.assertEqual(self.losses(), losses)
        self.assertEqual(self.result()["val_loss"], result["val_loss"])
        self.assertIn("after 10 steps", self.speedrun("eval", "runs/r")[0])

        # no good one is left
        for path in (self.run_folder / "checkpoints").iterdir():
            path.write_bytes(path.read_bytes()[:-2000])
        self.refused(*sample, names=["no good checkpoint"])
        self.refused("train", "--resume", "runs/r", names=["no good checkpoint"])

    def test_resume_of_what_is_no_run(self):
        self.refused("train", "--resume", "absent", names=["absent"])
        self.refused("train", "--resume", ".", names=["."])
        self.refused("train", "test.json", "--resume", "runs/r", names=["--resume"])

    # ------------------------------------------------------------ branches

    def branch(self, name, *arguments):
        """A run of that name from a checkpoint: its folder and its log."""
        text, error = self.speedrun("train", *arguments, "--set", f"run.name={name}")
        self.assertEqual(error, "")
        folder = self.folder / "runs" / name
        self.assertEqual(text, (folder / "log.txt").read_text(encoding="utf-8"))
        return folder, text

    def test_branches_from_a_checkpoint(self):
        self.speedrun("train", "test.json")
        whole = self.losses()
        checkpoint = "runs/r/checkpoints/step_000004.ckpt"
        before = (self.run_folder / "log.txt").read_bytes() + (self.run_folder / "metrics.jsonl").read_bytes()

        # The config is the checkpoint's, whatever the run's folder says now.
        self.write("runs/r/config.json", "{}")
        config = json.loads(self.speedrun("train", "--from", checkpoint, "--print-config")[0])
        self.assertEqual((config["model"]["width"], config["run"]["name"]), (32, "r"))
        run, text = self.branch("same", "--from", checkpoint)
        self.assertIn("step_000004.ckpt after 4 steps", text)
        self.assertEqual(self.losses(run), whole[4:])
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        self.assertEqual(result["from"], {"checkpoint": str(self.folder / checkpoint), "step": 4})
        self.assertEqual((result["val_loss"], result["tokens"]), (self.result()["val_loss"], 5120))
        self.assertGreater(result["clock_s"], self.metrics(run)[0]["clock_s"] / 2)
        self.assertEqual(sorted(path.name for path in (run / "checkpoints").iterdir()), ["step_000008.ckpt", "step_000010.ckpt"])
        self.assertEqual((self.run_folder / "log.txt").read_bytes() + (self.run_folder / "metrics.jsonl").read_bytes(), before)

        # A run's folder is its newest checkpoint; a longer schedule goes on.
        run, text = self.branch("longer", "--from", "runs/r", "--set", "schedule.steps=13")
        self.assertIn("step_000010.ckpt after 10 steps", text)
        self.assertEqual([step for step, _ in self.losses(run)], [10, 11, 12])

        # Another config on the same data, and weight extrapolation in one of two arms.
        arm = {**CONFIG, "optim": {"matrix": {"lr": 0.02}}}
        self.write("arm.json", json.dumps(arm))
        plain, text = self.branch("plain", "--from", checkpoint, "arm.json")
        self.assertIn("changed since the checkpoint: optim.matrix.lr", text)
        arm["extrapolation"] = {"method": "rre_suffix", "every": 4, "max_jump": 0.01}
        self.write("arm.json", json.dumps(arm))
        jumping, text = self.branch("jumping", "--from", checkpoint, "arm.json")
        self.assertRegex(text, r"\nstep 8: jump rre_suffix \S+ of the weights' norm.*, c = \S+ \S+ \S+, condition \S+\n")
        jumps = [line for line in self.metrics(jumping) if "jump" in line]
        self.assertEqual([(line["step"], line["refused"], len(line["c"])) for line in jumps], [(8, None, 3)])
        self.assertLessEqual(jumps[0]["jump_capped"], 0.0100001)
        losses = self.losses(plain)
        self.assertEqual(self.losses(jumping)[:4], losses[:4])
        self.assertNotEqual(self.losses(jumping)[4:], losses[4:])

        # Several ranks; none at all.
        run, text = self.branch("two ranks", "--from", "runs/r/checkpoints/step_000008.ckpt", "--gpus", "2")
        self.assertIn("step_000008.ckpt after 8 steps", text)
        for (_, found), (_, expected) in zip(self.losses(run), whole[8:], strict=True):
            self.assertAlmostEqual(found, expected, delta=1e-4)
        runs = sorted((self.folder / "runs").iterdir())
        self.assertIn("dry run", self.speedrun("train", "--from", checkpoint, "--dry-run")[0])
        self.assertEqual(sorted((self.folder / "runs").iterdir()), runs)

        # Without a name the folder tells the step.
        text, _ = self.speedrun("train", "--from", checkpoint, "--set", "run.name=")
        self.assertRegex(text, r"\nrun \S.*/runs/\d{8}-\d{6}-from_step_000004\n")

        # A damaged newest one is named, and passed by.
        newest = self.run_folder / "checkpoints" / "step_000010.ckpt"
        newest.write_bytes(newest.read_bytes()[:-2000])
        _, text = self.branch("older", "--from", "runs/r")
        self.assertRegex(text, r"warning: .*step_000010\.ckpt")
        self.assertIn("step_000008.ckpt after 8 steps", text)
        self.refused("train", "--from", newest, names=["step_000010.ckpt", "damaged"])
        self.refused("train", "--from", newest, "test.json", "--dry-run", names=["step_000010.ckpt", "damaged"])

    def test_branches_that_make_no_sense(self):
        self.speedrun("train", "test.json")
        checkpoint = "runs/r/checkpoints/step_000008.ckpt"
        self.refused("train", "--from", "absent", names=["absent", "no such run or checkpoint"])
        self.refused("train", "--from", "runs", names=["runs", "no good checkpoint"])
        self.refused("train", "--from", "test.json", names=["test.json", "not a speedrun checkpoint"])
        self.refused("train", "--from=", names=["--from", "checkpoint"])
        self.refused("train", "--from", checkpoint, "--resume", "runs/r", names=["--from", "--resume"])
        self.refused("train", "--from", checkpoint, "test.json", "test.json", names=["CONFIG"])
        self.refused("train", "--from", checkpoint, "--set", "schedule.steps=7", names=["step_000008.ckpt", "8 steps", "7"])
        self.refused("train", "--from", checkpoint, "--set", "train.init_weights=w.safetensors", names=["train.init_weights", "checkpoint"])
        self.refused("train", "--from", checkpoint, "--set", "train.batch_tokens=256", names=["train.batch_tokens", "512", "256"])
        self.refused("train", "--from", checkpoint, "--set", "model.width=64", "--gpus", "2", names=["model.width", "32", "64"])
        self.refused("train", "--from", checkpoint, "--set", "extrapolation.methd=rre", names=["extrapolation.methd"])
        self.refused("train", "--from", checkpoint, "--timeline", "t.json", names=["--timeline", "GPU"])
        self.assertEqual([path.name for path in (self.folder / "runs").iterdir()], ["r"])

    def assert_continues(self, done):
        """Resuming 5 steps past the newest checkpoint, after `done` steps, makes the losses of a run that nothing happened to."""
        steps = f"schedule.steps={done + 5}"
        text, _ = self.speedrun("train", "--resume", "runs/r", "--set", steps)
        self.assertIn(f"after {done} steps", text)
        self.assertEqual(self.result()["outcome"], "finished")
        self.speedrun("train", "test.json", "--set", steps, "--set", "eval.every=0", "--set", "run.name=whole")
        self.assertEqual(self.losses(), self.losses(self.folder / "runs" / "whole"))
        self.assertFalse([name for name in self.checkpoints() if not name.endswith(".ckpt")])

    def test_sigint_saves_and_resume_goes_on(self):
        process = self.start("checkpoint.every=0")
        metrics = self.run_folder / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and '"loss"' in metrics.read_text(encoding="utf-8"), process)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(), 130)
        result = self.result()
        self.assertEqual(result["outcome"], "SIGINT")
        self.assertEqual(self.checkpoints(), [f"step_{result['steps']:06}.ckpt"])
        self.assertEqual(len(self.losses()), result["steps"])
        self.assert_continues(result["steps"])

    def test_kill_loses_only_the_steps_since_the_checkpoint(self):
        process = self.start("checkpoint.every=3")
        checkpoint = self.run_folder / "checkpoints" / "step_000006.ckpt"
        self.wait_for(checkpoint.exists, process)
        process.kill()
        process.wait()
        newest = max(name for name in self.checkpoints() if name.endswith(".ckpt"))
        self.assert_continues(int(newest[5:11]))


class MainTrackTest(Executable):
    """Record #89's model with every feature at a size for two cores, and the experiments that are one key each."""

    TINY = str(ROOT / "configs/main_track_tiny.json")
    HERE = ["--set", "run.dir=runs", "--set", "run.name=r", "--set", "train.device=cpu"]

    def test_reaches_its_target_through_every_stage(self):
        self.speedrun("train", self.TINY, *self.HERE)
        result = self.result()
        self.assertEqual((result["outcome"], result["reached"], result["steps"]), ("finished", True, 100))
        self.assertLess(self.losses()[-1][1], 6)
        text, _ = self.speedrun("sample", "runs/r", "--tokens", "8")
        self.assertTrue(text.strip())

    def test_every_experiment_is_one_key(self):
        experiments = [
            "fp8.mlp_down=bf16", "fp8.mlp_down_scaling=current", "fp8.mlp_up_scaling=delayed", "fp8.mlp_up=bf16", "fp8.head=bf16",
            "fp8.warn_saturated=0.5", "model.smear=false", "model.bigram_sign_rows=0", "model.x0_injection=false",
            "model.residual_lambdas=false", "model.weight_lambdas=false", "model.mudd_gates=false", "model.mudd=false",
            "model.yarn=false", "model.tied_until_split=false", "model.layers.1.xsa=false", "model.layers.1.value_embedding=false",
            "model.layers.2.gate=false", "model.layers.2.key_offset=false", "model.layers.0.paired_heads=false", "model.layers.5.dc=false",
            "model.layers.0.window=long", "schedule.stages.0.window_long=32", "schedule.stages.1.lr_multiplier=2",
            "optim.muon.beta2=0.95", "optim.bigram.lr_multiplier=10", "train.seed=7", "train.reduction=mean",
        ]
        losses = {}
        for experiment in ["train.log_every=1", *experiments]:
            with self.subTest(experiment):
                self.speedrun("train", self.TINY, *self.HERE, "--set", f"run.name={experiment}", "--set", "schedule.scale=0.04",
                              "--set", "eval.tokens=2048", "--set", "checkpoint.at_end=false", "--set", experiment)
                losses[experiment] = self.losses(self.folder / "runs" / experiment)
        baseline = losses.pop("train.log_every=1")
        self.assertEqual(len(baseline), 4)
        # A step late in so short a run sees every key but those of Muon's statistics' later steps.
        unchanged = [experiment for experiment, found in losses.items() if found == baseline]
        self.assertEqual(unchanged, ["fp8.warn_saturated=0.5"])

    def test_smoke_and_record_configs_are_complete(self):
        for name, steps in (("main_track", 1285), ("main_track_smoke", 128)):
            text, _ = self.speedrun("train", ROOT / f"configs/{name}.json", "--print-schedule")
            self.assertEqual(len(text.splitlines()), steps + 1, name)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    SPEEDRUN = pathlib.Path(sys.argv[1]).resolve()
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)

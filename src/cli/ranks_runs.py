"""What ranks_test.py needs to make small runs of several ranks, to disturb them, and to compare what they leave."""

import array
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEEDRUN = pathlib.Path("speedrun")

# Whatever fails, all processes are to be gone by then. The watchdogs of these runs are set to 2 s. CMake tells a build with sanitizers
# to wait longer.
PATIENCE = float(os.environ.get("SPEEDRUN_TEST_PATIENCE", "1"))
LIMIT_S = 30 * PATIENCE
VOCABULARY = 512

# Record #89's model with every feature, FP8 but: its "current" scales are those of a micro-batch, which is smaller on more ranks.
# 12 steps pass through every stage; groups that update every second step have a gradient pending after an odd number of steps, and
# embedding and head part in step 7. The bigram table has so many rows that several ranks send each other the touched ones alone.
MAIN_TRACK = {
    "extends": str(ROOT / "configs/main_track_tiny.json"),
    "model": {"vocab_size": VOCABULARY, "width": 32, "mlp_hidden": 64, "bigram_rows": 4096, "bigram_sign_rows": 16, "dc_window": 8},
    "data": {"train": "train.bin", "val": "val.bin", "max_seq_len": 64},
    "train": {"device": "cpu", "threads": 1, "target_loss": 0.1},
    "eval": {"every": 5, "tokens": 1024, "row_tokens": 64, "final_window_short": 24, "final_window_long": 56},
    "checkpoint": {"every": 1, "keep": 100},
    "dist": {"heartbeat_s": 2},
    "run": {"dir": "runs", "name": "r"},
    "schedule": {
        "lr": {"cooldown_steps": 6, "hold_steps": 1},
        "momentum": {"warmup_steps": 4, "cooldown_steps": 2},
        "stages": {
            "0": {"steps": 3, "batch_tokens": 256, "max_seq_len": 32, "window_short": 8, "window_long": 16},
            "1": {"steps": 3, "batch_tokens": 256, "max_seq_len": 32, "window_short": 8, "window_long": 24},
            "2": {"steps": 5, "batch_tokens": 512, "max_seq_len": 48, "window_short": 16, "window_long": 40},
            "3": {"steps": 1, "batch_tokens": 512, "max_seq_len": 64, "window_short": 24, "window_long": 48},
        },
        "split_step": 7,
    },
    "fp8": {"mlp_up": "bf16", "mlp_down": "bf16", "head": "bf16"},
}
STEPS = 12

# GPT-2's model: rows instead of documents, AdamW, a clipped gradient. A constant learning rate, so that what a step does depends on
# no later one and runs of different lengths can be compared.
GPT2 = {
    "extends": str(ROOT / "configs/tiny.json"),
    "model": {"vocab_size": VOCABULARY, "width": 32, "num_heads": 2, "mlp_hidden": 64, "max_positions": 32},
    "data": {"train": "train.bin", "val": "val.bin", "repeat": 200},
    "train": {"device": "cpu", "threads": 1, "batch_tokens": 256, "seq_len": 32, "grad_clip": 0.5, "target_loss": 0.1},
    "eval": {"every": 5, "tokens": 512},
    "checkpoint": {"every": 1, "keep": 100},
    "dist": {"heartbeat_s": 2},
    "run": {"dir": "runs", "name": "r"},
    "schedule": {"steps": 10, "lr": {"warmup_steps": 2, "shape": "constant"}},
}
CONFIGS = {"main_track.json": MAIN_TRACK, "gpt2.json": GPT2}


def write_shard(path, seed, tokens):
    """Documents of up to 60 tokens in which most tokens follow from the one before, so that there is something to learn."""
    generator = random.Random(seed)
    ids = []
    while len(ids) < tokens:
        ids.append(VOCABULARY - 1)
        token = generator.randrange(VOCABULARY - 1)
        for _ in range(generator.randrange(60)):
            token = (7 * token + 3) % 257 if generator.random() < 0.8 else generator.randrange(VOCABULARY - 1)
            ids.append(token)
    header = struct.pack("<3i", 20240520, 1, tokens).ljust(1024, b"\0")
    path.write_bytes(header + struct.pack(f"<{tokens}H", *ids[:tokens]))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sets(overrides):
    return [part for value in overrides for part in ("--set", value)]


def left_in_shared_memory():
    """Segments of ranks (/dev/shm/speedrun-PID-…) whose maker is gone."""
    segments = (re.fullmatch(r"speedrun-(\d+)-.*", name) for name in os.listdir("/dev/shm"))
    return {found[0] for found in segments if found and not pathlib.Path("/proc", found[1]).exists()}


class Checkpoint:
    """What a checkpoint's file holds: `meta`, and of every tensor its values and the hash of its bits."""

    def __init__(self, path):
        content = path.read_bytes()
        header = json.loads(content[32:32 + struct.unpack("<Q", content[16:24])[0]])
        self.meta = header["meta"]
        self.hashes = {section["name"]: section["hash"] for section in header["sections"]}
        self.values = {}
        for section in header["sections"]:
            data = content[int(section["offset"]):][:section["bytes"]]
            if section["name"] == "fp8.scales":
                self.fp8_scales = [scale for scale, *_ in struct.iter_unpack("<f3I", data)]  # beside maxima and counts
            elif section["dtype"] == "f32":
                self.values[section["name"]] = array.array("f", data)


class Started:
    """A run in the background, of all whose processes an environment variable tells."""

    def __init__(self, command, folder, environment):
        self.mark = uuid.uuid4().hex
        self.output, self.error = (tempfile.TemporaryFile() for _ in range(2))
        clean = {name: value for name, value in os.environ.items()
                 if not re.match(r"(OMPI|PMI|SLURM|SPEEDRUN|TORCH|MASTER_|LOCAL_|RANK$|WORLD_SIZE$)", name)}
        self.process = subprocess.Popen([str(part) for part in command], cwd=folder, stdout=self.output, stderr=self.error,
                                        stdin=subprocess.DEVNULL, env={**clean, "RANKS_TEST_MARK": self.mark, **environment})

    def processes(self):
        """Process id -> rank (None: the launcher) of what runs."""
        found = {}
        for folder in pathlib.Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has ended, or is someone else's
                variables = (folder / "environ").read_bytes().split(b"\0")
                if b"RANKS_TEST_MARK=" + self.mark.encode() in variables:
                    ranks = [int(each[5:]) for each in variables if each.startswith(b"RANK=")]
                    found[int(folder.name)] = ranks[0] if ranks else None
        return found

    def kill_all(self):
        while left := self.processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        self.process.wait()
        for file in (self.output, self.error):
            file.close()

    def texts(self):
        for file in (self.output, self.error):
            file.seek(0)
            yield file.read().decode("utf-8", errors="replace")


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory(prefix="speedrun ranks é ")
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        write_shard(cls.folder / "train.bin", 1, 40000)
        write_shard(cls.folder / "val.bin", 2, 3000)
        for name, config in CONFIGS.items():
            (cls.folder / name).write_text(json.dumps(config), encoding="utf-8")
        cls.shared_memory = left_in_shared_memory()

    def setUp(self):
        self.addCleanup(shutil.rmtree, self.folder / "runs", ignore_errors=True)

    def tearDown(self):
        self.assertEqual(left_in_shared_memory() - self.shared_memory, set())

    # ------------------------------------------------------------ runs

    def start(self, *command, environment=()):
        started = Started([SPEEDRUN, *command], self.folder, dict(environment))
        self.addCleanup(started.kill_all)
        return started

    def end(self, started, limit_s=LIMIT_S):
        """Waits until every process of the run is gone. Returns exit code, standard output, standard error."""
        deadline = time.monotonic() + limit_s
        try:
            code = started.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        while (left := started.processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        output, error = started.texts()
        told = f"{started.process.args}\n{output}\n{error}"
        self.assertIsNotNone(code, f"still running after {limit_s} s: processes and their ranks {left}\n{told}")
        self.assertEqual(left, {}, f"processes and their ranks that are left\n{told}")
        return code, output, error

    def speedrun(self, *command, code=0, environment=(), limit_s=LIMIT_S):
        """Runs to the end. Returns standard output and standard error."""
        found, output, error = self.end(self.start(*command, environment=environment), limit_s)
        self.assertEqual(found, code, f"{command}\n{output}\n{error}")
        return output, error

    def train(self, ranks, name, *overrides, config="main_track.json", code=0, environment=()):
        """A new run of so many ranks. Returns its folder."""
        error = self.speedrun("train", config, "--gpus", ranks, *sets([f"run.name={name}", *overrides]), code=code,
                              environment=environment)[1]
        if code == 0:
            self.assertEqual(error, "")
        return self.folder / "runs" / name

    def resume(self, ranks, run, *overrides):
        output, error = self.speedrun("train", "--resume", run, "--gpus", ranks, *sets(overrides))
        self.assertEqual(error, "")
        self.assertNotIn("warning", output)

    def copy_of(self, run, name, step):
        """The run as if it had ended just after the checkpoint of `step`."""
        copy = self.folder / "runs" / name
        shutil.copytree(run, copy)
        for checkpoint in (copy / "checkpoints").iterdir():
            if checkpoint.name != f"step_{step:06}.ckpt":
                checkpoint.unlink()
        return copy

    # ------------------------------------------------------------ what runs leave

    @staticmethod
    def lines(run):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def numbers(self, run):
        """{(step, name): value} of all that does not depend on time. A step that is written twice is an error."""
        found = {}
        for line in self.lines(run):
            for name in ("loss", "grad_norm", "tokens", "val_loss", "val_tokens"):
                if name in line:
                    self.assertNotIn((line["step"], name), found, run)
                    found[line["step"], name] = line[name]
        return found

    @staticmethod
    def result(run):
        return json.loads((run / "result.json").read_text(encoding="utf-8"))

    @staticmethod
    def checkpoints(run):
        return sorted(path.name for path in (run / "checkpoints").iterdir())

    @staticmethod
    def checkpoint(run, step):
        return Checkpoint(run / "checkpoints" / f"step_{step:06}.ckpt")

    # ------------------------------------------------------------ comparisons

    def assert_same_numbers(self, run, expected, tolerance):
        """Losses and norms of two runs: the same steps, values that differ by `tolerance` at most, relative; 0: the same bits."""
        found, wanted = self.numbers(run), self.numbers(expected)
        self.assertEqual(list(found), list(wanted), run)
        for key, value in wanted.items():
            self.assertLessEqual(abs(found[key] - value), tolerance * abs(value), f"{run.name}: {key}: {found[key]} {value}")

    def assert_same_state(self, run, expected, step, tolerance):
        """Parameters, the optimizer's state and pending gradients after `step` steps. `tolerance`: of a tensor's largest value."""
        found, wanted = self.checkpoint(run, step), self.checkpoint(expected, step)
        self.assertEqual(found.meta["reader"], wanted.meta["reader"], run)
        self.assertEqual(list(found.hashes), list(wanted.hashes), run)
        if tolerance == 0:
            self.assertEqual(found.hashes, wanted.hashes, run)
        for name, values in wanted.values.items():
            size = max(map(abs, values))
            difference = max(abs(a - b) for a, b in zip(found.values[name], values))
            self.assertLessEqual(difference, tolerance * size, f"{run.name}: {name} after {step} steps, largest value {size}")

    def assert_one_cause(self, error, rank):
        self.assertRegex(error, r"\Aspeedrun: [^\n]*\n\Z")
        self.assertRegex(error, rf"\brank {rank}\b" if rank is not None else r"\branks? \d")

"""Runs of `speedrun` that wait for each other, some at the same time: each has a folder, a log beside it, and is made only once."""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

ENDED_WELL = ("finished", "stopped at target", "stopped at step")  # outcomes in result.json


@dataclasses.dataclass
class Run:
    name: str  # of its folder
    label: str  # for people
    arguments: list  # of `speedrun train`, without run.dir and run.name
    after: str | None = None  # the run whose checkpoint this one needs
    needs: pathlib.Path | None = None  # that checkpoint
    makes: pathlib.Path | None = None  # a checkpoint that others may need
    kind: str = "run"  # runs of a kind take about as long


class Refused(Exception):
    """What was asked for cannot be: one line that says why."""


def sets(values):
    return [part for value in values for part in ("--set", value)]


def resolved_config(binary, arguments):
    """Of `speedrun train ARGUMENTS`, without where the run is put; what the program does not take is Refused in its own words."""
    done = subprocess.run([str(binary), "train", *arguments, "--print-config"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(last_line_of(done.stderr) or last_line_of(done.stdout) or f"{binary} train {' '.join(arguments)} failed")
    config = json.loads(done.stdout)
    config.pop("run", None)
    return config


def different_keys(a, b, prefix=""):
    """Dotted names of what differs between two nested dictionaries."""
    found = []
    for key in sorted(a.keys() | b.keys()):
        name, left, right = f"{prefix}{key}", a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += different_keys(left, right, name + ".")
        elif left != right:
            found.append(name)
    return found


def keep_plan(folder, plan):
    """A folder goes on only with the runs of the same plan (a dictionary); further runs of that may join them."""
    file = folder / "plan.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_text(json.dumps(plan) + "\n", encoding="utf-8")
            return
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{folder}: {error}") from error
    if kept != plan:
        names = different_keys(kept, plan)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise Refused(f"{folder}: holds runs with another {shown}: name another folder with --out, or remove it")


def check_jobs(jobs, config):
    """Refused if runs that share a GPU would not repeat: micro-batches are then to be fixed."""
    if jobs > 1 and config["train"].get("device") != "cpu" and config["train"].get("micro_batch_tokens", 0) == 0:
        raise Refused("--jobs: runs that share a GPU choose micro-batches by the memory that they find, and then sum in another order: "
                      "give --set train.micro_batch_tokens=N")  # fmt: skip


def read_result(folder):
    """result.json of a run that has come to its end, else None."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if result.get("outcome") in ENDED_WELL else None


def last_line_of(text):
    """That has something in it; else an empty one."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def last_line(log):
    return last_line_of(log.read_text(encoding="utf-8", errors="replace") if log.exists() else "") or "it printed nothing"


def device_list(text):
    """Of an argument: GPUs as CUDA_VISIBLE_DEVICES names them, "0,1" → ["0", "1"]."""
    devices = [word.strip() for word in text.split(",")]
    if not all(devices) or len(set(devices)) < len(devices):
        raise argparse.ArgumentTypeError(f"'{text}': expected different GPUs with commas between them, 0,1 for example")
    return devices


class Queue:
    """Everything about the runs in one folder. `failures`: what went wrong, a line each. With `devices`, `jobs` runs at a time on each of
    these GPUs."""

    def __init__(self, binary, folder, jobs=1, limit=600.0, budget=0.0, say=print, devices=None):
        self.binary, self.folder, self.limit, self.say = binary, folder, limit, say
        self.places = (devices or [None]) * jobs
        self.began = time.monotonic()
        self.deadline = self.began + budget if budget else None  # after it no run is started
        self.failures, self.seconds, self.left_out = [], {}, 0
        folder.mkdir(parents=True, exist_ok=True)

    def elapsed(self):
        return time.monotonic() - self.began

    def out_of_time(self):
        return self.deadline is not None and time.monotonic() > self.deadline

    def result(self, name):
        return read_result(self.folder / name)

    def wanted(self, runs):
        """Those that have not been made; a finished run whose checkpoint is gone is made again if another one still needs it."""
        unfinished = [run for run in runs if self.result(run.name) is None]
        parents = {run.after for run in unfinished if run.needs is not None and not run.needs.exists()}
        return [run for run in runs if run in unfinished or run.name in parents]

    def work(self, runs, done=lambda run: None):
        """Makes what is wanted of `runs`, in their order as far as the checkpoints allow; done(run) after each that ended well."""
        waiting = self.wanted(runs)
        total, ended, running, failed, free = len(waiting), 0, {}, set(), list(self.places)
        try:
            while waiting or running:
                for run in [run for run in waiting if run.after in failed]:
                    waiting.remove(run)
                    failed.add(run.name)
                    ended += 1
                    self.failures.append(f"{run.name}: not made, because {run.after} failed")
                if self.out_of_time() and waiting:
                    self.left_out += len(waiting)
                    self.say(f"no time left: {len(waiting)} runs are not started; the same command goes on with them")
                    total, waiting = total - len(waiting), []
                busy = {run.name for _, run, _, _ in running.values()} | {run.name for run in waiting}
                for run in [run for run in waiting if run.after is None or run.after not in busy]:
                    if not free:
                        break
                    waiting.remove(run)
                    place = free.pop(0)
                    process = self.start(run, place)
                    running[process.pid] = (process, run, time.monotonic(), place)
                time.sleep(0.02)
                for pid, (process, run, since, place) in list(running.items()):
                    code = process.poll()
                    seconds = time.monotonic() - since
                    if code is None and seconds > self.limit:
                        process.kill()
                        process.wait()
                        code = f"none: it was ended after {self.limit:g} s"
                    if code is None:
                        continue
                    del running[pid]
                    free.append(place)
                    ended += 1
                    if self.ended_well(run, code):
                        self.seconds.setdefault(run.kind, []).append(seconds)
                        done(run)
                        self.tell(run, seconds, f"{ended}/{total}", waiting, running)
                    else:
                        failed.add(run.name)
        finally:
            for process, _, _, _ in running.values():  # an exception or Ctrl-C: nothing is left behind
                process.kill()
                process.wait()

    def start(self, run, device=None):
        shutil.rmtree(self.folder / run.name, ignore_errors=True)  # what an interrupted or older run left
        command = [str(self.binary), "train", *run.arguments, "--set", f"run.dir={self.folder}", "--set", f"run.name={run.name}"]
        environment = os.environ if device is None else os.environ | {"CUDA_VISIBLE_DEVICES": device}
        with open(self.folder / f"{run.name}.log", "wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment)

    def ended_well(self, run, code):
        log = self.folder / f"{run.name}.log"
        missing = run.makes is not None and not run.makes.exists()
        if code == 0 and self.result(run.name) is not None and not missing:
            return True
        if code == 0:
            why = f"{run.makes} is missing" if missing else "it left no result that says finished"
        else:
            why = last_line(log)
        self.failures.append(f"{run.name}: exit code {code}: {why} ({log})")
        self.say(f"FAILED {self.failures[-1]}")
        return False

    def tell(self, run, seconds, count, waiting, running):
        known = [seconds for times in self.seconds.values() for seconds in times]
        mean = lambda kind: sum(self.seconds.get(kind, known)) / len(self.seconds.get(kind, known))  # noqa: E731
        begun = [run.kind for _, run, _, _ in running.values()]
        left = (sum(mean(other.kind) for other in waiting) + sum(map(mean, begun)) / 2) / len(self.places)
        loss = self.result(run.name).get("val_loss")
        loss = "no validation loss" if loss is None else f"validation loss {loss:.5f}"
        self.say(f"[{self.elapsed():6.1f} s] {count} {run.label}: {loss}, {seconds:.1f} s; left about {left:.0f} s")

    def work_in_pieces(self, run):
        """One long run: within the time left, then it is told to stop, writes a checkpoint, and the next call goes on from it.
        True once it has ended well."""
        if self.result(run.name) is not None and (run.makes is None or run.makes.exists()):
            return True
        if self.out_of_time():
            self.left_out += 1
            return False
        folder = self.folder / run.name
        goes_on = any((folder / "checkpoints").glob("*.ckpt")) and self.result(run.name) is None
        if goes_on:
            self.say(f"{run.label}: goes on")
            with open(self.folder / f"{run.name}.log", "ab") as log:
                process = subprocess.Popen([str(self.binary), "train", "--resume", str(folder)], stdout=log,
                                           stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        else:
            self.say(f"{run.label}: starts")
            process = self.start(run)
        try:
            process.wait(None if self.deadline is None else max(self.deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode == 128 + signal.SIGTERM:
            self.left_out += 1
            self.say(f"{run.label}: stopped with a checkpoint; the same command goes on with it")
            return False
        return self.ended_well(run, process.returncode)

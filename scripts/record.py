#!/usr/bin/env python3
"""Runs a config n times on all GPUs of this host, with seeds 1 to n, and tells what it took in Markdown tables: clock, loss and the
record's test of it, speed, milliseconds a step. An interrupted set goes on where it was, and --runs may grow: give the same command
again.

    record.py [--train PATTERN --val PATTERN] [--local DIR] [--timeline]     the Main Track, three runs
    record.py --reference other/record.json                                  beside the runs of another machine or commit
    record.py --cpu                                                          a tiny model on CPU processes, in half a minute
"""

import argparse
import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import record_report
from run_metrics import stages
from run_queue import Queue, Refused, Run, keep_plan, last_line_of, resolved_config, sets

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECKPOINTS_OFF = ["checkpoint.every=0", "checkpoint.at_end=false"]
OWN_KEYS = {"train.seed", "run.dir", "run.name", *(text.partition("=")[0] for text in CHECKPOINTS_OFF)}
# On the CPU: some steps of every stage, few tokens of validation, a thread for each process.
CPU_SETS = ["schedule.scale=0.15", "eval.tokens=8192", "train.threads=1"]
# Steps of the whole schedule in the short runs. The timeline records some in the middle of every stage.
WARM_UP_STEPS, CPU_WARM_UP_STEPS, TIMELINE_STEPS = 12, 4, 120


def say(text):
    print(text, flush=True)


def gpus_present():
    """That a program started here would see; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def files_of(pattern):
    """As the program takes a pattern: a file of that name, or else what matches, with {a,b}."""
    if os.path.exists(pattern):
        return [pathlib.Path(pattern)]
    brace = re.search(r"\{([^{}]*)\}", pattern)
    if not brace:
        return sorted(pathlib.Path(path) for path in glob.glob(pattern))
    parts = [pattern[: brace.start()] + part + pattern[brace.end() :] for part in brace[1].split(",")]
    return sorted({path for part in parts for path in files_of(part)})


def copy_file(source, target):
    """Under another name until it is whole. To the disk: writing back later would disturb the runs."""
    part = target.with_name(f".{target.name}.part")
    try:
        with open(source, "rb") as read, open(part, "wb") as write:
            shutil.copyfileobj(read, write, 1 << 24)
            write.flush()
            os.fsync(write.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def copy_shards(patterns, folder):
    """Patterns by the names of folders in `folder` that their files go to: the patterns of the copies. What is there with the same
    size is taken as it is."""
    wanted, copies = [], {}
    for name, pattern in patterns.items():
        sources = files_of(pattern)
        if not sources:
            raise Refused(f"--local: no files match {pattern}")
        if len({source.name for source in sources}) < len(sources):
            raise Refused(f"--local: {pattern} matches files of the same name in several folders")
        wanted += [(source, folder / name / source.name) for source in sources]
        copies[name] = str(folder / name / pathlib.Path(pattern).name)
    missing = [(source, target) for source, target in wanted
               if not target.exists() or target.stat().st_size != source.stat().st_size]  # fmt: skip
    size = sum(source.stat().st_size for source, _ in missing)
    for name in patterns:
        (folder / name).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise Refused(f"--local {folder}: {size / 1e9:.2f} GB of shards do not fit into the {free / 1e9:.2f} GB that are free there")
    began = time.monotonic()
    for source, target in missing:
        copy_file(source, target)
    seconds = max(time.monotonic() - began, 1e-9)
    speed = f": {size / 1e9:.2f} GB in {seconds:.1f} s, {size / seconds / 1e6:,.0f} MB/s" if missing else ""
    say(f"{folder}: {len(missing)} shards copied, {len(wanted) - len(missing)} were there{speed}")
    for name, pattern in copies.items():
        strangers = set(files_of(pattern)) - {target for _, target in wanted}
        if strangers:
            raise Refused(f"--local: {min(strangers)} is none of {patterns[name]}: remove it, or name another folder")
    return copies


class Record:
    def __init__(self, args, gpus):
        self.args, self.gpus = args, gpus
        self.keys = list(CPU_SETS if args.cpu and not args.config else []) + (["train.device=cpu"] if args.cpu else []) + args.set
        if args.train:
            self.keys += [f"data.train={args.train}", f"data.val={args.val}"]
        self.config = self.resolve()
        if args.local:
            data = self.config["data"]
            copies = copy_shards({"train": data["train"], "val": data["val"]}, args.local.absolute())
            self.keys += [f"data.{name}={pattern}" for name, pattern in copies.items()]
            self.config = self.resolve()
        self.keys += CHECKPOINTS_OFF
        self.plan = {"config": self.config, "gpus": gpus}
        if (args.out / "plan.json").exists():
            keep_plan(args.out, self.plan)
        self.queue = Queue(args.binary, args.out / "runs", limit=args.limit, say=say)

    def resolve(self):
        config = resolved_config(self.args.binary, self.arguments([]))
        config["train"].pop("seed")
        config.pop("checkpoint")
        return config

    def arguments(self, keys):
        usual = ROOT / "configs" / ("main_track_tiny.json" if self.args.cpu else "main_track.json")
        return [str(self.args.config or usual), *sets(self.keys + keys)]

    def run(self, name, label, keys, flags=(), **more):
        flags = [*(["--gpus", str(self.gpus)] if self.gpus > 1 else []), *flags]
        return Run(name, label, [*self.arguments(keys), *flags], **more)

    def short(self, name, label, steps, flags=(), **more):
        """A run of about so many steps, at least one of every stage."""
        scale = self.config["schedule"].get("scale", 1) * min(steps / max(stages(self.config)[-1][1], 1), 1)
        keys = [f"schedule.scale={scale!r}", "eval.every=0", "eval.dense_every=0", "eval.at_start=false"]
        return self.run(name, label, keys, flags, kind=name, **more)

    def anew(self, run):
        """Made again even if it has been."""
        shutil.rmtree(self.queue.folder / run.name, ignore_errors=True)
        return run

    def make(self):
        seeds = range(1, self.args.runs + 1)
        runs = self.queue.wanted([self.run(f"seed_{seed}", f"seed {seed}", [f"train.seed={seed}"]) for seed in seeds])
        if self.args.timeline:
            trace = self.args.out / "timeline.json"
            timeline = self.short("timeline", "timeline", TIMELINE_STEPS, ["--timeline", str(trace)], makes=trace)
            if self.queue.result("timeline") is None or not trace.exists():
                runs.append(self.anew(timeline))
        if runs:
            self.check()
            keep_plan(self.args.out, self.plan)  # not before: what is refused claims no folder
            if self.args.warm_up:
                steps = CPU_WARM_UP_STEPS if self.args.cpu else WARM_UP_STEPS
                runs.insert(0, self.anew(self.short("warm_up", "warm-up, does not count", steps)))
            say(f"{len(runs)} runs to make; each tells how far it is in {self.queue.folder}/NAME.log")
        self.queue.work(runs)
        return record_report.write(self.args.out, [f"seed_{seed}" for seed in seeds], self.queue.failures, self.args.reference, say)

    def check(self):
        """Before anything takes time: whether the data suffices, the ranks divide the rows, and memory is enough."""
        command = [str(self.args.binary), "train", *self.run("", "", []).arguments, "--dry-run"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self.args.limit)
        except subprocess.TimeoutExpired as late:
            raise Refused(str(late)) from late
        if done.returncode:
            raise Refused(last_line_of(done.stderr) or last_line_of(done.stdout) or f"{' '.join(command)} failed")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(f"{message} (--help lists the arguments)")


def parse_arguments(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=os.environ.get("SPEEDRUN", ROOT / "build" / "speedrun"))
    parser.add_argument("--config", type=pathlib.Path, help="(default: configs/main_track.json)")
    parser.add_argument("--train", metavar="PATTERN", help="token shards, instead of the config's")
    parser.add_argument("--val", metavar="PATTERN")
    parser.add_argument("--local", type=pathlib.Path, metavar="DIR", help="copy the shards to this fast disk first")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="seeds 1 to N (default: 3)")
    parser.add_argument("--gpus", type=int, metavar="N", help="(default: all of this host; with --cpu 2 processes)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further keys, for every run")
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True,
                        help="a short run first that does not count: page cache, driver, clocks (default: yes)")  # fmt: skip
    parser.add_argument("--timeline", action="store_true", help="a short run more: communication that no compute covers")
    parser.add_argument("--reference", type=pathlib.Path, metavar="FILE", help="record.json of other runs, to print beside these")
    parser.add_argument("--cpu", action="store_true", help="CPU processes and configs/main_track_tiny.json, shortened")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="that a run may take (default: 1800)")
    parser.add_argument("--out", type=pathlib.Path, help="folder (default: runs/record, with --cpu runs/record_cpu)")
    args = parser.parse_args(arguments)
    args.out = (args.out or pathlib.Path("runs") / ("record_cpu" if args.cpu else "record")).absolute()
    args.binary = pathlib.Path(args.binary).absolute()
    if bool(args.train) != bool(args.val):
        parser.error("--train and --val: give both or neither")
    if args.runs < 1 or (args.gpus is not None and args.gpus < 1) or args.limit <= 0:
        parser.error("--runs, --gpus and --limit: 1 or more")
    if args.cpu and args.timeline:
        parser.error("--timeline records GPUs: not with --cpu")
    for text in args.set:
        if text.partition("=")[0] in OWN_KEYS:
            parser.error(f"--set {text}: seeds, folders and checkpoints are set here")
    return args


def number_of_gpus(args):
    if args.cpu:
        return args.gpus or 2
    present = gpus_present()
    if present == 0:
        raise Refused("no GPU here; --cpu tries everything on CPU processes")
    if args.gpus is not None and args.gpus > present:
        raise Refused(f"--gpus {args.gpus}: {present} here")
    return args.gpus or present


def main(arguments=None):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the queue ends its run, as at any other exit
    try:
        args = parse_arguments(arguments)
        if not os.access(args.binary, os.X_OK):
            raise Refused(f"{args.binary}: not built; run scripts/test.sh, or name one with --binary or SPEEDRUN")
        args.reference = record_report.read_reference(args.reference) if args.reference else None
        return Record(args, number_of_gpus(args)).make()
    except Refused as refused:
        print(f"record: {refused}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"record: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("record: interrupted; the same command goes on with what is missing", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Does a changed key help? Each seed trains the config as it is, and once more for every arm with its keys changed; arms are judged by
their paired differences to the config with the same seed.

    compare.py CONFIG --arm 'KEY=VALUE [KEY=VALUE …]' [--arm …] [--seeds 8] [--set KEY=VALUE …]

    compare.py configs/main_track.json --arm fp8.mlp_down=bf16 --arm 'optim.matrix.lr=0.02 optim.head.lr=0.01' --set schedule.scale=0.1

--set changes the config of all runs. An interrupted comparison goes on where it was: give the same command again, also with more seeds
or further arms."""

import argparse
import json
import os
import pathlib
import statistics
import sys

from markdown_tables import ALPHA, interval_text, number, p_text, table, verdict
from run_metrics import read_steps
from run_queue import Queue, Refused, Run, check_jobs, device_list, keep_plan, resolved_config, sets
from t_tests import holm, paired

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Losses are compared after equal steps; --set may say otherwise.
USUAL = ["checkpoint.every=0", "checkpoint.at_end=false", "train.stop_at_target=false"]


def say(text):
    print(text, flush=True)


def die(message):
    sys.exit(f"compare: {message}")


def last_tenth(folder, steps):
    """Mean training loss of the last tenth of a run's steps; None if a line is missing."""
    lines = read_steps(folder)
    losses = [lines.get(step, {}).get("loss") for step in range(steps - max(steps // 10, 1), steps)]
    return None if None in losses else statistics.fmean(losses)


class Arm:
    def __init__(self, keys):
        self.keys = keys  # none: the config as it is
        self.label = " ".join(keys) or "baseline"
        self.slug = "_".join(keys).replace("/", "-") or "baseline"


class Comparison:
    def __init__(self, args):
        self.args = args
        self.arguments = [str(args.config), *sets(USUAL + args.set)]
        self.arms = [Arm([])] + [Arm(text.split()) for text in args.arm]
        configs = {}
        for arm in self.arms:
            config = resolved_config(args.binary, self.arguments + sets(arm.keys))
            config["train"].pop("seed", None)
            same = next((other for other, known in configs.items() if known == config), None)
            if same is not None:
                raise Refused(f"--arm '{arm.label}': is the same config as {same}")
            configs[arm.label] = config
            check_jobs(args.jobs, config)
        keep_plan(args.out, {"config": configs["baseline"], "gpus": args.gpus})
        self.queue = Queue(args.binary, args.out / "runs", args.jobs, args.limit, args.budget, say, args.devices)

    def run_of(self, seed, arm):
        gpus = ["--gpus", str(self.args.gpus)] if self.args.gpus > 1 else []
        return Run(f"seed{seed}_{arm.slug}", f"seed {seed} {arm.label}",
                   [*self.arguments, *sets([f"train.seed={seed}", *arm.keys]), *gpus], kind=arm.label)  # fmt: skip

    def run(self):
        seeds = range(1, self.args.seeds + 1)
        say(f"{len(self.arms)} configs with {len(seeds)} seeds each: {len(self.arms) * len(seeds)} runs")
        # Seed by seed: what has been made when time runs out is pairs.
        self.queue.work([self.run_of(seed, arm) for seed in seeds for arm in self.arms])
        rows = [row for seed in seeds for row in self.rows_of(seed)]
        text = report(rows, [arm.label for arm in self.arms], self.args.jobs)
        failures = self.queue.failures
        if len({row["executable"] for row in rows} - {None}) > 1:
            failures = [*failures, "the runs were made by more than one build of speedrun"]
        text += "".join(f"- {failure}\n" for failure in failures)
        told = {"arms": [arm.label for arm in self.arms], "failures": failures, "runs": rows}
        (self.args.out / "compare.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        (self.args.out / "compare.md").write_text(text, encoding="utf-8")
        say(text)
        say(f"{self.args.out}: compare.md, compare.json")
        return 1 if failures else 3 if self.queue.left_out else 0

    def rows_of(self, seed):
        for arm in self.arms:
            name = self.run_of(seed, arm).name
            result = self.queue.result(name)
            if result is None or result.get("val_loss") is None:
                continue
            yield {"arm": arm.label, "seed": seed, "run": name, "val_loss": result["val_loss"], "steps": result["steps"],
                   "train_loss": last_tenth(self.queue.folder / name, result["steps"]), "clock_s": result.get("clock_s"),
                   "reached_at": result.get("reached_at"), "target": result.get("target_loss"),
                   "executable": result.get("build", {}).get("executable_hash")}  # fmt: skip


def mean_of(rows, key):
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.fmean(values) if values else None


def reached_text(rows):
    reached = [row["reached_at"] for row in rows if row["reached_at"]]
    if not reached:
        return f"0 of {len(rows)}"
    step, clock = (statistics.fmean(at[key] for at in reached) for key in ("step", "clock_s"))
    return f"{len(reached)} of {len(rows)}: step {step:.0f}, {clock:.1f} s"


def report(rows, labels, jobs):
    """Markdown. rows: of the finished runs; labels: of the arms, the baseline first."""
    by_arm = {label: {row["seed"]: row for row in rows if row["arm"] == label} for label in labels}
    base = by_arm[labels[0]]
    if not base:
        return "No baseline has ended.\n"
    pairs = {label: [(row, base[seed]) for seed, row in by_arm[label].items() if seed in base] for label in labels[1:]}
    results = {label: paired([row["val_loss"] - other["val_loss"] for row, other in of_arm])
               for label, of_arm in pairs.items() if of_arm}  # fmt: skip
    adjusted = dict(zip(results, holm([result.p for result in results.values()])))
    lines = []
    for label in labels:
        mine = list(by_arm[label].values())
        if not mine or (label != labels[0] and label not in results):
            lines.append([label, str(len(mine)), *["–"] * 8])
            continue
        line = [label, str(len(mine)), f"{mean_of(mine, 'val_loss'):.5f}", "", "", "", "", "", number(mean_of(mine, "clock_s"), ".1f"),
                reached_text(mine)]  # fmt: skip
        if label != labels[0]:
            result = results[label]
            train = [row["train_loss"] - other["train_loss"] for row, other in pairs[label]
                     if row["steps"] == other["steps"] and None not in (row["train_loss"], other["train_loss"])]  # fmt: skip
            line[1] = str(result.n)
            line[3:8] = [f"{result.mean:+.5f}", interval_text(result), p_text(adjusted[label]), verdict(result, adjusted[label]),
                         number(statistics.fmean(train) if train else None, "+.5f")]  # fmt: skip
        lines.append(line)
    head = ["arm", "n", "validation loss", "difference", "95% interval", "p (Holm)", "verdict", "training", "clock s", "target reached"]
    losses = [row["val_loss"] for row in base.values()]
    notes = ["Differences: the arm's loss minus that of the baseline with the same seed, mean over pairs; p: paired t-test, two-sided; "
             f"verdicts at p < {ALPHA} after Holm's correction over the arms.",
             "Training: the same difference in the mean training loss of the last tenth of the steps; of an arm that changes the loss "
             f"itself it says nothing. Target: {rows[0]['target']}."]  # fmt: skip
    if len(losses) > 1:
        notes.append(f"Standard deviation of the baseline over seeds: {statistics.stdev(losses):.5f}.")
    if jobs > 1:
        notes.append(f"Clocks: {jobs} runs at a time shared the device.")
    return table(head, lines) + "\n" + "".join(f"- {note}\n" for note in notes)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--arm", action="append", required=True, metavar="KEYS",
                        help="KEY=VALUE, or several with blanks between them (repeatable)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=8, help="1 to N (default: 8)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs, beside the config (repeatable)")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of each run (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time on one GPU (default: 1)")
    parser.add_argument("--devices", type=device_list, metavar="0,1,…", help="GPUs that make runs of their own (default: the first)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a run may take (default: 1800)")
    parser.add_argument("--budget", type=float, default=0, help="seconds after which no run is started; exit code 3 (default: none)")
    parser.add_argument("--out", type=pathlib.Path, help="folder (default: runs/compare_CONFIG)")
    parser.add_argument("--binary", type=pathlib.Path, default=os.environ.get("SPEEDRUN", ROOT / "build" / "speedrun"))
    args = parser.parse_args(arguments)
    if min(args.seeds, args.gpus, args.jobs) < 1:
        parser.error("--seeds, --gpus, --jobs: 1 or more")
    if args.gpus > 1 and args.devices:
        parser.error("--devices: each of them makes runs of its own; --gpus: all make one run. Give one of the two")
    if not all(text.split() and all("=" in word for word in text.split()) for text in args.arm):
        parser.error("--arm: expected KEY=VALUE, or several with blanks between them")
    args.out = (args.out or pathlib.Path("runs") / f"compare_{args.config.stem}").absolute()
    args.binary = pathlib.Path(args.binary).absolute()
    return args


def main(arguments=None):
    args = parse_arguments(arguments)
    if not os.access(args.binary, os.X_OK):
        die(f"{args.binary}: not built; run scripts/test.sh, or name one with --binary or SPEEDRUN")
    try:
        return Comparison(args).run()
    except Refused as refused:
        die(refused)


if __name__ == "__main__":
    sys.exit(main())

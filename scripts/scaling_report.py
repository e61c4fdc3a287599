#!/usr/bin/env python3
"""Tables of what scaling.sh has run, in Markdown, and whether all is as it should be (exit code 1 if not).

    scaling_report.py RUNS [--mode gpus|one-gpu|cpu]"""

import argparse
import pathlib
import re
import statistics
import sys

from markdown_tables import number, table
from run_metrics import pairs_ms, read_json, read_steps, stages, uncovered_rows
from run_queue import ENDED_WELL

FAILURE_LIMIT_S = 30  # from the failure of a rank until every process is gone
MEMORY_MIB = 64  # so much more may be in use after a failure than before it
UNCOVERED = 0.05  # of a step
# Largest mean difference in loss, relative, between numbers of ranks: sums in another order, in FP32 on the CPU and BF16 and FP8 on
# a GPU, where they grow from step to step.
LOSS_DIFFERENCE = {"cpu": 1e-3, "one-gpu": 5e-3, "gpus": 5e-3}
# The first step sees the same weights everywhere: loss and gradient norm. Where FP8 scales come from the maximum of a micro-batch
# (fp8.mlp_up_scaling = current) they follow the ranks, so that the norm agrees to FP8's roundings only.
FIRST_DIFFERENCE = {"cpu": (1e-6, 1e-3), "one-gpu": (5e-4, 5e-3), "gpus": (5e-4, 5e-3)}


def step_ms(steps, begin, end):
    pairs, _ = pairs_ms(steps, begin, end)
    return statistics.median(pairs) if pairs else None


def difference(a, b):
    """Relative, over the steps that both have: (first loss, mean loss, largest loss, first gradient norm, mean gradient norm)."""
    common = sorted(a.keys() & b.keys())
    if not common:
        return None
    relative = lambda key: [abs(a[s][key] - b[s][key]) / max(abs(b[s][key]), 1e-30) for s in common]  # noqa: E731
    losses, norms = relative("loss"), relative("grad_norm")
    return losses[0], statistics.fmean(losses), max(losses), norms[0], statistics.fmean(norms)


class Report:
    def __init__(self, runs, mode):
        self.runs, self.mode = runs, mode
        self.text, self.faults = [], []

    def fault(self, message):
        """Several tables may look at the same run; each fault is told once."""
        if message not in self.faults:
            self.faults.append(message)

    def check(self, good, message):
        """The table's last cell; what is not as it should be is told again at the end."""
        if not good:
            self.fault(message)
        return "yes" if good else "**NO**"

    def by_ranks(self, prefix):
        """Runs PREFIX_N that have begun, by N."""
        found = {}
        for folder in self.runs.glob(prefix + "_*"):
            match = re.fullmatch(re.escape(prefix) + r"_(\d+)", folder.name)
            if match and (folder / "metrics.jsonl").exists():
                found[int(match[1])] = folder
        for log in self.runs.glob(prefix + "_*.log"):
            match = re.fullmatch(re.escape(prefix) + r"_(\d+)\.log", log.name)
            result = read_json(self.runs / log.stem / "result.json") if match else None
            if match and (result is None or result["outcome"] not in ENDED_WELL):
                self.fault(f"{log.stem} did not finish: {log}")
        return dict(sorted(found.items()))

    def add(self, title, head, rows):
        if rows:
            self.text.append(f"**{title}**\n\n{table(head, rows)}")

    def speed(self, prefix, title):
        rows, one = [], {}
        for ranks, folder in self.by_ranks(prefix).items():
            steps, result = read_steps(folder), read_json(folder / "result.json") or {}
            joules = result.get("joules_per_token")
            for i, (begin, end, tokens) in enumerate(stages(read_json(folder / "config.json"))[:3]):
                ms = step_ms(steps, begin, end)
                if ms is None:
                    continue
                if ranks == 1:
                    one[i] = ms
                rows.append([str(ranks), str(i + 1), f"{tokens:,}", f"{ms:.1f}", f"{tokens / ms * 1e3:,.0f}",
                             f"{one[i] / ms:.2f}×" if i in one else "–",
                             number(joules * 1e3 if joules and i == 0 else None, ".3f")])  # fmt: skip
        self.add(title, ["GPUs", "stage", "tokens a step", "ms a step", "tokens/s", "speed-up", "mJ a token, whole run"], rows)

    def equality(self, prefix, title):
        folders = self.by_ranks(prefix)
        rows = []
        if len(folders) < 2:
            return
        base, first = min(folders), None
        for ranks, folder in folders.items():
            steps = read_steps(folder)
            if ranks == base:
                first = steps
                continue
            message = f"{prefix}: losses of {ranks} and {base} ranks differ"
            self.difference_row(rows, f"{ranks} against {base}", steps, first, message)
        self.add(title, DIFFERENCE_HEAD, rows)

    def difference_row(self, rows, name, a, b, message, same_weights=True):
        differences = difference(a, b)
        if differences is None:
            self.faults.append(f"{message}: no step in common")
            return
        first, mean, _, first_norm, _ = differences
        good = mean <= LOSS_DIFFERENCE[self.mode]
        if same_weights:
            good = good and first <= FIRST_DIFFERENCE[self.mode][0] and first_norm <= FIRST_DIFFERENCE[self.mode][1]
        rows.append([name, str(len(a.keys() & b.keys())), *(f"{d:.1e}" for d in differences), self.check(good, message)])

    def resume(self):
        rows = []
        for folder in sorted(self.runs.glob("resume_*_to_*")):
            match = re.fullmatch(r"resume_(\d+)_to_(\d+)", folder.name)
            if not match:
                continue
            base = self.runs / f"resume_{match[1]}"
            if (read_json(folder / "result.json") or {}).get("outcome") != "finished":
                self.faults.append(f"{folder.name} did not finish: {folder}.log")
                continue
            log = (self.runs / (folder.name + ".log")).read_text(encoding="utf-8", errors="replace")
            after = re.search(r"after (\d+) steps", log)
            if not after:
                self.faults.append(f"{folder.name} did not resume: {folder}.log")
                continue
            begin = int(after[1])
            tail = lambda path: {s: line for s, line in read_steps(path).items() if s >= begin}  # noqa: E731
            name = f"{match[1]} to {match[2]} after step {begin}"
            # Not from the same weights, strictly: FP8 scales lag by a step, and sums have another order.
            self.difference_row(rows, name, tail(folder), tail(base), f"{folder.name}: losses differ from the run that went on",
                                same_weights=False)  # fmt: skip
        self.add("A checkpoint goes on with another number of ranks", ["ranks", *DIFFERENCE_HEAD[1:]], rows)

    def timeline(self):
        rows = []
        for path in sorted(self.runs.glob("timeline_*.json"), key=lambda p: int(p.stem.split("_")[1])):
            ranks = int(path.stem.split("_")[1])
            windows = read_json(path)["otherData"]["windows"]
            for stage, (ms, compute, communication, uncovered, idle) in uncovered_rows(windows).items():
                good = "–"
                if self.mode == "gpus":
                    message = f"{ranks} GPUs, stage {stage + 1}: {uncovered:.1f} of {ms:.1f} ms uncovered"
                    good = self.check(uncovered <= UNCOVERED * ms, message)
                rows.append([str(ranks), str(stage + 1), f"{ms:.1f}", f"{compute:.1f}", f"{communication:.1f}",
                             f"{uncovered:.1f} ({100 * uncovered / ms:.1f}%)", f"{idle:.1f}", good])  # fmt: skip
        self.by_ranks("timeline")
        self.add("Where a step's time goes, ms, the rank with the most uncovered communication",
                 ["GPUs", "stage", "step", "compute", "communication", "uncovered", "idle", "< 5%"], rows)  # fmt: skip

    def failures(self):
        rows = []
        for log in [*self.runs.glob("fault_*.log"), *self.runs.glob("cycle_*.log")]:
            if not log.with_suffix(".json").exists():
                self.faults.append(f"{log.stem} was not watched to its end: {log}")
        for path in sorted(self.runs.glob("fault_*.json")):
            _, kind, rank = path.stem.split("_")
            told = read_json(path)
            seconds = told["seconds_after_failure"]
            log = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
            causes = [line for line in log.splitlines() if line.startswith("speedrun: ")]
            before, after = told.get("gpu_mib_before"), told.get("gpu_mib_after")
            good = (told["in_time"] and seconds is not None and seconds <= FAILURE_LIMIT_S and told["exit_code"] != 0 and causes
                    and (before is None or (after is not None and after <= before + MEMORY_MIB)))  # fmt: skip
            memory = "–" if before is None else f"{before}; {number(after, 'd')}"
            rows.append([f"kill -{'9' if kind == 'kill' else 'STOP'} of rank {rank}", number(seconds, ".1f"),
                         str(told["exit_code"]), causes[0].removeprefix("speedrun: ").replace("|", "\\|") if causes else "–", memory,
                         self.check(good, f"{path.stem}: see {path}")])  # fmt: skip
        self.add("Failures in the middle of a step",
                 ["what", "s until every process was gone", "exit code", "cause told", "GPU MiB before; after", "good"],
                 rows)  # fmt: skip

    def cycles(self):
        told = [read_json(path) for path in self.runs.glob("cycle_*.json")]
        if not told:
            return
        bad = [t for t in told if t["exit_code"] != 0 or not t["in_time"]]
        leaks = [t for t in told if t.get("gpu_mib_after") is not None and t["gpu_mib_after"] > t["gpu_mib_before"] + MEMORY_MIB]
        good = self.check(not bad and not leaks, f"{len(bad)} of {len(told)} starts failed, {len(leaks)} left GPU memory in use")
        seconds = statistics.median(t["seconds"] for t in told)
        self.add("Starts and ends in a row", ["starts", "failed", "left GPU memory in use", "median s", "good"],
                 [[str(len(told)), str(len(bad)), str(len(leaks)), f"{seconds:.1f}", good]])  # fmt: skip

    def full(self):
        rows, one = [], None
        for ranks, folder in self.by_ranks("full").items():
            result = read_json(folder / "result.json")
            if result is None:
                continue
            one = result["clock_s"] if ranks == 1 else one
            joules = result["joules_per_token"]
            rows.append([str(ranks), f"{result['clock_s']:.1f}", number(result["clock_s"] / one if one else None, ".3f"),
                         number(result["val_loss"], ".4f"), f"{result['tokens_per_s']:,.0f}",
                         number(joules * 1e3 if joules else None, ".3f")])  # fmt: skip
        self.add("Whole runs", ["GPUs", "clock, s", "of one GPU's", "validation loss", "tokens/s", "mJ a token"], rows)

    def make(self):
        if self.mode != "gpus":
            where = "Ranks share one GPU" if self.mode == "one-gpu" else "Ranks are CPU processes"
            self.text.append(f"{where}: times mean nothing here, only equality and failures do.\n")
        self.speed("stages", "Main Track, shortened stages")
        self.equality("stages", "The same losses on any number of ranks, relative differences")
        self.timeline()
        self.speed("gpt2", "GPT-2 124M" if self.mode != "cpu" else "GPT-2's architecture, tiny")
        self.equality("gpt2", "The same for GPT-2's architecture")
        self.resume()
        self.failures()
        self.cycles()
        self.full()
        return "\n".join(self.text)


DIFFERENCE_HEAD = ["ranks", "steps", "loss, first step", "loss, mean", "loss, largest", "gradient norm, first step",
                   "gradient norm, mean", "good"]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=pathlib.Path)
    parser.add_argument("--mode", choices=("gpus", "one-gpu", "cpu"), default="gpus")
    args = parser.parse_args()
    report = Report(args.runs, args.mode)
    print(report.make())
    for fault in report.faults:
        print(f"NOT as expected: {fault}")
    if not report.faults:
        print("All as expected.")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()

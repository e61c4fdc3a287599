"""What extrapolation_study.py found: tables in Markdown, every run as JSON and CSV, and a plot where matplotlib is."""

import csv
import json
import statistics

from markdown_tables import ALPHA, interval_text, number, p_text, table, verdict
from t_tests import holm, paired

COLUMNS = ("phase", "seed", "method", "setting", "val_loss", "val_loss_raw", "baseline_val_loss", "difference", "tail_s", "run")


def summary(rows):
    """Of the runs of one arm (rows of COLUMNS): means over those that have a baseline of the same seed."""
    rows = [row for row in rows if row["difference"] is not None]
    if not rows:
        return None
    tails = [row["tail_s"] for row in rows if row["tail_s"] is not None]
    return {"mean_loss": statistics.fmean(row["val_loss"] for row in rows), "tail_s": statistics.fmean(tails) if tails else None,
            "paired": paired([row["difference"] for row in rows]), "rows": rows}  # fmt: skip


def best_setting(rows, settings, seeds):
    """The setting with the smallest mean paired difference, of those that all of the tuning seeds have; None if there is none."""
    means = {}
    for setting in settings:
        found = summary([row for row in rows if row["setting"] == setting])
        if found and found["paired"].n == seeds:
            means[setting] = found["paired"].mean
    return min(means, key=means.get) if means else None


def slope(baselines, tail):
    """Loss per step of the baseline's own tail, mean over seeds: (loss at the branch, loss at the end) pairs; None without."""
    drops = [(first - last) / tail for first, last in baselines if first is not None]
    return statistics.fmean(drops) if drops else None


class Report:
    """Of a study as study.json holds it."""

    def __init__(self, study):
        self.study = study
        self.rows = study["runs"]
        self.text = []

    def of(self, phase, method=None):
        return [row for row in self.rows if row["phase"] == phase and method in (None, row["method"])]

    def tuning(self):
        rows = []
        for method, settings in self.study["grid"].items():
            for setting in settings:
                found = summary([row for row in self.of("tuning", method) if row["setting"] == setting])
                chosen = "yes" if self.study["chosen"].get(method) == setting else ""
                rows.append([method, setting, str(found["paired"].n) if found else "0",
                             number(found and found["paired"].mean, "+.5f"), chosen])  # fmt: skip
        if any(row[2] != "0" for row in rows):
            self.text.append("**Tuning** (seeds of their own; mean difference to the baseline of the same seed)\n\n" +
                             table(["method", "setting", "n", "difference", "taken"], rows))  # fmt: skip

    def comparison(self):
        found = {method: summary(self.of("final", method)) for method in self.study["chosen"]}
        found = {method: result for method, result in found.items() if result}
        adjusted = dict(zip(found, holm([result["paired"].p for result in found.values()])))
        per_step, source = self.steps_measure()
        baselines = self.of("final", "baseline")
        losses = [row["val_loss"] for row in baselines]
        tails = [row["tail_s"] for row in baselines if row["tail_s"] is not None]
        rows = [["baseline", "", str(len(losses)), number(statistics.fmean(losses), ".5f") if losses else "–", "", "", "", "", "", "",
                 number(statistics.fmean(tails) if tails else None, ".2f")]]  # fmt: skip
        for method, result in found.items():
            pair = result["paired"]
            steps = None if not per_step else -pair.mean / per_step
            rows.append([method, self.study["chosen"][method], str(pair.n), f"{result['mean_loss']:.5f}", f"{pair.mean:+.5f}", interval_text(pair),
                         p_text(pair.p), p_text(adjusted[method]), verdict(pair, adjusted[method]), number(steps, "+.1f"),
                         number(result["tail_s"], ".2f")])  # fmt: skip
        head = ["arm", "setting", "n", "mean loss", "difference", "95% interval", "p", "p (Holm)", "verdict", "steps saved", "tail s"]
        if losses:
            self.text.append(f"**Comparison** at equal steps ({self.study['steps']}; arms branch off after {self.study['branch']})\n\n" +
                             table(head, rows))  # fmt: skip
        notes = ["Differences: validation loss of the arm minus that of the baseline of the same seed. p: paired t-test, two-sided. "
                 f"Verdicts at p < {ALPHA} after Holm's correction over the arms."]  # fmt: skip
        if len(losses) > 1:
            notes.append(f"Standard deviation of the baseline over seeds: {statistics.stdev(losses):.5f}.")
        if per_step:
            notes.append(f"Steps saved: the gain over {per_step:.2e} of loss a step, {source}.")
        if self.study["jobs"] > 1:
            notes.append(f"Seconds of a tail: {self.study['jobs']} runs at a time shared the device.")
        self.text.append("\n".join(f"- {note}" for note in notes) + "\n")

    def steps_measure(self):
        """(loss a step, where it is from): longer baselines if there are some, else the baseline's own tail."""
        longer = [row for row in self.of("longer") if row["difference"] is not None and row["steps"] > self.study["steps"]]
        if longer:
            per_step = statistics.fmean(-row["difference"] / (row["steps"] - self.study["steps"]) for row in longer)
            return per_step, f"from baselines whose whole schedule is longer ({longer[0]['steps']} steps, {len(longer)} seeds)"
        pairs = [(row["branch_val_loss"], row["val_loss"]) for row in self.of("final", "baseline")]
        tail = self.study["steps"] - self.study["branch"]
        return slope(pairs, tail), (f"the baseline's mean descent over its last {tail} steps, where its rate falls: "
                                    "a longer schedule gains less a step, so this is the fewest that the gain is worth")  # fmt: skip

    def against_control(self):
        """The same arms beside the plain mean of the last weights: what extrapolation adds to averaging."""
        control = {row["seed"]: row["val_loss"] for row in self.of("final", "average")}
        rows, pairs = [], []
        for method in self.study["chosen"]:
            differences = [row["val_loss"] - control[row["seed"]] for row in self.of("final", method) if row["seed"] in control]
            if method != "average" and differences:
                pairs.append((method, paired(differences)))
        for (method, pair), adjusted in zip(pairs, holm([pair.p for _, pair in pairs])):
            rows.append([method, str(pair.n), f"{pair.mean:+.5f}", interval_text(pair), p_text(pair.p), p_text(adjusted)])
        if rows:
            self.text.append("**Against the control** (`average`, the plain mean of the last weights)\n\n" +
                             table(["arm", "n", "difference", "95% interval", "p", "p (Holm)"], rows))  # fmt: skip

    def make(self):
        self.tuning()
        self.comparison()
        self.against_control()
        if self.study["faults"]:
            self.text.append("**Not as it should be**\n\n" + "\n".join(f"- {fault}" for fault in self.study["faults"]) + "\n")
        return "\n".join(self.text)


def plot(study, path):
    """Paired differences of every seed, with mean and interval. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    report = Report(study)
    figure, axes = plt.subplots(figsize=(9, 5))
    for x, method in enumerate(study["chosen"]):
        found = summary(report.of("final", method))
        if not found:
            continue
        values, pair = [row["difference"] for row in found["rows"]], found["paired"]
        axes.plot([x - 0.15] * len(values), values, "o", color="grey", markersize=4, alpha=0.6)
        half = 0 if pair.low is None else pair.high - pair.mean
        axes.errorbar([x + 0.1], [pair.mean], yerr=[half], fmt="s", color="C0", capsize=5)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(study["chosen"])), list(study["chosen"]))
    axes.set_ylabel("validation loss minus baseline of the same seed\n(grey: seeds; blue: mean, 95%)")
    axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def write(study, folder, say):
    text = Report(study).make()
    (folder / "study.json").write_text(json.dumps(study, indent=1) + "\n", encoding="utf-8")
    (folder / "study.md").write_text(text, encoding="utf-8")
    with open(folder / "study.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(study["runs"])
    drawn = plot(study, folder / "study.png")
    say(text)
    say(f"{folder}: study.json, study.csv, study.md" + (", study.png" if drawn else ""))

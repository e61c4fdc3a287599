#!/usr/bin/env python3
"""Compares speedrun with the PyTorch oracle.

  compare.py grads  --ours OURS.safetensors --bf16 TORCH_BF16.safetensors --oracle TORCH_FP32.safetensors [--limit 1.5]
      relative error of every parameter's gradient against the FP32 oracle, ours and PyTorch's, and their ratio; fails above the limit
  compare.py grads  --ours OURS.safetensors --oracle TORCH.safetensors [--max-error 1e-4]
      relative error alone
  compare.py losses --ours metrics.jsonl --torch losses.jsonl [--max-mean 0.005] [--max-abs 1e-4] [--plot FILE.png] [--csv FILE.csv]
      two loss curves, step by step; fails above a limit that is given; with --again LOSSES.jsonl beside it how far PyTorch's own runs
      are apart
"""

import argparse
import csv
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tensor_file  # noqa: E402


def relative_error(value, truth):
    """‖value − truth‖ / ‖truth‖; where the truth is exactly zero: 0 if the value is zero too, else infinite."""
    error, size = (value.double() - truth.double()).norm().item(), truth.double().norm().item()
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size if math.isfinite(error) else math.inf


def compare_grads(args):
    ours, oracle = tensor_file.load(args.ours), tensor_file.load(args.oracle)
    bf16 = tensor_file.load(args.bf16) if args.bf16 else None
    missing = [name for name in oracle if name not in ours or (bf16 is not None and name not in bf16)]
    if missing:
        raise SystemExit(f"gradients missing in {args.ours} or {args.bf16}: {', '.join(missing)}")
    print(f"{'parameter':28} {'norm':>11} {'ours':>11}" + (f" {'torch bf16':>11} {'ratio':>7}" if bf16 else ""))
    limit = args.limit if bf16 else args.max_error
    failures, worst = [], 0.0
    for name, truth in oracle.items():
        if ours[name].shape != truth.shape:
            raise SystemExit(f"{args.ours}: {name} is {tuple(ours[name].shape)}, the oracle's is {tuple(truth.shape)}")
        our_error = measure = relative_error(ours[name], truth)
        line = f"{name:28} {truth.norm().item():11.4e} {our_error:11.4e}"
        if bf16:
            torch_error = relative_error(bf16[name], truth)
            measure = our_error / torch_error if torch_error > 0 else (0.0 if our_error == 0 else math.inf)
            line += f" {torch_error:11.4e} {measure:7.3f}"
        worst = max(worst, measure)
        if not measure <= limit:
            failures.append(name)
            line += "  <-- above the limit"
        print(line)
    kind = "ratio" if bf16 else "error"
    print(f"{len(oracle)} parameters, worst {kind} {worst:.3g}, limit {limit:g}: {f'{len(failures)} above it' if failures else 'all within it'}")
    return not failures


def read_losses(path):
    """step -> training loss; lines without one (validation) are passed over."""
    losses = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row.get("loss") is not None:
                losses[row["step"]] = row["loss"]
    return losses


def ascii_plot(curves, width=72, height=16):
    """A curve per letter, losses upwards, steps to the right."""
    points = [(step, loss) for curve in curves.values() for step, loss in curve.items()]
    steps, losses = [p[0] for p in points], [p[1] for p in points]
    low, high = min(losses), max(losses)
    span, last = (high - low) or 1, (max(steps) - min(steps)) or 1
    rows = [[" "] * width for _ in range(height)]
    for letter, curve in curves.items():
        for step, loss in curve.items():
            row = rows[round((high - loss) / span * (height - 1))]
            column = round((step - min(steps)) / last * (width - 1))
            row[column] = "*" if row[column] not in (" ", letter) else letter
    for i, row in enumerate(rows):
        print(f"{high - span * i / (height - 1):8.4f} |{''.join(row)}")
    print(f"{'':8}  step {min(steps)} … {max(steps)}; {', '.join(curves)}; * both")


def compare_losses(args):
    ours, torch_ = read_losses(args.ours), read_losses(args.torch)
    ours = {step + args.offset: loss for step, loss in ours.items()}
    steps = sorted(ours.keys() & torch_.keys())
    if not steps:
        raise SystemExit(f"no step is in both {args.ours} and {args.torch}")
    differences = [ours[step] - torch_[step] for step in steps]
    mean = sum(differences) / len(steps)
    mean_abs = sum(map(abs, differences)) / len(steps)
    worst = max(range(len(steps)), key=lambda i: abs(differences[i]))
    print(f"{len(steps)} steps in both ({len(ours)} ours, {len(torch_)} of PyTorch)")
    print(f"mean difference {mean:+.6f}, mean |difference| {mean_abs:.6f}, largest {differences[worst]:+.6f} at step {steps[worst]}")
    if args.again:
        again = read_losses(args.again)
        spread = [torch_[step] - again[step] for step in steps if step in again]
        mean_spread, largest = sum(map(abs, spread)) / max(1, len(spread)), max(map(abs, spread), default=math.nan)
        print(f"two runs of PyTorch: mean |difference| {mean_spread:.6f}, largest {largest:.6f}, {len(spread)} steps")
    print(f"last step {steps[-1]}: ours {ours[steps[-1]]:.6f}, PyTorch {torch_[steps[-1]]:.6f}")
    ascii_plot({"o": {s: ours[s] for s in steps}, "t": {s: torch_[s] for s in steps}})
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "ours", "torch", "difference"])
            writer.writerows([step, ours[step], torch_[step], ours[step] - torch_[step]] for step in steps)
    if args.plot:
        plot_losses(args.plot, args.title, steps, ours, torch_, differences)
    passed = True
    for name, limit, value in (("mean |difference|", args.max_mean, mean_abs), ("largest |difference|", args.max_abs, abs(differences[worst]))):
        if limit is not None:
            passed &= value <= limit
            print(f"{name} {value:.6g}, limit {limit:g}: {'within it' if value <= limit else 'ABOVE IT'}")
    return passed


def plot_losses(path, title, steps, ours, torch_, differences):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(9, 6.5), height_ratios=[3, 1])
    top.plot(steps, [torch_[step] for step in steps], label="PyTorch", linewidth=2.5, alpha=0.5)
    top.plot(steps, [ours[step] for step in steps], label="speedrun", linewidth=1)
    top.set_ylabel("training loss (nats per token)")
    top.set_title(title)
    top.legend()
    bottom.plot(steps, differences, linewidth=1)
    bottom.axhline(0, color="grey", linewidth=0.5)
    bottom.set_ylabel("speedrun − PyTorch")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    grads = modes.add_parser("grads")
    grads.add_argument("--ours", required=True)
    grads.add_argument("--bf16", help="PyTorch's own BF16 gradients, whose error ours is measured by")
    grads.add_argument("--oracle", required=True)
    grads.add_argument("--limit", type=float, default=1.5, help="with --bf16: largest allowed ratio")
    grads.add_argument("--max-error", type=float, default=1e-4, help="without: largest allowed relative error")
    losses = modes.add_parser("losses")
    losses.add_argument("--ours", required=True)
    losses.add_argument("--torch", required=True)
    losses.add_argument("--again", help="a second run of PyTorch's, for its spread")
    losses.add_argument("--offset", type=int, default=0, help="added to our step numbers")
    losses.add_argument("--max-mean", type=float, help="largest allowed mean |difference|")
    losses.add_argument("--max-abs", type=float, help="largest allowed |difference|")
    losses.add_argument("--plot", help="PNG to write")
    losses.add_argument("--csv", help="CSV to write")
    losses.add_argument("--title", default="same initial weights, same batches")
    args = parser.parse_args()
    if not (compare_grads if args.mode == "grads" else compare_losses)(args):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""What the folder of a run tells: steps, validations, stages, milliseconds of a step, uncovered communication of a timeline."""

import json
import math


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_lines(folder):
    """Of metrics.jsonl; none of a run that has not begun."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]


def read_steps(folder):
    """Lines of metrics.jsonl that belong to an update, by step; a resumed run holds each once."""
    return {line["step"]: line for line in read_lines(folder) if "loss" in line}


def validations(folder):
    """Finite validation losses by updates done."""
    return {line["step"]: line["val_loss"] for line in read_lines(folder) if line.get("val_loss") is not None}


def scaled(count, scale):
    """A step count of the config times schedule.scale, as the program rounds."""
    return max(1, math.floor(count * scale + 0.5)) if count > 0 else 0


def stages(config):
    """(first step, end, tokens a step) of every stage that has steps, or the one of a config without stages."""
    schedule = config["schedule"]
    scale, found, begin = schedule.get("scale", 1), [], 0
    listed = sorted(schedule.get("stages", {}).items(), key=lambda item: int(item[0]))
    for _, stage in listed:
        end = begin + scaled(stage["steps"], scale)
        if end > begin:
            found.append((begin, end, stage["batch_tokens"]))
        begin = end
    return found or [(0, scaled(schedule["steps"], scale), config["train"]["batch_tokens"])]


def pairs_ms(steps, begin, end, validated=(), skip=2):
    """Milliseconds a step of the pairs of neighbouring steps of a stage (tables update in every second step, so single steps differ),
    and the share of its steps that is in no pair: the first `skip`, and those next to a validation (`validated`: updates done)."""
    left_out = {step for done in validated for step in (done - 1, done)}
    kept = {step for step in range(begin + skip, end) if step in steps and step not in left_out}
    firsts = [step for step in sorted(kept) if step + 1 in kept and step - 1 in steps]
    pairs = [(steps[step + 1]["clock_s"] - steps[step - 1]["clock_s"]) / 2 * 1e3 for step in firsts]
    used = {member for step in firsts for member in (step, step + 1)}
    return pairs, 1 - len(used) / (end - begin)


def uncovered_rows(windows):
    """By stage, of the rank with the most uncovered: step, compute, communication, uncovered and idle ms, means over windows."""
    rows = {}
    for stage in sorted({w["stage"] for w in windows}):
        by_rank = []
        for rank in sorted({w["rank"] for w in windows}):
            own = [w for w in windows if w["stage"] == stage and w["rank"] == rank]
            steps = sum(w["steps"] for w in own)
            if not steps:
                continue
            keys = ("step_ms", "compute_ms", "communication_ms", "uncovered_communication_ms", "idle_ms")
            by_rank.append(tuple(sum(w[key] * w["steps"] for w in own) / steps for key in keys))
        rows[stage] = max(by_rank, key=lambda row: row[3])
    return rows

"""What changes from step to step, on a resolved configuration: rates, momentum, and with stages (Main Track) batch, windows, rotary
frequencies and the weights of the loss. Step s = 0, 1, … is the index of an update."""

import math
from dataclasses import dataclass, field

YARN_ALPHA, YARN_BETA, YARN_SCALE_GROWTH = 1, 32, 0.2


@dataclass
class Stage:
    begin: int
    end: int
    settings: dict
    batch_tokens: int = 0
    row_tokens: int = 0
    max_seq_len: int = 0
    window_short: int = 0  # tokens behind the query; 0: no limit
    window_long: int = 0
    frequencies: list = field(default_factory=list)  # of the rotating pairs, radians per position
    attention_scale: float = 0.0


@dataclass
class Step:
    stage: Stage
    lr_factor: float
    momentum: float
    next_weights: list  # w_k of the tokens ahead
    prefix_weight: float
    tied: bool  # head and embedding are the head's one matrix
    split: bool  # after this update the embedding becomes a copy of the head


def scaled_steps(config, count):
    """A step count times schedule.scale: halves round up, and a count above 0 stays above 0."""
    return max(1, math.floor(count * config["schedule"]["scale"] + 0.5)) if count else 0


def _spans(config):
    """(begin, end, settings) of the stages that have steps; without stages the whole run is one."""
    schedule = config["schedule"]
    stages = schedule.get("stages") or {}
    if not stages:
        return [(0, scaled_steps(config, schedule["steps"]), {})]
    spans, begin = [], 0
    for key in sorted(stages, key=int):
        end = begin + scaled_steps(config, stages[key]["steps"])
        if end > begin:
            spans.append((begin, end, stages[key]))
        begin = end
    return spans


def total_steps(config):
    return _spans(config)[-1][1]


def rotary_frequencies(model):
    """base^(−i/(n−1)) for the n = D/4 (with rotary_fraction 1/2) pairs that rotate."""
    n = int(model["rotary_fraction"] * (model["width"] // model["num_heads"]) / 2)
    return [model["rotary_base"] ** (-i / (n - 1)) for i in range(n)]


def stretch(frequencies, scale, old, new):
    """YaRN from a long window of `old` tokens to `new`: slow pairs follow the window, fast ones stay."""
    stretched = []
    for f in frequencies:
        rotations = old * f / (2 * math.pi)
        kept = min(1.0, max(0.0, (rotations - YARN_ALPHA) / (YARN_BETA - YARN_ALPHA)))
        stretched.append(f * (old / new + kept * (1 - old / new)))
    return stretched, scale * (1 + YARN_SCALE_GROWTH * math.log(new / old))


def stages(config):
    model, train, data = config["model"], config["train"], config["data"]
    found = []
    for begin, end, settings in _spans(config):
        stage = Stage(begin, end, settings)
        stage.batch_tokens = settings.get("batch_tokens") or train["batch_tokens"]
        stage.row_tokens = train["seq_len"] if data["reader"] == "rows" else stage.batch_tokens // data["document_rows"]
        stage.max_seq_len = settings.get("max_seq_len") or data["max_seq_len"]
        stage.window_short = settings.get("window_short") or model["window_short"]
        stage.window_long = settings.get("window_long") or model["window_long"]
        stage.frequencies = found[-1].frequencies if found else rotary_frequencies(model)
        stage.attention_scale = found[-1].attention_scale if found else model["attention_scale"] or (model["width"] / model["num_heads"]) ** -0.5
        if found and model["yarn"]:
            stage.frequencies, stage.attention_scale = stretch(stage.frequencies, stage.attention_scale, found[-1].window_long, stage.window_long)
        found.append(stage)
    return found


def _span_at(config, s):
    spans = _spans(config)
    return next((i for i, (_, end, _) in enumerate(spans) if s < end), len(spans) - 1)


def lr_factor(config, s):
    """Factor of every learning rate at update s: warm-up, a constant part that is the stage's, a fall, and a hold at its end."""
    lr = config["schedule"]["lr"]
    peak = _spans(config)[_span_at(config, s)][2].get("lr_multiplier", 1.0)
    warmup = scaled_steps(config, lr["warmup_steps"])
    if s < warmup:
        return peak * (s + 1) / warmup
    if lr["shape"] == "constant":
        return peak
    fall_end = total_steps(config) - scaled_steps(config, lr.get("hold_steps", 0))
    cooldown = scaled_steps(config, lr["cooldown_steps"]) or fall_end - warmup
    left = min(1.0, max(0.0, (fall_end - s) / cooldown))  # 1 at the start of the fall, 0 at its end
    shape = {
        "linear": left,
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "power": left ** lr["power"],
    }[lr["shape"]]
    return lr["final_fraction"] + (peak - lr["final_fraction"]) * shape


def muon_momentum(config, s):
    momentum, target = config["schedule"]["momentum"], config["optim"]["muon"]["momentum"]
    steps = total_steps(config)
    warmup = scaled_steps(config, momentum["warmup_steps"])
    cooldown = scaled_steps(config, momentum["cooldown_steps"])
    if s < warmup:
        return momentum["start"] + (target - momentum["start"]) * s / warmup
    if s > steps - cooldown:
        return target - (target - momentum["final"]) * (s - (steps - cooldown)) / cooldown
    return target


def is_tied(config, s):
    split_step = _split_step(config)
    return bool(config["model"].get("tied_until_split")) and (split_step is None or s <= split_step)


def splits(config, s):
    return is_tied(config, s) and s == _split_step(config)


def _split_step(config):
    """Updates of head and embedding are those of odd steps, and so is the last one that they share."""
    split_step = config["schedule"].get("split_step", 0)
    return scaled_steps(config, split_step) | 1 if split_step else None


def step_at(config, s):
    """A Step of a configuration with stages or without."""
    stage = stages(config)[_span_at(config, s)]
    settings = stage.settings
    progress = (s - stage.begin) / (stage.end - stage.begin)

    def between(start, end):
        return start + (end - start) * progress

    tied = is_tied(config, s)
    return Step(
        stage=stage,
        lr_factor=lr_factor(config, s),
        momentum=muon_momentum(config, s),
        next_weights=[between(*pair) for pair in zip(settings.get("mtp_start", [1.0]), settings.get("mtp_end", [1.0]))],
        prefix_weight=between(settings.get("prefix_start", 0.0), settings.get("prefix_end", 0.0)),
        tied=tied,
        split=splits(config, s),
    )

#!/usr/bin/env python3
"""Writes src/model/testdata/main_track_golden.bin: weights and a batch of a small model with every feature of the Main Track, and the
oracle's losses and gradients for them, in FP64.

    python3 scripts/torch_oracle/make_main_track_golden.py [--out FILE]

The file is little-endian: the number of arrays (uint32); then for each its name (uint32 length, bytes), its rank and extents (uint32
each), and its values (float32; ids are exact in it).
  weight/NAME, grad/NAME                    parameters; gradients of grad_scale · Σ loss, with the record's rule at row ends
  loss, eval.loss                           per token: training's several terms, evaluation's plain cross-entropy
  tied.loss, tied.grad/head.weight          where embedding and head are the head's one matrix
  fp8.0.loss, fp8.1.loss, fp8.grad/NAME     two steps with FP8, the down weights half as large again in the second, whose scales come
                                            from the first; gradients of some parameters, summed
  tokens, targets, doc_start, prefix        the batch: doc_start counts from the first row's start
  stage/…                                   windows, attention_scale, frequencies, next_weights, prefix_weight, grad_scale
src/model/main_track_golden_test.cpp builds the same model.
"""

import argparse
import struct
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import main_track  # noqa: E402
import main_track_parameters  # noqa: E402
import schedule  # noqa: E402
from model import padded_vocab  # noqa: E402

MODEL = {
    "vocab_size": 195, "vocab_padding": 8, "num_layers": 6, "width": 64, "num_heads": 4, "mlp_hidden": 40, "norm_eps": 2.0**-23,
    "softcap": "sigmoid", "softcap_value": 15, "smear": True, "smear_channels": 12, "bigram_rows": 101, "bigram_sign_rows": 7,
    "value_gate_channels": 6, "x0_injection": True, "residual_lambdas": True, "weight_lambdas": True, "mudd_gates": True,
    "mudd_gate_split": 3, "mudd": True, "mudd_early": 2, "mudd_late": 3, "gate_hidden": 16, "dc_window": 5, "rotary_base": 1024,
    "rotary_fraction": 0.5,
    "layers": {
        "0": {"window": "short", "paired_heads": True},
        "1": {"window": "short", "value_embedding": True, "xsa": True},
        "2": {"window": "long", "key_offset": True, "xsa": True, "gate": True},
        "3": {"attention": False, "skip_from": 2},
        "4": {"window": "short", "paired_heads": True, "value_embedding": True, "input_from": 3},
        "5": {"window": "long", "key_offset": True, "value_embedding": True, "gate": True, "dc": True, "input_from": 3},
    },
}  # fmt: skip
NO_FP8 = {"mlp_up": "bf16", "mlp_down": "bf16", "head": "bf16"}
FP8 = {
    "mlp_up": "fp8", "mlp_down": "fp8", "head": "fp8", "mlp_up_scaling": "current", "mlp_down_scaling": "delayed", "mlp_up_bound": 28,
    "mlp_down_bound": 448, "mlp_down_margin": 1.8, "down_weight_margin": 1.12, "down_weight_exact_steps": 1, "head_inp_bound": 100,
    "head_weight_bound": 1.6, "head_grad_bound": 0.75, "force_unit_scales": False,
}  # fmt: skip
FP8_GRADIENTS = ["h.0.mlp.up.weight", "h.2.mlp.down.weight", "head.weight"]
DOWN_GROWTH = 1.5
ROWS, ROW_TOKENS, GRAD_SCALE = 2, 40, 0.5
NEXT_WEIGHTS, PREFIX_WEIGHT = [1.0, 0.5, 0.125], 0.25


def make_weights(generator):
    """The initial weights, moved away from zeros and equal values."""
    weights = main_track_parameters.init_parameters(MODEL, 1)
    for name, value in weights.items():
        if name != "bigram.sign":
            weights[name] = value + 0.1 * torch.randn(value.shape, generator=generator)
    return weights


def make_batch(generator):
    """Documents of 1 to 19 tokens from an end-of-text id on; the first row starts with one, the second inside none."""
    end_of_text = MODEL["vocab_size"] - 1
    tokens = torch.randint(0, end_of_text, (ROWS, ROW_TOKENS + 1), generator=generator)
    for begin in (0, 3, 4, 21):
        tokens[0, begin] = end_of_text
    for begin in (0, 19, 33, 40):
        tokens[1, begin] = end_of_text
    begins = torch.where(tokens == end_of_text, torch.arange(ROW_TOKENS + 1), 0)
    return tokens[:, :-1], tokens[:, 1:], begins.cummax(1).values[:, :-1]


def leaves(weights):
    return {name: value.double().requires_grad_(name != "bigram.sign") for name, value in weights.items()}


def gradients(track, weights, batch, step):
    parameters = leaves(weights)
    objective, losses = track.objective(parameters, batch, step, GRAD_SCALE)
    objective.backward()
    return losses, {name: p.grad for name, p in parameters.items() if p.grad is not None}


def fp8_steps(track, weights, batch, step):
    """(losses of both steps, summed gradients of FP8_GRADIENTS)"""
    parameters, losses = leaves(weights), []
    for s in range(2):
        track.begin_step(parameters, s)
        objective, loss = track.objective(parameters, batch, step, GRAD_SCALE)
        objective.backward()
        track.end_step()
        losses.append(loss)
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name.endswith("mlp.down.weight"):
                    parameter *= DOWN_GROWTH
    return losses, {name: parameters[name].grad for name in FP8_GRADIENTS}


def write(path, arrays):
    with open(path, "wb") as file:
        file.write(struct.pack("<I", len(arrays)))
        for name, array in arrays.items():
            array = torch.as_tensor(array).detach().float().contiguous()
            file.write(struct.pack("<I", len(name)) + name.encode())
            file.write(struct.pack(f"<{1 + array.dim()}I", array.dim(), *array.shape) + array.numpy().astype("<f4").tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=Path(__file__).resolve().parents[2] / "src/model/testdata/main_track_golden.bin", type=Path)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(89)
    weights, batch = make_weights(generator), make_batch(generator)
    prefix = torch.randint(-40, MODEL["vocab_size"] - 1, (padded_vocab(MODEL),), generator=generator).clamp(min=-1)
    frequencies, scale = schedule.stretch(schedule.rotary_frequencies(MODEL), 0.2, 6, 11)
    stage = schedule.Stage(0, 1, {"prefix_start": PREFIX_WEIGHT}, window_short=6, window_long=11, frequencies=frequencies, attention_scale=scale)

    def step(tied):
        return schedule.Step(stage, 1.0, 0.0, NEXT_WEIGHTS, PREFIX_WEIGHT, tied, False)

    track, fp8_track = (main_track.MainTrack({"model": MODEL, "fp8": fp8}, torch.float64, prefix) for fp8 in (NO_FP8, FP8))
    losses, grads = gradients(track, weights, batch, step(tied=False))
    tied_losses, tied_grads = gradients(track, weights, batch, step(tied=True))
    evaluation = track.evaluate({name: value.double() for name, value in weights.items()}, batch, stage, tied=False)
    fp8_losses, fp8_grads = fp8_steps(fp8_track, weights, batch, step(tied=False))

    arrays = {f"weight/{name}": value for name, value in weights.items()} | {f"grad/{name}": value for name, value in grads.items()}
    arrays |= {"loss": losses.flatten(), "eval.loss": evaluation.flatten()}
    arrays |= {"tied.loss": tied_losses.flatten(), "tied.grad/head.weight": tied_grads["head.weight"]}
    arrays |= {f"fp8.{s}.loss": loss.flatten() for s, loss in enumerate(fp8_losses)}
    arrays |= {f"fp8.grad/{name}": grad for name, grad in fp8_grads.items()}
    row_begin = torch.arange(ROWS)[:, None] * ROW_TOKENS
    arrays |= {"tokens": batch[0].flatten(), "targets": batch[1].flatten(), "doc_start": (batch[2] + row_begin).flatten(), "prefix": prefix}
    arrays |= {"stage/windows": [stage.window_short, stage.window_long], "stage/attention_scale": [scale], "stage/frequencies": frequencies}
    arrays |= {"stage/next_weights": NEXT_WEIGHTS, "stage/prefix_weight": [PREFIX_WEIGHT], "stage/grad_scale": [GRAD_SCALE]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write(args.out, arrays)
    for name, value in grads.items():
        print(f"{name:28} {tuple(value.shape)!s:14} {value.norm().item():.4g}")
    print(f"{args.out}: {len(arrays)} arrays, {args.out.stat().st_size} bytes, mean loss {losses.mean().item():.4f}")


if __name__ == "__main__":
    main()

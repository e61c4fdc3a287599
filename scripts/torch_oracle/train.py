#!/usr/bin/env python3
"""An independent PyTorch oracle for speedrun: same configuration, same initial weights, same batches.

  speedrun train CONFIG --print-config > resolved.json
  train.py init  resolved.json --out init.safetensors        initial weights, for train.init_weights and for the modes below
  train.py train resolved.json --weights init.safetensors --steps 200 --out losses.jsonl [--bf16]
  train.py grads resolved.json --weights init.safetensors --out grads.safetensors [--bf16]

The Optimization Track starts with its head at zero, where every gradient but the head's is zero: for a comparison of gradients make some
steps first (train … --steps 10 --save-weights FILE) and take those weights.

Losses are means in nats per token over the batch of a step; step s (from 0) is the loss before update s.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import architectures  # noqa: E402
import main_track  # noqa: E402
import model as gpt  # noqa: E402
import schedule  # noqa: E402
import shards  # noqa: E402
import tensor_file  # noqa: E402
import vocabulary  # noqa: E402
from optim import Optimizer  # noqa: E402


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["init", "train", "grads"])
    parser.add_argument("config", help="resolved configuration (JSON)")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--weights", help="initial weights (safetensors); default: drawn as `init` draws them")
    parser.add_argument("--steps", type=int, help="updates to make (default: schedule.steps); the schedule itself does not change")
    parser.add_argument("--save-weights", help="train: file for the weights after the last step")
    parser.add_argument("--batch", type=int, default=0, help="grads: which batch of the stream (default 0)")
    parser.add_argument("--data", help="glob of train shards, instead of data.train")
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens of one forward and backward pass (default: the configuration's, or 16384)")
    parser.add_argument("--seed", type=int, help="of the initial weights (default: train.seed)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-fp8", action="store_true", help="leave FP8 out where the configuration has it: the truth to measure it by")
    parser.add_argument("--bf16", action="store_true", help="BF16 products and activations; default FP32, without TF32")
    parser.add_argument("--f64", action="store_true", help="everything in FP64")
    parser.add_argument("--f32-storage", action="store_true", help="keep weights and optimizer states in FP32 where the configuration says BF16")
    return parser.parse_args()


def load_weights(args, config, device, master_dtype):
    module = architectures.module_of(config)
    weights = tensor_file.load(args.weights) if args.weights else module.init_parameters(config["model"], args.seed or config["train"]["seed"])
    table = module.parameter_table(config["model"])
    if weights.keys() != table.keys():
        raise SystemExit(f"{args.weights}: names differ from the model's: {sorted(weights.keys() ^ table.keys())}")
    for name, (shape, _) in table.items():
        if tuple(weights[name].shape) != shape:
            raise SystemExit(f"{args.weights}: {name} is {tuple(weights[name].shape)}, expected {shape}")
    return {name: weights[name].to(device, master_dtype).requires_grad_(group is not None) for name, (_, group) in table.items()}


class Batches:
    """The stream of batches: (inputs, targets, starts of documents), each (rows, T)."""

    def __init__(self, args, config):
        self.config, data = config, config["data"]
        pattern = args.data or os.path.join(os.path.dirname(os.path.abspath(args.config)), data["train"])
        if data["reader"] == "rows":
            rows = shards.batches(pattern, config["train"]["batch_tokens"], config["train"]["seq_len"], data["repeat"])
            self.stream = ((inputs, targets, torch.zeros_like(inputs)) for inputs, targets in rows)
        else:
            bos = config["model"]["vocab_size"] - 1
            self.stream = shards.document_batches(pattern, data["document_rows"], bos, self._shape_at, data["repeat"])

    def _shape_at(self, s):
        stage = schedule.step_at(self.config, s).stage
        return stage.row_tokens, stage.max_seq_len

    def next(self):
        batch = next(self.stream, None)
        if batch is None:
            raise SystemExit("the train shards are used up")
        return batch


class Passes:
    """Forward and backward passes of a configuration's model."""

    def __init__(self, args, config, parameters, device, dtype):
        self.config, self.parameters, self.device, self.dtype = config, parameters, device, dtype
        self.micro_tokens = args.micro_batch_tokens or config["train"]["micro_batch_tokens"] or 16384
        self.track = None
        if architectures.is_main_track(config):
            self.track = main_track.MainTrack(config, dtype, self._prefix_table(args), fp8=not args.no_fp8)

    def _prefix_table(self, args):
        if not any(each["prefix_start"] or each["prefix_end"] for each in self.config["schedule"]["stages"].values()):
            return None
        model = self.config["model"]
        folder = os.path.join(os.path.dirname(os.path.abspath(args.config)), self.config["data"]["vocabulary"])
        return vocabulary.prefix_table(folder, model["vocab_size"], gpt.padded_vocab(model))

    def _objective(self, part, s, grad_scale):
        if self.track is None:
            loss = gpt.loss_sum(self.config["model"], self.parameters, part[0], part[1], self.dtype)
            return loss * grad_scale, loss
        objective, losses = self.track.objective(self.parameters, part, schedule.step_at(self.config, s), grad_scale)
        return objective, losses.sum()

    def step(self, batch, s):
        """Adds the gradients of step s's batch to .grad; returns the mean loss."""
        rows, row_tokens = batch[0].shape
        tokens = rows * row_tokens
        grad_scale = {"mean": 1 / tokens, "sum": 1.0, "row_mean": 1 / rows}[self.config["train"]["reduction"]]
        if self.track is not None:
            self.track.begin_step(self.parameters, s)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in zip(*(each.split(max(1, self.micro_tokens // row_tokens)) for each in batch)):
            objective, loss = self._objective([each.to(self.device) for each in part], s, grad_scale)
            objective.backward()
            total += loss.detach().double()
        if self.track is not None:
            self.track.end_step()
        return total.item() / tokens


def main():
    args = parse_arguments()
    with open(args.config, encoding="utf-8") as file:
        config = json.load(file)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.device)
    dtype = torch.float64 if args.f64 else torch.bfloat16 if args.bf16 else torch.float32
    master_dtype = torch.float64 if args.f64 else torch.float32

    if args.mode == "init":
        tensor_file.save(args.out, architectures.module_of(config).init_parameters(config["model"], args.seed or config["train"]["seed"]))
        return

    parameters = load_weights(args, config, device, master_dtype)
    batches, passes = Batches(args, config), Passes(args, config, parameters, device, dtype)
    # The oracle's attention is the plain chain of products; in BF16 PyTorch chooses the kernel, as its users have it.
    with sdpa_kernel(SDPBackend.MATH) if not args.bf16 else contextlib.nullcontext():
        if args.mode == "grads":
            for _ in range(args.batch):
                batches.next()
            loss = passes.step(batches.next(), 0)
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
            tensor_file.save(args.out, gradients, {"loss": repr(loss)})
            print(f"loss {loss:.9f}")
            return

        optimizer = Optimizer(config, parameters, torch.bfloat16 if args.bf16 else master_dtype, args.f32_storage)
        steps = args.steps or schedule.total_steps(config)
        with open(args.out, "w", encoding="utf-8") as file:
            for s in range(steps):
                start = time.perf_counter()
                loss = passes.step(batches.next(), s)
                grad_norm = optimizer.step(s)
                factor = schedule.lr_factor(config, s)
                row = {"step": s, "loss": loss, "grad_norm": grad_norm, "lr_factor": factor, "seconds": time.perf_counter() - start}
                print(json.dumps(row), file=file, flush=True)
                if s % 10 == 0 or s == steps - 1:
                    print(f"step {s:5d}  loss {loss:.6f}  grad norm {grad_norm:.4g}  {row['seconds'] * 1e3:.0f} ms", flush=True)
        if args.save_weights:
            tensor_file.save(args.save_weights, parameters)


if __name__ == "__main__":
    main()

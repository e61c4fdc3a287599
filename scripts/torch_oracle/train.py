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
import model as gpt  # noqa: E402
import shards  # noqa: E402
import tensor_file  # noqa: E402
from optim import Optimizer, lr_factor, scaled_steps  # noqa: E402


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
    parser.add_argument("--bf16", action="store_true", help="BF16 products and activations; default FP32, without TF32")
    parser.add_argument("--f64", action="store_true", help="everything in FP64")
    parser.add_argument("--f32-storage", action="store_true", help="keep weights and optimizer states in FP32 where the configuration says BF16")
    return parser.parse_args()


def load_weights(args, config, device, master_dtype):
    weights = tensor_file.load(args.weights) if args.weights else gpt.init_parameters(config["model"], args.seed or config["train"]["seed"])
    table = gpt.parameter_table(config["model"])
    if weights.keys() != table.keys():
        raise SystemExit(f"{args.weights}: names differ from the model's: {sorted(weights.keys() ^ table.keys())}")
    for name, (shape, _) in table.items():
        if tuple(weights[name].shape) != shape:
            raise SystemExit(f"{args.weights}: {name} is {tuple(weights[name].shape)}, expected {shape}")
    return {name: weights[name].to(device, master_dtype).requires_grad_() for name in table}


class Batches:
    def __init__(self, args, config, config_path):
        train = config["train"]
        pattern = args.data or os.path.join(os.path.dirname(os.path.abspath(config_path)), config["data"]["train"])
        self.tokens = train["batch_tokens"]
        micro = args.micro_batch_tokens or train["micro_batch_tokens"] or 16384
        self.micro_rows = max(1, min(micro, self.tokens) // train["seq_len"])
        self.gradient_scale = 1.0 if train["reduction"] == "sum" else 1.0 / self.tokens
        self.stream = shards.batches(pattern, self.tokens, train["seq_len"], config["data"]["repeat"])

    def next(self):
        batch = next(self.stream, None)
        if batch is None:
            raise SystemExit("the train shards are used up")
        return batch

    def forward_backward(self, config, parameters, batch, device, dtype):
        """Adds the gradients of the batch to .grad; returns the mean loss."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for inputs, targets in zip(*(part.split(self.micro_rows) for part in batch)):
            loss = gpt.loss_sum(config["model"], parameters, inputs.to(device), targets.to(device), dtype)
            (loss * self.gradient_scale).backward()
            total += loss.detach().double()
        return total.item() / self.tokens


def main():
    args = parse_arguments()
    with open(args.config, encoding="utf-8") as file:
        config = json.load(file)
    if config["data"]["reader"] != "rows":
        raise SystemExit("data.reader must be rows: the oracle knows no documents")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.device)
    dtype = torch.float64 if args.f64 else torch.bfloat16 if args.bf16 else torch.float32
    master_dtype = torch.float64 if args.f64 else torch.float32

    if args.mode == "init":
        tensor_file.save(args.out, gpt.init_parameters(config["model"], args.seed or config["train"]["seed"]))
        return

    parameters = load_weights(args, config, device, master_dtype)
    batches = Batches(args, config, args.config)
    # The oracle's attention is the plain chain of products; in BF16 PyTorch chooses the kernel, as its users have it.
    with sdpa_kernel(SDPBackend.MATH) if not args.bf16 else contextlib.nullcontext():
        if args.mode == "grads":
            for _ in range(args.batch):
                batches.next()
            loss = batches.forward_backward(config, parameters, batches.next(), device, dtype)
            tensor_file.save(args.out, {name: p.grad for name, p in parameters.items()}, {"loss": repr(loss)})
            print(f"loss {loss:.9f}")
            return

        optimizer = Optimizer(config, parameters, torch.bfloat16 if args.bf16 else master_dtype, args.f32_storage)
        steps = args.steps or scaled_steps(config, config["schedule"]["steps"])
        with open(args.out, "w", encoding="utf-8") as file:
            for s in range(steps):
                start = time.perf_counter()
                loss = batches.forward_backward(config, parameters, batches.next(), device, dtype)
                grad_norm = optimizer.step(s)
                row = {"step": s, "loss": loss, "grad_norm": grad_norm, "lr_factor": lr_factor(config, s), "seconds": time.perf_counter() - start}
                print(json.dumps(row), file=file, flush=True)
                if s % 10 == 0 or s == steps - 1:
                    print(f"step {s:5d}  loss {loss:.6f}  grad norm {grad_norm:.4g}  {row['seconds'] * 1e3:.0f} ms", flush=True)
        if args.save_weights:
            tensor_file.save(args.save_weights, parameters)


if __name__ == "__main__":
    main()

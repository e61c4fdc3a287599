#!/usr/bin/env python3
"""Runs the code of modded-nanogpt's record #89 itself, from a checkout of that repository, beside speedrun's Main Track: same
configuration, same initial weights, same batches.

  git clone https://github.com/KellerJordan/modded-nanogpt DIR
  speedrun train configs/main_track.json --print-config > resolved.json
  reference.py export resolved.json --source DIR --out init.safetensors                       its initial weights, for train.init_weights
  reference.py grads  resolved.json --source DIR --weights W.safetensors --out grads.safetensors [--fp32]     of the first step's batch
  reference.py train  resolved.json --source DIR --weights W.safetensors --steps 30 --out losses.jsonl [--runs 2]
  reference.py eval   resolved.json --source DIR --weights W.safetensors --out loss.jsonl       validation loss, as before the first step
  speedrun export runs/NAME W.safetensors; reference.py eval … --weights W.safetensors --completed 1285 …         as after the last one

Model, optimizer, schedule, FP8 refresh and loader are the reference's; stages, sizes, data and FP8 on or off come from the
configuration. It runs eagerly: rounded after every operation, where compiled code rounds less often. FlashAttention-3 is replaced by
PyTorch's attention with a mask. On a CPU, or with --fp32, its Triton and CUDA kernels are replaced by PyTorch operations too.

At the start the MLP's down weights, the bigram table and some gates are zero, and with them many gradients: `export --warm-steps 10`
trains some steps first, `export --perturb` adds noise to everything. Such weights are exact in BF16, every one of them, so that FP32
and BF16 start from the same numbers. `export --warm-steps 10 30 --out w{}.safetensors` writes the weights after 10 and after 30 steps.

Losses are means in nats per token over the batch of a step; step s (from 0) is the loss before update s.
"""

import argparse
import contextlib
import glob
import json
import os
import sys
import tempfile
import time

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
import torch  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reference_names  # noqa: E402
import reference_source  # noqa: E402
import tensor_file  # noqa: E402
import vocabulary  # noqa: E402

ROWS = 8  # of a step, each a micro-batch


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["export", "grads", "train", "eval"])
    parser.add_argument("config", help="resolved configuration (JSON)")
    parser.add_argument("--source", required=True, help="checkout of KellerJordan/modded-nanogpt")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--weights", help="weights to start from (safetensors); default: drawn by the reference")
    parser.add_argument("--data", help="glob of train shards, instead of data.train")
    parser.add_argument("--completed", type=int, default=0, help="eval: updates that the weights have had; the schedule's last: its last validation")
    parser.add_argument("--steps", type=int, default=30, help="train: updates to make (default 30)")
    parser.add_argument("--runs", type=int, default=1, help="train: so many runs from the same weights, for the spread; FILE.2.jsonl …")
    parser.add_argument("--nudge", type=int, default=0, help="train: that many runs, the last, start from weights moved by a rounding")
    parser.add_argument("--warm-steps", type=int, nargs="+", default=[0], help="export: updates to make first; several need a {} in --out")
    parser.add_argument("--start-out", help="export: file for the weights before those steps, too")
    parser.add_argument("--perturb", action="store_true", help="export: noise on every weight, so that no gradient is zero")
    parser.add_argument("--seed", type=int, default=1337, help="of drawn weights and noise")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--fp32", action="store_true", help="weights and activations in FP32, without TF32")
    parser.add_argument("--no-fp8", action="store_true", help="leave FP8 out where the configuration has it")
    parser.add_argument("--sum-fp32", action="store_true", help="grads: add up micro-batches in FP32, not in the weights' types as the reference")
    return parser.parse_args()


class Timer:
    def __init__(self, device):
        self.device, self.start = device, time.perf_counter()

    def line(self, text):
        if self.device != "cpu":
            torch.cuda.synchronize()
        now = time.perf_counter()
        print(f"{now - self.start:8.2f} s  {text}", flush=True)
        self.start = now


class Reference:
    """The reference's model, set up for a configuration."""

    def __init__(self, args, config, timer):
        self.args, self.config = args, config
        self.dtype = torch.float32 if args.fp32 else torch.bfloat16
        settings = {config["fp8"][part] for part in ("mlp_up", "mlp_down", "head")}
        if len(settings) != 1:
            raise SystemExit("fp8.mlp_up, fp8.mlp_down and fp8.head differ: the reference has all of them in FP8, or none")
        self.fp8 = settings == {"fp8"} and not args.no_fp8
        base = os.path.dirname(os.path.abspath(args.config))
        vocab_size = config["model"]["vocab_size"]
        tokens = vocabulary.token_bytes(os.path.join(base, config["data"]["vocabulary"]), vocab_size)
        ranks = {token: i for i, token in enumerate(tokens)}
        self.module = reference_source.load(args.source, args.device, self.dtype, self.fp8, ranks)
        timer.line("source loaded")
        self.model = reference_source.build_model(self.module, config, args.device, self.dtype, args.seed)
        reference_source.set_schedule(self.module, config)
        self.model.prefix_table.copy_(self.module.build_prefix_table(self.model.vocab_size))
        self.model.train()
        self.start = None  # weights to go back to
        if args.weights:
            self.start = tensor_file.load(args.weights)
            reference_names.set_weights(self.model, self.start)
        self.pattern = args.data or os.path.join(base, config["data"]["train"])
        count = sum(parameter.numel() for parameter in self.model.parameters())
        timer.line(f"model of {count / 1e6:.1f} M parameters on {args.device}, {self.dtype}, FP8 {'on' if self.fp8 else 'off'}")

    @contextlib.contextmanager
    def training(self):
        """(manager, loader) at the start of a run."""
        model, module = self.model, self.module
        model.zero_grad(set_to_none=True)
        manager = reference_source.make_manager(module, model, self.config)
        for buffer in (model._mlp_down_act_scales, model._mlp_down_proj_scales, model._mlp_down_proj_next_scales):
            buffer.fill_(1)
        if self.fp8:
            model.quantize_mlp_fp8(bootstrap_down=True)
        shards = sorted(glob.glob(self.pattern))
        if not shards:
            raise SystemExit(f"no shard matches {self.pattern}")
        with tempfile.TemporaryDirectory() as folder:
            # The loader always opens one shard more than it needs.
            for i, shard in enumerate([*shards, shards[-1]]):
                os.symlink(os.path.abspath(shard), os.path.join(folder, f"{i:06d}.bin"))
            stage = module.TRAINING_STAGES[0]
            loader = module.distributed_data_generator(
                os.path.join(folder, "*.bin"), stage.batch_size, stage.train_max_seq_len, grad_accum_steps=module.grad_accum_steps
            )
            yield manager, loader

    def passes(self, manager, loader, step, after_row=lambda: None):
        """Forward and backward of a step; the mean loss."""
        manager.advance_schedule(step)
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.args.device), 0
        for _ in range(ROWS):
            inputs, targets, cum_seqlens, bigram_inputs, _ = loader.send(manager.train_loader_send_args)
            losses = self.model(inputs, targets, cum_seqlens, bigram_inputs, manager.get_forward_args())
            (losses.sum() * self.module.grad_scale).backward()
            total += losses.detach().double().sum()
            tokens += inputs.numel()
            after_row()
        return total.item() / tokens

    @torch.no_grad()
    def validate(self, completed):
        """Mean loss of eval.tokens tokens in rows of eval.row_tokens, as after `completed` steps."""
        module, config = self.module, self.config["eval"]
        rows = config["row_tokens"]
        module.args.val_batch_size = rows * module.grad_accum_steps
        base = os.path.dirname(os.path.abspath(self.args.config))
        loader = module.distributed_data_generator(
            os.path.join(base, self.config["data"]["val"]), module.args.val_batch_size, -1, module.grad_accum_steps, align_to_bos=False
        )
        self.model.eval()
        with self.training() as (manager, _):
            schedule = module.training_schedule
            if completed > schedule.total_steps:
                raise SystemExit(f"--completed {completed}: the configuration's stages have {schedule.total_steps} steps")
            for step in [begin for begin, _ in schedule.boundaries if begin < completed] + [completed]:
                manager.advance_schedule(step)  # positions are stretched at the beginning of every stage
            if completed == schedule.total_steps and config["final_window_long"]:
                schedule.ws_post_yarn_ext = config["final_window_long"]
                manager.apply_final_ws_ext()
            total = torch.zeros((), dtype=torch.float64, device=self.args.device)
            for _ in range(config["tokens"] // rows):
                inputs, targets, cum_seqlens, bigram_inputs, _ = next(loader)
                total += self.model(inputs, targets, cum_seqlens, bigram_inputs, manager.get_forward_args()).double().sum()
        return total.item() / (config["tokens"] // rows * rows)

    def update(self, manager, step):
        manager.step_optimizers(step)
        if self.fp8:
            self.model.quantize_mlp_fp8(bootstrap_down=step < self.config["fp8"]["down_weight_exact_steps"])

    def train(self, steps, out=None, after_step=lambda steps_made: None):
        total = self.module.training_schedule.total_steps
        if steps > total:
            raise SystemExit(f"{steps} steps wanted, the configuration's stages have {total}")
        with self.training() as (manager, loader):
            for step in range(steps):
                start = time.perf_counter()
                loss = self.passes(manager, loader, step)
                self.update(manager, step)
                row = {"step": step, "loss": loss, "seconds": time.perf_counter() - start}
                print(f"step {step:5d}  loss {loss:.6f}  {row['seconds'] * 1e3:.0f} ms", flush=True)
                if out:
                    print(json.dumps(row), file=out, flush=True)
                after_step(step + 1)


@torch.no_grad()
def perturb(weights, seed):
    """Noise of a tenth of a weight's size, or where all are zero of a size that lets later layers feel it."""
    device = weights["wte"].device
    generator = torch.Generator(device).manual_seed(seed)
    sizes = {"bigram.table": 0.02, "smear.gate": 0.1, "lambda.smear": 0.2}
    for name, weight in weights.items():
        if name in ("bigram.sign", "wte"):
            continue
        size = 0.1 * weight.float().square().mean().sqrt().item()
        if size == 0:
            size = sizes.get(name, 0.02 if "mlp.down" in name else 0.1)
        noise = torch.randn(weight.shape, generator=generator, device=device) * size
        weight.copy_(weight.float() + noise)
    weights["wte"].copy_(weights["head.weight"])


def nudged(weights, seed):
    """Every weight moved by about a rounding to BF16: what another order of the same operations does to a run."""
    generator = torch.Generator().manual_seed(seed)
    factor = {name: 1 + torch.randn(weight.shape, generator=generator) * 2**-9 for name, weight in weights.items() if name != "bigram.sign"}
    return {name: (weight.float().cpu() * factor[name]).to(weight.dtype) if name in factor else weight for name, weight in weights.items()}


def main():
    args = parse_arguments()
    if len(args.warm_steps) > 1 and "{}" not in args.out:
        raise SystemExit("several --warm-steps: --out needs a {} where the number of steps goes")
    with open(args.config, encoding="utf-8") as file:
        config = json.load(file)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    timer = Timer(args.device)
    reference = Reference(args, config, timer)

    if args.mode == "export":
        if args.start_out:
            tensor_file.save(args.start_out, reference_names.weights(reference.model), keep_bf16=True)
            timer.line(f"wrote {args.start_out}")

        def write(steps_made):
            if steps_made not in args.warm_steps:
                return
            weights = reference_names.weights(reference.model)
            if args.perturb:
                perturb(weights, args.seed)
            if args.perturb or steps_made:
                weights = {name: weight.bfloat16() for name, weight in weights.items()}
            path = args.out.replace("{}", str(steps_made))
            tensor_file.save(path, weights, keep_bf16=True)
            timer.line(f"{steps_made} steps made, wrote {path}")

        write(0)
        reference.train(max(args.warm_steps), after_step=write)
    elif args.mode == "grads":
        sums = {}

        def add_up():
            for name, parameter in reference.model.named_parameters():
                if args.sum_fp32 and parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.float()
                    parameter.grad = None

        with reference.training() as (manager, loader):
            loss = reference.passes(manager, loader, 0, add_up)
        timer.line(f"loss {loss:.9f}")
        tensor_file.save(args.out, reference_names.gradients(reference.model, sums), {"loss": repr(loss)})
        timer.line(f"wrote {args.out}")
    elif args.mode == "eval":
        loss = reference.validate(args.completed)
        timer.line(f"validation loss {loss:.9f}")
        with open(args.out, "w", encoding="utf-8") as file:
            print(json.dumps({"val_loss": loss}), file=file)
    else:
        if reference.start is None:
            reference.start = {name: weight.clone() for name, weight in reference_names.weights(reference.model).items()}
        stem, suffix = os.path.splitext(args.out)
        for run in range(args.runs):
            if run:
                start = nudged(reference.start, args.seed + run) if run >= args.runs - args.nudge else reference.start
                reference_names.set_weights(reference.model, start)
            path = args.out if run == 0 else f"{stem}.{run + 1}{suffix}"
            with open(path, "w", encoding="utf-8") as file:
                reference.train(args.steps, file)
            timer.line(f"wrote {path}")


if __name__ == "__main__":
    main()

"""AdamW and Muon from their formulas, and the schedules, on a resolved configuration."""

import math

import torch

from model import parameter_table


def scaled_steps(config, count):
    """A step count times schedule.scale: halves round up, and a count above 0 stays above 0."""
    return max(1, math.floor(count * config["schedule"]["scale"] + 0.5)) if count else 0


def lr_factor(config, s):
    """Factor of every learning rate at update s = 0, 1, …"""
    lr = config["schedule"]["lr"]
    steps = scaled_steps(config, config["schedule"]["steps"])
    warmup = scaled_steps(config, lr["warmup_steps"])
    cooldown = scaled_steps(config, lr["cooldown_steps"]) or steps - warmup
    if s < warmup:
        return (s + 1) / warmup
    if lr["shape"] == "constant" or s < steps - cooldown:
        return 1.0
    left = max(0.0, (steps - s) / cooldown)  # 1 at the start of the cool-down, 0 after the last step
    shape = {
        "linear": left,
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "power": left ** lr["power"],
    }[lr["shape"]]
    return lr["final_fraction"] + (1 - lr["final_fraction"]) * shape


def muon_momentum(config, s):
    momentum, target = config["schedule"]["momentum"], config["optim"]["muon"]["momentum"]
    steps = scaled_steps(config, config["schedule"]["steps"])
    warmup = scaled_steps(config, momentum["warmup_steps"])
    cooldown = scaled_steps(config, momentum["cooldown_steps"])
    if s < warmup:
        return momentum["start"] + (target - momentum["start"]) * s / warmup
    if s > steps - cooldown:
        return target - (target - momentum["final"]) * (s - (steps - cooldown)) / cooldown
    return target


def orthogonalize(update, muon, dtype):
    """Newton-Schulz iterations towards the polar factor of an (R, C) matrix, in `dtype`."""
    x = update.to(dtype)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x = x / (x.norm() * muon["norm_margin"] + muon["eps"])
    rows = muon["coefficients"]
    for i in range(muon["iterations"]):
        a, b, c = rows[min(i, len(rows) - 1)]
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


class Optimizer:
    """Steps a parameter dictionary (leaf tensors with .grad). `muon_dtype` is the type of the Newton-Schulz products. Where a group keeps
    BF16 weights or states, they are FP32 tensors here, rounded to BF16 at each store, unless `f32_storage`."""

    def __init__(self, config, parameters, muon_dtype, f32_storage=False):
        self.config = config
        self.parameters = parameters
        self.muon_dtype = muon_dtype
        self.f32_storage = f32_storage
        self.groups = {name: group for name, (_, group) in parameter_table(config["model"]).items()}
        self.state = {}

    def _store(self, tensor, value, is_bf16):
        tensor.copy_(value.bfloat16() if is_bf16 and not self.f32_storage else value)

    @torch.no_grad()
    def step(self, s):
        """Update s = 0, 1, … with the gradients in .grad; those used are dropped. Returns their global L2 norm before clipping."""
        factor = lr_factor(self.config, s)
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in self.parameters.values() if p.grad is not None)).item()
        clip = self.config["train"]["grad_clip"]
        scale = clip / norm if 0 < clip < norm else 1.0
        for name, parameter in self.parameters.items():
            group = self.config["optim"][self.groups[name]]
            if (s + 1) % group["every"] != 0:
                continue
            grad = parameter.grad.to(parameter.dtype) * scale
            lr = group["lr"] * group["lr_multiplier"] * factor
            decay = lr * group["weight_decay"] * group["weight_decay_multiplier"]
            if group["optimizer"] == "muon":
                self._muon(name, parameter, grad, lr, decay, muon_momentum(self.config, s))
            else:
                self._adamw(name, parameter, grad, lr, decay, group)
            parameter.grad = None
        return norm

    def _adamw(self, name, parameter, grad, lr, decay, group):
        state = self.state.setdefault(name, {"t": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)})
        state["t"] += 1
        beta1, beta2, t = group["beta1"], group["beta2"], state["t"]
        m = beta1 * state["m"] + (1 - beta1) * grad
        v = beta2 * state["v"] + (1 - beta2) * grad.square()
        denominator = v.sqrt() / math.sqrt(1 - beta2**t) + group["eps"]
        value = parameter * (1 - decay) - (lr / (1 - beta1**t)) * m / denominator
        self._store(state["m"], m, group["state"] == "bf16")
        self._store(state["v"], v, group["state"] == "bf16")
        self._store(parameter, value, group["master"] == "none")

    def _muon(self, name, parameter, grad, lr, decay, mu):
        muon = self.config["optim"]["muon"]
        buffer = self.state.setdefault(name, torch.zeros_like(parameter))
        buffer.mul_(mu).add_(grad, alpha=1 - mu)
        update = (1 - mu) * grad + mu * buffer if muon["nesterov"] else buffer
        # q, k and v are three matrices, stored below one another.
        pieces = update.chunk(3) if name.endswith("attn.qkv.weight") else (update,)
        pieces = [orthogonalize(p, muon, self.muon_dtype).to(grad.dtype) * math.sqrt(max(1, p.size(0) / p.size(1))) for p in pieces]
        parameter.mul_(1 - decay).sub_(torch.cat(pieces), alpha=lr)

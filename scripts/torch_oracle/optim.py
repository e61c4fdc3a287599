"""Adam and Muon, each in its usual form and in the Main Track's, from their formulas, on a resolved configuration."""

import copy
import math

import torch

import architectures
import schedule


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
        self.module = architectures.module_of(config)
        self.groups = {name: group for name, (_, group) in self.module.parameter_table(config["model"]).items()}
        self.state = {}

    def _store(self, tensor, value, is_bf16):
        tensor.copy_(value.bfloat16() if is_bf16 and not self.f32_storage else value)

    @torch.no_grad()
    def step(self, s):
        """Update s = 0, 1, … with the gradients in .grad; those used are dropped. Returns their global L2 norm before clipping."""
        factor = schedule.lr_factor(self.config, s)
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in self.parameters.values() if p.grad is not None)).item()
        clip = self.config["train"]["grad_clip"]
        scale = clip / norm if 0 < clip < norm else 1.0
        for name, parameter in self.parameters.items():
            # While head and embedding are one matrix, the head has the gradient of both.
            follows_head = self.groups[name] == "embedding" and schedule.is_tied(self.config, s)
            if self.groups[name] is None or follows_head:
                continue
            group = self.config["optim"][self.groups[name]]
            if (s + 1) % group["every"] != 0:
                continue
            grad = parameter.grad.to(parameter.dtype) * scale
            lr = group["lr"] * group["lr_multiplier"] * factor
            decay = group["weight_decay"] * group["weight_decay_multiplier"] if self.module.decays(name) else 0.0
            if group["optimizer"] == "muon":
                self._muon(name, parameter, grad, lr, lr * decay, s)
            elif group["optimizer"] == "normuon":
                self._normuon(name, parameter, grad, lr, lr * decay * group["lr"] * factor, s)
            elif group["optimizer"] == "adam":
                self._adam(name, parameter, grad, lr, lr * lr * decay, group)
            else:
                self._adamw(name, parameter, grad, lr, lr * decay, group)
            parameter.grad = None
        if schedule.splits(self.config, s):
            self.parameters["wte"].copy_(self.parameters["head.weight"])
            self.state["wte"] = copy.deepcopy(self.state["head.weight"])
        return norm

    def _moments(self, name, parameter, grad, group):
        """(m, v) of this update, stored; and t."""
        state = self.state.setdefault(name, {"t": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)})
        state["t"] += 1
        m = group["beta1"] * state["m"] + (1 - group["beta1"]) * grad
        v = group["beta2"] * state["v"] + (1 - group["beta2"]) * grad.square()
        self._store(state["m"], m, group["state"] == "bf16")
        self._store(state["v"], v, group["state"] == "bf16")
        return m, v, state["t"]

    def _store_weight(self, name, parameter, value, group):
        self._store(parameter, value, group["master"] == "none" and not self.module.keeps_master(name))

    def _adamw(self, name, parameter, grad, lr, decay, group):
        m, v, t = self._moments(name, parameter, grad, group)
        denominator = v.sqrt() / math.sqrt(1 - group["beta2"] ** t) + group["eps"]
        value = parameter * (1 - decay) - (lr / (1 - group["beta1"] ** t)) * m / denominator
        self._store_weight(name, parameter, value, group)

    def _adam(self, name, parameter, grad, lr, decay, group):
        """ε beside the uncorrected root; decay only where the step makes the weight smaller."""
        m, v, t = self._moments(name, parameter, grad, group)
        correction = math.sqrt(1 - group["beta2"] ** t) / (1 - group["beta1"] ** t)
        update = lr * correction * m / (v.sqrt() + group["eps"])
        update = update + (update * parameter > 0) * decay * parameter
        self._store_weight(name, parameter, parameter - update, group)

    def _direction(self, name, grad, s):
        """Momentum's update, in the matrices that Muon sees."""
        muon, mu = self.config["optim"]["muon"], schedule.muon_momentum(self.config, s)
        buffer = self.state.setdefault(name, {"momentum": torch.zeros_like(grad)})["momentum"]
        buffer.mul_(mu).add_(grad, alpha=1 - mu)
        update = (1 - mu) * grad + mu * buffer if muon["nesterov"] else buffer
        return [orthogonalize(piece, muon, self.muon_dtype) for piece in update.chunk(self.module.muon_matrices(self.config["model"], name))]

    def _muon(self, name, parameter, grad, lr, decay, s):
        pieces = [p.to(grad.dtype) * math.sqrt(max(1, p.size(0) / p.size(1))) for p in self._direction(name, grad, s)]
        parameter.mul_(1 - decay).sub_(torch.cat(pieces), alpha=lr)

    def _normuon(self, name, parameter, grad, lr, decay, s):
        """Muon with mean squares of rows (of columns, where these are longer) evened out, and decay only where the step makes the weight
        smaller."""
        beta2, updates = self.config["optim"]["muon"]["beta2"], self._direction(name, grad, s)
        for i, (piece, x) in enumerate(zip(parameter.chunk(len(updates)), updates)):
            rows, columns = x.shape
            exact = x.to(grad.dtype)
            mean = exact.square().mean(1 if rows >= columns else 0, keepdim=True)
            v = self.state[name].setdefault(i, torch.zeros_like(mean))
            v.mul_(beta2).add_(mean, alpha=1 - beta2)
            factor = v.clamp(min=1e-10).rsqrt()
            factor = factor * exact.norm() / (exact * factor).norm().clamp(min=1e-10)
            step = exact * factor.to(x.dtype).to(grad.dtype)
            size = math.sqrt(max(1, rows / columns))
            piece.sub_((step * piece >= 0) * piece * (decay * size) + step * (lr * size))

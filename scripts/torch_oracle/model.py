"""GPT-2 and the Optimization Track's model, from the formulas, on a resolved configuration (a dict as `speedrun train --print-config`
prints it). One parameter dictionary, named as speedrun names it; plain functions; autograd does the backward pass.

Letters: B rows, T tokens of a row, C width, H heads, D = C / H, F hidden width of the MLP, Vp padded vocabulary. The softmax of the loss
runs over all Vp columns, padding included, for both architectures.

Precision: with dtype bfloat16 every parameter is cast to BF16 where it is used, activations and the residual stream are BF16, logits are
a BF16 product; rotary, soft-capping and cross-entropy are FP32. With float32 (or float64) everything is in that type.
"""

import math

import torch
import torch.nn.functional as F


def padded_vocab(model):
    padding = model["vocab_padding"]
    return -(-model["vocab_size"] // padding) * padding


def parameter_table(model):
    """name -> (shape, group); the order is that of the forward pass."""
    C, F_, Vp = model["width"], model["mlp_hidden"], padded_vocab(model)
    table = {"wte": ((Vp, C), "embedding")}

    def norm(name):
        if model["norm_gain"]:
            table[f"{name}.gain"] = ((C,), "vector")
            if model["norm"] == "layernorm" and model["bias"]:
                table[f"{name}.shift"] = ((C,), "vector")

    def linear(name, rows, columns):
        table[f"{name}.weight"] = ((rows, columns), "matrix")
        if model["bias"]:
            table[f"{name}.bias"] = ((rows,), "vector")

    if model["positions"] == "learned":
        table["wpe"] = ((model["max_positions"], C), "position")
    if model["embedding_norm"]:
        norm("norm_in")
    for layer in range(model["num_layers"]):
        norm(f"h.{layer}.norm1")
        linear(f"h.{layer}.attn.qkv", 3 * C, C)
        linear(f"h.{layer}.attn.out", C, C)
        norm(f"h.{layer}.norm2")
        linear(f"h.{layer}.mlp.up", F_, C)
        linear(f"h.{layer}.mlp.down", C, F_)
    norm("norm_out")
    if not model["tied_head"]:
        table["head.weight"] = ((Vp, C), "head")
    if model["head_bias"]:
        table["head.bias"] = ((Vp,), "vector")
    return table


def muon_matrices(_, name):
    """How many matrices Muon sees in a parameter: q, k and v are stored below one another."""
    return 3 if name.endswith("attn.qkv.weight") else 1


def decays(_):
    return True


def keeps_master(_):
    """Whatever the group's setting says."""
    return False


def init_parameters(model, seed):
    """Initial weights (FP32 values; the Optimization Track's embedding is rounded to BF16)."""
    generator = torch.Generator().manual_seed(seed)
    zero_projections = model["init"] == "zero_projections"
    parameters = {}
    for name, (shape, group) in parameter_table(model).items():
        if group == "vector":
            value = torch.ones(shape) if name.endswith(".gain") else torch.zeros(shape)
        else:
            is_projection = name.endswith(("attn.out.weight", "mlp.down.weight"))
            if zero_projections:
                if is_projection or group == "head":
                    std = 0.0
                else:
                    std = {"embedding": 1.0, "position": 0.02}.get(group, math.sqrt(0.33 / model["width"]))
            else:
                std = 0.02 / math.sqrt(2 * model["num_layers"]) if is_projection else 0.02
            value = torch.randn(shape, generator=generator) * std
            if zero_projections and group == "embedding":
                value = value.bfloat16().float()
        parameters[name] = value
    return parameters


def rotary_tables(model, T, device, dtype):
    """cos and sin of position · ω_j, each (T, D/2); ω_j = base^(-j/(n-1)) for the first n pairs, 0 for the others."""
    half = model["width"] // model["num_heads"] // 2
    n = round(model["rotary_fraction"] * half)
    exponent = torch.arange(n, dtype=torch.float64) / max(n - 1, 1)
    omega = torch.cat([model["rotary_base"] ** -exponent, torch.zeros(half - n, dtype=torch.float64)])
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    angle = torch.arange(T, dtype=torch.float64)[:, None] * omega[None, :]
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def rotate(x, cos, sin):
    """x (B, H, T, D): the pair (i, i + D/2) turns by the angle of its position; FP32 inside, one rounding."""
    x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).to(x.dtype)


def window_mask(model, layer, T, device):
    """None for full causal attention, else (T, T) booleans: query t sees keys t - window … t."""
    kind = model.get("layers", {}).get(str(layer), {}).get("window", "full")
    kind = kind.removesuffix("_window")
    window = {"full": 0, "short": model["window_short"], "long": model["window_long"]}[kind]
    if window == 0 or window >= T - 1:
        return None
    distance = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)[None, :]
    return (distance >= 0) & (distance <= window)


def softcap(model, logits):
    kind, c = model["softcap"], model["softcap_value"]
    if kind == "none":
        return logits
    if kind == "rational":
        return c * logits * torch.rsqrt(logits * logits + c * c)
    if kind == "sigmoid":
        return 23 * torch.sigmoid((logits + 5) / 7.5)
    raise SystemExit(f"model.softcap {kind} is unknown")


def loss_sum(model, parameters, inputs, targets, dtype):
    """Summed cross-entropy in nats over all tokens of inputs and targets (B, T)."""
    B, T = inputs.shape
    C, H = model["width"], model["num_heads"]
    D = C // H

    def get(name):
        return parameters[name].to(dtype) if name in parameters else None

    def norm(x, name):
        if model["norm"] == "layernorm":
            return F.layer_norm(x, (C,), get(f"{name}.gain"), get(f"{name}.shift"), model["norm_eps"])
        return F.rms_norm(x, (C,), get(f"{name}.gain"), model["norm_eps"])

    def linear(x, name):
        return F.linear(x, get(f"{name}.weight"), get(f"{name}.bias"))

    x = F.embedding(inputs, get("wte"))
    if model["positions"] == "learned":
        x = x + get("wpe")[:T]
    else:
        cos, sin = rotary_tables(model, T, x.device, dtype)
    if model["embedding_norm"]:
        x = norm(x, "norm_in")

    for layer in range(model["num_layers"]):
        h = f"h.{layer}"
        qkv = linear(norm(x, f"{h}.norm1"), f"{h}.attn.qkv").view(B, T, 3, H, D)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D) each
        if model["qk_norm"]:
            q, k = (F.rms_norm(part, (D,), None, model["norm_eps"]) for part in (q, k))
        if model["positions"] == "rotary":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = window_mask(model, layer, T, x.device)
        scale = model["attention_scale"] or 1 / math.sqrt(D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        x = x + linear(y.transpose(1, 2).reshape(B, T, C), f"{h}.attn.out")

        up = linear(norm(x, f"{h}.norm2"), f"{h}.mlp.up")
        up = F.gelu(up, approximate="tanh") if model["activation"] == "gelu" else F.relu(up).square()
        x = x + linear(up, f"{h}.mlp.down")

    head = get("wte") if model["tied_head"] else get("head.weight")
    logits = F.linear(norm(x, "norm_out"), head, get("head.bias"))
    logits = softcap(model, logits if dtype == torch.float64 else logits.float())
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

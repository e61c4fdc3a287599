"""Parameters of the Main Track's model (modded-nanogpt record #89): names, shapes and groups, the columns of the gate nets, and initial
values. Letters: C width, H heads, F hidden width of the MLP, V padded vocabulary, L layers."""

import math

import torch

from model import padded_vocab

GATE_SCALE = 0.1  # the gate nets' output scale at the start
SQRT_1_1 = math.sqrt(1.1)
LAYER_DEFAULTS = {
    "window": "full", "attention": True, "paired_heads": False, "key_offset": False, "value_embedding": False, "xsa": False,
    "gate": False, "dc": False, "input_from": -1, "skip_from": -1,
}  # fmt: skip


def layers_of(model):
    return [LAYER_DEFAULTS | model["layers"].get(str(layer), {}) for layer in range(model["num_layers"])]


def gate_layout(model):
    """net -> list of (use, layer, columns, wanted output at the start), in the order of the net's columns."""
    H, layers = model["num_heads"], layers_of(model)
    last = model["num_layers"] - 1
    nets = {"gate.pre": [], "gate.post": []}

    def net(layer):
        return nets["gate.pre" if layer < model["mudd_gate_split"] else "gate.post"]

    for use, start in (("xsa", 0.0), ("gate", 0.25)):
        for i, layer in enumerate(layers):
            if layer[use]:
                net(i).append((use, i, H, start))
    for i, layer in enumerate(layers):
        if layer["attention"] and not (model["mudd"] and i == last):
            if model["x0_injection"]:
                net(i).append(("x0", i, 1, 0.0))
            if model["bigram_rows"]:
                net(i).append(("bigram", i, 1, 0.05))
    for i, layer in enumerate(layers):
        if layer["skip_from"] >= 0:
            net(i).append(("skip", i, 1, 0.5))
    for i, layer in enumerate(layers):
        if layer["dc"]:
            net(i).extend([("dc1", i, H, 1.0), ("dc2", i, H, 0.0)])
    if model["mudd"]:
        starts = [0, 0, 0, 0, 0, 0, 2, 2, SQRT_1_1, 1, 0, 0.05, SQRT_1_1, 1]
        nets["mudd.mix"] = [("mix", last, 1, start) for start in starts]
        nets["mudd.out"] = [("out", last, 1, start) for start in (0, -0.5, 0, 0, 0)]
    return {name: columns for name, columns in nets.items() if columns}


def net_starts(columns):
    return torch.tensor([start for _, _, count, start in columns for _ in range(count)])


def parameter_table(model):
    """name -> (shape, group); group None: never trained."""
    C, F_, V, H, L = model["width"], model["mlp_hidden"], padded_vocab(model), model["num_heads"], model["num_layers"]
    layers, nets = layers_of(model), gate_layout(model)
    table = {"wte": ((V, C), "embedding")}
    if model["smear"]:
        table["smear.gate"] = ((model["smear_channels"],), "smear")
    if model["bigram_rows"]:
        table["bigram.table"] = ((model["bigram_rows"], C), "bigram")
        if model["bigram_sign_rows"]:
            table["bigram.sign"] = ((model["bigram_sign_rows"], C), None)
    for name, columns in nets.items():
        group = "mudd" if name.startswith("mudd") else "mudd_gate"
        count = len(net_starts(columns))
        if group == "mudd" or model["mudd_gates"]:
            table[f"{name}.w1"] = ((model["gate_hidden"], C), group)
            table[f"{name}.w2"] = ((count, model["gate_hidden"]), group)
        table[f"{name}.bias"] = ((count,), group)
    if "gate.pre" in nets or "gate.post" in nets:
        table["gate.scale"] = ((1,), "mudd_gate")
    if model["residual_lambdas"]:
        table["lambda.resid"] = ((L, 2), "resid_lambda")
        table["lambda.post"] = ((L, 2), "post_lambda")
    if model["weight_lambdas"]:
        table["lambda.weight"] = ((L, 2), "scalar")
    if model["smear"]:
        table["lambda.smear"] = ((1,), "scalar")
    if any(layer["skip_from"] >= 0 for layer in layers):
        table["lambda.skip"] = ((1,), "scalar")
    for i, layer in enumerate(layers):
        if layer["attention"]:
            table[f"h.{i}.attn.qk.weight"] = ((2 * C, C), "matrix")
            table[f"h.{i}.attn.v.weight"] = ((C, C), "matrix")
            table[f"h.{i}.attn.out.weight"] = ((C, C), "matrix")
            if layer["value_embedding"]:
                table[f"h.{i}.value.table"] = ((V, C), "value_embedding")
                if not (model["mudd"] and i == L - 1):
                    table[f"h.{i}.value.gate"] = ((H, 2 * model["value_gate_channels"]), "value_gate")
        table[f"h.{i}.mlp.up.weight"] = ((F_, C), "matrix")
        table[f"h.{i}.mlp.down.weight"] = ((F_, C), "down")
    table["head.weight"] = ((V, C), "head")
    return table


def muon_matrices(model, name):
    """How many matrices Muon sees in a parameter: Q and K go in pairs of heads."""
    if not name.endswith("attn.qk.weight"):
        return 1
    H = model["num_heads"]
    return H if H % 2 == 0 else 2 * H


def decays(name):
    return not name.endswith(".bias") and name != "gate.scale"


def keeps_master(name):
    """Whatever the group's setting says."""
    return name == "gate.scale"


def init_parameters(model, seed):
    generator = torch.Generator().manual_seed(seed)
    bound = math.sqrt(3) * 0.5 / math.sqrt(model["width"])
    nets = gate_layout(model)

    def uniform(shape, limit):
        return (2 * torch.rand(shape, generator=generator) - 1) * limit

    def normal(shape, std):
        return torch.randn(shape, generator=generator) * std

    parameters = {}
    for name, (shape, group) in parameter_table(model).items():
        if group == "matrix":
            value = uniform(shape, bound)
        elif name.endswith(".w1"):
            value = uniform(shape, 1 / math.sqrt(model["width"]))
        elif name.endswith(".bias"):
            value = net_starts(nets[name.removesuffix(".bias")]) / GATE_SCALE
        elif group == "head":
            value = normal(shape, 0.005)
        elif group == "value_embedding":
            value = normal(shape, 0.01)
        elif name == "bigram.sign":
            value = torch.where(normal(shape, 1) < 0, -1.0, 1.0)
        elif name == "lambda.weight":
            value = torch.tensor([0.5, 1.0]).repeat(model["num_layers"], 1)
        else:
            start = {"gate.scale": GATE_SCALE, "lambda.resid": SQRT_1_1, "lambda.post": 1.0, "lambda.skip": -1.5}
            value = torch.full(shape, start.get(name, 0.0))
        parameters[name] = value
    parameters["wte"] = parameters["head.weight"].clone()
    return parameters

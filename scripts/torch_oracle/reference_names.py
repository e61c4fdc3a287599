"""Parameters of the reference's model under speedrun's names: weights and gradients both ways."""

import torch

VALUE_LAYERS = (1, 2, 8, 9, 10)
NETS = {"gate.pre": ("mudd_gate", 0, 26), "gate.post": ("mudd_gate", 1, 41), "mudd.mix": ("mudd", 0, 14), "mudd.out": ("mudd", 1, 5)}
SKIPPED_LAYER = 6  # no attention


def views(theirs, width):
    """speedrun's name -> view of the reference's tensor. theirs: the reference's name -> tensor (weights, gradients, …)."""
    C = width
    yield "wte", theirs["embed.weight"]
    yield "smear.gate", theirs["smear_gate.weight"][0]
    yield "bigram.table", theirs["bigram_embed.weight"]
    if "bigram_sign_table" in theirs:
        yield "bigram.sign", theirs["bigram_sign_table"]
    for name, (net, i, columns) in NETS.items():
        yield f"{name}.w1", theirs[f"{net}_w1"][i]
        yield f"{name}.w2", theirs[f"{net}_w2"][i, :columns]
        yield f"{name}.bias", theirs[f"{net}_b2"][i, :columns]
    yield "gate.scale", theirs["_mudd_gate_scale"].view(1)
    yield "lambda.resid", theirs["resid_lambdas"]
    yield "lambda.post", theirs["post_lambdas"]
    layers = theirs["resid_lambdas"].size(0)
    scalars = theirs["scalars"]
    yield "lambda.weight", scalars[: 2 * layers].view(layers, 2)
    yield "lambda.smear", scalars[2 * layers : 2 * layers + 1]
    yield "lambda.skip", scalars[2 * layers + 1 : 2 * layers + 2]
    qk = theirs["qk_bank"].view(-1, 2 * C, C)[: layers - 1]
    vo = theirs["vo_bank"]
    tables = theirs["value_embeds"].view(len(VALUE_LAYERS), -1, C)
    for layer in range(layers):
        if layer != SKIPPED_LAYER:
            a = layer - (layer > SKIPPED_LAYER)
            yield f"h.{layer}.attn.qk.weight", qk[a]
            yield f"h.{layer}.attn.v.weight", vo[2 * a]
            yield f"h.{layer}.attn.out.weight", vo[2 * a + 1]
        if layer in VALUE_LAYERS:
            j = VALUE_LAYERS.index(layer)
            yield f"h.{layer}.value.table", tables[j]
            if layer != layers - 1:
                yield f"h.{layer}.value.gate", theirs["ve_gate_bank"][j]
        yield f"h.{layer}.mlp.up.weight", theirs["mlp_bank"][layer, 0]
        yield f"h.{layer}.mlp.down.weight", theirs["mlp_bank"][layer, 1]
    yield "head.weight", theirs["lm_head.weight"].T


def weights(model):
    theirs = {name: parameter.data for name, parameter in model.named_parameters()}
    theirs["bigram_sign_table"] = model.bigram_sign_table
    return dict(views(theirs, model.embed.embedding_dim))


@torch.no_grad()
def set_weights(model, values):
    """Padding that no name reaches becomes zero, as in a fresh model."""
    for parameter in model.parameters():
        parameter.zero_()
    ours = weights(model)
    if ours.keys() != values.keys():
        raise SystemExit(f"names of the weights differ from the model's: {sorted(ours.keys() ^ values.keys())}")
    for name, view in ours.items():
        if view.shape != values[name].shape:
            raise SystemExit(f"{name} is {tuple(values[name].shape)}, the reference's is {tuple(view.shape)}")
        view.copy_(values[name])


@torch.no_grad()
def gradients(model, sums):
    """sums: the reference's name -> gradient, where it is not the parameter's .grad. While head and embedding are one matrix, the head's
    gradient is that of both, added up in its type."""
    theirs = {}
    for name, parameter in model.named_parameters():
        grad = sums.get(name, parameter.grad)
        theirs[name] = torch.zeros_like(parameter) if grad is None else grad
    theirs["lm_head.weight"] += theirs["embed.weight"].T
    theirs["embed.weight"].zero_()
    return dict(views(theirs, model.embed.embedding_dim))

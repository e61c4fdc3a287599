"""Loads the training script of modded-nanogpt's record #89 from a checkout, up to and including its last class, so that its model,
optimizer, schedule and loader can be driven from outside, in one process, without compilation.

The source is read as a syntax tree and changed in general terms only:
  - what stands after the last class, and what talks to GPUs or other processes at import, is left out; every tensor is made on one device;
  - a slice that is assigned to another slice of the same tensor is copied first (compiled code does so by itself, eager code races);
  - the FP8 copy of the MLP's input is made from FP32, as compiled code does it;
  - with another type than BF16: that type everywhere.
Modules that are not installed (kernels, tiktoken) are stood in for. Scales of FP8 products are copied to where cuBLASLt 13 wants them.
"""

import ast
import os
import sys
import types

import torch
import torch.nn.functional as F

import reference_kernels

LAST_CLASS = "TrainingManager"
FP32_PARAMETERS = {"scalars", "post_lambdas", "resid_lambdas", "_mudd_gate_scale"}
NORM_EPS = 2.0**-23  # what compiled code takes for BF16 inputs


def _root_name(node):
    """The variable that a chain of attributes, calls and subscripts starts with."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _method(node, name):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _call_method(value, name):
    return ast.Call(ast.Attribute(value, name, ast.Load()), [], [])


class _Rewriter(ast.NodeTransformer):
    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype
        self.slice_copies = self.exact_copies = 0
        self.in_model = False

    def top_level(self, body):
        end = next((i for i, node in enumerate(body) if isinstance(node, ast.ClassDef) and node.name == LAST_CLASS), None)
        if end is None:
            raise SystemExit(f"the source has no class {LAST_CLASS}: not the record this script is for")
        kept = []
        for node in body[: end + 1]:
            # Reading itself for its log, and checks and calls that need a GPU or other processes.
            if isinstance(node, (ast.With, ast.Assert)):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _root_name(node.value) in ("torch", "dist"):
                continue
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "device":
                node.value = ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), "device", ast.Load()), [ast.Constant(self.device)], [])
            kept.append(self.visit(node))
        return kept

    def visit_ClassDef(self, node):
        outer, self.in_model = self.in_model, node.name == "GPT"
        self.generic_visit(node)
        self.in_model = outer
        return node

    def visit_keyword(self, node):
        self.generic_visit(node)
        if node.arg == "pin_memory":
            node.value = ast.Constant(self.device != "cpu")
        elif node.arg == "device" and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(self.device)
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Subscript) and isinstance(value, ast.Subscript) and ast.dump(target.value) == ast.dump(value.value):
            self.slice_copies += 1
            node.value = _call_method(value, "clone")
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if self.dtype != torch.bfloat16 and node.attr == "bfloat16" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            node.attr = str(self.dtype).removeprefix("torch.")
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if _method(node, "get_world_size"):
            return ast.Constant(1)
        if self.dtype != torch.bfloat16 and _method(node, "bfloat16") and not node.args:
            return ast.Call(ast.Attribute(node.func.value, "to", ast.Load()), [ast.parse(str(self.dtype), mode="eval").body], [])
        if self.in_model and _method(node, "detach"):
            self.exact_copies += 1
            return _call_method(node, "float")
        return node


def _stand_ins(ranks):
    kernels = types.ModuleType("kernels")
    attention = types.SimpleNamespace(flash_attn_varlen_func=reference_kernels.varlen_attention)
    kernels.get_kernel = lambda *_, **__: types.SimpleNamespace(flash_attn_interface=attention)
    tiktoken = types.ModuleType("tiktoken")
    tiktoken.get_encoding = lambda _: types.SimpleNamespace(_mergeable_ranks=ranks)
    sys.modules.update(kernels=kernels, tiktoken=tiktoken)


def _without_compilation(function=None, **_):
    return function if function is not None else lambda inner: inner


def _aligned(scale):
    return scale if scale.data_ptr() % 16 == 0 else scale.clone()


def _aligned_products(product):
    def scaled_mm(a, b, *, scale_a, scale_b, **options):
        return product(a, b, scale_a=_aligned(scale_a), scale_b=_aligned(scale_b), **options)

    return scaled_mm


def _emulated_products(dtype):
    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        del use_fast_accum
        out = (a.float() @ b.float()) * (scale_a * scale_b)
        return out.to(dtype if out_dtype == torch.bfloat16 else out_dtype)

    return scaled_mm


def _replace_kernels(triton_kernels, dc_triton_kernels):
    for name in ("linear_relu_square", "reduce_mlp_activation_scales", "quantize_transpose_mlp_down_weights", "transpose_copy", "transpose_add"):
        setattr(triton_kernels, name, getattr(reference_kernels, name))
    triton_kernels.XXT = reference_kernels.gram_of_rows
    triton_kernels.XTX = reference_kernels.gram_of_columns
    triton_kernels.ba_plus_cAA = reference_kernels.square_plus
    triton_kernels.ce_fwd_bwd = reference_kernels.cross_entropy_fp8_grad
    dc_triton_kernels.dc_attention_postonly_nodd_correction_add_base_triton = reference_kernels.dc_attention_add_base


def _complete_backward(function):
    """Compiled code takes it when gradients of a function's last arguments are missing; eager code wants a None for each, and does not
    mind too many."""
    backward = function.backward
    function.backward = staticmethod(lambda ctx, *grads: (*backward(ctx, *grads), *[None] * 8))


def load(source, device, dtype, fp8, ranks):
    """The reference as a module. device "cuda" or "cpu"; dtype BF16, or FP32 for all weights and activations; ranks: bytes -> id of every
    token but the end of text. Its own kernels run on a GPU in BF16, PyTorch's operations otherwise. Once a process."""
    own_kernels = device != "cpu" and dtype == torch.bfloat16
    source = os.path.abspath(source)
    path = os.path.join(source, "train_gpt.py")
    if not os.path.exists(path):
        raise SystemExit(f"{source}: no train_gpt.py; --source wants a checkout of KellerJordan/modded-nanogpt")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.pop("DISABLE_FP8", None)
    if not fp8:
        os.environ["DISABLE_FP8"] = "1"
    _stand_ins(ranks)
    torch.compile = _without_compilation
    if device == "cpu":
        properties = types.SimpleNamespace(multi_processor_count=1)
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_properties = lambda _: properties
    if not own_kernels:
        torch.cuda._compile_kernel = lambda *_, **__: types.SimpleNamespace(set_shared_memory_config=lambda _: None)
        torch._scaled_mm = _emulated_products(dtype)
    else:
        torch._scaled_mm = _aligned_products(torch._scaled_mm)

    sys.path.insert(0, source)
    import dc_triton_kernels
    import triton_kernels

    if not own_kernels:
        _replace_kernels(triton_kernels, dc_triton_kernels)

    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), path)
    rewriter = _Rewriter(device, dtype)
    tree.body = rewriter.top_level(tree.body)
    if (rewriter.slice_copies, rewriter.exact_copies) != (1, 2):
        raise SystemExit(
            f"{path}: {rewriter.slice_copies} assignments between slices of a tensor and {rewriter.exact_copies} detached copies in the "
            "model, expected 1 and 2: not the record this script is for"
        )
    module = types.ModuleType("reference_train_gpt")
    module.__file__ = path
    sys.modules[module.__name__] = module
    exec(compile(ast.fix_missing_locations(tree), path, "exec"), module.__dict__)

    module.norm = lambda x: F.rms_norm(x, (x.size(-1),), None, NORM_EPS)
    module.NorMuonAndAdam._cautious_wd_and_update_inplace = staticmethod(reference_kernels.update_with_master)
    if fp8:
        _complete_backward(module.FusedSoftcappedCrossEntropy)
    else:
        module.FusedSoftcappedCrossEntropy = reference_kernels.SoftcappedCrossEntropy
    module.ReLUSqrdMLP = triton_kernels.FusedLinearReLUSquareFunction.apply
    return module


def build_model(module, config, device, dtype, seed):
    """The reference's model with the sizes of a resolved configuration, weights in the types that its script gives them."""
    model = config["model"]
    expected = {"num_layers": 11, "num_heads": 6, "mlp_hidden": 4 * model["width"], "vocab_padding": 128, "gate_hidden": 64, "dc_window": 112}
    for key, value in expected.items():
        if model[key] != value:
            raise SystemExit(f"model.{key} is {model[key]}, the reference has {value}")
    module.args.bigram_vocab_size = model["bigram_rows"]
    module.args.bigram_dim = model["width"]
    module.args.bigram_sign_table_rows = model["bigram_sign_rows"]
    module.BOS_ID = model["vocab_size"] - 1
    longest = max(stage["batch_tokens"] for stage in config["schedule"]["stages"].values()) // 8
    longest = max(longest, config["eval"]["row_tokens"])
    torch.manual_seed(seed)
    with torch.device(device):
        gpt = module.GPT(
            vocab_size=model["vocab_size"],
            num_layers=model["num_layers"],
            num_heads=model["num_heads"],
            head_dim=model["width"] // model["num_heads"],
            model_dim=model["width"],
            max_seq_len=longest,
        )
    for name, parameter in gpt.named_parameters():
        if dtype == torch.float32:
            parameter.data = parameter.data.float()
        elif name not in FP32_PARAMETERS:
            parameter.data = parameter.data.bfloat16()
    gpt.bigram_sign_table = gpt.bigram_sign_table.to(dtype)
    return gpt


def set_schedule(module, config):
    """The reference's schedule with the stages of the configuration; prints where they differ from its own table."""
    schedule = config["schedule"]
    stages = [schedule["stages"][str(i)] for i in range(len(schedule["stages"]))]
    lr, momentum, muon = schedule["lr"], schedule["momentum"], config["optim"]["muon"]
    if len(stages) != 4 or lr["hold_steps"] != stages[3]["steps"]:
        raise SystemExit("the reference has three stages and an extension of schedule.lr.hold_steps steps; the configuration does not")
    if lr["final_fraction"] != 0.15 or lr["shape"] != "linear" or lr["warmup_steps"] or schedule["scale"] != 1:
        raise SystemExit("schedule.lr: the reference falls linearly to 0.15, without warm-up and with scale 1")
    scheduled = sum(stage["steps"] for stage in stages[:3])
    own = [(start, end) for start, end in module.training_schedule.boundaries]
    table, begin = [], 0
    for i, stage in enumerate(stages):
        values = {
            "lr_mul": stage["lr_multiplier"],
            "batch_size": stage["batch_tokens"],
            "window_sizes": (stage["window_short"], stage["window_long"]),  # in tokens: the manager's block is 1
            "mtp_weights_start": stage["mtp_start"],
            "mtp_weights_end": stage["mtp_end"],
            "train_max_seq_len": stage["max_seq_len"],
            "prefix_weight_start": stage["prefix_start"],
            "prefix_weight_end": stage["prefix_end"],
        }
        for key, value in values.items():
            theirs = getattr(module.TRAINING_STAGES[i], key)
            if key == "window_sizes":
                theirs = tuple(128 * size for size in theirs)
            if value != theirs:
                print(f"stage {i}: {key} {value}, the reference's own is {theirs}")
        if (begin, begin + stage["steps"]) != own[i]:
            print(f"stage {i}: steps {begin} to {begin + stage['steps']}, the reference's own are {own[i][0]} to {own[i][1]}")
        begin += stage["steps"]
        table.append(module.TrainingStage(**values, duration=None if i == 3 else stage["steps"] / scheduled))
    module.TRAINING_STAGES = table
    # Its places for documents are as few as FineWeb needs.
    module.TRAIN_MAX_NUM_DOCS = {rows: max(128, rows // 16) for rows in (stage["batch_tokens"] // 8 for stage in stages)}
    # Half a step less, so that the start of the fall is a whole number after truncation.
    cooldown = (lr["cooldown_steps"] - 0.5) / scheduled
    module.training_schedule = module.TrainingSchedule(table, scheduled, stages[3]["steps"], cooldown_frac=cooldown)
    module.get_muon_momentum.__defaults__ = (momentum["warmup_steps"], momentum["cooldown_steps"], momentum["start"], muon["momentum"])


def make_manager(module, model, config):
    manager = module.TrainingManager(model)
    manager.block_size = 1
    split_step = config["schedule"]["split_step"]
    manager.split_step = split_step | 1 if split_step else None  # 0: never
    return manager

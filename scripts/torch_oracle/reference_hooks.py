"""What reference_script.py puts into the reference's script at run time: the vocabulary from a file (REFERENCE_VOCAB), losses into a file
(REFERENCE_LOSSES), weights from a file (REFERENCE_START) and into files (REFERENCE_WEIGHTS), shards that are left as on 8 GPUs."""

import ast
import copy
import json
import os
import types

import vocabulary

ROWS = 8  # of a step
TOLD_AT_ONCE = 25  # steps: asking for a loss waits for the device


def get_encoding(_):
    tokens = vocabulary.token_bytes(os.environ["REFERENCE_VOCAB"], 50257)
    return types.SimpleNamespace(_mergeable_ranks={token: i for i, token in enumerate(tokens)})


def whole_steps(shard_class):
    """A shard begins a step only if it has all the rows of it."""
    next_row = shard_class.next_batch

    def next_batch(shard, *arguments):
        made = getattr(shard, "rows_made", 0)
        if made % ROWS == 0:
            begin = shard.i
            for _ in range(ROWS):
                next_row(shard, *arguments)  # StopIteration if there are too few
            shard.i = begin
        shard.rows_made = made + 1
        return next_row(shard, *arguments)

    shard_class.next_batch = next_batch


class Losses:
    """What the runs of one process lose; REFERENCE_RUNS of REFERENCE_STEPS steps each (0: all)."""

    def __init__(self, model, manager):
        self.file = open(os.environ["REFERENCE_LOSSES"], "w", encoding="utf-8")
        self.runs, self.steps = int(os.environ["REFERENCE_RUNS"]), int(os.environ["REFERENCE_STEPS"])
        self.run, self.sum, self.waiting = 1, 0, []
        self.optimizer = manager.get_state() if self.runs > 1 else None  # before the first step
        self.model, self.weights_every = model, int(os.environ["REFERENCE_WEIGHTS_EVERY"])
        if "REFERENCE_START" in os.environ:
            import reference_names
            import tensor_file

            reference_names.set_weights(model._orig_mod, tensor_file.load(os.environ["REFERENCE_START"]))
            model.quantize_mlp_fp8(bootstrap_down=True)
        self.write_weights(0)

    def write(self, **line):
        line = {"run": self.run} | line if self.runs > 1 else line
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def write_weights(self, updates):
        if self.run == 1 and "REFERENCE_WEIGHTS" in os.environ:
            import reference_names
            import tensor_file

            path = os.environ["REFERENCE_WEIGHTS"].replace("{}", str(updates))
            tensor_file.save(path, reference_names.weights(self.model._orig_mod), keep_bf16=True)

    def write_waiting(self):
        for number, loss, factor, ms in self.waiting:
            self.write(step=number, loss=loss.item() * factor, train_ms=ms)
        self.waiting.clear()

    def add(self, loss):
        """Of a micro-batch: its tokens' losses, divided by the number of micro-batches."""
        self.sum = self.sum + loss.detach()

    def step(self, step, micro_batches, tokens, train_ms, last):
        self.waiting.append((step, self.sum, micro_batches / tokens, train_ms))
        self.sum = 0
        if len(self.waiting) >= TOLD_AT_ONCE or last:
            self.write_waiting()
        if self.weights_every and ((step + 1) % self.weights_every == 0 or last):
            self.write_weights(step + 1)

    def stops(self, step):
        """Whether a run ends before this step."""
        if not self.steps or step < self.steps:
            return False
        self.write_waiting()
        return True

    def validation(self, step, loss, train_ms):
        self.write(step=step, val_loss=loss.item(), train_ms=train_ms)


def assigns(name):
    """Of a node: does it assign to this name?"""

    def test(node):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        return any(isinstance(target, ast.Name) and target.id == name for target in targets)

    return test


def assignments(tree, name):
    """Places in a module's body that assign to a name."""
    return [i for i, node in enumerate(tree.body) if assigns(name)(node)]


def more_runs(script):
    """Runs 2 and later, at the end of the first one's loop, with its compiled code. script: the script's names. What makes the model, and
    what comes between the warm-up and the loop's end, is executed again."""
    kept = script["kept"]
    with open(script["__file__"], encoding="utf-8") as file:
        tree = ast.parse(file.read())
    made, compiled = assignments(tree, "model")[:2]
    loop = max(i for i, node in enumerate(tree.body) if isinstance(node, ast.For))
    make = compile(ast.Module(tree.body[made:compiled], []), "<the model>", "exec")
    train = compile(ast.Module(tree.body[assignments(tree, "train_loader")[-1] : loop + 1], []), "<a run>", "exec")
    model, manager = script["model"], script["training_manager"]
    while kept.run < kept.runs:
        kept.run += 1
        names = dict(script)
        exec(make, names)
        model._orig_mod.load_state_dict(names.pop("model").state_dict())
        model.zero_grad(set_to_none=True)
        manager.reset(copy.deepcopy(kept.optimizer))
        model.quantize_mlp_fp8(bootstrap_down=True)
        model.train()
        exec(train, script)

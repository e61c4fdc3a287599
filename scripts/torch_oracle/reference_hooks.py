"""What reference_script.py puts into the reference's script at run time: the vocabulary from a file (REFERENCE_VOCAB), losses into a file
(REFERENCE_LOSSES), shards that are left as on 8 GPUs."""

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
    def __init__(self):
        self.file = open(os.environ["REFERENCE_LOSSES"], "w", encoding="utf-8")
        self.sum, self.waiting = 0, []

    def write(self, **line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def add(self, loss):
        """Of a micro-batch: its tokens' losses, divided by the number of micro-batches."""
        self.sum = self.sum + loss.detach()

    def step(self, step, micro_batches, tokens, train_ms, last):
        self.waiting.append((step, self.sum, micro_batches / tokens, train_ms))
        self.sum = 0
        if len(self.waiting) < TOLD_AT_ONCE and not last:
            return
        for number, loss, factor, ms in self.waiting:
            self.write(step=number, loss=loss.item() * factor, train_ms=ms)
        self.waiting.clear()

    def validation(self, step, loss, train_ms):
        self.write(step=step, val_loss=loss.item(), train_ms=train_ms)
